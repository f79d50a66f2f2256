"""A priority queue whose items can change their rank or leave."""

from __future__ import annotations

import heapq
from typing import Any, TypeVar

T = TypeVar("T")

#: Stale entries that are tolerated beyond the number of items.
_MAX_STALE = 64


class LazyHeap(dict[T, tuple[float, int, Any]]):
    """Priority queue of items by rank, the lowest first. Every call is O(log n), amortised.

    The dict holds each item's current entry, so len(), `in` and iteration have the speed of C. A stale entry leaves the
    heap when it comes to the top, or when half of all entries are stale: without this rule, entries that never come to
    the top take 0.65 kB for every sample.

    Items are hashable; no two of them have the same rank and `then` (see `push`). Change the heap only by these
    methods.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        super().__init__()
        #: (rank, then, item). An entry is stale if it is not the dict's entry of its item.
        self._heap: list[tuple[float, int, Any]] = []

    def push(self, item: T, rank: float, then: int = 0) -> None:
        """Add an item with this rank, or change its rank. Items of equal rank are ordered by `then`."""
        entry = self[item] = (rank, then, item)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self) + _MAX_STALE:
            self._drop_stale()

    def discard(self, item: T) -> bool:
        """Remove an item; return whether it was present."""
        if self.pop(item, None) is None:
            return False
        if len(self._heap) > 2 * len(self) + _MAX_STALE:
            self._drop_stale()
        return True

    def first(self) -> T:
        """Return the item of the lowest rank without removing it; the heap must not be empty."""
        heap = self._heap
        while True:
            item: T = heap[0][2]
            if self.get(item) is heap[0]:
                return item
            heapq.heappop(heap)

    def _drop_stale(self) -> None:
        self._heap = list(self.values())
        heapq.heapify(self._heap)
