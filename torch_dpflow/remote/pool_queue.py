"""The samples of a pool that wait to be loaded, the one wanted soonest first."""

from __future__ import annotations

import heapq

from torch_dpflow.remote.pool_objects import PoolObject

#: So many more entries than twice the waiting objects there may be before those that are out of date go.
_STALE_ENTRIES = 64


class LoadQueue:
    """Ordered by distance, then by age. Every call is O(log n), amortised.

    An object that is wanted sooner than before is pushed again; the entry that it had goes when it comes up, or, as
    that may be never while others are wanted sooner, when half of all are such.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, PoolObject]] = []
        self._waiting: set[PoolObject] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, wanted: PoolObject) -> None:
        """It waits, at its distance; one that waits already moves there."""
        self._waiting.add(wanted)
        heapq.heappush(self._heap, _entry(wanted))
        if len(self._heap) > 2 * len(self._waiting) + _STALE_ENTRIES:
            self._heap = [_entry(one) for one in self._waiting]
            heapq.heapify(self._heap)

    def moved(self, wanted: PoolObject) -> None:
        """Its distance has shrunk, if it waits."""
        if wanted in self._waiting:
            self.push(wanted)

    def discard(self, wanted: PoolObject) -> None:
        """It does not wait any more."""
        self._waiting.discard(wanted)

    def first(self) -> PoolObject | None:
        """The one that is wanted soonest; it goes on waiting."""
        while self._heap:
            distance, _, wanted = self._heap[0]
            if wanted in self._waiting and distance == wanted.distance:
                return wanted
            heapq.heappop(self._heap)
        return None

    def validate(self) -> None:
        """Check every invariant; O(n), for tests. Raises AssertionError."""
        entries = {(distance, number) for distance, number, _ in self._heap}
        for wanted in self._waiting:
            assert not wanted.loading
            assert not wanted.ready
            assert wanted.tickets
            assert (wanted.distance, wanted.number) in entries


def _entry(wanted: PoolObject) -> tuple[int, int, PoolObject]:
    return wanted.distance, wanted.number, wanted
