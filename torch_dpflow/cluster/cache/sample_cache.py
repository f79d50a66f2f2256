"""A shard's sample cache, for prefetched and for cached samples (thesis 3.4.2, 3.4.3, figure 4-12).

A pure state machine: calls return instructions, which the caller must carry out in order.

**References.** A job requests samples ahead of its need, each under a ticket, and releases a ticket once it has the
sample. A sample stays in memory while the policy keeps it or, if the capacity suffices, while it has a ticket.

**Freshness.** A sample of a repeatable flow may be served any number of times. A random sample is served under at most
one ticket of each job: a job that wants the key again gets another draw. The policy may keep a random sample until
every job has requested it.

**Capacity.** A load begins when its expected bytes fit into the capacity, together with the bytes that are held and the
expected bytes of running loads. For a sample that a job waits for, the cache evicts all cached samples if need be. Then
it drops the ready samples that are needed last and that no job has fetched, and queues them again. If that is not
enough, requests are answered with the samples that are ready, so that their jobs release these. To prefetch samples,
the cache evicts only if samples with tickets and running loads then take at most half of the capacity.

**Stages.** A dataset can have two stages: a cacheable stage, and a per-draw stage that runs for each job and epoch. The
cache then has two kinds of entries. *Inputs* are outputs of the cacheable stage, one for each sample, kept by the
policy. *Final samples* are outputs of the per-draw stage, one for each sample and draw, kept while a job wants them.
Loading a final sample first requests its input, as a job would, and holds the input until the per-draw stage has run.
Final samples may take half of the capacity, and inputs take what final samples do not use. At most `concurrency` final
samples wait for inputs, so that neither kind of entry can block the other forever.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
    RequestId,
    RequestTable,
    Serve,
    ShardCacheStatistics,
    Ticket,
)
from torch_dpflow.errors import UsageError
from torch_dpflow.lookahead import Lookahead

#: To prefetch, the cache evicts only if samples with tickets and running loads then take at most this share.
AHEAD_SHARE = 0.5
#: With two stages: maximum share of the capacity for final samples; minimum change of the inputs' capacity, as a share.
_DRAWN_SHARE, _STEP = 0.5, 1 / 32


class SampleCache:
    """State machine that decides which samples are loaded, kept and served. Not thread-safe: one thread owns it.

    Args:
        capacity_bytes: maximum bytes of samples that are held or being loaded. A single larger sample can exceed it,
            and so can samples that turn out larger than earlier ones.
        concurrency: maximum number of running loads, of each stage.
        repeatable: whether loading a sample twice gives the same value.
        staged: whether there is a per-draw stage after the cacheable stage.
        policy: creates the cache's policy for a number of bytes; None: a sample is kept only while it has a ticket.

    Raises OptionError: a number is below 1.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        concurrency: int,
        repeatable: bool,
        staged: bool = False,
        policy: Callable[[int], Policy] | None = None,
    ) -> None:
        check_int("capacity_bytes", capacity_bytes, minimum=1)
        check_int("concurrency", concurrency, minimum=1)
        self._capacity = capacity_bytes
        self._readers: dict[str, CacheReader] = {}
        #: Number of readers of each job.
        self._jobs: Counter[str] = Counter()
        kept = None if policy is None else policy(capacity_bytes)
        #: Table of samples. With two stages, `_kept` has the inputs and `_drawn` the final samples.
        self._kept = ObjectTable(capacity_bytes, kept, repeatable=repeatable or staged)
        self._drawn = ObjectTable(_drawn_bytes(capacity_bytes), None, repeatable=True, by_draw=True) if staged else None
        self._tables = [self._kept] if self._drawn is None else [self._drawn, self._kept]
        self._requests = RequestTable()
        self._numbers = itertools.count(1)
        #: By the number of the running load.
        self._loading: dict[int, CacheEntry] = {}
        #: Reader that wants the inputs of final samples. A ticket is the number of the final sample's load.
        self._inputs = CacheReader("", "")
        #: Maximum number of running loads of each stage; may be changed at any time.
        self.concurrency = concurrency
        #: Whether a requested sample does not fit even after all possible evictions.
        self._must_flush = False

    # -- jobs ------------------------------------------------------------------------------------------------

    def join(self, reader: str, job: str = "") -> None:
        """Add a reader. Does nothing if the reader has joined already.

        job: name of the job of which the reader is a rank; empty: the reader is the whole job, and has its name.
        """
        if reader in self._readers:
            return
        added = self._readers[reader] = CacheReader(reader, job or reader)
        self._jobs[added.job] += 1
        if self._jobs[added.job] == 1:
            self._kept.join(added.job)

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
            self._kept.leave(gone.job, self._jobs)
        return self._admit(out)

    def hint(self, job: str, lookahead: Lookahead, *, weight: float = 1.0) -> None:
        """Pass a job's lookahead and its weight to the cache's policy. Ignore a job that has no reader here."""
        if job in self._jobs:
            self._kept.hint(job, lookahead, weight)

    # -- capacity --------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Maximum bytes of samples that are held or being loaded."""
        return self._capacity

    @property
    def used(self) -> int:
        """Bytes of samples that are held or being loaded."""
        return sum(table.held + table.reserved for table in self._tables)

    # -- reading ---------------------------------------------------------------------------------------------

    def is_wanted(self, job: str, ticket: Ticket) -> bool:
        """Return whether the reader `job` has requested a sample under this ticket, and not released it."""
        return ticket in self._reader(job).wants

    def want(
        self, job: str, wants: Iterable[tuple[Ticket, int]], draw: int | None, *, counts: bool = True
    ) -> list[CacheInstruction]:
        """Record samples that `job` will fetch. Tickets that the job already holds are ignored.

        job: name of a reader, as in `join`.
        wants: (ticket, key) of each sample, in the order in which the job needs them.
        draw: together with a sample's key, the seed of its random draws. None: with two stages, the job wants outputs
            of the cacheable stage.
        counts: whether the policy counts these as reads of the job's present epoch.

        Raises UsageError: the job has not joined, or it wants both samples and outputs of the cacheable stage.
        """
        reader = self._reader(job)
        held = reader.wants
        new = {ticket: key for ticket, key in wants if ticket not in held}
        table = self._kept
        if self._drawn is not None and new:
            if reader.draws is None:
                reader.draws = draw is not None
            if reader.draws != (draw is not None):
                raise UsageError(f"job {job!r} wants samples and outputs of the cacheable stage; join as two jobs")
            table = self._drawn if reader.draws else table
        if counts:
            self._kept.read(list(new.values()), reader.job)
        oldest = next(iter(new), 0) if reader.oldest is None else reader.oldest
        out: list[CacheInstruction] = []
        for ticket, key in new.items():
            # At least 1, because 0 is the distance of requested samples.
            distance = max(1, 1 + ticket - oldest)
            held[ticket] = self._want(table, reader, ticket, key, draw or 0, distance, out)
        return self._admit(out)

    def fetch(self, job: str, request: RequestId, tickets: Sequence[Ticket]) -> list[CacheInstruction]:
        """Fetch samples that `job` wants. One `Serve`, now or later, answers with all, some or none of them.

        Raises UsageError: the job has not joined, a ticket is not wanted, or the request's number is in use.
        """
        return self._admit([*self._requests.open(request, self._reader(job), tickets)])

    def release(self, job: str, tickets: Iterable[Ticket]) -> list[CacheInstruction]:
        """Release tickets of `job`, which has the samples or no longer needs them. Unknown tickets are ignored.

        Raises UsageError: the job has not joined.
        """
        return self._admit(self._release(self._reader(job), tickets))

    def tickets_outside(self, job: str, first: int, end: int) -> list[Ticket]:
        """Return the tickets of `job` for keys outside `range(first, end)`."""
        return [ticket for ticket, wanted in self._reader(job).wants.items() if not first <= wanted.key < end]

    @property
    def cache_samples(self) -> int:
        """Estimated number of samples that the policy can keep; 0 without a policy, or before a sample was loaded."""
        return self._kept.cache_samples

    def resize(self, capacity_bytes: int) -> list[CacheInstruction]:
        """Change the capacity. Samples beyond it are dropped, but fetched samples only after their release.

        Raises OptionError if `capacity_bytes` is below 1.
        """
        check_int("capacity_bytes", capacity_bytes, minimum=1)
        self._capacity = capacity_bytes
        if self._drawn is None:
            self._kept.resize(capacity_bytes)
        else:
            self._drawn.resize(_drawn_bytes(capacity_bytes))
        self._trim()
        return self._admit([])

    # -- loading ---------------------------------------------------------------------------------------------

    def key_of(self, load: int) -> int | None:
        """Return the key of a running load's sample; None if the load has ended."""
        entry = self._loading.get(load)
        return None if entry is None else entry.key

    def loaded(self, arrivals: Iterable[Arrival]) -> list[CacheInstruction]:
        """Store the results of loads. Results of cancelled loads are ignored."""
        out: list[CacheInstruction] = []
        for load, value, size, keep in arrivals:
            arrived = self._loading.get(load)
            if arrived is not None:
                out += self._store(arrived, value, size)
                if keep and self._table_of(arrived) is self._kept:
                    self._kept.offer(arrived, self._jobs)
        self._trim()
        return self._admit(out)

    def statistics(self) -> ShardCacheStatistics:
        """Return contents and counts. With two stages, `wants`, `shared`, `loads`, `cached` count inputs only."""
        kept, tables = self._kept, self._tables
        return ShardCacheStatistics(
            wants=kept.wants,
            shared=kept.shared,
            loads=kept.loads,
            held_bytes=sum(table.held for table in tables),
            reserved_bytes=sum(table.reserved for table in tables),
            capacity_bytes=self._capacity,
            ready=sum(table.ready for table in tables),
            loading=kept.running + sum(map(self._has_input, self._inputs.wants)),
            queued=sum(len(table.queue) for table in tables),
            cached=kept.cached,
            jobs=len(self._readers),
            drawn=0 if self._drawn is None else self._drawn.loads,
        )

    def _reader(self, name: str) -> CacheReader:
        try:
            return self._readers[name]
        except KeyError:
            raise UsageError(f"job {name!r} has not joined this cache, or has left it; join first") from None

    def _table_of(self, entry: CacheEntry) -> ObjectTable:
        return self._kept if self._drawn is None or entry.queue is self._kept.queue else self._drawn

    def _want(
        self,
        table: ObjectTable,
        reader: CacheReader,
        ticket: Ticket,
        key: int,
        draw: int,
        distance: int,
        out: list[CacheInstruction],
    ) -> CacheEntry:
        """Return the entry of a sample that `reader` wants; begin to load a new entry at once if nothing waits."""
        table.wants += 1
        wanted = table.find(key, reader.job, draw)
        if wanted is not None:
            table.shared += 1
            if distance < wanted.distance:
                wanted.distance = distance
                if wanted.is_waiting:
                    table.queue.add(wanted)
            table.attach(wanted, reader, ticket, self._jobs)
            return wanted
        added = table.add(key, draw, distance, reader, ticket)
        if not table.queue and table.running < self.concurrency:
            size = table.expected_size(added)
            if table.has_room(size):
                out += self._begin(added, size)
                return added
        table.queue.push(added, distance, added.number)
        return added

    def _begin(self, entry: CacheEntry, size: int) -> list[CacheInstruction]:
        """Begin to load an entry; for an output of the per-draw stage, first load its input. size: expected bytes."""
        load = next(self._numbers)
        table = self._table_of(entry)
        table.begin(entry, load, size)
        self._loading[load] = entry
        if table is self._kept:
            return [Load(load, entry.key, entry.draw)]
        out: list[CacheInstruction] = []
        inputs = self._inputs
        inputs.wants[load] = self._want(self._kept, inputs, load, entry.key, 0, 1, out)
        return out + self._taken(self._requests.open(entry, inputs, [load]))

    def _taken(self, serves: Iterable[Serve]) -> list[CacheInstruction]:
        """Return the answers for jobs, and begin the per-draw stage of entries whose inputs have arrived."""
        out: list[CacheInstruction] = []
        for serve in serves:
            entry = serve.request
            if not isinstance(entry, CacheEntry):
                out.append(serve)
                continue
            ((_, value),) = serve.samples
            if value.is_sample:
                out.append(Load(entry.loading, entry.key, entry.draw, value))
            else:  # the error of its input
                out += self._store(entry, value, value.nbytes)
        return out

    def _store(self, entry: CacheEntry, value: Any, size: int) -> list[CacheInstruction]:
        """Store the result of an entry's load, and answer the requests that it completes."""
        load, table = entry.loading, self._table_of(entry)
        del self._loading[load]
        out = [] if table is self._kept else self._release_input(load)
        table.store(entry, value, size)
        if entry.requests:
            out += self._taken(self._requests.arrived(entry))
        return out

    def _has_input(self, load: int) -> bool:
        """Return whether the input of a running load has arrived, so that its per-draw stage runs."""
        return self._inputs.wants[load].tickets[self._inputs.name, load]

    def _release_input(self, load: int) -> list[CacheInstruction]:
        # Without the answer to its own request, which nothing waits for.
        return [one for one in self._release(self._inputs, [load]) if not isinstance(one, Serve)]

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
            table, load = self._table_of(wanted), wanted.loading
            if not table.detach(wanted, reader.name, ticket):
                continue
            if load:
                del self._loading[load]
                if table is self._kept or self._has_input(load):
                    cancelled.append(load)
                if table is not self._kept:
                    out += self._release_input(load)
            elif not wanted.ready:
                table.queue.discard(wanted)
            table.release(wanted)
        return [*out, Cancel(cancelled)] if cancelled else out

    # -- admission -------------------------------------------------------------------------------------------

    def _admit(self, out: list[CacheInstruction]) -> list[CacheInstruction]:
        """Begin loads while they fit, the nearest first; return `out` with their instructions.

        Every event ends with this.
        """
        for table in self._tables:
            if table is self._kept and self._drawn is not None:
                self._balance(self._drawn)
            self._must_flush = False
            while table.queue and table.running < self.concurrency:
                first = table.queue.first()
                size = table.expected_size(first)
                if not (table.has_room(size) or self._make_room(first, size)):
                    break
                table.queue.discard(first)
                out += self._begin(first, size)
            if self._must_flush:
                out += self._requests.flush(table.queue)
        return out

    def _balance(self, drawn: ObjectTable) -> None:
        """Set the inputs' capacity to what final samples do not use."""
        capacity = max(1, self._capacity - drawn.held - drawn.reserved)
        if abs(capacity - self._kept.capacity) > self._capacity * _STEP:
            self._kept.resize(capacity)
            self._trim()

    def _make_room(self, wanted: CacheEntry, size: int) -> bool:
        """Evict as much as is allowed for loading this entry; return whether the entry fits then."""
        table = self._table_of(wanted)
        if not wanted.requests:
            return table.make_room(size, share=AHEAD_SHARE)
        if table.make_room(size, share=1.0):
            return True
        while self._requeue_farthest(table):
            if table.has_room(size):
                return True
        # Everything left is requested, served or being loaded. A sample larger than the capacity is loaded alone.
        self._must_flush = True
        return not table.running and not table.held

    def _trim(self) -> None:
        """Drop samples that are not needed now while the capacity is exceeded."""
        for table in self._tables:
            while table.is_over and (table.evict() or self._requeue_farthest(table)):
                pass

    def _requeue_farthest(self, table: ObjectTable) -> bool:
        """Drop the ready sample that is wanted last, and queue it again; return whether there was such a sample."""
        farthest = table.farthest_spare()
        if farthest is None:
            return False
        table.requeue(farthest)
        table.queue.add(farthest)
        return True


def _drawn_bytes(capacity: int) -> int:
    return max(1, int(capacity * _DRAWN_SHARE))
