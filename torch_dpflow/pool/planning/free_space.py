"""Allocation of places in one block of memory. Pure: it counts offsets, and allocated bytes never move."""

from __future__ import annotations

from bisect import bisect

from torch_dpflow._core.checks import check_int


class FreeSpace:
    """Allocator of places in `capacity` bytes, each in the first gap that is large enough. Not thread-safe.

    Raises OptionError for a capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = check_int("capacity", capacity, minimum=1)
        #: (offset, length) of the gaps, by offset; no two are adjacent.
        self._gaps: list[tuple[int, int]] = [(0, capacity)]

    @property
    def used(self) -> int:
        """Number of bytes that are not free."""
        return self.capacity - sum(length for _, length in self._gaps)

    def take(self, size: int) -> int | None:
        """Reserve `size` bytes and return their offset; None if no gap is large enough."""
        if not size:
            return 0
        for place, (offset, length) in enumerate(self._gaps):
            if length >= size:
                self._gaps[place : place + 1] = [(offset + size, length - size)] if length > size else []
                return offset
        return None

    def free(self, offset: int, size: int) -> None:
        """Free `size` bytes at the offset that `take(size)` has returned."""
        if not size:
            return
        place = bisect(self._gaps, (offset, size))
        if place < len(self._gaps) and self._gaps[place][0] == offset + size:
            size += self._gaps.pop(place)[1]
        if place and sum(self._gaps[place - 1]) == offset:
            place -= 1
            before, length = self._gaps.pop(place)
            offset, size = before, length + size
        self._gaps.insert(place, (offset, size))
