"""The layout of memory of the patent on prefetch caches: one line that is compacted.

[0010] to [0014], claims 1 and 4: a line that is filled from its start, with a list of what lies where. Once it is
used up to a threshold, what was read goes, and what was not moves towards the start.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_dpflow._core.checks import check_int
from torch_dpflow.errors import OptionError


class Move(NamedTuple):
    """Copy these bytes towards the start; source and target may overlap."""

    source: int
    target: int
    length: int


@dataclass(slots=True)
class _Entry:
    offset: int
    length: int
    #: Whether it was read, which frees it.
    spent: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.length


class SlidingSpace:
    """One line, compacted once it is used up to `threshold`.

    With L bytes live in the mean, each compaction moves L and frees the threshold less L, so of each byte stored L /
    (threshold - L) are moved, less what lies at the start already: a threshold just above what is live copies much.
    Readers have to copy a sample out before the next `store`. If those that are used in place stayed, and nothing
    moved across them, what is stored behind them would creep towards the end: a shuffled epoch in batches of 64
    filled 32 times the room that it needs.

    Raises OptionError: a threshold above the capacity, or a number below 1.
    """

    def __init__(self, capacity: int, threshold: int | None = None) -> None:
        self.capacity = check_int("capacity", capacity, minimum=1)
        self.threshold = capacity if threshold is None else check_int("threshold", threshold, minimum=1)
        if self.threshold > capacity:
            raise OptionError(f"threshold={threshold} is above capacity={capacity}; give at most that")
        #: By offset, read ones too until they are evicted.
        self._line: list[_Entry] = []
        self._entries: dict[Hashable, _Entry] = {}
        #: What the last `store` has moved, in order; and samples that were moved in all.
        self.moves: list[Move] = []
        self.moved = 0

    @property
    def used(self) -> int:
        """Bytes that cannot be given out now."""
        return self._line[-1].end if self._line else 0

    def store(self, samples: Sequence[tuple[Hashable, int]]) -> bool:
        """Make `moves`, in order, then place samples, (key, length) each; False: no room, and nothing has changed."""
        size, live = sum(length for _, length in samples), sum(one.length for one in self._entries.values())
        if size > self.capacity - live:
            return False
        self.moves = self._compact() if self.used + size > self.threshold else []
        for key, length in samples:
            entry = self._entries[key] = _Entry(self.used, length)
            self._line.append(entry)
        return True

    def locate(self, key: Hashable) -> tuple[int, int]:
        """Offset and length of a sample, valid until the next `store`."""
        entry = self._entries[key]
        return entry.offset, entry.length

    def spend(self, key: Hashable) -> None:
        """A sample was read."""
        self._entries.pop(key).spent = True

    def _compact(self) -> list[Move]:
        """Evict what was read; move what was not, neighbours at once."""
        moves: list[Move] = []
        self._line = [entry for entry in self._line if not entry.spent]
        end = 0
        for entry in self._line:
            if entry.offset > end:
                self.moved += 1
                last = moves[-1] if moves else None
                if last and (last.source + last.length, last.target + last.length) == (entry.offset, end):
                    moves[-1] = last._replace(length=last.length + entry.length)
                else:
                    moves.append(Move(entry.offset, end, entry.length))
                entry.offset = end
            end = entry.end
        return moves
