"""What is to be read, in an order that is known when an epoch begins: pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from torch_dpflow.errors import OptionError, UsageError

_LARGEST_KEY = (1 << 31) - 1


class KnownOrder:
    """One epoch's order; each position is taken once, and several behind it with it.

    `following` and `left_before` look at each position up to their last one that was not taken; in reading ahead those
    are few. It takes 4 bytes a position.

    order: the keys in the order in which they are read, below 2^31; kept as it is if it is an array of int32.
    Raises OptionError: the order has more dimensions than one, or a key is too large.
    """

    def __init__(self, order: npt.ArrayLike) -> None:
        given = np.asarray(order)
        given = given if given.dtype == np.int32 else given.astype(np.int64)
        if given.ndim != 1:
            raise OptionError(f"order has {given.ndim} dimensions; give keys in a single list")
        if len(given) and int(given.max()) > _LARGEST_KEY:
            raise OptionError(f"key {int(given.max())} is above {_LARGEST_KEY}; give smaller ones")
        self._order = given.astype(np.int32, copy=False)
        #: Every position before it was taken, and these behind it.
        self._nearest = 0
        #: The position of the first key that is kept.
        self._first = 0
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return self._first + len(self._order)

    def extend(self, keys: npt.NDArray[np.int32]) -> None:
        """These come behind the others, and keys that were taken are forgotten."""
        self._order = np.concatenate([self._order[self._nearest - self._first :], keys])
        self._first = self._nearest

    def key(self, position: int) -> int:
        """What is read there, where that is not taken."""
        return int(self._order[position - self._first])

    def is_taken(self, position: int) -> bool:
        """Whether it was taken."""
        return position < self._nearest or position in self._taken

    def nearest(self) -> int | None:
        """The first position of all that was not taken; None where every one was."""
        return self._nearest if self._nearest < len(self) else None

    def left_before(self, end: int) -> int:
        """How many positions before `end` were not taken."""
        return max(0, end - self._nearest) - sum(position < end for position in self._taken)

    def following(self, position: int, count: int) -> list[int]:
        """This position and those that one request takes with it, which were not taken, at most `count`."""
        found: list[int] = []
        for one in self.behind(position):
            if len(found) >= count:
                break
            if not self.is_taken(one):
                found.append(one)
        return found

    def behind(self, position: int) -> Iterable[int]:
        """This position and those that one request may take with it, rising."""
        return range(position, len(self))

    def take(self, positions: Sequence[int]) -> None:
        """Take these. Raises UsageError: one of them was taken before."""
        taken = next((one for one in positions if self.is_taken(one)), None)
        if taken is not None:
            raise UsageError(f"position {taken} was taken already; each one is read once an epoch")
        self._taken.update(positions)
        while self._nearest in self._taken:
            self._taken.discard(self._nearest)
            self._nearest += 1
