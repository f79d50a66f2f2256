"""What nobody can exceed: a bound over all samplers and caches, and the best eviction for a given order.

Both count as the engine does: a sample asked for twice at one instant is loaded at most once.
"""

import heapq
from collections import Counter
from itertools import groupby, pairwise
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.schedule import Kind, Schedule


def upper_bound(plan: Schedule, capacity: int) -> float:
    """The share of accesses that could be hits with a cache of `capacity` samples, whoever chooses.

    Within an epoch a job reads distinct samples, of which at most `capacity` can be cached when it begins to
    be watched. So over any chain of disjoint stretches of time, each inside one epoch of one job, the loads
    are at least the reads of the watched jobs less `capacity` for every change. The best chain is found by
    dynamic programming over instants. Besides, what is read at all must be loaded once.
    """
    chain: dict[int, int] = {}
    best = accesses = 0
    for _, simultaneous in groupby(plan.events, key=attrgetter("instant")):
        arriving = max(0, best - capacity)
        for event in simultaneous:
            if event.kind is Kind.EPOCH:
                chain[event.job] = arriving
            elif event.kind is Kind.REQUEST:
                chain[event.job] = max(chain[event.job], arriving) + event.size
                best = max(best, chain[event.job])
                accesses += event.size
    loads = max(best, _first_loads(plan))
    return 1 - loads / accesses if accesses else 0.0


def _first_loads(plan: Schedule) -> int:
    """How many samples are certainly read: the union of the sets of jobs that finish an epoch."""
    jobs = plan.workload.jobs
    read = Counter((event.job, event.epoch) for event in plan.events for _ in range(event.size))
    finished = {job for (job, _), size in read.items() if size == len(jobs[job].indices)}
    union = np.zeros(plan.workload.samples, dtype=bool)
    for job in finished:
        union[jobs[job].indices] = True
    return int(union.sum())


def best_evictions(samples: NDArray[np.int64], instants: NDArray[np.int64], capacity: int) -> NDArray[np.bool_]:
    """Which accesses are hits under the best eviction for this order: Belady's.

    `samples` and `instants` have one entry for each access, in order; instants do not decrease. After every
    instant the `capacity` samples that come next are kept, out of those kept before and those just read: no
    policy can do better, not even one that keeps or drops a sample within an instant.
    """
    following = _next_uses(samples, instants)
    hits = np.zeros(len(samples), dtype=bool)
    #: kept sample -> place of its next use
    due: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    starts = np.flatnonzero(np.diff(instants, prepend=-1))
    for first, end in pairwise([*starts.tolist(), len(samples)]):
        in_hand: set[int] = set()
        for k, x in enumerate(samples[first:end].tolist(), first):
            hits[k] = x in due or x in in_hand
            in_hand.add(x)
        for x, use in zip(samples[first:end].tolist(), following[first:end].tolist()):
            due[x] = use
            heapq.heappush(farthest, (-use, x))
        while len(due) > capacity:
            negated, victim = heapq.heappop(farthest)
            if due.get(victim) == -negated:
                del due[victim]
    return hits


def _next_uses(samples: NDArray[np.int64], instants: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each access the place of the sample's next access at a later instant; len(samples) if none."""
    count = len(samples)
    order = np.lexsort((np.arange(count), samples))
    following = np.full(count, count, dtype=np.int64)
    place, use = count, count
    later = -1
    previous = -1
    for k in order[::-1].tolist():
        if samples[k] != previous:
            previous, use, later, place = samples[k], count, instants[k], k
        elif instants[k] != later:
            use, later = place, instants[k]
        following[k], place = use, k
    return following
