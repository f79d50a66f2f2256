"""A shard's sample cache: prefetch buffer and cache over one set of entries (thesis 3.4.2, 3.4.3, figure 4-12).

A pure state machine: each call returns instructions, in order; there is no socket, thread or clock inside.

**References.** A job wants samples ahead of its need, each under a ticket, and releases a ticket once it has
the sample. An entry stays while a ticket refers to it or the cache holds it. A sample that two jobs want is
loaded once.

**Freshness.** A sample of a repeatable flow may be served any number of times. A random sample is served at most
once to each job: a job that wants the key again gets another draw. The policy may keep it for jobs that have not
had it; it is dropped when every job has.

**Capacity.** A load begins when its expected bytes fit next to those that are held and those that running loads are
expected to bring. To prefetch a sample the cache evicts at most half of the capacity. For a sample that a job waits
for, the cache evicts everything if need be; then ready samples that are wanted farthest ahead are dropped and queued
again. If that is not enough, requests are answered with the samples that are ready, so that their jobs release them. So
the sample that a job waits for can always be loaded, even if another job holds samples and does not read.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch_dpflow._core.checks import check_int
from torch_dpflow.caches.policy import Policy
from torch_dpflow.cluster.cache.object_table import ObjectTable
from torch_dpflow.cluster.cache.objects import (
    Arrival,
    CacheEntry,
    CacheInstruction,
    CacheReader,
    Cancel,
    Load,
    LoadQueue,
    RequestId,
    RequestTable,
    ShardCacheStatistics,
    Ticket,
)
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.lookahead import Lookahead

#: The share of the capacity that the cache evicts at most for samples that no request waits for.
AHEAD_SHARE = 0.5


class SampleCache:
    """Decides what is loaded, kept and served. Not thread-safe: one thread owns it.

    Every call costs amortised O(log n) for each sample in it, except `leave`, which costs O(cached) for random
    samples.

    Args:
        capacity_bytes: maximum bytes of samples that are held or being loaded. A single larger sample
            exceeds it, and it is exceeded while samples turn out larger than earlier ones.
        concurrency: maximum number of running loads.
        repeatable: whether loading a sample twice gives the same value (if `by_draw`, with the same draw).
        by_draw: whether each draw of a sample is an object of its own. Then only samples that jobs have requested are
            kept.
        policy: makes the cache's policy for a budget of bytes; None: only samples that jobs have requested are kept.
        numbers: the source of load numbers; caches of one owner may share it.

    Raises:
        OptionError: a number is below 1, or there is a policy for samples by draw.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        concurrency: int,
        repeatable: bool,
        by_draw: bool = False,
        policy: Callable[[int], Policy] | None = None,
        numbers: Iterator[int] | None = None,
    ) -> None:
        check_int("capacity_bytes", capacity_bytes, minimum=1)
        check_int("concurrency", concurrency, minimum=1)
        if by_draw and policy is not None:
            raise OptionError(
                "by_draw=True with a policy: a policy keeps one object for each sample; leave out one of the two"
            )
        self._readers: dict[str, CacheReader] = {}
        #: By job, how many of the readers are its ranks.
        self._jobs: Counter[str] = Counter()
        kept = None if policy is None else policy(capacity_bytes)
        self._objects = ObjectTable(capacity_bytes, kept, repeatable=repeatable, by_draw=by_draw)
        self._queue = LoadQueue()
        self._requests = RequestTable(self._queue)
        self._numbers = itertools.count(1) if numbers is None else numbers
        #: By the number of the running load.
        self._loading: dict[int, CacheEntry] = {}
        #: Maximum number of running loads; may be changed at any time.
        self.concurrency = concurrency
        self._wants = self._shared = self._loads = 0
        #: Whether a requested sample does not fit although everything that can be evicted has been.
        self._must_flush = False

    # -- jobs ------------------------------------------------------------------------------------------------

    def join(self, reader: str, job: str = "", *, counts: bool = True) -> None:
        """Add a reader; nothing changes for one that has joined already.

        job: the job of which it is a rank; empty: it is the whole job, by its own name.
        counts: whether its requests are reported to the cache's policy as reads; if not, call `note_reads`.
        """
        if reader in self._readers:
            return
        added = self._readers[reader] = CacheReader(reader, job or reader, counts)
        self._jobs[added.job] += 1
        if counts and self._jobs[added.job] == 1:
            self._objects.join(added.job)

    def leave(self, reader: str) -> list[CacheInstruction]:
        """Remove a reader that has ended or died, and release all of its tickets. An unknown reader is ignored."""
        gone = self._readers.pop(reader, None)
        if gone is None:
            return []
        out: list[CacheInstruction] = [*self._requests.abandon(gone)]
        out += self._release(gone, list(gone.wants))
        self._jobs[gone.job] -= 1
        if not self._jobs[gone.job]:
            del self._jobs[gone.job]
            self._objects.leave(gone.job, self._jobs)
        return self._admit(out)

    def hint(self, job: str, lookahead: Lookahead, *, weight: float = 1.0) -> None:
        """Pass a job's lookahead and its weight to the cache's policy. Ignore a job that has no reader here."""
        if job in self._jobs:
            self._objects.hint(job, lookahead, weight)

    def note_reads(self, reader: str, keys: Sequence[int]) -> None:
        """Report the reads of `reader` to the cache's policy, without a request.

        Used if a sample has two stages: reader `reader` reads a result, for which another reader requests the sample.
        """
        self._objects.read(keys, self._reader(reader).job)

    # -- capacity --------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Maximum bytes that are held or being loaded."""
        return self._objects.capacity

    @property
    def used(self) -> int:
        """Bytes that are held or being loaded."""
        return self._objects.held + self._objects.reserved

    # -- reading ---------------------------------------------------------------------------------------------

    def is_wanted(self, job: str, ticket: Ticket) -> bool:
        """Return whether a reader holds this ticket."""
        return ticket in self._reader(job).wants

    def want(
        self, job: str, wants: Iterable[tuple[Ticket, int]], draw: int, *, counts: bool = True
    ) -> list[CacheInstruction]:
        """Record samples that `job` will fetch: (ticket, key), nearest first. A ticket that the job holds is ignored.

        draw: seed of the random draws of samples that have to be loaded; differs between jobs and epochs.
        counts: whether the policy counts them as reads of the epoch that its job is in.

        Raises:
            UsageError: the job has not joined.
        """
        reader = self._reader(job)
        held = reader.wants
        new = {ticket: key for ticket, key in wants if ticket not in held}
        if reader.counts and counts:
            self._objects.read(list(new.values()), reader.job)
        oldest = next(iter(new), 0) if reader.oldest is None else reader.oldest
        out: list[CacheInstruction] = []
        for ticket, key in new.items():
            # At least 1, because 0 is the distance of requested samples.
            held[ticket] = self._want(reader, ticket, key, draw, max(1, 1 + ticket - oldest), out)
        self._wants += len(new)
        return self._admit(out)

    def fetch(self, job: str, request: RequestId, tickets: Sequence[Ticket]) -> list[CacheInstruction]:
        """Fetch samples that `job` wants; one `Serve` answers with all of them, or with some.

        Raises:
            UsageError: the job has not joined, a ticket is not wanted, or the request's number is in use.
        """
        return self._admit([*self._requests.open(request, self._reader(job), tickets)])

    def release(self, job: str, tickets: Iterable[Ticket]) -> list[CacheInstruction]:
        """Release tickets of `job`, which has the samples or no longer needs them. Unknown tickets are ignored.

        Raises:
            UsageError: the job has not joined.
        """
        return self._admit(self._release(self._reader(job), tickets))

    def tickets_outside(self, job: str, first: int, end: int) -> list[Ticket]:
        """Return the tickets of `job` for keys outside `range(first, end)`."""
        return [ticket for ticket, wanted in self._reader(job).wants.items() if not first <= wanted.key < end]

    @property
    def cache_samples(self) -> int:
        """How many samples the cache can hold, by the size of the latest; 0 before the first."""
        return self._objects.cache_samples

    def resize(self, capacity_bytes: int) -> list[CacheInstruction]:
        """Change the capacity; bytes beyond it are dropped as soon as no request waits for them.

        Raises:
            OptionError: it is below 1.
        """
        check_int("capacity_bytes", capacity_bytes, minimum=1)
        self._objects.resize(capacity_bytes)
        self._trim()
        return self._admit([])

    # -- loading ---------------------------------------------------------------------------------------------

    def key_of(self, load: int) -> int | None:
        """Return the sample of a running load; None if it is over."""
        entry = self._loading.get(load)
        return None if entry is None else entry.key

    def loaded(self, arrivals: Iterable[Arrival]) -> list[CacheInstruction]:
        """Store the results of loads; cancelled ones are ignored."""
        out: list[CacheInstruction] = []
        for load, value, size, keep in arrivals:
            arrived = self._loading.pop(load, None)
            if arrived is None:
                continue
            self._objects.store(arrived, value, size)
            if arrived.requests:
                out += self._requests.arrived(arrived)
            if keep:
                self._objects.offer(arrived, self._jobs)
        self._trim()
        return self._admit(out)

    def statistics(self) -> ShardCacheStatistics:
        """Return the present contents, and counts until now."""
        return ShardCacheStatistics(
            wants=self._wants,
            shared=self._shared,
            loads=self._loads,
            held_bytes=self._objects.held,
            reserved_bytes=self._objects.reserved,
            capacity_bytes=self._objects.capacity,
            ready=self._objects.ready,
            loading=len(self._loading),
            queued=len(self._queue),
            cached=self._objects.cached,
            jobs=len(self._readers),
        )

    # -- inside ----------------------------------------------------------------------------------------------

    def _reader(self, name: str) -> CacheReader:
        try:
            return self._readers[name]
        except KeyError:
            raise UsageError(f"job {name!r} has not joined this cache, or has left it; join first") from None

    def _want(
        self, reader: CacheReader, ticket: Ticket, key: int, draw: int, distance: int, out: list[CacheInstruction]
    ) -> CacheEntry:
        """Return the entry of a sample that `reader` wants; begin to load a new one at once if nothing waits."""
        objects = self._objects
        wanted = objects.find(key, reader.job, draw)
        if wanted is not None:
            self._shared += 1
            if distance < wanted.distance:
                wanted.distance = distance
                if wanted.is_waiting:
                    self._queue.add(wanted)
            objects.attach(wanted, reader, ticket, self._jobs)
            return wanted
        added = objects.add(key, draw, distance, reader, ticket)
        if not self._queue and len(self._loading) < self.concurrency:
            size = objects.expected_size(added)
            if objects.has_room(size):
                out.append(self._begin(added, size))
                return added
        self._queue.push(added, distance, added.number)
        return added

    def _begin(self, entry: CacheEntry, size: int) -> Load:
        """Begin to load an entry, of which `size` bytes are expected."""
        self._loads += 1
        load = next(self._numbers)
        self._objects.begin(entry, load, size)
        self._loading[load] = entry
        return Load(load, entry.key, entry.draw)

    def _release(self, reader: CacheReader, tickets: Iterable[Ticket]) -> list[CacheInstruction]:
        out: list[CacheInstruction] = []
        cancelled: list[int] = []
        for ticket in tickets:
            wanted = reader.wants.get(ticket)
            if wanted is None:
                continue
            if wanted.requests:
                out += self._requests.shorten(reader, ticket)
            del reader.wants[ticket]
            if not self._objects.detach(wanted, reader.name, ticket):
                continue
            if wanted.loading:
                del self._loading[wanted.loading]
                cancelled.append(wanted.loading)
            elif not wanted.ready:
                self._queue.discard(wanted)
            self._objects.release(wanted)
        return [*out, Cancel(cancelled)] if cancelled else out

    # -- admission -------------------------------------------------------------------------------------------

    def _admit(self, out: list[CacheInstruction]) -> list[CacheInstruction]:
        """Begin loads while they fit, the nearest first; every call ends with this."""
        self._must_flush = False
        queue, loading, objects = self._queue, self._loading, self._objects
        while queue and len(loading) < self.concurrency:
            first = queue.first()
            size = objects.expected_size(first)
            if not (objects.has_room(size) or self._make_room(first, size)):
                break
            queue.discard(first)
            out.append(self._begin(first, size))
        if self._must_flush:
            out += self._requests.flush()
        return out

    def _make_room(self, wanted: CacheEntry, size: int) -> bool:
        """Make room for an entry by the evictions that are allowed for it; return whether the entry fits then."""
        if not wanted.requests:
            return self._objects.make_room(size, share=AHEAD_SHARE)
        if self._objects.make_room(size, share=1.0):
            return True
        while self._requeue_farthest():
            if self._objects.has_room(size):
                return True
        # Everything left is requested, served or being loaded. A sample larger than the capacity is loaded alone.
        self._must_flush = True
        return not self._loading and not self._objects.held

    def _trim(self) -> None:
        """Drop samples that are not needed now, after samples were larger than expected or the capacity shrank."""
        while self._objects.is_over and (self._objects.evict() or self._requeue_farthest()):
            pass

    def _requeue_farthest(self) -> bool:
        """Drop the ready sample that is wanted last and queue it again; return whether there was any."""
        farthest = self._objects.farthest_spare()
        if farthest is None:
            return False
        self._objects.requeue(farthest)
        self._queue.add(farthest)
        return True
