"""Bodies of the calls to a router: from jobs and from shards."""

from __future__ import annotations

from typing import Annotated

import msgspec

from torch_dpflow._core.clocks import LEASE_S
from torch_dpflow.ipc.messages.fields import MAX_RANKS, MAX_SAMPLES, Body, Count, Name, Seconds, Text


class RegisterShard(Body):
    """To a router: heartbeat of a shard, which serves at `address`. Answered with `RangeAssignment`."""

    shard: Name
    #: Number of the shard's process, higher than that of every earlier process of the shard.
    incarnation: Count
    address: Text
    #: Secret of the node that started the shard. It is required because jobs connect to every registered shard.
    token: Name
    #: Number of samples that fit in the shard's cache, by the size of recent samples; 0 if not known.
    cache_samples: Count = 0


class RangeAssignment(Body):
    """Answer to `RegisterShard`: the shard owns the keys from `first` to before `end`, in this routing generation."""

    generation: Count
    first: Count
    end: Count
    #: Whether other shards own the shard's keys now, so that the shard should end once its jobs have left.
    retired: bool = False


class Route(Body):
    """The shard that owns the keys from `first` to before `end`."""

    first: Count
    end: Count
    shard: Name
    address: Text


class LookaheadRequest(Body):
    """To a router, from a shard: return the known future reads of a job, for keys from `first` to before `end`.

    Answered with `JobLookahead` and its frames.
    """

    flow: Name
    job: Name
    first: Count
    end: Count
    #: Version of the latest answer, 0 for none; an unchanged version is answered without frames.
    version: Count
    #: Number of the job's next samples to cover in the answer; used only in flows of more than `MAX_WHOLE` samples.
    horizon: Count


class JobLookahead(Body):
    """Answer to `LookaheadRequest`: the reads of a job in its epoch, as far as the router knows them (thesis 3.4.3).

    Five frames follow, or none if nothing new is known: the certain samples in order, the first of which may be drawn
    already; the likely samples; their weights (float64); the members; the order of the next epoch. The dtype of samples
    is `compact(size)`.
    """

    epoch: Count
    #: Version of this lookahead, higher after each change; 0 while nothing is known.
    version: Count
    #: Whether the certain samples are all remaining samples, so that no sample is likely or unknown.
    is_complete: bool = False
    #: How many of the requested keys the job reads in the whole epoch.
    length: Count = 0
    #: Whether the frame of the members is valid: the job's samples in the epoch or, if `is_complete` is False, those
    #: that it had not read before it began the epoch at this router. False: all keys of the request are members.
    has_members: bool = False
    has_following: bool = False
    #: As in `JobOptions`.
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class ReportOrder(Body):
    """To a router: the order of an epoch, which the job's own sampler decided.

    A frame of sample numbers follows, of the dtype that `samplers.indices.compact` returns.
    """

    job: JobId
    epoch: Count


class RoutingTable(Body):
    """Table of the owners of all keys. Each change of the table raises its generation."""

    generation: Count
    routes: list[Route]


class JobId(Body):
    """Identity of a process that reads: a job, or a rank of a job."""

    name: Name
    #: Number from the router that distinguishes processes of one name. A process gets a higher number after its lease
    #: has expired.
    generation: Count
    #: Name and version of the flow. Another flow's service, which may listen at the same address now, refuses the call.
    flow: Name
    #: Name of the job of which the process is a rank; empty if the process is the whole job.
    job: Text = ""


class JobFigures(Body):
    """Counts of a job's reads since it was opened."""

    #: Seconds that the training loop waited in `next()`.
    stall_s: Seconds
    #: Seconds from the start to the latest batch of an epoch, added up over all epochs.
    reading_s: Seconds
    batches: Count
    samples: Count
    #: Bytes of the samples, as received from the shards.
    bytes: Count


class JobHeartbeat(Body):
    """To a router: heartbeat of a job. Answered with `JobHeartbeatReply`."""

    job: JobId
    figures: JobFigures | None = None
    #: Whether the job is in the middle of an epoch.
    reads: bool = True


