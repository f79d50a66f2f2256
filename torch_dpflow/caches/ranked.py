"""Base class of the policies that evict the key whose next use is farthest, by some measure of distance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from torch_dpflow.caches.policy import (
    MAX_KEY,
    Job,
    Mask,
    Policy,
    Sizes,
    check_key,
    check_size,
    check_sizes,
)
from torch_dpflow.caches.residents import Ranking, Residents
from torch_dpflow.lookahead import Keys


class RankedPolicy(Policy):
    """Base class of policies that evict the key whose next use is farthest; among equals, the oldest load.

    Offered keys are added, all keys of a call together, before keys are evicted. So an offered key is not kept if its
    distance is the greatest and the budget is full.

    Args:
        ranking: computes the distances.
        keys: as in `Policy`. Arrays grow if larger keys appear.
    """

    #: Approximate number of keys that are kept in exact order; see `Residents`.
    front: ClassVar[int] = 1024

    def __init__(
        self,
        ranking: Ranking,
        *,
        max_items: int | None = None,
        max_bytes: int | None = None,
        keys: int | None = None,
    ) -> None:
        super().__init__(max_items=max_items, max_bytes=max_bytes, keys=keys)
        self._ranking = ranking
        self._residents = Residents(ranking, self.front)
        self._span = 0
        self._known_keys = keys
        if keys:
            self._reach(keys - 1)

    @abstractmethod
    def _read(self, key: int, job: Job) -> None:
        """Record that `job` reads `key`, which is below the span."""

    @abstractmethod
    def _read_many(self, keys: Keys, job: Job) -> None:
        """Record reads of many keys, in order."""

    @abstractmethod
    def _grow(self, span: int) -> None:
        """Grow arrays to hold keys below `span`."""

    def access(self, key: int, job: Job) -> bool:
        if not 0 <= key < self._span:
            self._reach(key)
        self._read(key, job)
        load = self._residents.load_of[key]
        if not load:
            self._misses += 1
            return False
        self._hits += 1
        self._residents.renew(key, load)
        return True

    def access_many(self, keys: Keys, job: Job) -> Mask:
        if not len(keys):
            return np.zeros(0, dtype=np.bool_)
        self._reach_many(keys)
        self._read_many(keys, job)
        loads = self._residents.loads.take(keys)
        hits: Mask = loads > 0
        found = keys[hits]
        self._hits += len(found)
        self._misses += len(keys) - len(found)
        self._residents.renew_many(found, loads[hits])
        return hits

    def admit(self, key: int, size: int = 1) -> Sequence[int]:
        if not 0 <= key < self._span:
            self._reach(key)
        check_size(size)
        residents = self._residents
        if residents.load_of[key]:
            gone = self._resize(key, size)
            if self._is_over():
                evicted = self._shrink_many().tolist()
                self._evicted += len(evicted)
                gone += evicted
            return gone
        self._offered += 1
        if self.max_bytes is not None and size > self.max_bytes:
            self._refused += 1
            return (key,)
        residents.add(key, size)
        return self._shrink(key) if self._is_over() else ()

    def admit_many(self, keys: Keys, sizes: Sizes | None = None) -> npt.NDArray[np.int64]:
        self._reach_many(keys)
        if sizes is not None:
            check_sizes(keys, sizes)
        keys, sizes, gone = self._sort_out(keys, sizes)
        if len(keys):
            self._residents.add_many(keys, 1 if sizes is None else sizes)
        if not self._is_over():
            return gone
        evicted = self._shrink_many()
        bypassed = int(np.count_nonzero(self._residents.loads.take(keys) == 0))
        self._bypassed += bypassed
        self._evicted += len(evicted) - bypassed
        return np.concatenate([gone, evicted]) if len(gone) else evicted

    def evict(self) -> int | None:
        if not self._residents.count:
            return None
        key = self._residents.pop()
        self._evicted += 1
        return key

    def discard(self, key: int) -> bool:
        if key not in self:
            return False
        self._residents.remove(key)
        self._discarded += 1
        return True

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and 0 <= key < self._span and self._residents.load_of[key] > 0

    def __len__(self) -> int:
        return self._residents.count

    def __iter__(self) -> Iterator[int]:
        return iter(self._residents.keys().tolist())

    @property
    def nbytes(self) -> int:
        return self._residents.size

    def _shrink(self, newcomer: int) -> list[int]:
        """Evict keys until the budget holds again, after `newcomer` was added; return the evicted keys."""
        gone = [self._residents.pop()]
        while self._is_over():
            gone.append(self._residents.pop())
        bypassed = newcomer in gone
        self._bypassed += bypassed
        self._evicted += len(gone) - bypassed
        return gone

    def _shrink_many(self) -> npt.NDArray[np.int64]:
        gone = self._residents.pop_many(0 if self.max_items is None else len(self) - self.max_items)
        if self.max_bytes is not None and self.nbytes > self.max_bytes:
            more = self._residents.pop_many(self.nbytes - self.max_bytes, by_size=True)
            gone = np.concatenate([gone, more])
        return gone

    def _resize(self, key: int, size: int) -> list[int]:
        """Set the size of a resident key; returns the key if it is too large to stay."""
        self._residents.resize(key, size)
        if not self._is_too_large(size):
            return []
        self._residents.remove(key)
        self._evicted += 1
        return [key]

    def _sort_out(
        self, keys: Keys, sizes: Sizes | None
    ) -> tuple[npt.NDArray[np.int64], Sizes | None, npt.NDArray[np.int64]]:
        """Return (keys to add, each once; their sizes; keys to drop at once, because they are too large).

        Keys that are resident already are not added again; their sizes are updated.
        """
        if len(keys) > 1:
            keys, sizes = _once(keys, sizes)
        gone: list[int] = []
        wanted = self._residents.loads.take(keys) == 0
        if not wanted.all():
            for place in np.flatnonzero(~wanted).tolist():
                gone += self._resize(int(keys[place]), 1 if sizes is None else int(sizes[place]))
        self._offered += int(np.count_nonzero(wanted))
        if sizes is not None and self.max_bytes is not None:
            large = wanted & (sizes > self.max_bytes)
            self._refused += int(np.count_nonzero(large))
            gone += keys[large].tolist()
            wanted &= ~large
        if wanted.all():
            return keys.astype(np.int64, copy=False), sizes, np.array(gone, dtype=np.int64)
        kept = keys[wanted].astype(np.int64, copy=False)
        return kept, None if sizes is None else sizes[wanted], np.array(gone, dtype=np.int64)

    def _reach_many(self, keys: Keys) -> None:
        if len(keys):
            check_key(int(keys.min()))
            highest = int(keys.max())
            if highest >= self._span:
                self._reach(highest)

    def _reach(self, key: int) -> None:
        """Grow arrays to hold `key` and some more."""
        check_key(key)
        span = key + 1 if self._span == 0 else min(max(key + 1, self._span + self._span // 2), MAX_KEY + 1)
        self._residents.grow(span)
        self._grow(span)
        self._span = span


def _once(keys: Keys, sizes: Sizes | None) -> tuple[Keys, Sizes | None]:
    """Return each key once, at its first place, with its last size."""
    ordered = np.sort(keys)
    if not (ordered[1:] == ordered[:-1]).any():
        return keys, sizes
    unique, first = np.unique(keys, return_index=True)
    order = first.argsort()
    if sizes is not None:
        last = len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]
        sizes = sizes[last[order]]
    return unique[order], sizes
