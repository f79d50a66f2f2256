"""The loader benchmark itself: its workloads cost what they say, and its sides deliver the same."""

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.loader import METRICS, chosen, compare
from benchmarks.loader_run import digest, time_epoch, time_starts
from benchmarks.loader_workloads import SKEW, WORKLOADS, JpegCrops, Setting, SkewedCost
from examples import natural_images

SETTING = Setting(images=Path("unused"), spin=1, quick=True)


@pytest.fixture
def spun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds of every call of `spin`, which are counted instead of done."""
    rounds: list[int] = []
    monkeypatch.setattr("benchmarks.loader_workloads.spin", rounds.append)
    return rounds


def test_one_sample_in_a_hundred_costs_a_hundred_times_the_rest(spun: list[int]) -> None:
    dataset = SkewedCost(1000, spin=7)
    assert [dataset[index] for index in range(1000)] == list(range(1000))
    assert sorted(spun) == [7] * 990 + [7 * SKEW] * 10


def test_crops_are_the_same_for_every_reader_and_of_the_stated_form(tmp_path: Path) -> None:
    images = natural_images.Specification(classes=2, train=2, val=2)
    natural_images.generate(tmp_path / "data", images, processes=1, progress=False)
    files = sorted((tmp_path / "data").glob("train/*/*.jpg"))
    as_float, as_bytes = (JpegCrops(files, 6, as_float=kind) for kind in (True, False))
    assert (as_float[0].shape, as_float[0].dtype) == ((3, 224, 224), torch.float32)
    assert (as_bytes[0].shape, as_bytes[0].dtype) == ((3, 224, 224), torch.uint8)
    assert torch.equal(as_bytes[3], as_bytes[3])
    assert not torch.equal(as_bytes[1], as_bytes[3])  # the same file, another crop
    assert torch.equal(as_float[2], as_bytes[2] / 255)


@pytest.mark.parametrize("text", ["a", "a,c", "e", "d,e,f"])
def test_letters_choose_workloads_and_e_stands_for_both_starts(text: str) -> None:
    keys = chosen(text)
    assert {key[0] for key in keys} == set(text.split(","))
    assert ("e" in text) == ({"e fork", "e spawn"} <= set(keys))


def test_an_unknown_letter_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'z' is none of a, b, c"):
        chosen("z")


def test_an_epoch_reports_figures_that_the_table_knows() -> None:
    workload = WORKLOADS["c"]
    figures = time_epoch(workload, workload.sides["dpflow"], SETTING, step_s=0.0)
    assert figures.keys() - {"samples"} <= {metric.name for metric in METRICS}
    assert figures["samples"] == len(workload.dataset(SETTING))
    assert figures["stall_share"] <= 1
    assert all(value >= 0 for value in figures.values())


def test_starts_report_the_first_batch_of_the_first_and_of_later_epochs() -> None:
    workload = WORKLOADS["e fork"]
    figures = time_starts(workload, workload.sides["dpflow"], SETTING)
    assert figures.keys() == {"import_ms", "first_batch_ms", "later_first_batch_ms"}
    assert all(value > 0 for value in figures.values())


def test_digests_tell_one_order_from_another() -> None:
    workload = WORKLOADS["e fork"]
    ours, theirs = (digest(workload, workload.sides[side], SETTING) for side in ("dpflow", "torch"))
    shuffled = dataclasses.replace(workload.sides["torch"], arguments={"shuffle": True})
    assert ours == theirs
    assert digest(workload, shuffled, SETTING) != ours


@pytest.mark.slow
def test_comparison_runs_every_side_in_a_process_of_its_own() -> None:
    comparison = compare("e fork", SETTING, rounds=1, step_ms=0.0)
    assert {side: len(rounds) for side, rounds in comparison.rounds.items()} == {"torch": 1, "dpflow": 1}
    assert comparison.ratio("dpflow", "first_batch_ms") > 0
