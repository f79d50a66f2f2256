"""A priority queue whose items may change their rank or leave."""

from __future__ import annotations

import heapq
from typing import Any, TypeVar

T = TypeVar("T")

#: So many stale entries more than there are items may pile up before they go.
_MAX_STALE = 64


class LazyHeap(dict[T, tuple[float, int, Any]]):
    """Items by rank, the lowest first. Every call is O(log n), amortised.

    An item that changes its rank or leaves does so in a dictionary, which this is: len(), `in` and iteration are of the
    items, at the speed of C. The entry that it had in the heap goes when it comes up or, as that may be never while
    others rank lower, when half of all entries are stale: in a pool that is never short of room, or whose jobs always
    wait, 0.65 kB stayed of every sample.

    Items are hashable; no two of them have the same rank and `then`. Changed by the methods below only.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        super().__init__()
        #: (rank, then, item), those that are stale among them: an entry is not that the dictionary has for its item.
        self._heap: list[tuple[float, int, Any]] = []

    def push(self, item: T, rank: float, then: int = 0) -> None:
        """It is here, at this rank, and by `then` among equals; one that is here already moves there."""
        entry = self[item] = (rank, then, item)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self) + _MAX_STALE:
            self._drop_stale()

    def discard(self, item: T) -> bool:
        """It leaves; whether it was here."""
        if self.pop(item, None) is None:
            return False
        if len(self._heap) > 2 * len(self) + _MAX_STALE:
            self._drop_stale()
        return True

    def first(self) -> T:
        """The item of the lowest rank, which stays. There must be one."""
        heap = self._heap
        while True:
            item: T = heap[0][2]
            if self.get(item) is heap[0]:
                return item
            heapq.heappop(heap)

    def _drop_stale(self) -> None:
        self._heap = list(self.values())
        heapq.heapify(self._heap)

    def validate(self) -> None:
        """Check every invariant; O(n), for tests. Raises AssertionError."""
        entries = set(map(id, self._heap))
        assert all(id(entry) in entries and entry[2] == item for item, entry in self.items())
        assert len(self._heap) <= 2 * len(self) + _MAX_STALE
