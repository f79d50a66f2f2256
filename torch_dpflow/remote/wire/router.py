"""Bodies of the calls to a router: from jobs and from shards."""

from __future__ import annotations

from typing import Annotated

import msgspec

from torch_dpflow.remote.wire.body import MAX_SAMPLES, Body
from torch_dpflow.remote.wire.fields import Count, Name, Seconds, Text
from torch_dpflow.remote.wire.limits import MAX_RANKS


class Enlist(Body):
    """From a shard: it serves at this address. Repeated as a heartbeat; answered with `RangeAssignment`."""

    shard: Name
    #: Higher for each process.
    incarnation: Count
    address: Text
    #: The newest routing generation that it has heard of, 0 for none: a router that starts anew knows none.
    generation: Count
    #: Of the node that has started it: whoever could enlist would be sent the jobs' calls.
    token: Name
    #: How many samples its cache can hold, by the size of the latest; 0 where that is not known.
    cache_samples: Count = 0


class RangeAssignment(Body):
    """To a shard: the keys that it owns, and since which generation."""

    generation: Count
    first: Count
    end: Count
    #: Whether it is to own nothing any more, and may end once its jobs have gone.
    retired: bool = False


class Route(Body):
    """Which shard owns the keys from `first` to before `end`."""

    first: Count
    end: Count
    shard: Name
    address: Text


class RoutingTable(Body):
    """Who owns what. Every change has a higher generation."""

    generation: Count
    routes: list[Route]


class JobId(Body):
    """A process that reads, a job or a rank of one, and which of those that have read under its name."""

    name: Name
    #: Higher for each process, and after each lapse of its lease. The flow's router gives it out.
    generation: Count
    #: The name and version of what it reads: where a service has ended, another flow's may listen there next.
    flow: Name


class JobFigures(Body):
    """What a job has read since it was opened."""

    #: Seconds that it waited in `next()`, and that passed from the beginning of its epochs to their latest batch.
    stall_s: Seconds
    reading_s: Seconds
    batches: Count
    samples: Count
    #: Bytes of them, as they came from the shards.
    bytes: Count


class JobBeat(Body):
    """To a router: a job lives. Answered with the routing table's generation."""

    job: JobId
    figures: JobFigures | None = None


class JobRank(Body):
    """Which part of a job with several ranks (DDP) a process reads."""

    #: The job's name, which all its ranks give.
    job: Name
    rank: Count
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    #: Whether samples that do not divide evenly are left out; else some are read twice.
    drop_last: bool = False


class Join(Body):
    """To a router: a process begins to read, as a job or as a rank of one. Answered with `Joined`."""

    #: The name under which it reads, and the name and version of what it reads.
    reader: Name
    flow: Name
    #: Drawn by the process: tells it from another that would read under the same name.
    holder: Count
    #: Decides the job's private permutation.
    seed: Count
    #: Samples of one batch of this process.
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    #: None: it is the whole job.
    rank: JobRank | None = None
    #: Whether the frame that follows holds the job's samples, int64; without it, it reads all.
    has_indices: bool = False


class Joined(Body):
    """From a router: it reads."""

    #: Of the process from now on.
    generation: Count
    #: Samples of its part of an epoch.
    length: Count
    table: RoutingTable


class EpochPlace(Body):
    """Where a process is in an epoch. A frame marks which samples it has been given, one bit each."""

    epoch: Count
    #: How many of its part it has been given.
    position: Count


class StartEpoch(Body):
    """To a router: an epoch begins or goes on. A frame follows for each of `places`."""

    job: JobId
    #: Where it is, then where it was in the epoch before.
    places: Annotated[list[EpochPlace], msgspec.Meta(min_length=1, max_length=2)]


class DrawSamples(Body):
    """To a router: samples of the process's part of an epoch. A frame of int64 answers, empty at the end."""

    job: JobId
    epoch: Count
    #: How many of its part it has been given; the same ones come again where it asks again.
    position: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]


#: How long a job, or a shard, may be silent before it is taken for dead, seconds.
JOB_LEASE_S, SHARD_LEASE_S = 15.0, 5.0


#: Most processes that read one flow.
MAX_JOBS = 1024


class RouterSettings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What of a router may change while it runs."""

    #: The shards that are to own keys.
    shards: list[str]
