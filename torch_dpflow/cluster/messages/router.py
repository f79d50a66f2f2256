"""Bodies of the calls to a router: from jobs and from shards."""

from __future__ import annotations

from typing import Annotated

import msgspec

from torch_dpflow.ipc.messages.fields import MAX_RANKS, MAX_SAMPLES, Body, Count, Name, Seconds, Text


class RegisterShard(Body):
    """From a shard: it serves at this address. Repeated as its heartbeat; answered with `RangeAssignment`."""

    shard: Name
    #: Counts the processes of this shard.
    incarnation: Count
    address: Text
    #: The newest routing generation that it has seen, 0 for none: a router that restarts has forgotten it.
    generation: Count
    #: A secret of the node that started it: jobs call whoever registers.
    token: Name
    #: How many samples its cache can hold, by the size of the latest; 0 where that is not known.
    cache_samples: Count = 0


class RangeAssignment(Body):
    """To a shard: the keys that it owns, and since which generation."""

    generation: Count
    first: Count
    end: Count
    #: Whether it owns nothing any more, and ends when its jobs have left. In this order (others get its keys, jobs
    #: leave, it ends) no job asks in circles for an owner of its keys.
    retired: bool = False


class Route(Body):
    """The shard that owns the keys from `first` to before `end`."""

    first: Count
    end: Count
    shard: Name
    address: Text


class LookaheadRequest(Body):
    """From a shard: what is known of a job's future reads of the keys from `first` to before `end`.

    Answered with `JobLookahead` and its frames.
    """

    #: The name and version of the flow.
    flow: Name
    job: Name
    first: Count
    end: Count
    #: The version of the latest answer, 0 for none: the same one is answered without frames.
    version: Count


class JobLookahead(Body):
    """What is known of a job's epoch (thesis 3.4.3), of the samples that it had not read when the epoch was begun here.

    Five frames follow, arrays of sample numbers (`compact`) but for the weights (float64): the certain samples in
    their order, from the beginning on; the likely ones; their weights; the members; the order of the next epoch.
    """

    epoch: Count
    #: Another one for each change; 0: nothing is known.
    version: Count
    #: Whether the certain samples are all that were left, so that nothing is likely or unknown.
    is_complete: bool = False
    #: Samples of the whole epoch.
    length: Count = 0
    #: Whether the members are those in the frame: all that the job reads in the epoch or, of an order that is not
    #: complete, all that were left. Otherwise all keys of the request.
    has_members: bool = False
    has_following: bool = False
    #: Samples per second of these keys, as measured; 0: not measured.
    speed: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    #: As of `JobOptions`.
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class ReportOrder(Body):
    """To a router: the order of an epoch that the job's own sampler decides. A frame of samples (`compact`) follows."""

    job: JobId
    epoch: Count


class RoutingTable(Body):
    """The owners of all keys. Every change has a higher generation."""

    generation: Count
    routes: list[Route]


class JobId(Body):
    """A process that reads, which is a job or a rank of one."""

    name: Name
    #: Tells it from others that have had its name: the router numbers each process, anew after its lease has expired.
    generation: Count
    #: The name and version of what it reads: another flow's service may listen at the address of one that has ended.
    flow: Name
    #: The job of which it is a rank; empty: it is the whole job.
    job: Text = ""


class JobFigures(Body):
    """What a job has read since it was opened."""

    #: Seconds that the training loop waited in `next()`.
    stall_s: Seconds
    #: Seconds from the beginning of each epoch to its latest batch.
    reading_s: Seconds
    batches: Count
    samples: Count
    #: Bytes of the samples, as received from the shards.
    bytes: Count


class JobHeartbeat(Body):
    """To a router: a job's heartbeat. Answered with `JobHeartbeatReply`."""

    job: JobId
    figures: JobFigures | None = None
    #: Whether it is in the middle of an epoch.
    reads: bool = True


class JobHeartbeatReply(Body):
    """The answer to `JobHeartbeat`."""

    #: Of the routing table.
    generation: Count
    #: As of `FlowView`.
    limited_by: Text = ""


class JobRank(Body):
    """The part of a job with several ranks (DDP) that a process reads."""

    #: The job's name, which all its ranks share.
    job: Name
    rank: Count
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    #: Whether to leave out samples that do not divide evenly; else some are read twice.
    drop_last: bool = False


class Join(Body):
    """To a router: a process begins to read, as a job or as a rank of one. Answered with `Joined`."""

    #: Its name, and the name and version of what it reads.
    reader: Name
    flow: Name
    #: A random number of the process: tells it from others that use the same name.
    holder: Count
    #: Decides the job's own permutation.
    seed: Count
    #: Samples of one batch of this process.
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    #: None: it is the whole job.
    rank: JobRank | None = None
    #: Whether the frame that follows holds the job's samples, int64; without it, it reads all.
    has_indices: bool = False
    #: Share of its picks that ignore what other jobs have loaded; and its weight for the cache policy.
    independence: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    #: As of `own_process`: others of its host can tell by it that it has ended.
    process: Text = ""
    #: The random number of a process with the same name that is known to have ended; 0: of none.
    replaces: Count = 0


class NameHolder(Body):
    """The process that has a name. To a router: the name; answered with this."""

    #: Its random number and its identity, as of `Join`; 0 if no process has the name.
    holder: Count
    process: Text


class Joined(Body):
    """The answer to `Join`."""

    #: Of the process's `JobId` from now on.
    generation: Count
    #: Samples of an epoch, of its part where it is a rank.
    length: Count
    table: RoutingTable


class EpochPlace(Body):
    """Where a process is in an epoch. A frame has one bit for each sample, set where it has been drawn."""

    epoch: Count
    #: How many samples of its part have been drawn.
    position: Count


class StartEpoch(Body):
    """To a router: an epoch begins or goes on. A frame follows for each of `places`."""

    job: JobId
    #: Of the present epoch, then of the one before.
    places: Annotated[list[EpochPlace], msgspec.Meta(min_length=1, max_length=2)]
    #: Whether the process has read nothing, of this epoch or another.
    fresh: bool = False


class DrawSamples(Body):
    """To a router: draw samples of the process's part of an epoch. Answered with a frame of int64, empty at the end."""

    job: JobId
    epoch: Count
    #: How many samples of its part have been drawn; a repeated call gets the same samples.
    position: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]


#: How long the lease of a job, and of a shard, lasts after its latest heartbeat, seconds.
JOB_LEASE_S, SHARD_LEASE_S = 15.0, 5.0


#: Most processes that read one flow.
MAX_JOBS = 1024


class RouterSettings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The settings of a router, which may change while it runs."""

    #: The shards that own keys.
    shards: list[str]
    #: As of `FlowView`, for jobs.
    limited_by: str = ""
