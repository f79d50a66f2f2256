"""The resident keys in eviction order: a lazy priority queue whose priorities shrink over time.

A key's *distance* is the distance to its next use. The key with the greatest distance is evicted first; among equals
the one loaded first. Every read shrinks the distances of all keys, each job's at its own pace, so storing distances
would mean updating every key at every read. The queue stores upper bounds instead and computes the true distance only
of keys that may be evicted next, as lazy greedy selection does. Amortised, an operation costs O(log n), mostly in
numpy, and a key takes 4 to 8 bytes besides its load number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.sparse_zeros import sparse_zeros
from torch_dpflow.caches.coarse_order import CoarseOrder, Ranks
from torch_dpflow.lookahead import Keys

Distances = npt.NDArray[np.float64]

_NO_KEYS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


class Ranking(ABC):
    """Computes distances of keys. A distance may only shrink; before it grows, see `Residents`."""

    @abstractmethod
    def distance(self, key: int) -> float:
        """Return the distance of a resident key's next use, in any unit."""

    @abstractmethod
    def distances(self, keys: Keys) -> Distances:
        """Do the same for many keys."""

    @abstractmethod
    def renew(self, key: int) -> float:
        """Recompute the stored values of a key that was read or became resident; return its distance."""

    @abstractmethod
    def renew_many(self, keys: Keys) -> Distances:
        """Do the same for many keys."""


