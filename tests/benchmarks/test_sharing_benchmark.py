"""The benchmark of sharing: its scenarios are what their names say, and every side reads every sample."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import sharing
from benchmarks.sharing import METRICS, SCENARIOS, SIDES, Run, Scenario, choice
from examples import natural_images

IMAGES = natural_images.Specification(classes=2, train=8, val=2)


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    natural_images.generate(tmp_path / "images", IMAGES, processes=1, progress=False)
    monkeypatch.setattr(sharing, "IMAGES", tmp_path / "images")


@pytest.mark.slow
@pytest.mark.usefixtures("images")
@pytest.mark.parametrize("side", ["torch", "dpflow"])
def test_every_side_reads_every_sample_of_jobs_that_begin_one_after_the_other(side: str) -> None:
    scenario = Scenario(jobs=2, stagger=0.5, step_ms=1.0, spread=0.5, kept=True)
    figures = Run(side=side, scenario=scenario, samples=64, epochs=1, cache=1.0).measure()
    assert {metric.name for metric in METRICS} <= figures.keys()
    assert figures["samples_per_s"] > 0
    assert figures["cpu_ms_per_sample"] > 0
    assert 0 <= figures["stall_share"] <= figures["worst_stall_share"] <= 1
    assert figures["decodes_per_sample"] <= 1


@pytest.mark.slow
@pytest.mark.usefixtures("images")
@pytest.mark.skipif("tensorsocket" not in SIDES, reason="tensorsocket is not installed")
def test_tensorsockets_jobs_are_measured_too() -> None:
    figures = Run(side="tensorsocket", scenario=Scenario(jobs=2), samples=640, epochs=1, cache=1.0).measure()
    assert {metric.name for metric in METRICS} <= figures.keys()
    assert figures["samples_per_s"] > 0


def test_tensorsocket_is_left_out_where_jobs_begin_one_after_the_other() -> None:
    staggered, unequal = SCENARIOS["staggered"][0], SCENARIOS["unequal"][0]
    assert [scenario.allows("tensorsocket") for scenario in (staggered, unequal)] == [False, True]
    assert all(staggered.allows(side) for side in ("torch", "dpflow"))


def test_scenarios_cover_the_numbers_of_jobs_the_staggers_and_the_speeds() -> None:
    assert [scenario.jobs for scenario in SCENARIOS["together"]] == [1, 2, 4]
    assert [scenario.stagger for scenario in SCENARIOS["staggered"]] == [0.1, 0.25, 0.5]
    assert {scenario.kept for scenario in SCENARIOS["unequal"]} == {False, True}
    slow = SCENARIOS["unequal"][0]
    assert [slow.step_of(number) for number in range(4)] == [100, 150, 200, 250]


def test_titles_tell_scenarios_apart() -> None:
    titles = [scenario.title for group in SCENARIOS.values() for scenario in group]
    assert len(set(titles)) == len(titles)
    assert "1 job; drawn afresh" in titles
    assert "4 jobs; 25% of an epoch apart; kept" in titles
    assert "4 jobs; 100, 150, 200, 250 ms steps; drawn afresh" in titles


def test_names_are_chosen_from_those_that_there_are() -> None:
    assert choice(list(SCENARIOS), "unequal,together") == ["unequal", "together"]
    with pytest.raises(argparse.ArgumentTypeError, match="'apart' is none of together, staggered, unequal"):
        choice(list(SCENARIOS), "apart")
