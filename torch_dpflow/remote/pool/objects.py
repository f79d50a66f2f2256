"""What a pool keeps: objects, the jobs that want them, their fetches, and what it tells its owner to do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec

from torch_dpflow.errors import UsageError
from torch_dpflow.lazy_heap import LazyHeap

#: Names one want of one job; a job counts upwards in the order of its plan and never uses one twice.
Ticket: TypeAlias = int
#: Names one fetch; the owner's choice.
RequestId: TypeAlias = Hashable


class Load(msgspec.Struct, frozen=True, gc=False):
    """Have this sample loaded, then call `Pool.loaded`."""

    #: Names this load from here to the worker and back; no other has it, not even where a sample is loaded again.
    load: int
    key: int
    #: Decides, with the key, what is drawn by chance.
    draw: int
    #: What the first part of the work gave, where only the rest is to be done; None: all of it is.
    input: Any = None


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """Nobody wants these any more; they were told to be loaded and have not come."""

    loads: list[int]


class Serve(msgspec.Struct, frozen=True):
    """Answer this request with these samples, each with its ticket; what it asked for besides, ask anew."""

    request: RequestId
    samples: list[tuple[Ticket, Any]]


PoolInstruction: TypeAlias = Load | Cancel | Serve


class Arrival(NamedTuple):
    """What a load has come to."""

    load: int
    value: Any
    #: Bytes that it takes.
    size: int
    #: Whether the cache may have it; not where the load failed.
    keep: bool = True


@dataclass(frozen=True, kw_only=True)
class PoolStatistics:
    """A snapshot of what a pool has counted since it was made, and of what it holds."""

    #: Samples that jobs have asked for.
    wants: int
    #: Of these, those that were here or on their way.
    shared: int
    #: Loads begun.
    loads: int
    #: Bytes held now, and expected of loads under way.
    held_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    #: Samples held, samples on their way, and samples that wait to be loaded.
    ready: int
    loading: int
    queued: int
    #: Samples held in the cache, read or not.
    cached: int
    jobs: int
    #: Samples drawn by chance from what is kept; see `pool_staged`.
    drawn: int = 0


@dataclass(eq=False, slots=True)
class PoolObject:
    """One loading of one sample.

    It waits to be loaded, is loading, and is ready; from there it may have to wait again::

        waiting -- begin --> loading -- store --> ready -- requeue --> waiting
                                 `-- cancel --> gone  `-- drop --> gone

    Its methods alone change it; who calls them keeps the pool's sums and indexes in step.
    """

    #: Counts the objects of a pool: a smaller one is older.
    number: int
    key: int
    draw: int
    #: How soon it is wanted: 0 where a request waits for it, else samples ahead of the job that is nearest.
    distance: int
    #: The tickets that refer to it, by job.
    tickets: dict[str, set[Ticket]]
    #: Jobs that have been given it or are to be; a sample drawn by chance goes to each once.
    claimed: set[str]
    #: The load that is to bring it; 0 where there is none.
    loading: int = 0
    #: Whether `value` is here.
    ready: bool = False
    value: Any = None
    #: Bytes of `value`; what is expected of the load before it is here.
    size: int = 0
    #: Whether the cache holds it.
    cached: bool = False
    #: How often it has been told to be loaded.
    loads: int = 0
    #: Requests that have it among theirs and are not answered, with its ticket in each, in the order of their coming.
    requests: dict[tuple[RequestId, Ticket], None] = field(default_factory=dict)
    #: Jobs and their tickets that have been answered with it and are not released.
    served: set[tuple[str, Ticket]] = field(default_factory=set)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits to be loaded."""
        return not self.loading and not self.ready

    @property
    def is_spare(self) -> bool:
        """Whether it is ready for jobs of which none has been given it or waits for it."""
        return self.ready and bool(self.tickets) and not self.served and not self.requests

    # -- who wants it ----------------------------------------------------------------------------------------

    def attach(self, job: str, ticket: Ticket) -> None:
        """`job` wants it."""
        own = self.tickets.get(job)
        if own is None:
            self.tickets[job] = {ticket}
        else:
            own.add(ticket)
        self.claimed.add(job)

    def detach(self, job: str, ticket: Ticket) -> None:
        """`job` has it, or gives it up."""
        own = self.tickets[job]
        own.discard(ticket)
        self.served.discard((job, ticket))
        if not own:
            del self.tickets[job]

    def approach(self, distance: int) -> None:
        """A job wants it so soon, which is sooner than before."""
        self.distance = distance

    def wait(self, request: RequestId, ticket: Ticket) -> None:
        """A request has it among its own."""
        self.requests[request, ticket] = None
        self.distance = 0

    def forgo(self, request: RequestId, ticket: Ticket) -> bool:
        """A request has it among its own no more; whether it was the last one."""
        del self.requests[request, ticket]
        if self.requests:
            return False
        self.distance = 1  # near still, but behind what a job waits for
        return True

    def answer(self, request: RequestId, ticket: Ticket, job: str) -> Any:
        """A request of `job` is answered with it, and has it among its own no more."""
        del self.requests[request, ticket]
        if not self.requests:
            self.distance = 1
        self.served.add((job, ticket))
        return self.value

    # -- whether it is here ----------------------------------------------------------------------------------

    def begin(self, load: int, size: int) -> None:
        """This load is to bring it, and so many bytes are expected."""
        self.loading, self.size = load, size
        self.loads += 1

    def store(self, value: Any, size: int) -> None:
        """It has come."""
        self.loading, self.ready, self.value, self.size = 0, True, value, size

    def cancel(self) -> None:
        """Its load is given up."""
        self.loading = 0

    def drop(self) -> None:
        """Give up what has come, for good or to be loaded again. The cache must not hold it."""
        self.ready, self.value = False, None

    def cache(self, held: bool) -> None:
        """The cache holds it from now on, or does not."""
        self.cached = held

    def validate(self) -> None:
        """Check every invariant; for tests. Raises AssertionError."""
        assert not (self.ready and self.loading)
        assert self.ready or self.value is None
        assert self.ready or (self.tickets and not self.cached and not self.served)
        assert self.tickets or self.cached
        assert self.loads or not (self.ready or self.loading)
        assert all(self.tickets.values())
        assert set(self.tickets) <= self.claimed
        assert all(ticket in self.tickets[job] for job, ticket in self.served)
        assert (self.distance == 0) == bool(self.requests)
        assert not self.requests or self.tickets


