"""Where fetched samples lie in one block of memory: pure; the owner of the memory copies and frees as it is told.

`BlockSpace` keeps the samples of a request together in a block that is free once all of them were read: nothing
moves, for more room. The patent's layout, behind the same contract, is in `benchmarks/sliding_space`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch_dpflow.checks import check_int
from torch_dpflow.errors import UsageError


class Move(NamedTuple):
    """Copy these bytes towards the start; source and target may overlap."""

    source: int
    target: int
    length: int


class Stored(NamedTuple):
    """Make these moves, in order; then each sample's bytes belong to its offset."""

    moves: list[Move]
    offsets: list[int]


@dataclass(slots=True)
class SpaceEntry:
    offset: int
    length: int
    #: Whether it was read, which frees it.
    spent: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.length


class Space(ABC):
    """Places for samples in `capacity` bytes. One thread owns it.

    Raises OptionError: a capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = check_int("capacity", capacity, minimum=1)
        self._entries: dict[Hashable, SpaceEntry] = {}
        #: Bytes of samples that were not read.
        self.live = 0
        #: Samples that moves have copied.
        self.moved = 0

    @abstractmethod
    def store(self, samples: Sequence[tuple[Hashable, int]]) -> Stored | None:
        """Place the samples of one request, (key, length) each; None: there is no room, and nothing has changed.

        Raises UsageError: a key is stored already, or a length is below 0.
        """

    @property
    @abstractmethod
    def used(self) -> int:
        """Bytes that cannot be given out now."""

    def holds(self, key: Hashable) -> bool:
        """Whether it was stored and is not spent."""
        return key in self._entries

    def locate(self, key: Hashable) -> tuple[int, int]:
        """Offset and length of a sample, valid until the next `store`. Raises UsageError: it is not there."""
        entry = self._entry(key)
        return entry.offset, entry.length

    @abstractmethod
    def spend(self, key: Hashable) -> None:
        """A sample was read, and nobody uses its bytes any more. Raises UsageError: it is not there."""

    def _entry(self, key: Hashable) -> SpaceEntry:
        try:
            return self._entries[key]
        except KeyError:
            raise UsageError(f"{key!r} is not in this space; it was never stored, or it was read") from None

    def _add(self, key: Hashable, offset: int, length: int) -> SpaceEntry:
        entry = self._entries[key] = SpaceEntry(offset, length)
        self.live += length
        return entry

    def _remove(self, key: Hashable) -> SpaceEntry:
        entry = self._entry(key)
        del self._entries[key]
        self.live -= entry.length
        return entry

    def _check(self, samples: Sequence[tuple[Hashable, int]]) -> int:
        seen: set[Hashable] = set()
        for key, length in samples:
            if key in self._entries or key in seen:
                raise UsageError(f"{key!r} is stored already; store each sample once")
            seen.add(key)
            if length < 0:
                raise UsageError(f"{key!r} has length {length}; a length is at least 0")
        return sum(length for _, length in samples)

    def validate(self) -> None:
        """Check every invariant; for tests. Raises AssertionError."""
        entries = sorted(self._entries.values(), key=lambda entry: (entry.offset, entry.end))
        assert all(not entry.spent and entry.offset >= 0 for entry in entries)
        assert all(entry.end <= self.capacity for entry in entries)
        assert all(one.end <= other.offset for one, other in pairwise(entries))
        assert self.live == sum(entry.length for entry in entries)
        assert self.live <= self.used <= self.capacity


@dataclass(slots=True)
class _Block:
    offset: int
    length: int
    #: Samples in it that were not read.
    left: int


class BlockSpace(Space):
    """Each request's samples in one block, the first gap that is large enough; it is free once all were read."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        #: (offset, length) of what is free, by offset, no two of them neighbours.
        self._gaps: list[tuple[int, int]] = [(0, capacity)]
        self._blocks: dict[Hashable, _Block] = {}

    @property
    def used(self) -> int:
        return self.capacity - sum(length for _, length in self._gaps)

    def store(self, samples: Sequence[tuple[Hashable, int]]) -> Stored | None:
        size = self._check(samples)
        offset = self._take(size) if samples else 0
        if offset is None:
            return None
        block, offsets = _Block(offset, size, len(samples)), []
        for key, length in samples:
            self._add(key, offset, length)
            self._blocks[key] = block
            offsets.append(offset)
            offset += length
        return Stored([], offsets)

    def spend(self, key: Hashable) -> None:
        self._remove(key)
        block = self._blocks.pop(key)
        block.left -= 1
        if not block.left:
            self._free(block.offset, block.length)

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

    def validate(self) -> None:
        super().validate()
        assert all(sum(one) < other[0] for one, other in pairwise(self._gaps))
        blocks = {id(block): block for block in self._blocks.values()}.values()
        pieces = sorted([*self._gaps, *((block.offset, block.length) for block in blocks if block.length)])
        assert [offset for offset, _ in pieces] == [sum(piece) for piece in [(0, 0), *pieces]][: len(pieces)]
        assert sum(length for _, length in pieces) == self.capacity
