"""Scaling of one flow's shards: decides once a second how many threads should serve its samples. A pure state machine.

A shard serves samples in one thread. This thread limits the flow if two conditions hold for several seconds:

- jobs wait for data;
- by its processor time, the busiest shard's thread is busy all the time; or nearly all the time, if workers are idle
  for a part of their time. Workers also count as busy while their results wait for the thread.

A thread that waits for a processor has less processor time, and does not count as busy: more shards would not help.

**Up.** The number of shards then grows by half, at least by one. The next step follows after the new shards have been
measured. If a step has hardly increased the rate, the next step is delayed, each time for twice as long: if all jobs
read the keys of one shard, more shards do not help.

**Down.** One shard is removed if the busiest thread would also have been far from its limit with one shard less, for
some time. Each step up that follows a step down doubles this time. So the number settles while the load is constant.

Every change moves keys to other shards, which load their samples again. Therefore the number does not change during a
pause of jobs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from msgspec.structs import astuple

from torch_dpflow.cluster.control.autoscale import FlowCounts, between

#: Length of the window over which threads are measured, and the pause before a new window after a change (seconds).
WINDOW_S, SETTLE_S = 5.0, 3.0
#: A thread is full if its busy share is at least `FULL`, or `NEARLY_FULL` while that of workers is below `IDLE`.
FULL, NEARLY_FULL, IDLE = 0.92, 0.85, 0.9
#: Jobs count as waiting if they wait for at least this share of their time.
STALLED = 0.05
#: Doubling the shards should increase the rate by at least this share, and smaller steps in proportion.
BROUGHT = 0.1
#: One shard is removed if, without it, the busiest thread would have been busy for less than the share `LOW` of the
#: time, during `DOWN_S` seconds.
LOW, DOWN_S = 0.5, 30.0
#: Delay of the next step up after a step that did not help, and the maximum of any delay (seconds).
HOLD_S, LONGEST_S = 120.0, 3600.0


class ShardCounts(msgspec.Struct, frozen=True):
    """Counters of a shard since its start."""

    #: Processor time of the shard's thread, and time for which the shard has served (seconds).
    thread_s: float
    serving_s: float
    served: float
    #: Sums over the shard's workers: seconds in which they had tasks, and seconds in which they existed.
    busy_s: float
    worker_s: float


#: The shards of a flow that own keys, by id and incarnation.
Shards: TypeAlias = Mapping[tuple[str, int], ShardCounts]


@dataclass(frozen=True, slots=True)
class _Load:
    """Figures of a window: share of the time in which the busiest thread was busy, and samples per second."""

    busiest: float
    rate: float
    #: Whether the thread is full, and jobs wait.
    is_limit: bool


class ShardScaler:
    """State machine that decides how many shards one flow should have. Not thread-safe; a step is O(shards + jobs)."""

    def __init__(self) -> None:
        #: The number of shards that the flow should have.
        self.target = 1
        #: Whether a shard's thread limits the flow, and the latest `step` has not raised the number of shards.
        self.is_limit = False
        self._history: deque[tuple[float, FlowCounts, Shards]] = deque()
        self._settled_at = -math.inf
        #: Number of shards before the latest step up, and the rate at that time.
        self._step: tuple[int, float] | None = None
        self._was_down = False
        self._may_grow_at, self._hold_s = -math.inf, HOLD_S
        #: Since when the flow has had a shard too many (seconds); and how long it must have.
        self._low_since, self._down_s = math.inf, DOWN_S

    def restore(self, shards: int) -> None:
        self.target = max(1, shards)

    def step(self, counts: FlowCounts, own: Shards, now: float, *, shards: int, least: int, most: int) -> None:
        """Set `target` by the present counts.

        counts: figures of the flow.
        own: counters of the shards that own keys.
        shards: number of shards that should run now. It differs from `target` if nodes have joined, or if the cluster
            cannot run more shards.
        least, most: no step goes below or above these numbers of shards.
        """
        self.is_limit = False
        if len(own) != shards or (self._history and self._history[-1][2].keys() != own.keys()):
            self._settle(now)
        if now < self._settled_at:
            return
        self._history.append((now, counts, own))
        while len(self._history) > 2 and self._history[1][0] <= now - WINDOW_S:
            self._history.popleft()
        load = self._measure()
        if load is None:
            self._low_since = math.inf
            return
        if load.is_limit:
            self.is_limit = not self._grow(load, shards, most, now)
        if shards <= least or load.busiest * shards >= LOW * (shards - 1):
            self._low_since = math.inf
            return
        self._low_since = min(self._low_since, now)
        if now - self._low_since >= self._down_s:
            self._change(shards - 1, now)
            self._step, self._was_down = None, True

    def _measure(self) -> _Load | None:
        """Return the figures of the window; None if the window is too short, or if no job has read in it."""
        (began, first, before), (ended, last, after) = self._history[0], self._history[-1]
        _, stall_s, reading_s = between(first, last)
        passed = [_passed(before[name], counts) for name, counts in after.items()]
        if ended - began < WINDOW_S or reading_s <= 0 or any(one.serving_s <= 0 for one in passed):
            return None
        busiest = max(one.thread_s / one.serving_s for one in passed)
        is_idle = sum(one.busy_s for one in passed) < IDLE * sum(one.worker_s for one in passed)
        is_full = busiest >= (NEARLY_FULL if is_idle else FULL)
        rate = sum(one.served / one.serving_s for one in passed)
        return _Load(busiest, rate, is_full and stall_s >= STALLED * reading_s)

    def _grow(self, load: _Load, shards: int, most: int, now: float) -> bool:
        """Take a step up, unless the maximum is reached or more shards did not help; return whether it was taken."""
        if self._step is not None:
            before, rate = self._step
            if load.rate < rate * (1 + BROUGHT * (shards / before - 1)):
                self._may_grow_at = now + self._hold_s
                self._hold_s = min(2 * self._hold_s, LONGEST_S)
            self._step = None
        if now < self._may_grow_at or shards >= most:
            return False
        if self._was_down:
            self._down_s, self._was_down = min(2 * self._down_s, LONGEST_S), False
        self._step = (shards, load.rate)
        self._change(min(most, shards + max(1, shards // 2)), now)
        return True

    def _change(self, target: int, now: float) -> None:
        self.target = target
        self._settle(now)

    def _settle(self, now: float) -> None:
        """Discard the measured figures, because the shards or their processes have changed."""
        self._history.clear()
        self._settled_at, self._low_since = now + SETTLE_S, math.inf


def _passed(first: ShardCounts, last: ShardCounts) -> ShardCounts:
    return ShardCounts(*(after - before for before, after in zip(astuple(first), astuple(last))))
