"""Demand for a flow in simulated time, and the autoscaling that meets it. No figure depends on the machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.scaling_model import (
    SPREAD,
    FlowModel,
    ScalingOutcome,
    ScalingRun,
    autoscaled,
)

#: workers before anything changes, and samples a second that they can just serve, at 90% of their time
FIRST, STEADY = 24, 432.0
#: when demand doubles, seconds
CHANGE_S = 60.0


@dataclass(frozen=True)
class Scenario:
    """What happens to a flow, for how long, and when its demand changes."""

    name: str
    model: FlowModel
    duration_s: float
    changes_at: float | None = None


def _doubles(now: float) -> float:
    return STEADY if now < CHANGE_S else 2 * STEADY


def _waves(now: float) -> float:
    return 500.0 - 300.0 * math.cos(2 * math.pi * now / 300.0)


def _gaps(now: float) -> float:
    return STEADY if now % 120.0 < 90.0 else 0.0


def _constant(now: float) -> float:
    return STEADY


SCENARIOS = [
    *(
        Scenario(
            f"demand x 2, cold start {cold_s:g} s",
            FlowModel(demand=_doubles, cold_start_s=cold_s, first=FIRST),
            360.0,
            CHANGE_S,
        )
        for cold_s in (3.0, 10.0, 40.0)
    ),
    Scenario("waves, 200 to 800 a second", FlowModel(demand=_waves, first=12), 600.0),
    Scenario("waves, cold start 40 s", FlowModel(demand=_waves, cold_start_s=40.0, first=12), 600.0),
    Scenario("gaps of 30 s each 120 s", FlowModel(demand=_gaps, first=FIRST), 600.0),
    Scenario(
        "storage gives 500 of 800 a second",
        FlowModel(demand=lambda now: 800.0, storage=500.0, first=FIRST),
        600.0,
    ),
    Scenario(
        "second epoch from the cache",
        FlowModel(demand=_constant, per_sample=lambda now: 1.0 if now < 200.0 else 0.1, first=FIRST),
        600.0,
    ),
]


def run(scenario: Scenario, seed: int) -> ScalingOutcome:
    """Simulate a scenario once."""
    return ScalingRun(scenario.model, autoscaled(scenario.model.first, 512), seed).run(scenario.duration_s)


def settled_s(outcome: ScalingOutcome, since: float) -> float:
    """Return how long after `since` the job last stalled, seconds; 0 if it did not stall."""
    return max([0.0, *(at - since for at in outcome.stalled_at)])


def cold_start_percentile(median_s: float) -> float:
    """Return the time within which 95% of workers start, seconds."""
    return median_s * math.exp(SPREAD * 1.645)