class Residents:
    """A set of keys, with `pop` for the one of the greatest distance.

    A key's distance may only shrink until the next `add` or `move` of that key; when it grows, call `raise_bounds`
    or `rebuild`. A key may have several entries: at least one bounds its distance from above, the others are dropped
    when they reach the top.

    Args:
        ranking: what to order by.
        front: how many keys are kept in fine order.
    """

    #: The highest load number; after it, keys are renumbered.
    highest_load: ClassVar[int] = 2**31 - 1

    def __init__(self, ranking: Ranking, front: int) -> None:
        self._ranking = ranking
        self._front_size = front
        #: Number of each key's load, from 1; 0 where the key is not resident.
        self.loads: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self.load_of: memoryview[Any] = self.loads.data
        #: How many keys are resident.
        self.count = 0
        self._last_load = 0
        self._coarse = CoarseOrder(front, self._resident, self._ranks)
        #: Keys that ranked above the floor of the coarse order when they were added, in one of two forms: an array
        #: for bulk operations, or a heap of (-distance then, load, key) for single ones. One of the two is empty.
        self._front: Keys = _NO_KEYS
        self._heap: list[tuple[float, int, int]] = []
        #: Keys that ranked at or below the floor and are not yet in the coarse order.
        self._strays: list[int] = []
        self._stray_arrays: list[Keys] = []
        self._stray_count = 0

    def keys(self) -> npt.NDArray[np.int64]:
        """Return the resident keys, ascending. O(the largest key)."""
        return np.flatnonzero(self.loads)

    def grow(self, span: int) -> None:
        """Grow arrays to hold keys below `span`."""
        loads = sparse_zeros(span, np.int32)
        loads[: len(self.loads)] = self.loads
        self.loads, self.load_of = loads, loads.data

    def add(self, key: int, distance: float) -> None:
        """Add a key that is not resident."""
        if self._last_load == self.highest_load:
            self._renumber()
        self._last_load += 1
        self.load_of[key] = self._last_load
        self.count += 1
        self.move(key, distance, self._last_load)

    def move(self, key: int, distance: float, load: int) -> None:
        """Set the distance of a resident key; `load` is its load number."""
        coarse = self._coarse
        if distance > coarse.floor_distance or (distance == coarse.floor_distance and load < coarse.floor_load):
            if len(self._front):
                self._to_heap()
            heappush(self._heap, (-distance, load, key))
            if len(self._heap) > 4 * self._front_size:
                self._lower_front()
        else:
            self._strays.append(key)
            if len(self._strays) > 4 * self._front_size:
                self._file_strays()

    def pop(self) -> int:
        """Remove and return the key to evict first; the set must not be empty."""
        if len(self._front):
            self._to_heap()
        while True:
            key = self._pop_heap()
            if key is not None:
                self.remove(key)
                return key
            self._refill()
            self._to_heap()

    def remove(self, key: int) -> None:
        """Remove a resident key."""
        self.load_of[key] = 0
        self.count -= 1

    def _pop_heap(self) -> int | None:
        """Return the key to evict next, if it is in the heap."""
        heap, load_of, coarse, distance_of = self._heap, self.load_of, self._coarse, self._ranking.distance
        while heap:
            bound, load, key = heap[0]
            if load_of[key] != load:
                heappop(heap)
                continue
            distance = distance_of(key)
            if distance < coarse.floor_distance or (distance == coarse.floor_distance and load >= coarse.floor_load):
                self._strays.append(key)
                heappop(heap)
            elif distance < -bound:
                heapreplace(heap, (-distance, load, key))
            else:
                heappop(heap)
                return key
        return None

    def add_many(self, keys: Keys, distances: Distances) -> None:
        """Add distinct keys that are not resident, in this order."""
        if self._last_load + len(keys) > self.highest_load:
            self._renumber()
        self.loads[keys] = np.arange(self._last_load + 1, self._last_load + 1 + len(keys))
        self._last_load += len(keys)
        self.count += len(keys)
        self.move_many(keys, distances)

    def move_many(self, keys: Keys, distances: Distances) -> None:
        """Set the distances of resident keys."""
        if self._heap:
            self._to_front()
        # Where distances are equal the load decides; `_sift_front` moves misplaced keys down again.
        high = distances >= self._coarse.floor_distance
        up = keys[high]
        if len(up) < len(keys):
            low = keys[~high]
            self._stray_arrays.append(low)
            self._stray_count += len(low)
            if self._stray_count > 4 * self._front_size:
                self._file_strays()
        if len(up):
            self._front = np.concatenate([self._front, up])
            if len(self._front) > 4 * self._front_size:
                self._lower_front()

    def pop_many(self, amount: int, sizes: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """Remove the fewest keys, in eviction order, whose sizes add up to `amount`.

        `sizes`: of every key, indexed by key; None counts each key as 1. All keys go if they do not reach it.
        """
        if self._heap:
            self._to_front()
        gone: list[npt.NDArray[np.int64]] = []
        while amount > 0 and self.count:
            ranks = self._sift_front()
            if not len(self._front):
                self._refill()
                continue
            taken = self._take_highest(ranks, amount, sizes)
            amount -= len(taken) if sizes is None else int(sizes[taken].sum())
            gone.append(taken)
        return np.concatenate(gone) if gone else _NO_KEYS

    def _sift_front(self) -> Ranks:
        """Remove keys from the front that are not resident or not above the floor; return the ranks of the others."""
        ranks = self._ranks(self._front)
        resident = ranks.imag < 0
        high = (ranks > self._coarse.floor) & resident
        if not high.all():
            low = resident & ~high
            if low.any():
                self._coarse.put(self._front[low], ranks[low])
            self._front, ranks = self._front[high], ranks[high]
        return ranks

    def _take_highest(self, ranks: Ranks, amount: int, sizes: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
        wanted = amount if sizes is None else self._guess(amount, sizes)
        cut = max(0, len(ranks) - wanted)
        order = ranks.argpartition(cut) if cut > 0 else np.arange(len(ranks))
        chosen = order[cut:]
        chosen = chosen[ranks[chosen].argsort()[::-1]]
        # Entries of one key rank alike, and so lie side by side.
        loads = ranks.imag[chosen]
        first = np.empty(len(chosen), dtype=np.bool_)
        first[0] = True
        np.not_equal(loads[1:], loads[:-1], out=first[1:])
        keys: npt.NDArray[np.int64] = self._front[chosen[first]].astype(np.int64, copy=False)
        if sizes is not None:
            keys = keys[: int(sizes[keys].cumsum().searchsorted(amount)) + 1]
        elif cut > 0:
            self._front = self._front[order[:cut]]
        self.loads[keys] = 0
        self.count -= len(keys)
        return keys

    def _guess(self, amount: int, sizes: npt.NDArray[np.int64]) -> int:
        """Estimate how many keys of the front add up to `amount`."""
        mean = float(sizes[self._front].mean())
        return min(len(self._front), int(amount / max(1.0, mean)) + 1)

    def raise_bounds(self, distance: float) -> None:
        """Raise the bounds: any distance may have grown by up to `distance` since its key's `add` or `move`."""
        if self._heap:
            self._to_front()
        self._coarse.raise_bounds(distance)

    def _renumber(self) -> None:
        """Renumber the resident keys in the same order, because load numbers have run out."""
        keys = self.keys()
        self.loads[keys[self.loads[keys].argsort()]] = np.arange(1, len(keys) + 1)
        self._last_load = len(keys)
        self.rebuild()

    def rebuild(self) -> None:
        """Rebuild the queue after any change of distances. O(the largest key)."""
        self._restart(self.keys())

    def _restart(self, keys: Keys) -> None:
        """Replace all entries by one for each of `keys`, the resident ones."""
        self._front, self._heap = _NO_KEYS, []
        self._strays, self._stray_arrays, self._stray_count = [], [], 0
        self._coarse.restart(keys)

    def _resident(self, keys: Keys) -> Keys:
        return keys[self.loads.take(keys) > 0]

    def _ranks(self, keys: Keys) -> Ranks:
        ranks = np.empty(len(keys), dtype=np.complex128)
        ranks.real = self._ranking.distances(keys)
        np.negative(self.loads.take(keys), out=ranks.imag, casting="unsafe")
        return ranks

    def _refill(self) -> None:
        """Fill the empty front with the highest bucket; at least one key is resident."""
        self._file_strays()
        front = self._coarse.open()
        if front is None:
            raise AssertionError(f"{self.count} keys are resident, and none of them is in the queue")
        self._front = front

    def _file_strays(self) -> None:
        strays = np.concatenate([np.array(self._strays, dtype=np.int64), *self._stray_arrays])
        self._strays, self._stray_arrays, self._stray_count = [], [], 0
        strays = self._resident(strays)
        if len(strays):
            ranks = self._ranks(strays)
            # A key whose distance grew above the floor was added again by `move`, so it has an entry in the front.
            low = ranks <= self._coarse.floor
            self._coarse.put(strays[low], ranks[low])
        if self._coarse.size > 2 * self.count + 8 * self._front_size:
            self._drop_repeated()

    def _drop_repeated(self) -> None:
        """Keep one entry for each resident key, because most are stale."""
        if 16 * self.count > len(self.loads):
            self.rebuild()
            return
        if self._heap:
            self._to_front()
        self._restart(np.unique(self._resident(np.concatenate([self._front, *self._coarse.entries()]))))

    def _lower_front(self) -> None:
        """Shorten the front: move all but the highest keys into the coarse order."""
        if self._heap:
            self._to_front()
        ranks = self._sift_front()
        cut = len(ranks) - self._front_size
        if cut > 0:
            order = ranks.argpartition(cut)
            lower = order[:cut]
            self._coarse.cover(self._front[lower], ranks[lower])
            self._front = self._front[order[cut:]]

    def _to_heap(self) -> None:
        keys = self._resident(self._front)
        ranks = self._ranks(keys)
        loads = (-ranks.imag).astype(np.int64)
        self._heap += zip((-ranks.real).tolist(), loads.tolist(), keys.tolist())
        heapify(self._heap)
        self._front = _NO_KEYS

    def _to_front(self) -> None:
        keys = np.array([key for _, _, key in self._heap], dtype=np.int64)
        self._front = np.concatenate([self._front, keys])
        self._heap = []