class JobHeartbeatReply(Body):
    """Answer to `JobHeartbeat`: the routing table's generation, the flow's limit and its number of jobs."""

    #: Generation of the routing table.
    generation: Count
    #: As in `FlowView`.
    limited_by: Text = ""
    #: Number of jobs that have read the flow since its router started; 0: not known.
    jobs: Count = 0


class JobRank(Body):
    """Rank of a process in a job of several ranks (DDP)."""

    #: The job's name, which all its ranks share.
    job: Name
    rank: Count
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    #: Whether to drop samples that do not divide evenly among the ranks; otherwise some samples are read twice.
    drop_last: bool = False


class Join(Body):
    """To a router: a process starts to read, as a job or as a rank of a job. Answered with `Joined`."""

    #: Name of the process, and name and version of the flow.
    reader: Name
    flow: Name
    #: Random number that identifies the process among others with the same name.
    holder: Count
    #: Seeds the permutation of the job.
    seed: Count
    #: Samples of one batch of this process.
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    #: None: the process is the whole job.
    rank: JobRank | None = None
    #: Whether a frame with the samples of the job (int64) follows; otherwise the job reads all samples.
    has_indices: bool = False
    #: Share of the job's picks that ignore what other jobs have loaded; and the job's weight for the cache policy.
    independence: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    #: Result of `own_process`, by which other processes of the host can check whether this process has ended.
    process: Text = ""
    #: `holder` of each process of the same job that is known to have ended.
    replaces: Annotated[list[Count], msgspec.Meta(max_length=MAX_RANKS)] = []
    #: Previous generation of the process, 0 for none. The answer contains a higher generation; a repeated call returns
    #: the same generation.
    after: Count = 0


class NameHolder(Body):
    """Process that holds the name of a job or rank. The call `holders` with a job's name returns a list of these."""

    #: As in `Join`.
    holder: Count
    process: Text


class Joined(Body):
    """Answer to `Join`: the generation of the process, its number of samples, and the routing table."""

    #: Generation of the process's `JobId` until it joins again.
    generation: Count
    #: Number of samples of an epoch; for a rank, of its part of the epoch.
    length: Count
    table: RoutingTable


class EpochPlace(Body):
    """Position of a process in an epoch. A frame follows: one bit for each sample, set if drawn; no bits if none is."""

    epoch: Count
    #: Number of samples that have been drawn of the process's part.
    position: Count
    #: Whether another frame follows: the samples that had been read when the unread samples were divided among the
    #: present ranks.
    has_earlier: bool = False


class StartEpoch(Body):
    """To a router: start or continue an epoch at this position. The frames of each of `places` follow."""

    job: JobId
    #: Position in the current epoch; then, for ranks, the position in the epoch before.
    places: Annotated[list[EpochPlace], msgspec.Meta(min_length=1, max_length=2)]
    #: Whether the process has read nothing so far, in any epoch.
    fresh: bool = False


class DrawSamples(Body):
    """To a router: draw the next samples of the process's part of an epoch.

    Answered with a frame of int64 sample numbers, empty at the end of the part. The body of the answer is the number of
    samples at the epoch's start whose order follows from seed and epoch alone; 0 for a job of several ranks.
    """

    job: JobId
    epoch: Count
    #: Number of samples of the process's part that were drawn before. A repeated call returns the same samples.
    position: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]


class ReadByAll(Body):
    """To a router: return the samples that all ranks together have read when each has read `position` samples.

    Answered with a frame of one bit for each sample, or without a frame if the samples are not known.
    """

    job: JobId
    epoch: Count
    position: Count


#: How long the leases of jobs and shards last after the latest heartbeat (seconds).
JOB_LEASE_S, SHARD_LEASE_S = 3 * LEASE_S, LEASE_S
#: Maximum number of processes that read one flow.
MAX_JOBS = 1024


class RouterSettings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The settings of a router, which may change while it runs."""

    #: Ids of the shards that should own the flow's keys.
    shards: list[str]
    #: As in `FlowView`; reported to jobs.
    limited_by: str = ""
