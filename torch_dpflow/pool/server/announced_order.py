"""An order that a reader has announced to a server, and the places of what was read of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.errors import DPFlowError

Keys = npt.NDArray[np.int32]
_SIDES: tuple[Any, Any] = ("left", "right")


class AheadPlace:
    """A sample in memory, whose bytes stay as long as somebody refers to this."""

    __slots__ = ("_free", "length", "offset")

    def __init__(self, offset: int, length: int, free: Callable[[], None]) -> None:
        self.offset, self.length = offset, length
        self._free = free

    def __del__(self) -> None:
        self._free()


class AnnouncedOrder:
    """One reader's order, of those records that have no place in memory.

    owner: the connection that has announced it.
    grows: whether more of it may be on its way.
    """

    def __init__(self, owner: str, spread: int, keys: Keys, *, grows: bool = False) -> None:
        self.owner, self.spread, self.keys, self.grows = owner, spread, keys, grows
        self._by_key = np.argsort(keys, kind="stable").astype(np.int32)
        #: The position of the first of `keys`, and of the first one that may be read.
        self._first = self.passed = 0
        #: What was served and not taken, by position: its place, or why there is none.
        self.served: dict[int, AheadPlace | DPFlowError] = {}
        #: Positions whose answer was that there is no room until others are taken.
        self.refused: set[int] = set()

    def positions(self, key: int) -> list[int]:
        """Where this record is read."""
        first, end = (int(np.searchsorted(self.keys, key, side, sorter=self._by_key)) for side in _SIDES)
        return [self._first + one for one in self._by_key[first:end].tolist()]

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self._first + len(self.keys)

    def extend(self, keys: Keys, spread: int) -> None:
        """These are read then; what was passed over is forgotten."""
        self.keys = np.concatenate([self.keys[self.passed - self._first :], keys])
        self._first, self.spread, self.grows = self.passed, spread, True
        self._by_key = np.argsort(self.keys, kind="stable").astype(np.int32)
