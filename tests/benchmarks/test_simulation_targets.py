"""Targets, and the pictures and tables of what was measured."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.scenarios import SCENARIOS
from benchmarks.simulation.study import Case, measure
from benchmarks.simulation.targets import Target, all_targets, compare, hit_rates
from tests.later import Later

figures, plots = Later("benchmarks.simulation.figures"), Later("benchmarks.simulation.plots")


@pytest.fixture(scope="module", autouse=True)
def _fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib opens fonts for its first figure and keeps the files open."""
    path = tmp_path_factory.mktemp("fonts") / "figure.png"
    plots.p_values(path, "warm", {"panel": {"p": np.array([0.1, 1.0])}}, level=0.05)


def case(sampler: str, policy: str, capacity: float = 0.1) -> Case:
    return Case(
        scenario="same1",
        workload=lambda seed: SCENARIOS["same1"](40, seed),
        sampler=sampler,
        policy=policy,
        capacity=capacity,
    )


def target(amount: float, tolerance: float | None) -> Target:
    coordl = case("coordl", "lru")
    return Target(figure="x", what="y", case=coordl, amount=amount, tolerance=tolerance, value=hit_rates)


def test_near_and_at_least() -> None:
    assert target(75.0, 1.0).accepts(74.0)
    assert not target(75.0, 1.0).accepts(76.1)
    assert target(75.0, None).accepts(99.0)
    assert not target(75.0, None).accepts(74.9)


def test_targets_are_compared_with_what_several_seeds_give() -> None:
    steps: list[None] = []
    near, above = compare([target(75.0, 1.0), target(75.1, None)], range(2), lambda: steps.append(None))
    assert near.measured == above.measured == pytest.approx(75)
    assert near.spread == 0
    assert (near.passed, above.passed) == (True, False)
    assert len(steps) == 2


def test_the_last_target_spans_all_cases() -> None:
    *_, spanning = all_targets()
    assert spanning.case is None
    [_, comparison] = compare([target(75.0, 1.0), spanning], [0], lambda: None)
    assert comparison.measured == pytest.approx(0)
    assert comparison.passed


def test_every_figure_has_cases_for_every_bar_and_point() -> None:
    for name, factory in figures.FIGURES.items():
        cases = factory().cases
        settings = {(one.scenario, one.capacity) for one in cases}
        contestants = {(one.scenario, one.sampler, one.policy) for one in cases}
        assert len(cases) * len({one.scenario for one in cases}) == len(settings) * len(contestants), name


def test_curves_and_bars_are_written(tmp_path: Path) -> None:
    outcomes = [measure(case("independent", policy, share), [0]) for policy in ("lru", "alsd") for share in (0.1, 0.5)]
    figures.draw_curves(tmp_path / "curves.png", "curves", outcomes, {30.0: "12 GiB"})
    figures.draw_bars(tmp_path / "bars.png", "bars", outcomes[::2])
    for picture in tmp_path.iterdir():
        assert picture.read_bytes().startswith(b"\x89PNG")
