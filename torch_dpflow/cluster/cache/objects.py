"""Parts of a sample cache: entries, readers, open fetches, and the instructions that the cache returns."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec

from torch_dpflow._core.lazy_heap import LazyHeap
from torch_dpflow.errors import UsageError

#: Number of a job's request for one sample, used only once. Samples that the job reads later have higher tickets.
Ticket: TypeAlias = int
#: Id of one fetch, chosen by the owner of the cache.
RequestId: TypeAlias = Hashable


class Load(msgspec.Struct, frozen=True, gc=False):
    """Instruction: load this sample, then call `SampleCache.loaded`."""

    #: Number of this load. Each load of a sample has a different number.
    load: int
    key: int
    #: Together with the key, the seed of the random draws.
    draw: int
    #: Input of the per-draw stage, which is the output of the cacheable stage; None: the cacheable stage should run.
    input: Any = None


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """Instruction: cancel these running loads, because no job needs their samples now."""

    loads: list[int]


class Serve(msgspec.Struct, frozen=True):
    """Instruction: answer this fetch with these samples, each with its ticket.

    The job must fetch missing samples again.
    """

    request: RequestId
    samples: list[tuple[Ticket, Any]]


CacheInstruction: TypeAlias = Load | Cancel | Serve


class Arrival(NamedTuple):
    """Outcome of loading one sample."""

    #: Number of the load, its result, and the bytes of the result.
    load: int
    value: Any
    size: int
    #: Whether the value may be cached; False for a failed load.
    keep: bool = True


@dataclass(frozen=True, kw_only=True)
class ShardCacheStatistics:
    """Snapshot of a sample cache: its contents now, and its counts since it was created."""

    #: Number of samples that jobs have requested.
    wants: int
    #: Number of requested samples that were ready, loading or queued already.
    shared: int
    loads: int
    #: Bytes of samples held now, and expected from running loads.
    held_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    #: Samples held, being loaded, and waiting to be loaded.
    ready: int
    loading: int
    queued: int
    #: Samples that the policy keeps, whether or not a job requests them.
    cached: int
    jobs: int
    #: Loads of outputs of the per-draw stage that have begun.
    drawn: int = 0


#: Shared by all entries without a request, as most are; never changed.
_NO_REQUESTS: dict[tuple[RequestId, Ticket], None] = {}


class CacheEntry:
    """Entry of a sample cache: one sample that waits to be loaded, is loading, or is ready::

        waiting -- begin --> loading -- store --> ready -- requeue --> waiting

    In each of these states, an entry is removed from its table once it has no ticket and is not cached.

    Args:
        queue: queue of waiting entries of the table that owns the entry.
        number: the entry's number in the table, in the order of creation.
        draw: together with the key, the seed of the sample's random draws.
        distance: 0 if a fetch waits for the entry; otherwise 1 or more, and lower if a job will read it sooner.
        reader, ticket: the first reader that wants the entry, and its ticket.
    """

    # One is made for every sample that is loaded: a class with slots, and few objects in it.
    __slots__ = (
        "cached",
        "claimed",
        "distance",
        "draw",
        "key",
        "loading",
        "loads",
        "number",
        "queue",
        "ready",
        "requests",
        "served",
        "size",
        "tickets",
        "value",
    )

    def __init__(
        self,
        queue: LoadQueue,
        number: int,
        key: int,
        draw: int,
        distance: int,
        reader: CacheReader,
        ticket: Ticket,
    ) -> None:
        self.queue = queue
        self.number = number
        self.key = key
        self.draw = draw
        self.distance = distance
        #: Whether the entry was served under a ticket, by (reader, ticket).
        self.tickets: dict[tuple[str, Ticket], bool] = {(reader.name, ticket): False}
        #: Number of tickets under which the entry was served.
        self.served = 0
        #: Jobs that have requested the entry. A random sample is served under only one ticket of each job.
        self.claimed = {reader.job}
        #: The number of its running load; 0: none.
        self.loading = 0
        self.ready = False
        self.value: Any = None
        #: Bytes of `value`, or the bytes expected from its load.
        self.size = 0
        #: Whether the policy keeps the entry, even without a ticket.
        self.cached = False
        self.loads = 0
        #: Open fetches of the entry, oldest first, each with the entry's ticket.
        self.requests = _NO_REQUESTS

    @property
    def is_waiting(self) -> bool:
        return not self.loading and not self.ready

    @property
    def is_spare(self) -> bool:
        """Whether the value can be dropped and loaded again: tickets exist, but none was served and no fetch waits."""
        return self.ready and bool(self.tickets) and not self.served and not self.requests

    def attach(self, reader: CacheReader, ticket: Ticket) -> None:
        self.tickets[reader.name, ticket] = False
        self.claimed.add(reader.job)

    def detach(self, reader: str, ticket: Ticket) -> None:
        self.served -= self.tickets.pop((reader, ticket))

    def add_request(self, request: RequestId, ticket: Ticket) -> None:
        if self.requests:
            self.requests[request, ticket] = None
        else:
            self.requests = {(request, ticket): None}
        self.distance = 0

    def drop_request(self, request: RequestId, ticket: Ticket) -> bool:
        """Remove a request for this entry; return True if no request is left."""
        del self.requests[request, ticket]
        if self.requests:
            return False
        self.requests = _NO_REQUESTS
        self.distance = 1  # still near, but behind what a job waits for
        return True

    def serve(self, request: RequestId, ticket: Ticket, reader: str) -> Any:
        """Record that a request of `reader` is answered, and return the entry's value."""
        self.drop_request(request, ticket)
        holder = reader, ticket
        self.served += not self.tickets[holder]
        self.tickets[holder] = True
        return self.value

    # -- loading and caching ---------------------------------------------------------------------------------

    def begin(self, load: int, size: int) -> None:
        """Record that the load with this number begins; the sample is expected to have `size` bytes."""
        self.loading, self.size = load, size
        self.loads += 1

    def store(self, value: Any, size: int) -> None:
        """Store the result of the entry's load."""
        self.loading, self.ready, self.value, self.size = 0, True, value, size

    def drop(self) -> None:
        """Drop the entry's value. Call this only for an entry that is not cached."""
        self.ready, self.value = False, None


