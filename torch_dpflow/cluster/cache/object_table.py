"""Table of a sample cache's entries, and sums of their bytes."""

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
    """Table of a sample cache's entries, and sums of their bytes.

    A ticket is a reader's request for one sample. An entry stays in the table while it has a ticket or is cached.

    Args:
        capacity: bytes that ready entries and running loads may take together.
        policy: decides which entries stay cached; None: no entry is cached.
        repeatable: whether loading a sample twice gives the same value.
        by_draw: keep a separate entry for each random draw of a sample; requires `policy=None`.
    """

    def __init__(self, capacity: int, policy: Policy | None, *, repeatable: bool, by_draw: bool = False) -> None:
        self.capacity = capacity
        self._policy = policy
        self._repeatable = repeatable
        self._by_draw = by_draw
        self._numbers = itertools.count(1)
        #: Entries of each key, the oldest first. Several entries of a key are separate random draws.
        self._by_key: dict[int, list[CacheEntry]] = {}
        #: Cached entries, at most one for each key.
        self._cached: dict[int, CacheEntry] = {}
        #: Spare entries (see `CacheEntry.is_spare`), the farthest first, and some that are no longer spare. None until
        #: memory is short for the first time.
        self._spare: LazyHeap[CacheEntry] | None = None
        #: Mean size of the latest samples (bytes); None before the first sample.
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
        """Estimated number of samples that the policy can keep; 0 without a policy, or before a sample was loaded."""
        if self._policy is None or self._mean is None:
            return 0
        return max(1, int(_KEPT_SHARE * self.capacity / max(1.0, self._mean)))

    @property
    def is_over(self) -> bool:
        """Whether ready entries and running loads exceed the capacity."""
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
        """Remove a job from the policy, and uncache random samples that all remaining jobs (`left`) have requested."""
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
        """Return an entry of `key` that may be served to `job`, or None. draw: as in `CacheEntry`, for `by_draw`."""
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
        """Add a ticket to an entry. A random sample is no longer cached once all of `jobs` have requested it."""
        if entry.ready and not entry.tickets:
            self.pinned += entry.size
            self._note_spare(entry)
        entry.attach(reader, ticket)
        if entry.cached:
            self._drop_if_spent(entry, jobs)

    def detach(self, entry: CacheEntry, reader: str, ticket: Ticket) -> bool:
        """Remove a ticket. Return True if the entry has no ticket left; the caller must then call `release`."""
        entry.detach(reader, ticket)
        if not entry.tickets:
            return True
        if self._spare is not None and entry.is_spare:
            self._note_spare(entry)
        return False

    def release(self, entry: CacheEntry) -> None:
        """Remove an entry without tickets, if not cached. The caller cancels its load or removes it from `queue`."""
        if entry.loading:
            entry.loading = 0
            self.running -= 1
            self.reserved -= entry.size
        elif entry.ready:
            self.pinned -= entry.size
        if not entry.cached:
            self._remove(entry)

    def begin(self, entry: CacheEntry, load: int, size: int) -> None:
        """Record that the load with this number begins; the sample is expected to have `size` bytes."""
        entry.begin(load, size)
        self.running += 1
        self.loads += 1
        self.reserved += size

    def store(self, entry: CacheEntry, value: Any, size: int) -> None:
        """Store the result of the entry's load. The entry must have a ticket."""
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
        """Drop the value of an entry that has tickets. The caller must add the entry to the queue again."""
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
        """Return whether `size` more bytes fit into the capacity."""
        return self.held + self.reserved + size <= self.capacity

    def make_room(self, size: int, *, share: float) -> bool:
        """Evict cached entries until `size` more bytes fit; return whether they fit.

        share: maximum share of the capacity for samples with tickets, running loads and these bytes together. Nothing
            is evicted if they exceed it. 1: no maximum.
        """
        if share < 1 and self.pinned + self.reserved + size > share * self.capacity:
            return self.has_room(size)
        while not self.has_room(size):
            if not self.evict():
                return False
        return True

    def evict(self) -> bool:
        """Evict the cached entry that the policy chooses. Return False if no entry is cached."""
        key = None if self._policy is None else self._policy.evict()
        if key is not None:
            self._uncache(self._cached[key])
        return key is not None

    def offer(self, entry: CacheEntry, jobs: Collection[str]) -> None:
        """Cache a loaded entry if the policy admits it, but no random sample that all of `jobs` have requested."""
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
