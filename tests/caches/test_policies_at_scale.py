"""With as many keys as it takes to fill several buckets, the least valuable keys are still evicted first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from torch_dpflow.caches import alsd, make_policy, residents
from torch_dpflow.caches.alsd import ALSD, Aggregate
from torch_dpflow.lookahead import Lookahead

SAMPLES, BATCH, JOBS = 30_000, 400, 3

Positions = npt.NDArray[np.int64]


class Bench:
    """The residents of a cache whose jobs told their whole orders, as plain arrays."""

    def __init__(self, orders: list[Positions], slots: int) -> None:
        self.slots = slots
        self.positions = np.array([order.argsort() for order in orders])
        self.reached = np.zeros(len(orders), dtype=np.int64)
        self.loads = np.zeros(SAMPLES, dtype=np.int64)
        self.last_load = 0

    def distances(self, aggregate: Aggregate) -> npt.NDArray[np.int64]:
        left = self.positions - self.reached[:, None]
        if aggregate == "mean":
            total: npt.NDArray[np.int64] = np.where(left < 0, SAMPLES, left).sum(axis=0)
            return total
        moments = np.where(left < 0, self.reached.max() + SAMPLES, self.positions)
        earliest: npt.NDArray[np.int64] = moments.min(axis=0)
        return earliest

    def admit(self, keys: Positions, aggregate: Aggregate) -> list[int]:
        """Which keys go, in order, if `keys` come in."""
        self.loads[keys] = np.arange(self.last_load, self.last_load + len(keys)) + 1
        self.last_load += len(keys)
        resident = np.flatnonzero(self.loads)
        order = np.lexsort((self.loads[resident], -self.distances(aggregate)[resident]))
        gone = resident[order[: max(0, len(resident) - self.slots)]]
        self.loads[gone] = 0
        return gone.tolist()


@pytest.fixture
def of_one_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs whose paces are not measured, and so are alike, within the first epoch."""
    monkeypatch.setattr(alsd, "_MEASUREMENTS", 1)


@pytest.mark.usefixtures("of_one_pace")
@pytest.mark.parametrize(("aggregate", "by_one"), [("min", True), ("mean", False)])
def test_alsd_gives_up_the_farthest(aggregate: Aggregate, by_one: bool) -> None:
    rng = np.random.default_rng(5)
    orders = [rng.permutation(SAMPLES) for _ in range(JOBS)]
    policy = ALSD(max_items=9000, keys=SAMPLES, aggregate=aggregate)
    bench = Bench(orders, 9000)
    for job, order in enumerate(orders):
        policy.hint(job, Lookahead.of_order(order, epoch=0))
    for first in range(0, SAMPLES, BATCH):
        for job, order in enumerate(orders):
            keys = order[first : first + BATCH]
            singly = by_one and first % (5 * BATCH) == 0
            step = _one_by_one if singly else _in_bulk
            step(policy, bench, job, keys, aggregate)


def _in_bulk(policy: ALSD, bench: Bench, job: int, keys: Positions, aggregate: Aggregate) -> None:
    bench.reached[job] += len(keys)
    hits = policy.access_many(keys, job)
    assert (hits == (bench.loads[keys] > 0)).all()
    assert policy.admit_many(keys[~hits]).tolist() == bench.admit(keys[~hits], aggregate)


def _one_by_one(policy: ALSD, bench: Bench, job: int, keys: Positions, aggregate: Aggregate) -> None:
    """A few keys of the batch, each on its own; the rest in bulk."""
    for key in keys[:20].tolist():
        bench.reached[job] += 1
        if not policy.access(key, job):
            assert list(policy.admit(key)) == bench.admit(np.array([key]), aggregate)
    _in_bulk(policy, bench, job, keys[20:], aggregate)


class BriefALSD(ALSD):
    front = 16


@pytest.mark.usefixtures("of_one_pace")
@pytest.mark.parametrize("aggregate", ["min", "mean"])
def test_alsd_gives_up_the_farthest_where_few_of_many_keys_are_resident(aggregate: Aggregate) -> None:
    """Jobs follow each other closely, so most accesses are hits, which leave old entries in the queue."""
    order = np.random.default_rng(6).permutation(SAMPLES)
    policy, bench = BriefALSD(max_items=300, keys=SAMPLES, aggregate=aggregate), Bench([order] * JOBS, 300)
    for job in range(JOBS):
        policy.hint(job, Lookahead.of_order(order, epoch=0))
    for first in range(0, 10_000, 40):
        for job in range(JOBS):
            behind = first - 80 * job
            if behind >= 0:
                _in_bulk(policy, bench, job, order[behind : behind + 40], aggregate)
    assert policy.statistics().hit_rate > 0.6


@pytest.mark.parametrize("many", [False, True], ids=["one-by-one", "in-bulk"])
def test_load_numbers_that_run_out_are_counted_again(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    monkeypatch.setattr(residents, "_MIN_ROOM", 8)
    policy = ALSD(max_items=6, keys=100)
    admit: Callable[[list[int]], list[int]]
    if many:
        admit = lambda keys: policy.admit_many(np.array(keys)).tolist()  # noqa: E731
    else:
        admit = lambda keys: [gone for key in keys for gone in policy.admit(key)]  # noqa: E731
    gone = [key for first in range(0, 60, 6) for key in admit(list(range(first, first + 6)))]
    # All are equally far, so they go in the order in which they came.
    assert gone == list(range(54))
    assert sorted(policy) == list(range(54, 60))


@pytest.mark.parametrize("name", ["alsd", "alsd-mean", "use-distance", "refcnt"])
def test_jobs_join_begin_epochs_and_leave_without_a_pass_over_all_keys(name: str) -> None:
    """Counted in pages of memory that a step touches, as numpy's arrays of 32 million keys would be."""
    keys, process = 32_000_000, psutil.Process()
    policy = make_policy(name, max_bytes=1000, keys=keys)
    policy.admit_many(np.arange(0, keys, keys // 200))
    order = np.random.default_rng(3).permutation(200) * (keys // 200) + 7

    def turn(epoch: int) -> None:
        for job in range(6):
            policy.join(job)
            policy.hint(job, Lookahead(epoch=epoch, length=keys, certain=order))
            policy.access_many(order[:100], job)
            policy.hint(job, Lookahead(epoch=epoch, length=keys, position=100, certain=order[100:]))

    before = process.memory_info().rss
    for epoch in range(3):
        turn(epoch)
    for job in range(6):
        policy.forget(job)
    # 200 keys in each of six arrays of cells and their codes, a page of 4 KiB for each, and twice that.
    assert process.memory_info().rss - before < 2 * 200 * 6 * 2 * 4096 < keys
