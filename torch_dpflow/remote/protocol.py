"""Bodies of the calls between jobs, services and nodes: one typed struct each, validated when it comes in."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from torch_dpflow.remote.flow_spec import FlowSpec
from torch_dpflow.remote.job_options import MAX_RANKS
from torch_dpflow.remote.messages import Count, Name, Seconds, Text
from torch_dpflow.remote.parcel import ParcelTable

#: Most samples that one message names.
MAX_SAMPLES = 1 << 14
#: Workers that a sample may take down before it is given up.
POISON_LIMIT = 3
#: Most bytes of what the workers of one flow load, packed, and of one piece of that.
MAX_CONTENT_BYTES, CONTENT_PIECE_BYTES = 1 << 30, 4 << 20
#: Most processes of one node.
MAX_PROCESSES = 8192
#: Most states of a flow that are remembered.
MAX_LIFE = 32

SampleKeys: TypeAlias = Annotated[list[Count], msgspec.Meta(max_length=MAX_SAMPLES)]


class Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """What all bodies share: arrays on the wire; too many fields are an error."""


# --- to a node ----------------------------------------------------------------------------------------------


class Launch(Body):
    """A process that a node is to keep running."""

    #: Unique in the node; a prefix up to a slash names a group.
    id: Name
    #: What it runs: a name of `services.roles.ROLES`.
    role: Name
    #: For the role, msgpack. Other arguments make another process of it.
    arguments: bytes = b""
    #: For the role, msgpack. What may change while the process runs: it hears of it in answer to a beat.
    settings: bytes = b""


class Desire(Body):
    """To a node: keep these running, and nothing else that was launched so."""

    launches: Annotated[list[Launch], msgspec.Meta(max_length=MAX_PROCESSES)]


class Ending(Body):
    """To a node: kill this worker. Where it is desired still, another takes its place."""

    id: Name
    incarnation: Count


class Beat(Body):
    """From a process of a node: it lives. Answered with `Standing`."""

    id: Name
    incarnation: Count
    #: Where it listens; empty where it does not.
    address: Text
    #: Figures for people and for the coordinator.
    status: dict[Name, Any]


class Standing(Body):
    """To a process of a node."""

    #: Whether it is to go on.
    wanted: bool
    #: Those of its launch, as they are now.
    settings: bytes = b""


class ProcessView(Body):
    """What a node knows of one of its processes."""

    id: Name
    role: Name
    #: Higher for each process that has run under this id.
    incarnation: Count
    #: Its number where it runs, for people; 0 while it does not run, or where it has none.
    pid: Count
    #: Empty until its first beat.
    address: Text
    status: dict[Name, Any]
    #: How often it has been started again.
    restarts: Count = 0
    runs: bool = True


class Running(Body):
    """From a node: what it runs. Answers `changes`, which names the revision that its caller has seen."""

    #: Higher whenever a process has begun, ended or said where it listens; 0 is before the first.
    revision: Count
    processes: Annotated[list[ProcessView], msgspec.Meta(max_length=MAX_PROCESSES)]


# --- to a coordinator ---------------------------------------------------------------------------------------


Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class ContentPiece(Body):
    """To a coordinator: a piece of what a flow's workers load, which is its frame.

    Answered with how many bytes of it are there: from where to go on, all of them at the end. None: no flow is known
    that loads it.
    """

    #: SHA-256 of the whole.
    digest: Digest
    offset: Count
    #: Bytes of the whole.
    size: Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class ContentRequest(Body):
    """To a coordinator: the piece at `offset` is wanted. Answered with the bytes of the whole, and the piece."""

    digest: Digest
    offset: Count


class Access(Body):
    """To a coordinator: a job is going to read this flow. Answered with the router's address."""

    flow: Name
    version: Count


class Scale(Body):
    """To a coordinator: this flow is to have so many shards, and workers in all of them together.

    Without a number of workers it keeps those that it has, but for one to each shard. Answered with `FlowView`.
    """

    flow: Name
    shards: Count
    workers: Count | None = None


class Part(Body):
    """What a flow has of a cluster: at most what its description asks for."""

    shards: Count
    #: Of all its shards together, as all that follows.
    workers: Count
    memory_bytes: Count


class LifeStep(Body):
    """A flow came into a state."""

    state: Name
    #: How long ago, seconds.
    age_s: Seconds


class FlowView(Body):
    """What a coordinator knows of a flow."""

    spec: FlowSpec
    state: Name
    jobs: Count
    replaced: bool
    #: The latest states, the one that it is in last.
    life: Annotated[list[LifeStep], msgspec.Meta(max_length=MAX_LIFE)]
    #: None while its services do not run.
    part: Part | None
    #: After how many seconds its services end unless a job comes; None where they do not wait for one.
    idle_in_s: Seconds | None = None


# --- to a router --------------------------------------------------------------------------------------------


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
    room: Count = 0


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


# --- to a shard ---------------------------------------------------------------------------------------------


class Ask(Body):
    """To a shard: samples that the job will need (`want`), or waits for (`fetch`). Each has a ticket.

    A fetch is answered with `Served`, with all of the samples or some.
    """

    job: JobId
    #: Of the routing table by which the job has chosen this shard.
    routing: Count
    epoch: Count
    #: Decides what is drawn by chance. None: what the deterministic part of a flow in two parts gives is wanted.
    draw: Count | None
    tickets: SampleKeys
    keys: SampleKeys
    #: Tickets whose samples the job has.
    taken: SampleKeys
    #: How many of the samples, the last ones, a fetch does not wait for yet.
    ahead: Count = 0

    @property
    def awaited(self) -> list[tuple[int, int]]:
        """Ticket and key of each sample that a fetch waits for."""
        most = len(self.tickets) - self.ahead
        return list(zip(self.tickets[:most], self.keys[:most]))


#: What a sample came to: itself, an exception of the code that loads it, or the death of its workers.
SAMPLE, FAILED, POISONED = range(3)


class ServedSample(Body):
    """One sample; its parcel's frames follow."""

    ticket: Count
    kind: Annotated[int, msgspec.Meta(ge=SAMPLE, le=POISONED)]
    parcel: ParcelTable


class Served(Body):
    """From a shard: samples; their frames follow, in order."""

    samples: Annotated[list[ServedSample], msgspec.Meta(max_length=MAX_SAMPLES)]
    #: Samples that the shard has given to jobs since it was started, these among them, and those that it has loaded.
    served: Count = 0
    decodes: Count = 0
