"""Each epoch of each job is uniform over all orders, whatever is shared: a short run of the long study.

Every count is of another run, so that what one epoch has of the one before does not matter. Sets overlap in
part: with equal sets no sampler that is blind to labels could fail.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulation.contestants import make_group
from tests.later import Later
from tests.samplers.timed_jobs import TimedJob, run_jobs

stats = Later("scipy.stats")
SIZE, JOBS, RUNS = 48, 3, 100
#: Half of the samples are everybody's, the others one job's each.
CORE = [np.r_[0:24, 24 + 8 * k : 32 + 8 * k] for k in range(JOBS)]


def failing_shares(strategy: str, *, independence: float = 0.0) -> tuple[float, float, float]:
    """Of the worst job: shares of positions and samples that fail, chi-square over degrees of freedom."""
    length = len(CORE[0])
    counts = np.zeros((JOBS, length, SIZE))
    for seed in range(RUNS):
        jobs = [
            TimedJob(start, speed, members, epochs=2, batch_size=4, independence=independence)
            for start, speed, members in zip((0, 10, 19), (1.0, 0.7, 0.9), CORE)
        ]
        readings = run_jobs(make_group(strategy, SIZE, capacity=10, seed=seed), jobs, seed)
        for k, reading in enumerate(readings):
            counts[k, np.arange(length), reading.orders[1]] += 1
    own = np.stack([count[:, members] for count, members in zip(counts, CORE)])
    squares = (own - RUNS / length) ** 2 / (RUNS / length)
    by_position, by_sample = (stats.chi2.sf(squares.sum(axis), length - 1) for axis in (2, 1))
    ratio = squares.sum((1, 2)) / (length - 1) ** 2
    return (
        max(map(_rejected, by_position)),
        max(map(_rejected, by_sample)),
        float(ratio[np.abs(ratio - 1).argmax()]),
    )


def _rejected(p_values: np.ndarray, level: float = 0.05) -> float:
    """The share that fails by the rule of Benjamini and Hochberg."""
    below = np.sort(p_values) <= level * np.arange(1, len(p_values) + 1) / len(p_values)
    return float((np.flatnonzero(below)[-1] + 1) / len(below)) if below.any() else 0.0


#: Of the others `tests/benchmarks/test_simulation_uniformity.py` says so over as many epochs.
@pytest.mark.parametrize(
    "strategy",
    [
        "shared-log",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("joader", "coordl", "independent")),
    ],
)
def test_orders_are_uniform(strategy: str) -> None:
    positions, samples, ratio = failing_shares(strategy)
    # A perfect sampler fails at a position in one run of twenty, and has a ratio of 1.00 +- 0.05.
    assert positions <= 2 / 32
    assert samples <= 2 / 32
    assert 0.8 < ratio < 1.2


@pytest.mark.slow
def test_orders_are_uniform_with_some_independence() -> None:
    assert max(failing_shares("shared-log", independence=0.3)[:2]) <= 2 / 32


@pytest.mark.parametrize("strategy", [pytest.param("dynagcs-letter", marks=pytest.mark.slow), "dynagcs"])
def test_the_test_can_fail(strategy: str) -> None:
    """The thesis's DynaGCS reads first what is shared, and must be found out."""
    positions, samples, ratio = failing_shares(strategy)
    assert positions > 0.25  # four times what a uniform order is allowed
    assert samples > 0.25
    assert ratio > 2