@dataclass(eq=False, slots=True)
class CacheReader:
    """Process that reads from a sample cache: a job, or a rank of a job."""

    name: str
    #: Name of the job: the reader is the job, or a rank of it. The policy treats the ranks of a job as one job.
    job: str
    #: With two stages: True if the reader wants samples, False for outputs of the cacheable stage; None: not known yet.
    draws: bool | None = None
    #: Entries that the reader wants and has not released, oldest first.
    wants: dict[Ticket, CacheEntry] = field(default_factory=dict)
    requests: set[RequestId] = field(default_factory=set)

    @property
    def oldest(self) -> Ticket | None:
        return next(iter(self.wants), None)


@dataclass(eq=False, slots=True)
class FetchRequest:
    """Unanswered fetch by a reader."""

    number: RequestId
    job: CacheReader
    tickets: list[Ticket]
    #: Number of these tickets whose entries are not ready.
    missing: int = 0

    @property
    def first(self) -> CacheEntry:
        """Entry of the first ticket. The entries of all tickets of the request are in one table."""
        return self.job.wants[self.tickets[0]]


class LoadQueue(LazyHeap[CacheEntry]):
    """Queue of entries that wait to be loaded: the lowest distance first, then the oldest entry."""

    __slots__ = ()

    def add(self, wanted: CacheEntry) -> None:
        """Add an entry, or move it to the place of its present distance."""
        self.push(wanted, wanted.distance, wanted.number)


class RequestTable:
    """Table of open fetches, called requests. Entries that a request waits for are the next to be loaded."""

    def __init__(self) -> None:
        self._open: dict[RequestId, FetchRequest] = {}

    def open(self, number: RequestId, job: CacheReader, tickets: Sequence[Ticket]) -> list[Serve]:
        """Open a request of `job` for these tickets; return its answer if all samples are ready, otherwise [].

        Raises UsageError if `job` does not hold all of the tickets, or if `number` is in use.
        """
        if number in self._open:
            raise UsageError(f"request {number!r} is open; use another number for each fetch")
        unknown = next((ticket for ticket in tickets if ticket not in job.wants), None)
        if unknown is not None:
            raise UsageError(f"job {job.name!r} fetches ticket {unknown}, which it does not want; want it first")
        request = self._open[number] = FetchRequest(number, job, list(dict.fromkeys(tickets)))
        job.requests.add(number)
        for ticket in request.tickets:
            wanted = job.wants[ticket]
            wanted.add_request(number, ticket)
            if not wanted.ready:
                request.missing += 1
                if not wanted.loading:
                    wanted.queue.add(wanted)
        return [] if request.missing else [self._serve(request)]

    def arrived(self, wanted: CacheEntry) -> list[Serve]:
        """Record that an entry is loaded; return answers to the requests that are now complete."""
        complete: list[Serve] = []
        for number, _ in list(wanted.requests):
            request = self._open[number]
            request.missing -= 1
            if not request.missing:
                complete.append(self._serve(request))
        return complete

    def shorten(self, job: CacheReader, ticket: Ticket) -> list[Serve]:
        """Remove a released ticket from the requests of `job`; return answers to the requests that are now complete."""
        wanted = job.wants[ticket]
        complete: list[Serve] = []
        for number in [number for number, asked in wanted.requests if asked == ticket]:
            request = self._open[number]
            if request.job is job:
                request.tickets.remove(ticket)
                self._drop_request(wanted, number, ticket)
                request.missing -= not wanted.ready
                if not request.missing:
                    complete.append(self._serve(request))
        return complete

    def flush(self, queue: LoadQueue) -> list[Serve]:
        """Answer requests with the samples that are ready. Requests without a ready sample stay open.

        queue: only requests for entries of the table with this queue are answered.
        """
        partly = [one for one in self._open.values() if one.missing < len(one.tickets) and one.first.queue is queue]
        return [self._serve(request) for request in partly]

    def abandon(self, job: CacheReader) -> list[Serve]:
        """Close all requests of a reader that leaves; return an answer without samples to each."""
        numbers = list(job.requests)
        job.requests.clear()
        for number in numbers:
            for ticket in self._open.pop(number).tickets:
                self._drop_request(job.wants[ticket], number, ticket)
        return [Serve(number, []) for number in numbers]

    def _serve(self, request: FetchRequest) -> Serve:
        number, job = request.number, request.job
        del self._open[number]
        job.requests.discard(number)
        samples: list[tuple[Ticket, Any]] = []
        for ticket in request.tickets:
            wanted = job.wants[ticket]
            if wanted.ready:
                samples.append((ticket, wanted.serve(number, ticket, job.name)))
            else:
                self._drop_request(wanted, number, ticket)
        return Serve(number, samples)

    def _drop_request(self, wanted: CacheEntry, request: RequestId, ticket: Ticket) -> None:
        if wanted.drop_request(request, ticket) and wanted.is_waiting:
            wanted.queue.add(wanted)
