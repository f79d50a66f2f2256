"""A priority queue whose items can change their rank or leave."""

from __future__ import annotations

import heapq
from typing import Any, TypeVar

T = TypeVar("T")

#: Stale entries that are tolerated beyond the number of items.
_MAX_STALE = 64


class LazyHeap(dict[T, tuple[float, int, Any]]):
    """Priority queue of hashable items by rank, the lowest first. Every method is O(log n), amortised.

    No two items may have the same rank and `then` (see `push`). As a dict it maps each item to its current entry (rank,
    then, item); change it only by the methods of this class. Removed items are released later.
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
        """Remove an item if it is present; return whether it was."""
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
