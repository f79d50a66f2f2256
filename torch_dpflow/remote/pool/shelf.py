"""The objects of a pool: by key, in the cache or wanted, and how many bytes they take together."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from torch_dpflow.caches.policy import Policy
from torch_dpflow.lazy_heap import LazyHeap
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.remote.pool.objects import PoolObject, Ticket

#: What a sample is expected to take before the first has come, bytes.
_FIRST_GUESS = 1 << 16
#: The part of all room that a cache can count on; the rest is for what is on its way.
_KEPT_SHARE = 0.9
#: From so many keys on a policy is told of them together.
_MANY_KEYS = 8
#: Weight of the latest sample in the expected size.
_SIZE_WEIGHT = 0.1


class Shelf:
    """Keeps the books of a pool. Decides nothing but what the cache's policy decides.

    An object is here while a ticket refers to it or the cache holds it.
    """

    def __init__(
        self, capacity: int, policy: Policy | None, *, repeatable: bool, by_draw: bool = False
    ) -> None:
        self.capacity = capacity
        self._policy = policy
        self._repeatable = repeatable
        self._by_draw = by_draw
        self._numbers = itertools.count(1)
        #: By key, the oldest first; more than one where a draw has been served to some.
        self._by_key: dict[int, list[PoolObject]] = {}
        #: What the policy keeps: one object for each key.
        self._cached: dict[int, PoolObject] = {}
        #: Every spare object, the farthest first; and ready ones that have not been found out to be spare no more.
        self._spare: LazyHeap[PoolObject] = LazyHeap()
        #: Mean size of the latest samples; None before the first.
        self._mean: float | None = None
        #: Bytes of ready objects; of those with tickets; expected of loads under way.
        self.held = self.pinned = self.reserved = 0
        #: Ready objects.
        self.ready = 0

    @property
    def cached(self) -> int:
        """Objects that the cache holds."""
        return len(self._cached)

    @property
    def room(self) -> int:
        """How many samples as large as the latest the cache can hold; 0 without a cache, and before the first."""
        if self._policy is None or self._mean is None:
            return 0
        return max(1, int(_KEPT_SHARE * self.capacity / max(1.0, self._mean)))

    @property
    def is_over(self) -> bool:
        """Whether more is held or on its way than there is room for."""
        return self.held + self.reserved > self.capacity

    def resize(self, capacity: int) -> None:
        """There is room for so many bytes from now on; nothing goes yet."""
        self.capacity = capacity
        if self._policy is not None:
            self._policy.max_bytes = capacity

    # -- jobs ------------------------------------------------------------------------------------------------

    def join(self, job: str) -> None:
        """A job begins to read."""
        if self._policy is not None:
            self._policy.join(job)

    def leave(self, job: str, left: Collection[str]) -> None:
        """A job has gone; `left` are still there. What was drawn for it alone goes."""
        if self._policy is None:
            return
        self._policy.forget(job)
        if not self._repeatable:
            for entry in list(self._cached.values()):
                self._drop_if_spent(entry, left)

    def foresee(self, job: str, lookahead: Lookahead) -> None:
        """Tell the policy of a job's future."""
        if self._policy is not None:
            self._policy.foresee(job, lookahead)

    # -- objects ---------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[int], job: str) -> None:
        """Tell the policy that `job` reads these now."""
        if self._policy is None:
            return
        if len(keys) >= _MANY_KEYS:
            self._policy.access_many(np.array(keys, dtype=np.int64), job)
        else:
            for key in keys:
                self._policy.access(key, job)

    def find(self, key: int, job: str, draw: int) -> PoolObject | None:
        """What `job`, which asks for this draw of `key`, may be given; None where it has to be loaded."""
        # Not by generators: this runs for every sample of every job.
        for entry in self._by_key.get(key, ()):
            if self._by_draw:
                if entry.draw == draw:
                    return entry
            elif self._repeatable or job not in entry.claimed:
                return entry
        return None

    def add(self, key: int, draw: int, distance: int, job: str, ticket: Ticket) -> PoolObject:
        """A new object, to be loaded, which `job` wants."""
        added = PoolObject(next(self._numbers), key, draw, distance, {job: {ticket}}, {job})
        same = self._by_key.get(key)
        if same is None:
            self._by_key[key] = [added]
        else:
            same.append(added)
        return added

    def attach(self, entry: PoolObject, job: str, ticket: Ticket, jobs: Collection[str]) -> None:
        """`job`, one of `jobs`, wants this object, which is here already."""
        if entry.ready and not entry.tickets:
            self.pinned += entry.size
            self._note_spare(entry)
        entry.attach(job, ticket)
        if entry.cached:
            self._drop_if_spent(entry, jobs)

    def detach(self, entry: PoolObject, job: str, ticket: Ticket) -> bool:
        """`job` has it, or gives it up; whether nobody wants it any more. Then `release` is to follow."""
        entry.detach(job, ticket)
        if not entry.tickets:
            return True
        if entry.ready and not entry.served and not entry.requests:
            self._note_spare(entry)
        return False

    def release(self, entry: PoolObject) -> None:
        """No ticket refers to it any more."""
        if entry.loading:
            entry.cancel()
            self.reserved -= entry.size
        elif entry.ready:
            self.pinned -= entry.size
        if not entry.cached:
            self._remove(entry)

    def begin(self, entry: PoolObject, load: int, size: int) -> None:
        """It is being loaded, and so many bytes are expected."""
        entry.begin(load, size)
        self.reserved += size

    def store(self, entry: PoolObject, value: Any, size: int) -> None:
        """It has come; tickets refer to it."""
        self.reserved -= entry.size
        entry.store(value, size)
        self.held += size
        self.pinned += size
        self.ready += 1
        self._mean = size if self._mean is None else self._mean + _SIZE_WEIGHT * (size - self._mean)
        if not entry.requests:
            self._note_spare(entry)

    def requeue(self, entry: PoolObject) -> None:
        """Give up what has come; tickets refer to it, and it will be loaded again."""
        if entry.cached:
            self._discard(entry)
        self.pinned -= entry.size
        self._drop(entry)

    def farthest_spare(self) -> PoolObject | None:
        """The ready object wanted farthest ahead, of those that no job waits for or has been given."""
        while self._spare:
            entry = self._spare.first()
            if entry.is_spare:
                return entry
            self._spare.discard(entry)
        return None

    # -- room ------------------------------------------------------------------------------------------------

    def expected_size(self, entry: PoolObject) -> int:
        """What it is expected to take when it has come, bytes."""
        if entry.loads:
            return entry.size
        return min(_FIRST_GUESS, self.capacity) if self._mean is None else max(1, int(self._mean))

    def has_room(self, size: int) -> bool:
        """Whether so many bytes may be loaded."""
        return self.held + self.reserved + size <= self.capacity

    def make_room(self, size: int, *, share: float) -> bool:
        """Whether so many bytes may be loaded, for which the cache gives up `share` of all room if it must.

        With a share of 1 the cache gives up everything, even where that does not do.
        """
        if share < 1 and self.pinned + self.reserved + size > share * self.capacity:
            return self.has_room(size)
        while not self.has_room(size):
            if not self.evict():
                return False
        return True

    def evict(self) -> bool:
        """Have the policy give up one object; whether it had any."""
        key = None if self._policy is None else self._policy.evict()
        if key is not None:
            self._uncache(self._cached[key])
        return key is not None

    def offer(self, entry: PoolObject, jobs: Collection[str]) -> None:
        """Let the policy keep what has come, if it is of use to anybody of `jobs` but those who have it."""
        if self._policy is None or (not self._repeatable and entry.claimed.issuperset(jobs)):
            return
        earlier = self._cached.get(entry.key)
        if earlier is not None:
            self._discard(earlier)
        self._cached[entry.key] = entry
        entry.cache(True)
        for key in self._policy.admit(entry.key, entry.size):
            self._uncache(self._cached[key])

    # -- inside ----------------------------------------------------------------------------------------------

    def _note_spare(self, entry: PoolObject) -> None:
        if entry not in self._spare:
            self._spare.push(entry, -entry.distance, entry.number)

    def _drop_if_spent(self, entry: PoolObject, jobs: Collection[str]) -> None:
        if entry.cached and not self._repeatable and entry.claimed.issuperset(jobs):
            self._discard(entry)

    def _discard(self, entry: PoolObject) -> None:
        assert self._policy is not None
        self._policy.discard(entry.key)
        self._uncache(entry)

    def _uncache(self, entry: PoolObject) -> None:
        del self._cached[entry.key]
        entry.cache(False)
        if not entry.tickets:
            self._remove(entry)

    def _remove(self, entry: PoolObject) -> None:
        if entry.ready:
            self._drop(entry)
        entries = self._by_key[entry.key]
        if len(entries) == 1:
            del self._by_key[entry.key]
        else:
            entries.remove(entry)

    def _drop(self, entry: PoolObject) -> None:
        self.held -= entry.size
        self.ready -= 1
        entry.drop()
        if entry in self._spare:
            self._spare.discard(entry)

    def validate(self, jobs: Collection[str]) -> None:
        """Check every invariant; O(n), for tests. Raises AssertionError."""
        entries = [entry for same in self._by_key.values() for entry in same]
        for entry in entries:
            entry.validate()
            assert set(entry.tickets) <= set(jobs)
            assert self._repeatable or not (entry.cached and entry.claimed.issuperset(jobs))
            assert entry in self._spare or not entry.is_spare
        ready = [entry for entry in entries if entry.ready]
        assert self.held == sum(entry.size for entry in ready)
        assert self.ready == len(ready)
        assert self.pinned == sum(entry.size for entry in ready if entry.tickets)
        assert self.reserved == sum(entry.size for entry in entries if entry.loading)
        assert {id(entry) for entry in entries if entry.cached} == set(map(id, self._cached.values()))
        assert self._policy is None or set(self._policy) == set(self._cached)
        self._spare.validate()
        assert set(self._spare) <= set(ready)
