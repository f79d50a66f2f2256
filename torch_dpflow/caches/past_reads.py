"""Policies that decide by past reads: LRU, LFU and MinIO.

cachetools' caches cannot be used, because they hold values; a policy holds only keys.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from torch_dpflow._core.lazy_heap import LazyHeap
from torch_dpflow.caches.policy import Job, Policy, check_key, check_size, check_weight
from torch_dpflow.lookahead import Lookahead


class KeyedPolicy(Policy):
    """Base class of policies that decide by past reads. A subclass defines the order of eviction."""

    def __init__(self, *, max_items: int | None = None, max_bytes: int | None = None, keys: int | None = None) -> None:
        super().__init__(max_items=max_items, max_bytes=max_bytes, keys=keys)
        # Not a dict: to find its first key, Python skips the places of all removed keys.
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0
        self._jobs: dict[Job, float] = {}

    def access(self, key: int, job: Job) -> bool:
        if key < 0:
            check_key(key)
        if job not in self._jobs:
            self._jobs[job] = 1.0
        if key in self._sizes:
            self._hits += 1
            self._used(key)
            return True
        self._misses += 1
        return False

    def admit(self, key: int, size: int = 1) -> Sequence[int]:
        if key < 0:
            check_key(key)
        if size < 0:
            check_size(size)
        if key in self._sizes:
            return self._resize(key, size)
        self._offered += 1
        if self._is_too_large(size):
            self._refused += 1
            return (key,)
        gone = self._evict_for(size)
        if gone is None:
            self._bypassed += 1
            return (key,)
        self._sizes[key] = size
        self._bytes += size
        self._entered(key)
        return gone

    def evict(self) -> int | None:
        if not self._sizes:
            return None
        key = self._next_victim()
        self._drop(key)
        self._evicted += 1
        return key

    def discard(self, key: int) -> bool:
        if key not in self._sizes:
            return False
        self._drop(key)
        self._discarded += 1
        return True

    def join(self, job: Job, *, weight: float = 1.0) -> None:
        self._jobs[job] = check_weight(job, weight)

    def hint(self, job: Job, lookahead: Lookahead) -> None:
        self._jobs.setdefault(job, 1.0)

    def forget(self, job: Job) -> None:
        self._jobs.pop(job, None)

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(self._jobs)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def _entered(self, key: int) -> None:
        """Record that `key` has become resident."""

    def _used(self, key: int) -> None:
        """Record a read of a resident key."""

    def _left(self, key: int) -> None:
        """Record that `key` is no longer resident."""

    @abstractmethod
    def _next_victim(self) -> int:
        """Return the key to evict next; at least one is resident."""

    def _evict_for(self, size: int) -> list[int] | None:
        """Evict until a key of this size fits; returns the evicted keys, or None if the policy refuses the key."""
        gone: list[int] = []
        while not self._fits(size):
            key = self._next_victim()
            self._drop(key)
            gone.append(key)
        self._evicted += len(gone)
        return gone

    def _fits(self, size: int) -> bool:
        return (self.max_items is None or len(self._sizes) < self.max_items) and (
            self.max_bytes is None or self._bytes + size <= self.max_bytes
        )

    def _drop(self, key: int) -> None:
        self._bytes -= self._sizes.pop(key)
        self._left(key)

    def _resize(self, key: int, size: int) -> list[int]:
        self._bytes += size - self._sizes[key]
        self._sizes[key] = size
        gone: list[int] = []
        if self._is_too_large(size):
            self._drop(key)
            gone.append(key)
        while self._is_over():
            victim = self._next_victim()
            self._drop(victim)
            gone.append(victim)
        self._evicted += len(gone)
        return gone


class LRU(KeyedPolicy):
    """Policy that evicts the least recently read key; the load of a key counts as a read."""

    name = "lru"

    def _used(self, key: int) -> None:
        self._sizes.move_to_end(key)

    def _next_victim(self) -> int:
        return next(iter(self._sizes))


class LFU(KeyedPolicy):
    """Policy that evicts the key with the fewest reads since its load; among equals, the least recently read one."""

    name = "lfu"

    def __init__(self, *, max_items: int | None = None, max_bytes: int | None = None, keys: int | None = None) -> None:
        super().__init__(max_items=max_items, max_bytes=max_bytes, keys=keys)
        #: Keys by how often they were read; among equals by the number of the latest read.
        self._by_reads: LazyHeap[int] = LazyHeap()
        self._numbers = itertools.count()

    def _entered(self, key: int) -> None:
        self._by_reads.push(key, 1, next(self._numbers))

    def _used(self, key: int) -> None:
        self._by_reads.push(key, self._by_reads[key][0] + 1, next(self._numbers))

    def _left(self, key: int) -> None:
        self._by_reads.discard(key)

    def _next_victim(self) -> int:
        return self._by_reads.first()


class MinIO(KeyedPolicy):
    """Policy that keeps the first keys that fit. If an epoch reads each key once, replacing them gains nothing.

    `evict` evicts the key that was loaded last.
    """

    name = "minio"

    def _next_victim(self) -> int:
        return next(reversed(self._sizes))

    def _evict_for(self, size: int) -> list[int] | None:
        return [] if self._fits(size) else None
