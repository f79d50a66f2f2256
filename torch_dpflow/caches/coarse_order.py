"""Lower part of the queue in `residents`: keys in buckets, which are sorted further only when they are needed.

An incremental quicksort (Navarro and Paredes, "On sorting, heaps, and minimum spanning trees", 2010) over numpy
arrays, for keys whose ranks shrink over time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from torch_dpflow.lookahead import Keys

#: Ranks of keys, the highest to be evicted first. Real part: the distance. Imaginary part: the load number times -1.
#: numpy orders complex numbers by these. It has no partition by two arrays, and sorting by two (lexsort) takes 17
#: times as long as a partition of these, for 200,000 keys.
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

    The key with the highest rank (see `Ranks`) is evicted first. No key of a bucket ranks above the bucket's bound;
    bounds ascend from the bottom bucket to the top one. The *floor* is the bound of the top bucket: keys that rank
    above it are not in the stack.

    Args:
        front: approximate number of keys that `open` returns. A larger number makes each eviction slower; a smaller
            one means more calls of `open`.
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
        """Add keys that rank at or below the floor. ranks: the rank of each key."""
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
        """Add keys that all rank above the floor, on top of the stack. The highest of `ranks` becomes the floor."""
        top = complex(ranks.max())
        if self._stack and self._stack[-1].size < self._front * _FAN_OUT:
            self._stack[-1].add(keys)
            self._stack[-1].bound = top
        else:
            self._stack.append(_Bucket(top, keys))
        self.size += len(keys)
        self._changed()

    def open(self) -> Keys | None:
        """Remove and return the keys with the highest ranks; None if none is resident. Lower the floor below them."""
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
        """Raise all bounds by `distance`, after distances of keys have grown by at most this."""
        for bucket in self._stack:
            bucket.bound = complex(bucket.bound.real + distance, bucket.bound.imag)
        self._changed()

    def restart(self, keys: Keys) -> None:
        """Replace all keys by `keys`, whose ranks are not known."""
        self._stack = [_Bucket(complex(np.inf, 0.0), keys)] if len(keys) else []
        self.size = len(keys)
        self._changed()

    def _changed(self) -> None:
        self._bounds = None
        #: Bound of the topmost bucket, as a rank and by its parts: no key in here ranks above it.
        self.floor = self._stack[-1].bound if self._stack else complex(-np.inf, -np.inf)
        self.floor_distance = self.floor.real
        self.floor_load = -self.floor.imag
