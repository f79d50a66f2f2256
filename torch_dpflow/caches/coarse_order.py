"""Keys in a coarse order: buckets with upper bounds, which are sorted further only when they are needed.

The lower part of the queue in `residents`, by incremental quicksort (Navarro and Paredes, "On sorting, heaps, and
minimum spanning trees", 2010) over numpy arrays, for keys whose ranks shrink over time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from torch_dpflow.lookahead import Keys

#: Distance as real part, minus the load number as imaginary part: numpy orders complex numbers by the real
#: part, then by the imaginary part, which is the order of eviction. It has no partition by two arrays, and
#: sorting by two (lexsort) takes 17 times as long as a partition of these, for 200,000 keys.
Ranks = npt.NDArray[np.complex128]

#: How many fronts one bucket is split into, and how many it may take before another bucket is begun.
_FAN_OUT = 48


class _Bucket:
    __slots__ = ("bound", "chunks", "size")

    def __init__(self, bound: complex, keys: Keys) -> None:
        self.bound = bound
        self.chunks = [keys.astype(np.int32, copy=False)]
        self.size = len(keys)

    def add(self, keys: Keys) -> None:
        self.chunks.append(keys.astype(np.int32, copy=False))
        self.size += len(keys)


class CoarseOrder:
    """Stack of buckets of keys, ordered by eviction rank.

    A key's rank is its place in the order of eviction; it is not the rank of a process. Bounds ascend from the bottom
    bucket to the top one, and no key of a bucket ranks above the bucket's bound. The *floor* is the bound of the top
    bucket: keys that rank above it are not in the stack.

    Args:
        front: approximate number of keys that `open` returns. A larger number makes each eviction slower, a smaller one
            makes `open` more frequent.
        resident: function that returns the resident keys of an array.
        ranks: function that returns the current ranks of an array of keys.
    """

    def __init__(self, front: int, resident: Callable[[Keys], Keys], ranks: Callable[[Keys], Ranks]) -> None:
        self._front = front
        self._resident = resident
        self._ranks = ranks
        self._stack: list[_Bucket] = []
        self._bounds: Ranks | None = None
        #: Entries in all buckets, stale and repeated ones included.
        self.size = 0
        self._changed()

    def put(self, keys: Keys, ranks: Ranks) -> None:
        """Add keys that rank at or below the floor; `ranks` are their ranks."""
        if len(self._stack) == 1:
            self._stack[0].add(keys)
        else:
            if self._bounds is None:
                self._bounds = np.array([bucket.bound for bucket in self._stack])
            place = self._bounds.searchsorted(ranks)
            order = place.argsort(kind="stable")
            place, keys = place[order], keys[order]
            ends = np.flatnonzero(place[1:] != place[:-1]) + 1
            for where, part in zip(place[[0, *ends.tolist()]].tolist(), np.split(keys, ends)):
                self._stack[where].add(part)
        self.size += len(keys)

    def cover(self, keys: Keys, ranks: Ranks) -> None:
        """Push keys, all of which rank above the floor, on top of the stack.

        The highest of their ranks becomes the floor. The keys join the top bucket if it is small, else they form a new
        one.
        """
        top = complex(ranks.max())
        if self._stack and self._stack[-1].size < self._front * _FAN_OUT:
            self._stack[-1].add(keys)
            self._stack[-1].bound = top
        else:
            self._stack.append(_Bucket(top, keys))
        self.size += len(keys)
        self._changed()

    def open(self) -> Keys | None:
        """Remove and return the keys with the highest ranks, and lower the floor below them.

        Return None if there are no keys.
        """
        while self._stack:
            bucket = self._stack.pop()
            self.size -= bucket.size
            self._changed()
            keys = self._resident(np.concatenate(bucket.chunks))
            ranks = self._ranks(keys)
            high = ranks > self.floor
            if not high.all():
                self.put(keys[~high], ranks[~high])
                keys, ranks = keys[high], ranks[high]
            if len(keys) > 2 * self._front:
                keys = self._split(keys, ranks)
            if len(keys):
                return keys
        return None

    def _split(self, keys: Keys, ranks: Ranks) -> Keys:
        """Divide `keys` into buckets of equal size, and return the keys that rank above all of them."""
        while len(keys) > 2 * self._front:
            parts = min(_FAN_OUT, -(-len(keys) // self._front))
            ends = np.arange(1, parts) * len(keys) // parts
            order = ranks.argpartition(ends - 1)
            bounds = ranks[order[ends - 1]].tolist()
            *lower, highest = np.split(order, ends)
            self._stack += [_Bucket(bound, keys[part]) for bound, part in zip(bounds, lower)]
            self.size += len(keys) - len(highest)
            keys, ranks = keys[highest], ranks[highest]
        self._changed()
        # A rank that equals the floor is a second entry of the key that set the floor.
        return keys[ranks > self.floor]

    def raise_bounds(self, distance: float) -> None:
        """Raise all bounds, because every rank may have grown by `distance`."""
        for bucket in self._stack:
            bucket.bound = complex(bucket.bound.real + distance, bucket.bound.imag)
        self._changed()

    def restart(self, keys: Keys) -> None:
        """Replace all entries by `keys`, whose ranks are unknown."""
        self._stack = [_Bucket(complex(np.inf, 0.0), keys)] if len(keys) else []
        self.size = len(keys)
        self._changed()

    def _changed(self) -> None:
        self._bounds = None
        #: Bound of the topmost bucket, as a rank and by its parts: no key in here ranks above it.
        self.floor = self._stack[-1].bound if self._stack else complex(-np.inf, -np.inf)
        self.floor_distance = self.floor.real
        self.floor_load = -self.floor.imag
