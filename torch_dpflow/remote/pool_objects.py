"""What a pool keeps: objects, the jobs that want them, and what it tells its owner to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec

#: Names one want of one job; a job counts upwards in the order of its plan and never uses one twice.
Ticket: TypeAlias = int
#: Names one fetch; the owner's choice.
RequestId: TypeAlias = int


class Load(msgspec.Struct, frozen=True, gc=False):
    """Have this sample loaded, then call `Pool.loaded`."""

    #: Counts the loads of the pool; none has the number of another, not even where a sample is loaded again.
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


Instruction: TypeAlias = Load | Cancel | Serve


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
    """One loading of one sample."""

    number: int
    key: int
    draw: int
    #: The load that it has been told to be loaded by and that has not come; 0 where there is none.
    loading: int = 0
    #: Whether `value` is here.
    ready: bool = False
    value: Any = None
    #: Bytes of `value`; what is expected while it is loading.
    size: int = 0
    #: Whether the cache holds it.
    cached: bool = False
    #: Whether it is noted as one that no job has been given.
    noted: bool = False
    #: How often it has been told to be loaded.
    loads: int = 0
    #: How soon it is wanted: 0 now, else samples ahead of the job that is nearest.
    distance: int = 0
    #: The tickets that refer to it, by job.
    tickets: dict[str, set[Ticket]] = field(default_factory=dict)
    #: Jobs that have been given it or are to be; a sample drawn by chance goes to each once.
    claimed: set[str] = field(default_factory=set)
    #: Requests that have it among theirs and are not answered, with its ticket in each.
    requests: set[tuple[RequestId, Ticket]] = field(default_factory=set)
    #: Jobs and their tickets that have been answered with it and are not released.
    served: set[tuple[str, Ticket]] = field(default_factory=set)


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
