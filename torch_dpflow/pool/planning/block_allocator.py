"""Allocation of places for samples in one block of memory. Pure; the memory's owner copies the bytes.

The samples of a request lie together in a block, which is free once all of them were read: nothing moves, at the cost
of some capacity. The patent's layout moves samples instead.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch_dpflow._core.checks import check_int
from torch_dpflow.errors import UsageError


@dataclass(slots=True)
class _Block:
    offset: int
    length: int
    #: Unread samples in it.
    left: int


class BlockAllocator:
    """Places for samples in `capacity` bytes: one block per request, in the first gap that is large enough.

    One thread owns it. Raises OptionError for a capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = check_int("capacity", capacity, minimum=1)
        #: (offset, length) of the free gaps, by offset; no two are adjacent.
        self._gaps: list[tuple[int, int]] = [(0, capacity)]
        #: Block, offset and length of each sample.
        self._samples: dict[Hashable, tuple[_Block, int, int]] = {}

    @property
    def used(self) -> int:
        """Bytes that are not free."""
        return self.capacity - sum(length for _, length in self._gaps)

    def store(self, samples: Sequence[tuple[Hashable, int]]) -> bool:
        """Place the samples of one request, (key, length) each; return False, with nothing changed, if they do not fit.

        Raises UsageError if a key is stored already, or a length is negative.
        """
        seen: set[Hashable] = set()
        for key, length in samples:
            if key in self._samples or key in seen:
                raise UsageError(f"{key!r} is stored already; store each sample once")
            seen.add(key)
            if length < 0:
                raise UsageError(f"{key!r} has length {length}; a length is at least 0")
        size = sum(length for _, length in samples)
        offset = self._take(size)
        if offset is None:
            return False
        block = _Block(offset, size, len(samples))
        for key, length in samples:
            self._samples[key] = block, offset, length
            offset += length
        return True

    def locate(self, key: Hashable) -> tuple[int, int]:
        """Return offset and length of a sample. Raises UsageError if it is not stored."""
        _, offset, length = self._entry(key)
        return offset, length

    def spend(self, key: Hashable) -> None:
        """Free a sample after it was read. Raises UsageError if it is not stored."""
        block, _, _ = self._entry(key)
        del self._samples[key]
        block.left -= 1
        if not block.left:
            self._free(block.offset, block.length)

    def _entry(self, key: Hashable) -> tuple[_Block, int, int]:
        try:
            return self._samples[key]
        except KeyError:
            raise UsageError(f"{key!r} is not in this space; it was never stored, or it was read") from None

    def _take(self, size: int) -> int | None:
        if not size:
            return 0
        for place, (offset, length) in enumerate(self._gaps):
            if length >= size:
                rest = [(offset + size, length - size)] if length > size else []
                self._gaps[place : place + 1] = rest
                return offset
        return None

    def _free(self, offset: int, length: int) -> None:
        if not length:
            return
        insort(self._gaps, (offset, length))
        joined: list[tuple[int, int]] = []
        for gap in self._gaps:
            if joined and sum(joined[-1]) == gap[0]:
                joined[-1] = (joined[-1][0], joined[-1][1] + gap[1])
            else:
                joined.append(gap)
        self._gaps = joined
