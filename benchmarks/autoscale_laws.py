"""The laws of others by which a number of workers is set, sketched after their code with its defaults.

Each sees what ours sees, once a second. `benchmarks.autoscale` compares them in one model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch_dpflow.cluster.control.autoscale import Autoscaler, Bounds, FlowCounts
from torch_dpflow.cluster.control.scaling_model import Law

#: no law may have more
MOST = 512


class Difference:
    """What has happened since the law was asked before."""

    def __init__(self) -> None:
        self._before = FlowCounts(jobs=0)

    def of(self, counts: FlowCounts) -> FlowCounts:
        before, self._before = self._before, counts
        return FlowCounts(
            jobs=counts.jobs,
            requested=counts.requested - before.requested,
            loads=counts.loads - before.loads,
            busy_s=counts.busy_s - before.busy_s,
            worker_s=counts.worker_s - before.worker_s,
            late_s=counts.late_s - before.late_s,
        )


def ours(first: int) -> Law:
    """The law of `torch_dpflow.cluster.control.autoscale`."""
    law = Autoscaler(Bounds(most=MOST), first)
    return lambda counts, now: law.step(counts, now).workers


def tf_data(first: int) -> Law:
    """tf.data service's AutoScaler: what consumers would take, by what a worker gives; no hysteresis, no headroom."""
    latest, target = Difference(), first

    def law(counts: FlowCounts, now: float) -> int:
        nonlocal target
        passed = latest.of(counts)
        if passed.loads > 0 and passed.requested > 0:
            # consumers report the time between their requests without what they waited for the answer
            consumed = passed.requested / max(1e-3, 1.0 - min(1.0, passed.late_s))
            target = max(1, math.ceil(min(consumed, 4 * passed.requested) / (passed.loads / passed.busy_s)))
        return min(target, MOST)

    return law


def cachew(first: int) -> Law:
    """Cachew: one worker more or less by a cost of batch time; looks again when that changes by 40%; each 10 s."""
    latest, target, stable = Difference(), first, 0
    best_s = math.inf
    settled_s: float | None = None

    def law(counts: FlowCounts, now: float) -> int:
        nonlocal target, stable, best_s, settled_s
        if now % 10.0:
            return target
        passed = latest.of(counts)
        if not passed.requested or counts.working != target:
            return target
        cost_s = (10.0 / passed.requested) * (8.0 + 0.31 * target)
        if settled_s is not None:
            stable += 1
            if stable >= 20 and abs(10.0 / passed.requested - settled_s) > 0.4 * settled_s:
                settled_s, best_s, stable = None, math.inf, 0
        elif cost_s < best_s:
            best_s, target = cost_s, min(target + 1, MOST)
        else:
            target, settled_s = max(1, target - 1), 10.0 / passed.requested
        return target

    return law


def ray_data(first: int) -> Law:
    """Ray Data: one actor more while all are used and none is pending, one less while fewer than half are."""
    latest, target = Difference(), first

    def law(counts: FlowCounts, now: float) -> int:
        nonlocal target
        passed = latest.of(counts)
        used = passed.busy_s / passed.worker_s if passed.worker_s else 0.0
        if used >= 0.95 and counts.working >= target:
            target = min(target + 1, MOST)
        elif used < 0.5 and passed.worker_s:
            target = max(1, target - 1)
        return target

    return law


def dask(first: int) -> Law:
    """Dask's adaptive scaling: queued work by 5 s; fewer only once that was wanted three times in a row."""
    latest, target, wanted_less = Difference(), first, 0
    queue = 512

    def law(counts: FlowCounts, now: float) -> int:
        nonlocal target, wanted_less
        passed = latest.of(counts)
        if not passed.loads:
            return target
        # the queue has what is prefetched and not there: it is as long as jobs ask ahead, however much they wait
        share = passed.busy_s / passed.worker_s if passed.worker_s else 0.0
        wanted = max(1, math.ceil(share * queue * passed.busy_s / passed.loads / 5.0))
        wanted_less = wanted_less + 1 if wanted < target else 0
        if wanted > target or wanted_less >= 3:
            target, wanted_less = min(wanted, MOST), 0
        return target

    return law


LAWS: dict[str, Callable[[int], Law]] = {
    "ours": ours,
    "tf.data": tf_data,
    "Cachew": cachew,
    "Ray Data": ray_data,
    "Dask": dask,
}
