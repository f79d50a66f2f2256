"""Bodies of the calls to a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from torch_dpflow._core.checks import check_fields, check_int
from torch_dpflow.cluster.messages.flow_spec import MAX_WORKERS, MIN_MEMORY, FlowSpec
from torch_dpflow.ipc.messages.fields import Body, Count, Name, Seconds, Text

#: Most bytes of a flow's content, which is what its workers load, pickled; and of one piece of it.
MAX_CONTENT_BYTES, CONTENT_PIECE_BYTES = 1 << 30, 4 << 20


#: Most states in a flow's history.
MAX_LIFE = 32


Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class ContentPiece(Body):
    """To a coordinator: a piece of a flow's content, in a frame.

    Answered with the number of bytes that the coordinator has, which is the offset of the next piece. None: it knows no
    flow with this content.
    """

    #: SHA-256 of the content.
    digest: Digest
    offset: Count
    #: Bytes of the content.
    size: Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class ContentRequest(Body):
    """To a coordinator: send the piece at `offset`. Answered with the content's size, and the piece as a frame."""

    digest: Digest
    offset: Count


class Access(Body):
    """To a coordinator: a job begins to read this flow. Answered with the router's address."""

    flow: Name
    version: Count


class Scale(Body):
    """To a coordinator: run this flow with so many shards, and workers in all of them together.

    None: it keeps as many as it has, and at least one worker for each shard. Answered with `FlowView`.
    """

    #: With or without a version, as of `FlowRegistry.find`.
    flow: Name
    shards: Count | None
    workers: Count | None = None


class Part(Body):
    """The share of a cluster that a flow has been given: at most what its description asks for."""

    shards: Count
    #: Of all its shards together, as is the memory.
    workers: Count
    memory_bytes: Count


class LifeStep(Body):
    """A flow entered a state."""

    state: Name
    #: How long ago, seconds.
    age_s: Seconds


class WorkerSeconds(Body):
    """For how long a flow's workers have run, seconds: all of them together, and the part of each job."""

    #: Those of jobs that have left, and those in which nobody read, are in the sum alone or in the jobs' parts.
    total: Seconds
    by_job: dict[Name, Seconds]
    #: Of a worker, as the platform's settings say; 0: they do not.
    price_per_hour: Seconds = 0.0


class CostRequest(Body):
    """To a coordinator: what the workers of this flow have taken. Answered with `Cost`."""

    #: Its name and version.
    flow: Name
    #: The process that reads.
    job: Name


class Cost(Body):
    """For how long a flow's workers have run since its services began, seconds, and the part of one job."""

    flow_s: Seconds
    job_s: Seconds


class FlowView(Body):
    """What a coordinator knows of a flow."""

    spec: FlowSpec
    state: Name
    jobs: Count
    #: Whether a higher version is registered: this one is forgotten soon after its last job has left.
    replaced: bool
    #: The latest states; the last is the present one.
    life: Annotated[list[LifeStep], msgspec.Meta(max_length=MAX_LIFE)]
    #: None while its services do not run.
    part: Part | None
    #: What keeps its jobs from reading faster, as "workers" or "storage"; empty: nothing that is known.
    limited_by: Text = ""
    #: What its workers have taken since its services began.
    workers_s: WorkerSeconds | None = None
    #: After how many seconds without a job its services end; None while it has jobs, or no services.
    idle_in_s: Seconds | None = None


class AutoscaleLimits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How many workers all flows have together, at least and at most, where their number follows what jobs need."""

    least: int
    most: int
    #: How long a job that pauses keeps its workers, seconds.
    hold_s: float = 120.0


class CoordinatorArguments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The arguments of a coordinator's role."""

    #: The state store's address.
    state: str
    #: Holds the lease of the state store, as of `StateStore.renew`.
    owner: str
    #: Where to listen; empty: an address that the node chooses.
    address: str = ""
    #: As of `ClusterLimits`.
    workers: int | None = None
    memory_bytes: int | None = None
    #: HOST:PORT to serve metrics at; empty: nowhere.
    metrics: str = ""
    autoscale: AutoscaleLimits | None = None
    #: As of `WorkerSeconds`.
    price_per_hour: float = 0.0

    @property
    def limits(self) -> ClusterLimits:
        """What all flows have together at most."""
        return ClusterLimits(workers=self.workers, memory_bytes=self.memory_bytes, autoscale=self.autoscale)


@dataclass(frozen=True, kw_only=True)
class ClusterLimits:
    """The most that all flows of a cluster may use together.

    Args:
        workers: processes that load; None: as many as the flows ask for.
        memory_bytes: memory for samples, bytes; None: as much as they ask for.
        autoscale: between which numbers the workers follow what jobs need; None: flows have as many as they ask for.
        shards: how many ports there are at which workers of a platform call; None: any number.

    Raises:
        OptionError: less than one flow needs, or more than can be used.
    """

    workers: int | None = None
    memory_bytes: int | None = None
    autoscale: AutoscaleLimits | None = None
    shards: int | None = None

    def __post_init__(self) -> None:
        for name, least, most in (("workers", 1, MAX_WORKERS), ("memory_bytes", MIN_MEMORY, 2**53)):
            check_fields(self, check_int, name, minimum=least, maximum=most, optional=True)

    @property
    def flows(self) -> int | None:
        """How many flows can run at once; None: any number."""
        most = [one for one in (self.workers, self.shards) if one is not None]
        most += [self.memory_bytes // MIN_MEMORY] if self.memory_bytes is not None else []
        return min(most, default=None)
