"""The benchmark of waiting: the host's processors are never exceeded, and every side reads every sample once."""

from __future__ import annotations

import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks import waiting
from benchmarks.report import Comparison
from benchmarks.waiting import (
    METRICS,
    OWN,
    OWN_VARIABLE,
    PROCESSORS,
    SIDES,
    Job,
    Load,
    Processors,
    Run,
    Side,
    StatedTime,
    TimedSamples,
    busiest,
    check,
    picture,
)
from tests.new_process import interpreter

#: Holds all processors of a folder, prints a line, and does not end by itself.
HOLDER = """
import sys
from contextlib import ExitStack
from pathlib import Path
from benchmarks.waiting import PROCESSORS, Processors
with ExitStack() as stack:
    for _ in range(PROCESSORS):
        stack.enter_context(Processors(Path(sys.argv[1])).held())
    print("held", flush=True)
    sys.stdin.read()
"""


def records_of(dataset: TimedSamples, workers: int) -> np.ndarray:
    loader = DataLoader(dataset, num_workers=workers, multiprocessing_context="fork" if workers else None)
    return torch.cat([*loader]).numpy()


@pytest.mark.parametrize("allowed", [1, 2])
def test_more_workers_than_processors_never_load_at_once(tmp_path: Path, allowed: int) -> None:
    load = Load(samples=48, sample_s=0.002)
    read = records_of(TimedSamples(load, Processors(tmp_path, allowed)), workers=4)
    check([read], load.samples)
    assert busiest(read) == allowed
    assert set(read[:, 1]) == set(range(allowed))


def test_a_remote_worker_loads_while_the_host_has_no_free_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OWN_VARIABLE, "1")
    processors = Processors(tmp_path, 1)
    with processors.held():
        read = records_of(TimedSamples(Load(samples=4, sample_s=0.001), processors), workers=0)
    assert set(read[:, 1]) == {OWN}
    assert busiest(read) == 0


def test_the_processors_of_a_killed_process_are_free_again(tmp_path: Path) -> None:
    with interpreter(HOLDER, str(tmp_path), stdin=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert Processors(tmp_path)._free() is None
        holder.kill()
    with Processors(tmp_path).held() as number:
        assert number == 0


def test_times_have_the_stated_mean() -> None:
    load = Load(sample_s=0.020)
    assert sum(map(load.sample_s_of, range(800))) / 800 == pytest.approx(0.020)


def test_a_sleep_is_shorter_by_what_earlier_ones_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    late = iter([0.5, 2.0, 0.0, 0.0, 0.0])
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds + next(late)

    monkeypatch.setattr(waiting.time, "sleep", sleep)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now)
    stated = StatedTime()
    for _ in range(5):
        stated.sleep(1.0)
    assert slept == [1.0, 0.5, 0.0, 0.0, 1.0]
    assert now == 5.0


def test_a_check_finds_lost_and_repeated_samples_and_too_many_at_once() -> None:
    fine = np.array([[index, 0, index, index + 1] for index in range(5)], dtype=float)
    check([fine], 5)
    with pytest.raises(ValueError, match="job 1 read 4 of 5 samples, 4 with repetitions"):
        check([fine, fine[:-1]], 5)
    with pytest.raises(ValueError, match="job 0 read 5 of 5 samples, 6 with repetitions"):
        check([np.concatenate([fine, fine[:1]])], 5)
    fine[:, 2] = 0
    assert busiest(fine) == 5
    with pytest.raises(ValueError, match="5 samples were loaded at once on a host with 4 processors"):
        check([fine], 5)


def test_sides_have_the_workers_that_their_names_give() -> None:
    assert [(side.jobs, side.local) for side in SIDES.values()] == [
        (1, PROCESSORS),
        (1, PROCESSORS),
        (2, PROCESSORS),
        (2, 0),
    ]
    assert [side.is_ours for side in SIDES.values()] == [False, True, False, True]


def test_the_picture_shows_the_waiting_of_each_side() -> None:
    rounds = {side: [{"waiting_s": 0.5 + number, "epoch_s": 10.0}] for number, side in enumerate(SIDES)}
    root = ElementTree.fromstring(picture(Comparison(benchmark="waiting", workload="", rounds=rounds)))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[3:-1] == [text for number, side in enumerate(SIDES) for text in (side, f"{0.5 + number:.2f}")]


def test_a_job_is_the_same_in_its_process() -> None:
    job = Job(number=1, side=Side(jobs=2), load=Load(), folder="/somewhere", address="/an/address")
    assert Job.from_text(job.text) == job


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "torch_dpflow" in name else ()) for name in SIDES]
)
def test_every_side_reads_every_sample_once(name: str) -> None:
    side = SIDES[name]
    # `measure` raises where a sample is missing or repeated, or where the host's processors were exceeded.
    figures = Run(side=side, load=Load(samples=64, batch_size=8, sample_s=0.002, step_s=0.002)).measure()
    assert {metric.name for metric in METRICS} == figures.keys()
    assert 0 < figures["waiting_s"] < figures["epoch_s"]
    assert 0 < figures["step_share"] < 1
    if side.has_flow:
        assert figures["remote_share"] == 1
        assert figures["loads_per_sample"] <= 1
        return
    assert figures["loads_per_sample"] == 1
    assert figures["remote_share"] == 0
    assert figures["worker_s"] == pytest.approx(PROCESSORS * figures["epoch_s"])