@dataclass(eq=False, slots=True)
class PoolJob:
    """One job that reads from a pool."""

    name: str
    #: Whether the cache's policy is to hear of what it reads.
    counts: bool = True
    #: What it wants and has not released, in the order in which it asked.
    wants: dict[Ticket, PoolObject] = field(default_factory=dict)
    #: Its open requests.
    requests: set[RequestId] = field(default_factory=set)

    @property
    def oldest(self) -> Ticket | None:
        """The ticket that it has held longest."""
        return next(iter(self.wants), None)


@dataclass(eq=False, slots=True)
class PoolRequest:
    """One fetch that has not been answered."""

    number: RequestId
    job: PoolJob
    tickets: list[Ticket]
    #: How many of them are not ready.
    missing: int = 0


class LoadQueue(LazyHeap[PoolObject]):
    """The objects that wait to be loaded, by distance, then by age."""

    __slots__ = ()

    def add(self, wanted: PoolObject) -> None:
        """It waits, at its distance; one that waits already moves there."""
        self.push(wanted, wanted.distance, wanted.number)

    def validate(self) -> None:
        super().validate()
        for wanted, (rank, then, _) in self.items():
            assert rank == wanted.distance
            assert then == wanted.number
            assert wanted.is_waiting


class RequestTable:
    """Who waits for what. An object that somebody waits for goes to the head of `queue`."""

    def __init__(self, queue: LoadQueue) -> None:
        self._queue = queue
        self._open: dict[RequestId, PoolRequest] = {}

    def open(self, number: RequestId, job: PoolJob, tickets: Sequence[Ticket]) -> list[Serve]:
        """`job` waits for these. UsageError where it does not want one of them, or the number is in use."""
        if number in self._open:
            raise UsageError(f"request {number!r} is open; give each fetch a number of its own")
        unknown = next((ticket for ticket in tickets if ticket not in job.wants), None)
        if unknown is not None:
            raise UsageError(
                f"job {job.name!r} fetches ticket {unknown}, which it does not want; want it first"
            )
        request = self._open[number] = PoolRequest(number, job, list(dict.fromkeys(tickets)))
        job.requests.add(number)
        for ticket in request.tickets:
            wanted = job.wants[ticket]
            wanted.wait(number, ticket)
            if not wanted.ready:
                request.missing += 1
                if not wanted.loading:
                    self._queue.add(wanted)
        return [] if request.missing else [self._serve(request)]

    def arrived(self, wanted: PoolObject) -> list[Serve]:
        """It has come: answer the requests that lacked nothing else."""
        complete: list[Serve] = []
        for number, _ in list(wanted.requests):
            request = self._open[number]
            request.missing -= 1
            if not request.missing:
                complete.append(self._serve(request))
        return complete

    def shorten(self, job: PoolJob, ticket: Ticket) -> list[Serve]:
        """`job` gives this ticket up; a request that lacked nothing else is answered."""
        wanted = job.wants[ticket]
        complete: list[Serve] = []
        for number in [number for number, asked in wanted.requests if asked == ticket]:
            request = self._open[number]
            if request.job is job:
                request.tickets.remove(ticket)
                self._forgo(wanted, number, ticket)
                request.missing -= not wanted.ready
                if not request.missing:
                    complete.append(self._serve(request))
        return complete

    def flush(self) -> list[Serve]:
        """Answer every request that has something with what it has."""
        partly = [request for request in self._open.values() if request.missing < len(request.tickets)]
        return [self._serve(request) for request in partly]

    def abandon(self, job: PoolJob) -> list[Serve]:
        """`job` is gone: answer its requests with nothing."""
        numbers = list(job.requests)
        job.requests.clear()
        for number in numbers:
            for ticket in self._open.pop(number).tickets:
                self._forgo(job.wants[ticket], number, ticket)
        return [Serve(number, []) for number in numbers]

    def _serve(self, request: PoolRequest) -> Serve:
        number, job = request.number, request.job
        del self._open[number]
        job.requests.discard(number)
        samples: list[tuple[Ticket, Any]] = []
        for ticket in request.tickets:
            wanted = job.wants[ticket]
            if wanted.ready:
                samples.append((ticket, wanted.answer(number, ticket, job.name)))
            else:
                self._forgo(wanted, number, ticket)
        return Serve(number, samples)

    def _forgo(self, wanted: PoolObject, request: RequestId, ticket: Ticket) -> None:
        if wanted.forgo(request, ticket) and wanted.is_waiting:
            self._queue.add(wanted)

    def validate(self) -> None:
        """Check every invariant; O(n), for tests. Raises AssertionError."""
        for number, request in self._open.items():
            wanted = [request.job.wants[ticket] for ticket in request.tickets]
            assert number in request.job.requests
            assert all((number, ticket) in entry.requests for ticket, entry in zip(request.tickets, wanted))
            assert request.missing == sum(not entry.ready for entry in wanted)
            assert request.missing > 0, "a complete request was not answered"
