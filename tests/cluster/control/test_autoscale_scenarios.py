"""What autoscaling promises, in simulated time."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.scaling_model import ScalingOutcome
from tests.cluster.control.scaling_scenarios import CHANGE_S, SCENARIOS, cold_start_percentile, run, settled_s

SEEDS = (0, 1, 2)
DOUBLES = (0, 1, 2)
WAVES, SLOW_WAVES, GAPS, STORAGE, CACHED = 3, 4, 5, 6, 7
#: Worker-seconds, in those of somebody who knows all beforehand; and where cold starts take 40 s.
MOST, MOST_WHERE_SLOW, MOST_WHERE_FULL = 1.25, 1.35, 2.5


def ours(number: int) -> list[ScalingOutcome]:
    return [run(SCENARIOS[number], seed) for seed in SEEDS]


@pytest.mark.parametrize("number", DOUBLES)
def test_after_demand_has_doubled_jobs_wait_for_little_more_than_a_cold_start(number: int) -> None:
    cold_s = SCENARIOS[number].model.cold_start_s
    outcomes = ours(number)
    settled = statistics.median(settled_s(one, CHANGE_S) for one in outcomes)
    assert 0 < settled <= cold_start_percentile(cold_s) + 10.0
    most = MOST_WHERE_SLOW if cold_s >= 40 else MOST
    assert 1.0 <= statistics.median(one.ratio for one in outcomes) <= most


def test_waves_cost_a_quarter_more_than_what_is_needed_and_few_starts() -> None:
    for number, most in ((WAVES, MOST), (SLOW_WAVES, MOST_WHERE_SLOW)):
        outcomes = ours(number)
        assert 1.0 <= statistics.median(one.ratio for one in outcomes) <= most
        assert max(one.starts for one in outcomes) <= 100


def test_full_storage_is_not_chased() -> None:
    outcomes = ours(STORAGE)
    assert max(one.ratio for one in outcomes) <= MOST_WHERE_FULL
    assert max(one.stall_share for one in outcomes) <= 0.40  # of which 37.5% cannot be avoided


def test_gaps_and_caches() -> None:
    assert max(one.stall_share for one in [*ours(GAPS), *ours(CACHED)]) < 0.01
    assert max(one.ratio for one in ours(CACHED)) <= 1.5
