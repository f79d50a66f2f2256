"""Bodies of the calls to a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from torch_dpflow._core.checks import check_fields, check_int
from torch_dpflow.cluster.messages.flow_spec import MAX_WORKERS, MIN_MEMORY, FlowSpec
from torch_dpflow.ipc.messages.fields import Body, Count, Name, Seconds, Text

#: Most bytes of the content of a flow (the pickled dataset), and of one piece of it.
MAX_CONTENT_BYTES, CONTENT_PIECE_BYTES = 1 << 30, 4 << 20
#: Most states in the history of a flow.
MAX_LIFE = 32

Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class ContentPiece(Body):
    """To a coordinator: a piece of the content of a flow, in a frame.

    Answered with the number of bytes received so far, which is the offset of the next piece; None if no flow has this
    content.
    """

    #: SHA-256 of the content.
    digest: Digest
    offset: Count
    #: Bytes of the content.
    size: Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class ContentRequest(Body):
    """To a coordinator: send the piece at `offset`. Answered with the size of the content, and the piece as a frame."""

    digest: Digest
    offset: Count


class Access(Body):
    """To a coordinator: a job starts to read this flow. Answered with the address of the router."""

    flow: Name
    version: Count


class Scale(Body):
    """To a coordinator: set the number of shards of a flow, and of the workers of all its shards together.

    None keeps the number, with at least one worker for each shard. Answered with `FlowView`.
    """

    #: With or without a version: see `FlowRegistry.find`.
    flow: Name
    shards: Count | None
    workers: Count | None = None


class Part(Body):
    """The share of a cluster that a flow has: at most what its description requests."""

    shards: Count
    #: Of all its shards together, like the memory.
    workers: Count
    memory_bytes: Count


class LifeStep(Body):
    """A flow entered a state."""

    state: Name
    #: Seconds ago.
    age_s: Seconds


class WorkerSeconds(Body):
    """How long the workers of a flow have run, seconds: in total, and the part of each job."""

    #: Includes time of jobs that have left, and time without readers.
    total: Seconds
    by_job: dict[Name, Seconds]
    #: Of a worker, by the settings of the platform; 0 if not set.
    price_per_hour: Seconds = 0.0


class CostRequest(Body):
    """To a coordinator: request the worker-seconds of a flow. Answered with `Cost`."""

    #: Name and version.
    flow: Name
    #: The process that reads.
    job: Name


class Cost(Body):
    """Worker-seconds of a flow since its services started, and the part of one job."""

    flow_s: Seconds
    job_s: Seconds


class FlowView(Body):
    """State of a flow, as its coordinator reports it."""

    spec: FlowSpec
    state: Name
    jobs: Count
    #: Whether a higher version is registered: this one is deleted soon after its last job has left.
    replaced: bool
    #: The latest states; the last one is current.
    life: Annotated[list[LifeStep], msgspec.Meta(max_length=MAX_LIFE)]
    #: None while its services do not run.
    part: Part | None
    #: What limits the speed of its jobs, such as "workers" or "storage"; empty if nothing is known.
    limited_by: Text = ""
    #: Since its services started.
    workers_s: WorkerSeconds | None = None
    #: Seconds until its services end if no job comes; None while it has jobs, or no services.
    idle_in_s: Seconds | None = None


class AutoscaleLimits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bounds of the number of workers of all flows together, if it follows the demand of jobs."""

    least: int
    most: int
    #: How long a job that pauses keeps its workers, seconds.
    hold_s: float = 120.0


class CoordinatorArguments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Arguments of a coordinator's process."""

    #: The state store's address.
    state: str
    #: Owner of the lease of the state store: see `StateStore.renew`.
    owner: str
    #: At which to listen; empty for an address that the node chooses.
    address: str = ""
    #: As in `ClusterLimits`.
    workers: int | None = None
    memory_bytes: int | None = None
    #: HOST:PORT at which to serve metrics; empty for none.
    metrics: str = ""
    autoscale: AutoscaleLimits | None = None
    #: As in `WorkerSeconds`.
    price_per_hour: float = 0.0

    @property
    def limits(self) -> ClusterLimits:
        """Limits of all flows together."""
        return ClusterLimits(workers=self.workers, memory_bytes=self.memory_bytes, autoscale=self.autoscale)


@dataclass(frozen=True, kw_only=True)
class ClusterLimits:
    """Limits of all flows of a cluster together.

    Args:
        workers: most processes that load; None: as many as the flows request.
        memory_bytes: most memory for samples, bytes; None: as much as the flows request.
        autoscale: bounds between which the number of workers follows the demand of jobs; None: as the flows request.
        shards: number of ports at which remote workers connect; None: any number.

    Raises:
        OptionError: a limit is below the needs of one flow, or above what can be used.
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
        """Most flows that can run at once; None: any number."""
        most = [one for one in (self.workers, self.shards) if one is not None]
        most += [self.memory_bytes // MIN_MEMORY] if self.memory_bytes is not None else []
        return min(most, default=None)
