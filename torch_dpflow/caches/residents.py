"""The resident keys in eviction order: a lazy priority queue whose priorities shrink over time.

A key's *distance* is the distance to its next use. The key with the greatest distance is evicted first; among equals,
the key that was loaded first. Every read shrinks the distances of all keys, so storing distances would mean updating
every key at every read. The queue stores upper bounds instead, and computes the true distance only of keys that may be
evicted next. Adding, reading or evicting a key costs O(log n), amortised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.sparse_zeros import sparse_zeros
from torch_dpflow.caches.coarse_order import CoarseOrder, Ranks
from torch_dpflow.lookahead import Keys

Distances = npt.NDArray[np.float64]

_NO_KEYS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
#: Minimum capacity for load numbers.
_MIN_ROOM = 1 << 12
#: Keys that are recomputed at once, which bounds the memory.
_CHUNK = 1 << 16


#: Load numbers of keys (see `Ranking`); 0: the key is not resident.
Loads = npt.NDArray[np.int32]


class Ranking(ABC):
    """Source of the distances of resident keys. A distance only shrinks; `Residents` says what to call if it grows.

    Each load of a key into the cache has a number (`load`, `loads`), by which a ranking can store values.
    """

    @abstractmethod
    def distance(self, key: int, load: int) -> float:
        """Return the distance of a resident key to its next use, in any unit."""

    @abstractmethod
    def distances(self, keys: Keys, loads: Loads) -> Distances:
        """Return the distances of many keys; for keys that are not resident, any values."""

    def renew(self, key: int, load: int) -> float:
        """Recompute the stored values of a key, after it was read or became resident; return its distance."""
        return self.distance(key, load)

    def renew_many(self, keys: Keys, loads: Loads) -> Distances:
        """Recompute the stored values of many keys; return their distances."""
        return self.distances(keys, loads)

    def renumber(self, loads: npt.NDArray[np.intp], room: int) -> None:  # noqa: B027
        """Move the values stored at these load numbers to 0, 1, 2 and so on, and make space for `room` numbers."""


class Residents:
    """Set of the resident keys, as a priority queue: `pop` removes the key of the greatest distance.

    After `add` or `renew` of a key, its distance must only shrink. If distances have grown, call `renew` for these
    keys, `raise_bounds` or `rebuild`.

    Args:
        front: approximate number of keys that are kept in exact order: those to be evicted next.
    """

    def __init__(self, ranking: Ranking, front: int) -> None:
        self._ranking = ranking
        self._front_size = front
        #: Load number of each key, from 1; 0 for a key that is not resident.
        self.loads: Loads = np.zeros(0, dtype=np.int32)
        self.load_of: memoryview[Any] = self.loads.data
        #: How many keys are resident, and the sum of their sizes.
        self.count = self.size = 0
        self._last_load = 0
        self._store_loads(np.zeros(0, np.int32), np.zeros(0, np.int64), 1)
        self._coarse = CoarseOrder(front, self._resident, self._ranks)
        #: Keys that ranked above the floor of the coarse order when they were added, in one of two forms: an array
        #: for bulk operations, or a heap of (-distance then, load, key) for single ones. One of the two is empty.
        self._front: Keys = _NO_KEYS
        self._heap: list[tuple[float, int, int]] = []
        #: Keys that ranked at or below the floor and are not yet in the coarse order.
        self._strays: list[int] = []
        self._stray_arrays: list[Keys] = []
        self._stray_count = 0

    def _store_loads(self, keys: npt.NDArray[np.int32], sizes: npt.NDArray[np.int64], room: int) -> None:
        #: By load number: the key, and its size. As arrays, and as views for single items.
        self._keys, self._sizes = np.zeros(room, np.int32), np.zeros(room, np.int64)
        self._key_at, self._size_at = self._keys.data, self._sizes.data
        self._keys[1 : len(keys) + 1], self._sizes[1 : len(keys) + 1] = keys, sizes
        self._last_load = len(keys)

    def keys(self) -> npt.NDArray[np.int64]:
        """Return the resident keys, the oldest load first. O(count), amortised."""
        return self._keys[self._numbers()].astype(np.int64)

    def _numbers(self) -> npt.NDArray[np.intp]:
        """Return the load numbers of resident keys, ascending."""
        end = self._last_load + 1
        return 1 + np.flatnonzero(self.loads[self._keys[1:end]] == np.arange(1, end))

    def grow(self, span: int) -> None:
        """Make space for all keys below `span`."""
        loads = sparse_zeros(span, np.int32)
        loads[: len(self.loads)] = self.loads
        self.loads, self.load_of = loads, loads.data

    def size_of(self, key: int) -> int:
        size: int = self._size_at[self.load_of[key]]
        return size

    def resize(self, key: int, size: int) -> None:
        self.size += size - self.size_of(key)
        self._size_at[self.load_of[key]] = size

    def add(self, key: int, size: int) -> None:
        if self._last_load + 1 == len(self._keys):
            self.rebuild(more=1)
        self._last_load = load = self._last_load + 1
        self.load_of[key] = load
        self._key_at[load], self._size_at[load] = key, size
        self.count += 1
        self.size += size
        self.renew(key, load)

    def renew(self, key: int, load: int) -> None:
        """Recompute the distance of a resident key. load: its load number."""
        distance = self._ranking.renew(key, load)
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
        """Remove and return the key with the greatest distance; the set must not be empty."""
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
        self.size -= self.size_of(key)
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
            distance = distance_of(key, load)
            if distance < coarse.floor_distance or (distance == coarse.floor_distance and load >= coarse.floor_load):
                self._strays.append(key)
                heappop(heap)
            elif distance < -bound:
                heapreplace(heap, (-distance, load, key))
            else:
                heappop(heap)
                return key
        return None

    def add_many(self, keys: Keys, sizes: npt.NDArray[np.integer[Any]] | int) -> None:
        """Add distinct keys that are not resident, in this order."""
        if self._last_load + len(keys) >= len(self._keys):
            self.rebuild(more=len(keys))
        first, end = self._last_load + 1, self._last_load + 1 + len(keys)
        self._keys[first:end], self._sizes[first:end] = keys, sizes
        self.size += int(self._sizes[first:end].sum())
        self.count += len(keys)
        self._last_load = end - 1
        self.loads[keys] = loads = np.arange(first, end, dtype=np.int32)
        self.renew_many(keys, loads)

    def renew_many(self, keys: Keys, loads: Loads) -> None:
        """Recompute the distances of resident keys. loads: their load numbers."""
        if not len(keys):
            return
        distances = self._ranking.renew_many(keys, loads)
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

    def pop_many(self, amount: int, *, by_size: bool = False) -> npt.NDArray[np.int64]:
        """Remove and return the next `amount` keys in eviction order, or all keys if there are fewer.

        by_size: `amount` is a total size instead: remove keys until their sizes reach it.
        """
        if self._heap:
            self._to_front()
        gone: list[npt.NDArray[np.int64]] = []
        while amount > 0 and self.count:
            ranks = self._sift_front()
            if not len(self._front):
                self._refill()
                continue
            before = self.size
            taken = self._take_highest(ranks, amount, by_size)
            amount -= before - self.size if by_size else len(taken)
            gone.append(taken)
        return np.concatenate(gone) if gone else _NO_KEYS

    def _sift_front(self) -> Ranks:
        """Keep only keys in the front that are resident and above the floor; return their ranks."""
        ranks = self._ranks(self._front)
        resident = ranks.imag < 0
        high = (ranks > self._coarse.floor) & resident
        if not high.all():
            low = resident & ~high
            if low.any():
                self._coarse.put(self._front[low], ranks[low])
            self._front, ranks = self._front[high], ranks[high]
        return ranks

    def _take_highest(self, ranks: Ranks, amount: int, by_size: bool) -> npt.NDArray[np.int64]:
        # Sizes of keys differ: an estimate of the number of keys whose sizes sum to `amount`.
        wanted = min(len(ranks), int(amount * self.count / max(1, self.size)) + 1) if by_size else amount
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
        sizes = self._sizes[self.loads[keys]]
        if by_size:
            keys = keys[: int(sizes.cumsum().searchsorted(amount)) + 1]
        elif cut > 0:
            self._front = self._front[order[:cut]]
        self.size -= int(sizes[: len(keys)].sum())
        self.loads[keys] = 0
        self.count -= len(keys)
        return keys

    def raise_bounds(self, distance: float) -> None:
        """Allow for distances that have grown, by up to `distance`, since the `add` or `renew` of their keys."""
        if self._heap:
            self._to_front()
        self._coarse.raise_bounds(distance)

    def rebuild(self, *, more: int = 0, renew: bool = False) -> None:
        """Build the queue again for changed distances, and number the loads from 1. O(count), amortised.

        Args:
            more: number of further loads to reserve space for.
            renew: whether the ranking's stored values have changed too, and must be recomputed.
        """
        numbers = self._numbers()
        keys, count = self._keys[numbers], len(numbers)
        room = max(_MIN_ROOM, 2 * (count + more) + 1)
        self._store_loads(keys, self._sizes[numbers], room)
        self._ranking.renumber(np.concatenate([[0], numbers]), room)
        self.loads[keys] = np.arange(1, count + 1)
        for start in range(0, count if renew else 0, _CHUNK):
            piece = keys[start : start + _CHUNK]
            self._ranking.renew_many(piece, self.loads[piece])
        self._front, self._heap = _NO_KEYS, []
        self._strays, self._stray_arrays, self._stray_count = [], [], 0
        self._coarse.restart(keys)

    def _resident(self, keys: Keys) -> Keys:
        return keys[self.loads.take(keys) > 0]

    def _ranks(self, keys: Keys) -> Ranks:
        ranks, loads = np.empty(len(keys), dtype=np.complex128), self.loads.take(keys)
        ranks.real = self._ranking.distances(keys, loads)
        np.negative(loads, out=ranks.imag, casting="unsafe")
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
            # A key whose distance grew above the floor was added again by `renew`, so it has an entry in the front.
            low = ranks <= self._coarse.floor
            self._coarse.put(strays[low], ranks[low])
        if self._coarse.size > 2 * self.count + 8 * self._front_size:
            self.rebuild()  # most entries are stale

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
