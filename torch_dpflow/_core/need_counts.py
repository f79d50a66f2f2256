"""Counts of the jobs that still need each key, for many keys: most calls do not pass over all keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_dpflow._core.sparse_zeros import sparse_zeros

#: States of a key in a job's epoch. READ also stands for keys that the job does not read. All others count as NEEDED.
NEEDED, READ = 0, 2
States = NDArray[np.uint8]
Keys = NDArray[np.integer[Any]]
#: Keys of an ended epoch that are counted at once: the end of an epoch of many keys must not delay the next call.
_PIECE = 1 << 16
#: Most ended epochs that are not counted to their end.
_MAX_ENDED = 8


class NeedCounts:
    """Number of jobs that still need a key, for each of the keys 0 to `size` - 1.

    Jobs that read all keys are counted by one number for all keys, with a correction of -1 for each key that a job has
    read. After a job's epoch, calls of `count_ended` remove its corrections piece by piece; counts are always exact.
    """

    def __init__(self, size: int) -> None:
        #: How many jobs read all keys; by key, what to add to that.
        self._whole = 0
        self.extra = sparse_zeros(size, np.int16)
        #: Ended epochs: their states by key, the first key that is not counted yet, and whether they had all keys.
        self._ended: list[tuple[States, int, bool]] = []

    def grow(self, size: int) -> None:
        """Extend to `size` keys. Only jobs that read all keys need the new keys."""
        while self._ended:
            self.count_ended()
        extra = sparse_zeros(size, np.int16)
        extra[: len(self.extra)] = self.extra
        self.extra = extra

    def of(self, keys: Keys) -> NDArray[np.int16]:
        """Return how many jobs need each of these keys."""
        counts: NDArray[np.int16] = self.extra[keys] + np.int16(self._whole)
        for states, first, whole in self._ended:
            found = _to_correct(states[keys], whole) & (keys >= first)
            counts += found if whole else -found.astype(np.int16)
        return counts

    def of_one(self, key: int) -> int:
        """Return how many jobs need a key."""
        count = self._whole + int(self.extra[key])
        for states, first, whole in self._ended:
            if key >= first and (states[key] == READ) == whole:
                count += 1 if whole else -1
        return count

    def begin(self, states: States, read: Keys, *, whole: bool) -> None:
        """Add a job's epoch, of which it has read the keys `read`.

        states: the states of all keys, with READ for those in `read`. whole: whether the job reads all keys; then this
            costs O(len(read)), else O(size).
        """
        if whole:
            self._whole += 1
            self.extra[read] -= 1
        else:
            self.extra += states != READ

    def on_read(self, keys: Keys) -> None:
        """Record that a job has read these distinct keys, which it needed."""
        self.extra[keys] -= 1

    def end(self, states: States, *, whole: bool) -> None:
        """Remove a job's epoch. states, whole: as in `begin`. The caller must not change `states` afterwards."""
        self._whole -= whole
        self._ended.append((states, 0, whole))
        self.count_ended()
        while len(self._ended) > _MAX_ENDED:
            self.count_ended()

    def count_ended(self) -> None:
        """Remove what the oldest ended epoch still contributes to `extra`, for 65,536 keys. Call this often."""
        if self._ended:
            states, first, whole = self._ended.pop(0)
            end = first + _PIECE
            # The other places are not written: their pages may take no memory.
            self.extra[first + np.flatnonzero(_to_correct(states[first:end], whole))] += 1 if whole else -1
            if end < len(states):
                self._ended.insert(0, (states, end, whole))


def _to_correct(states: States, whole: bool) -> NDArray[np.bool_]:
    """Return a mask over `states`: the keys of an ended epoch whose counts must be corrected.

    whole: whether the job was to read all keys. The keys that it has read are then corrected, otherwise all others.
    """
    found: NDArray[np.bool_] = states == READ if whole else states != READ
    return found
