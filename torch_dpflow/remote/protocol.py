"""Bodies of the calls between jobs, services and nodes: one typed struct each, validated when it comes in."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from torch_dpflow.remote.flow_spec import FlowSpec
from torch_dpflow.remote.messages import Count, Name, Text
from torch_dpflow.remote.parcel import ParcelTable

#: Most samples that one message names.
MAX_SAMPLES = 1 << 14
#: Most processes of one node.
MAX_PROCESSES = 8192

Keys: TypeAlias = Annotated[list[Count], msgspec.Meta(max_length=MAX_SAMPLES)]


class Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """What all bodies share: arrays on the wire; too many fields are an error."""


# --- to a node ----------------------------------------------------------------------------------------------


class Launch(Body):
    """A process that a node is to keep running."""

    #: Unique in the node; a prefix up to a slash names a group.
    id: Name
    #: What it runs: a name of `services.roles.ROLES`.
    role: Name
    #: For the role, msgpack.
    arguments: bytes = b""


class Desire(Body):
    """To a node: keep these running, and nothing else that was launched so."""

    launches: Annotated[list[Launch], msgspec.Meta(max_length=MAX_PROCESSES)]


class Beat(Body):
    """From a process of a node: it lives."""

    id: Name
    incarnation: Count
    #: Where it listens; empty where it does not.
    address: Text
    #: Figures for people and for the coordinator.
    status: dict[Name, Any]


class ProcessView(Body):
    """What a node knows of one of its processes."""

    id: Name
    role: Name
    #: Counts the processes that have run under this id.
    incarnation: Count
    #: 0 while it does not run.
    pid: Count
    #: Empty until its first beat.
    address: Text
    status: dict[Name, Any]


# --- to a coordinator ---------------------------------------------------------------------------------------


class Access(Body):
    """To a coordinator: a job is going to read this flow. Answered with the router's address."""

    flow: Name
    version: Count


class FlowView(Body):
    """What a coordinator knows of a flow."""

    spec: FlowSpec
    state: Name
    jobs: Count
    replaced: bool


# --- to a router --------------------------------------------------------------------------------------------


class Enlist(Body):
    """From a shard: it serves at this address. Repeated as a heartbeat; answered with `RangeAssignment`."""

    shard: Name
    #: Higher for each process, and after each lapse of its lease.
    incarnation: Count
    address: Text
    #: The newest routing generation that it has heard of, 0 for none: a router that starts anew knows none.
    generation: Count
    #: Of the node that has started it: whoever could enlist would be sent the jobs' calls.
    token: Name


class RangeAssignment(Body):
    """To a shard: the keys that it owns, and since which generation."""

    generation: Count
    first: Count
    end: Count


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
    """A job, and which of the processes that have read under its name."""

    name: Name
    #: Higher for each process, and after each lapse of its lease.
    generation: Count


class Join(Body):
    """To a router: a job begins to read. Answered with `Joined`."""

    job: JobId
    #: Decides its private permutation.
    seed: Count
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    #: Chosen by the router where it is None; a job that comes back names its own.
    stream: Count | None = None
    #: Whether the frame that follows holds the job's samples, int64; without it, it reads all.
    has_indices: bool = False
    #: Whether the router draws its order.
    traverses: bool = True


class Joined(Body):
    """From a router: the job reads."""

    #: Which of the flow's jobs it is, for what is drawn by chance.
    stream: Count
    #: Samples of its epoch.
    length: Count
    table: RoutingTable


class StartEpoch(Body):
    """To a router: the job's epoch begins or goes on; a frame marks what it has of it, one bit a sample."""

    job: JobId
    epoch: Count


class Draw(Body):
    """To a router: the next samples of the job's epoch. A frame of int64 answers, empty at the end."""

    job: JobId
    epoch: Count
    #: How many samples of the epoch the job has drawn; the router says so where it has another number.
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
    #: Decides what is drawn by chance.
    draw: Count
    tickets: Keys
    keys: Keys
    #: Tickets whose samples the job has.
    taken: Keys


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
