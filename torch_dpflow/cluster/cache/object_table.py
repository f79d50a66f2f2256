"""Table of a sample cache's entries, cached or wanted, and the bytes that they take."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from torch_dpflow._core.lazy_heap import LazyHeap
from torch_dpflow.caches.policy import Policy
from torch_dpflow.cluster.cache.objects import CacheEntry, CacheReader, LoadQueue, Ticket
from torch_dpflow.lookahead import Lookahead

#: Expected bytes of a sample before any has been loaded.
_FIRST_GUESS = 1 << 16
#: The share of the capacity that a cache can count on; running loads take the rest.
_KEPT_SHARE = 0.9
#: At least this many reads are reported to a policy in one call.
_MANY_KEYS = 8
#: Weight of the latest sample in the expected size.
_SIZE_WEIGHT = 0.1


class ObjectTable:
    """Table of a sample cache's entries, and sums of their bytes. The cache's policy decides which cached entries stay.

    A ticket is a reader's request for one sample. An entry is held while a ticket refers to it, or while it is cached.

    Args:
        policy: decides which entries stay cached; None: only entries with tickets are held.
        repeatable: whether loading a sample twice gives the same value.
        by_draw: whether each random draw of a sample is a separate entry; `policy` is then None.
    """

    def __init__(self, capacity: int, policy: Policy | None, *, repeatable: bool, by_draw: bool = False) -> None:
        self.capacity = capacity
        self._policy = policy
        self._repeatable = repeatable
        self._by_draw = by_draw
        self._numbers = itertools.count(1)
        #: By key, the oldest first; more than one where a draw has been served to some jobs.
        self._by_key: dict[int, list[CacheEntry]] = {}
        #: What the policy keeps: at most one object for each key.
        self._cached: dict[int, CacheEntry] = {}
        #: Every spare object, the farthest first, and ready objects that were spare before. None until memory is short
        #: for the first time, as few caches need it.
        self._spare: LazyHeap[CacheEntry] | None = None
        #: Mean size of the latest samples; None before the first.
        self._mean: float | None = None
        #: Bytes of ready entries, bytes of ready entries with tickets, and expected bytes of running loads.
        self.held = self.pinned = self.reserved = 0
        self.ready = self.running = 0
        #: Number of tickets so far, of tickets whose entry existed already, and of loads that have begun.
        self.wants = self.shared = self.loads = 0
        #: Entries that wait to be loaded.
        self.queue = LoadQueue()

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def cache_samples(self) -> int:
        """Number of samples that the cache can hold, by their recent mean size; 0 if unknown, or without a policy."""
        if self._policy is None or self._mean is None:
            return 0
        return max(1, int(_KEPT_SHARE * self.capacity / max(1.0, self._mean)))

    @property
    def is_over(self) -> bool:
        """Whether the bytes held or being loaded exceed the capacity."""
        return self.held + self.reserved > self.capacity

    def resize(self, capacity: int) -> None:
        """Change the capacity; evicts nothing."""
        self.capacity = capacity
        if self._policy is not None:
            self._policy.max_bytes = capacity

    # -- jobs ------------------------------------------------------------------------------------------------

    def join(self, job: str) -> None:
        if self._policy is not None:
            self._policy.join(job)

    def leave(self, job: str, left: Collection[str]) -> None:
        """Remove a job. Drop random samples that all remaining jobs (`left`) have received."""
        if self._policy is None:
            return
        self._policy.forget(job)
        if not self._repeatable:
            for entry in list(self._cached.values()):
                self._drop_if_spent(entry, left)

    def hint(self, job: str, lookahead: Lookahead, weight: float) -> None:
        """Pass a job's lookahead and weight to the policy."""
        if self._policy is not None:
            self._policy.join(job, weight=weight)
            self._policy.hint(job, lookahead)

    # -- objects ---------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[int], job: str) -> None:
        if self._policy is None:
            return
        if len(keys) >= _MANY_KEYS:
            self._policy.access_many(np.array(keys, dtype=np.int64), job)
        else:
            for key in keys:
                self._policy.access(key, job)

    def find(self, key: int, job: str, draw: int) -> CacheEntry | None:
        """Return an entry of `key` that may serve this draw of `job`; None if there is no such entry."""
        # Plain loops, because this runs for every sample of every job.
        for entry in self._by_key.get(key, ()):
            if self._by_draw:
                if entry.draw == draw:
                    return entry
            elif self._repeatable or job not in entry.claimed:
                return entry
        return None

    def add(self, key: int, draw: int, distance: int, reader: CacheReader, ticket: Ticket) -> CacheEntry:
        added = CacheEntry(self.queue, next(self._numbers), key, draw, distance, reader, ticket)
        same = self._by_key.get(key)
        if same is None:
            self._by_key[key] = [added]
        else:
            same.append(added)
        return added

    def attach(self, entry: CacheEntry, reader: CacheReader, ticket: Ticket, jobs: Collection[str]) -> None:
        """Add a ticket to an existing entry. A random sample that all jobs (`jobs`) now have leaves the cache."""
        if entry.ready and not entry.tickets:
            self.pinned += entry.size
            self._note_spare(entry)
        entry.attach(reader, ticket)
        if entry.cached:
            self._drop_if_spent(entry, jobs)

    def detach(self, entry: CacheEntry, reader: str, ticket: Ticket) -> bool:
        """Remove a ticket of `reader`. Return whether the entry has no tickets now; if so, call `release`."""
        entry.detach(reader, ticket)
        if not entry.tickets:
            return True
        if self._spare is not None and entry.is_spare:
            self._note_spare(entry)
        return False

    def release(self, entry: CacheEntry) -> None:
        """Count an entry without tickets as unneeded; remove it unless it is cached. The caller cancels its load."""
        if entry.loading:
            entry.loading = 0
            self.running -= 1
            self.reserved -= entry.size
        elif entry.ready:
            self.pinned -= entry.size
        if not entry.cached:
            self._remove(entry)

    def begin(self, entry: CacheEntry, load: int, size: int) -> None:
        """Record that the entry's load begins; the sample is expected to have `size` bytes."""
        entry.begin(load, size)
        self.running += 1
        self.loads += 1
        self.reserved += size

    def store(self, entry: CacheEntry, value: Any, size: int) -> None:
        """Store the result of the entry's load; at least one ticket refers to the entry."""
        self.running -= 1
        self.reserved -= entry.size
        entry.store(value, size)
        self.held += size
        self.pinned += size
        self.ready += 1
        self._mean = size if self._mean is None else self._mean + _SIZE_WEIGHT * (size - self._mean)
        if self._spare is not None and not entry.requests:
            self._note_spare(entry)

    def requeue(self, entry: CacheEntry) -> None:
        """Drop the value of an entry that has tickets, so that the entry can be loaded again."""
        if entry.cached:
            self._discard(entry)
        self.pinned -= entry.size
        self._drop(entry)

    def farthest_spare(self) -> CacheEntry | None:
        """Return the spare entry (see `CacheEntry.is_spare`) that is needed last; None if there is none."""
        if self._spare is None:
            self._spare = LazyHeap()
            for entry in itertools.chain.from_iterable(self._by_key.values()):
                if entry.is_spare:
                    self._note_spare(entry)
        while self._spare:
            entry = self._spare.first()
            if entry.is_spare:
                return entry
            self._spare.discard(entry)
        return None

    # -- capacity --------------------------------------------------------------------------------------------

    def expected_size(self, entry: CacheEntry) -> int:
        if entry.loads:
            return entry.size
        return min(_FIRST_GUESS, self.capacity) if self._mean is None else max(1, int(self._mean))

    def has_room(self, size: int) -> bool:
        """Return whether `size` more bytes fit."""
        return self.held + self.reserved + size <= self.capacity

    def make_room(self, size: int, *, share: float) -> bool:
        """Evict cached entries until `size` more bytes fit; return whether they fit.

        share: if below 1, nothing is evicted while samples with tickets, running loads and these bytes together exceed
            this share of the capacity.
        """
        if share < 1 and self.pinned + self.reserved + size > share * self.capacity:
            return self.has_room(size)
        while not self.has_room(size):
            if not self.evict():
                return False
        return True

    def evict(self) -> bool:
        """Evict the cached entry that the policy chooses. Return whether there was a cached entry."""
        key = None if self._policy is None else self._policy.evict()
        if key is not None:
            self._uncache(self._cached[key])
        return key is not None

    def offer(self, entry: CacheEntry, jobs: Collection[str]) -> None:
        """Offer a loaded entry to the policy, unless it is a random sample that all of `jobs` have received."""
        if self._policy is None or (not self._repeatable and entry.claimed.issuperset(jobs)):
            return
        earlier = self._cached.get(entry.key)
        if earlier is not None:
            self._discard(earlier)
        self._cached[entry.key] = entry
        entry.cached = True
        for key in self._policy.admit(entry.key, entry.size):
            self._uncache(self._cached[key])

    def _note_spare(self, entry: CacheEntry) -> None:
        if self._spare is not None and entry not in self._spare:
            self._spare.push(entry, -entry.distance, entry.number)

    def _drop_if_spent(self, entry: CacheEntry, jobs: Collection[str]) -> None:
        if entry.cached and not self._repeatable and entry.claimed.issuperset(jobs):
            self._discard(entry)

    def _discard(self, entry: CacheEntry) -> None:
        assert self._policy is not None
        self._policy.discard(entry.key)
        self._uncache(entry)

    def _uncache(self, entry: CacheEntry) -> None:
        del self._cached[entry.key]
        entry.cached = False
        if not entry.tickets:
            self._remove(entry)

    def _remove(self, entry: CacheEntry) -> None:
        if entry.ready:
            self._drop(entry)
        entries = self._by_key[entry.key]
        if len(entries) == 1:
            del self._by_key[entry.key]
        else:
            entries.remove(entry)

    def _drop(self, entry: CacheEntry) -> None:
        self.held -= entry.size
        self.ready -= 1
        entry.drop()
        if self._spare is not None:
            self._spare.discard(entry)
