"""Is every epoch a uniform permutation, as jobs get it through real services? Counts over many epochs, and their tests.

The tests are those of `benchmarks.simulation.uniformity`. As in that study each run is of new jobs with seeds of their
own, and their second epochs are counted, when all are under way: epochs of one job resemble each other. When the last
job of a run has left, the group is as good as new. The long test reads thousands of epochs of 100 samples::

    .venv/bin/python -m pytest -m slow -s tests/cluster/shared/test_shared_uniformity.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.simulation.uniformity import Counts, Verdict
from tests.shared_datasets import Numbers
from torch_dpflow.cluster.client.open_job import SharedJob

Join = Callable[..., SharedJob]
JOBS = 3
#: Batches that job 0 has when each of the others begins, and how many each may have for one of its.
STARTS, SPEEDS = (0, 2, 4), (1.0, 0.6, 0.85)


@dataclass
class Pace:
    """Holds jobs to their speeds, by how far job 0 is and not by a clock."""

    #: Batches that job 0 has; infinite when it is through.
    first: float = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def step(self, job: int, batches: int) -> None:
        """`job` has so many batches: wait until it may have the next."""
        with self.changed:
            if job == 0:
                self.first = batches
                self.changed.notify_all()
            else:
                self.changed.wait_for(lambda: batches + 1 <= SPEEDS[job] * (self.first - STARTS[job]), 60)

    def end(self, job: int) -> None:
        """`job` is through."""
        if job == 0:
            self.step(0, 1 << 30)


def overlapping(size: int) -> list[NDArray[np.int64]]:
    """Half of the samples are everybody's, the others one job's each."""
    own = size // 2 // JOBS
    return [np.r_[0 : size // 2, size // 2 + own * k : size // 2 + own * (k + 1)] for k in range(JOBS)]


def second_epochs(
    join: Join, flow: str, members: list[NDArray[np.int64]], run: int, size: int, **options: object
) -> list[list[int]]:
    """One run: what each job gets in its second epoch."""
    pace = Pace()
    orders: list[list[int]] = [[] for _ in members]
    errors: list[BaseException] = []

    def read(number: int) -> None:
        try:
            with join(
                flow,
                Numbers(size),
                batch_size=size // 12,
                seed=run * JOBS + number,
                indices=members[number],
                ready=1,
                requested=2,
                **options,
            ) as job:
                batches = 0
                for epoch in range(2):
                    for _, keys in job.traverse(epoch):
                        orders[number] += keys.tolist() * epoch
                        batches += 1
                        pace.step(number, batches)
        except BaseException as error:
            errors.append(error)
        finally:
            pace.end(number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return orders


def judge(
    join: Join, flow: str, members: list[NDArray[np.int64]], runs: int, size: int, **options: object
) -> list[Verdict]:
    """The tests' word on each job's orders over so many runs; ValueError for an epoch that is no permutation."""
    counts = [Counts(indices) for indices in members]
    for run in range(runs):
        for count, order in zip(counts, second_epochs(join, flow, members, run, size, **options)):
            count.add(np.array(order))
    return [count.verdict() for count in counts]


def told(verdicts: list[Verdict]) -> str:
    rows = [
        f"job {number}: {one.epochs} epochs, chi2/df {one.position_ratio:.3f} by position, {one.item_ratio:.3f} by "
        f"sample; {one.failing_positions:.1%} of positions and {one.failing_items:.1%} of samples fail"
        for number, one in enumerate(verdicts)
    ]
    return "\n".join(rows)


def worst(verdicts: list[Verdict]) -> tuple[float, float]:
    """Least adjusted p value, and the chi-square ratio farthest from 1."""
    p = min(float(min(one.position_p.min(), one.item_p.min())) for one in verdicts)
    ratios = [ratio for one in verdicts for ratio in (one.position_ratio, one.item_ratio)]
    return p, max(ratios, key=lambda ratio: abs(ratio - 1))


def test_the_orders_that_jobs_get_are_uniform(join: Join, flow: str) -> None:
    verdicts = judge(join, flow, overlapping(24), runs=24, size=24)
    p, ratio = worst(verdicts)
    print(told(verdicts))
    assert p > 1e-5
    assert 0.6 < ratio < 1.6


@pytest.mark.slow
def test_the_test_can_fail_through_services_too(join: Join, flow: str) -> None:
    """The thesis's intersection tree hands out first what is shared."""
    p, ratio = worst(judge(join, flow, overlapping(24), runs=24, size=24, strategy="dynagcs"))
    print(f"p {p:.1e}, chi2/df {ratio:.2f}")
    assert p < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("sets", ["overlapping", "equal"])
def test_thousands_of_epochs_are_uniform(join: Join, flow: str, sets: str) -> None:
    size = 150 if sets == "overlapping" else 100
    members = overlapping(size) if sets == "overlapping" else [np.arange(size)] * JOBS
    verdicts = judge(join, flow, members, runs=1000, size=size)
    print(f"\n{sets} sets, {2 * JOBS * 1000} epochs read\n{told(verdicts)}")
    p, ratio = worst(verdicts)
    assert p > 1e-3
    assert 0.9 < ratio < 1.1
