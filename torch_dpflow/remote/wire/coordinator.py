"""Bodies of the calls to a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from torch_dpflow.checks import check_fields, check_int
from torch_dpflow.remote.wire.body import Body
from torch_dpflow.remote.wire.fields import Count, Name, Seconds
from torch_dpflow.remote.wire.flow_spec import MAX_WORKERS, MIN_MEMORY, FlowSpec

#: Most bytes of what the workers of one flow load, packed, and of one piece of that.
MAX_CONTENT_BYTES, CONTENT_PIECE_BYTES = 1 << 30, 4 << 20


#: Most states of a flow that are remembered.
MAX_LIFE = 32


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


class CoordinatorArguments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The arguments of a coordinator's role."""

    #: A state store's address.
    state: str
    #: Who has it to himself, as of `StateStore.renew`.
    owner: str
    #: Where to listen; empty: where the node's place says.
    address: str = ""
    #: As of `ClusterLimits`.
    workers: int | None = None
    memory_bytes: int | None = None
    #: HOST:PORT where metrics can be had; empty: nowhere.
    metrics: str = ""

    @property
    def limits(self) -> ClusterLimits:
        """What all flows have together at most."""
        return ClusterLimits(workers=self.workers, memory_bytes=self.memory_bytes)


@dataclass(frozen=True, kw_only=True)
class ClusterLimits:
    """The most that all flows of a cluster have together.

    Args:
        workers: processes that load; None: as many as the flows ask for.
        memory_bytes: room for samples, bytes; None: as much as they ask for.

    Raises:
        OptionError: less than one flow needs, or more than can be.
    """

    workers: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, least, most in (("workers", 1, MAX_WORKERS), ("memory_bytes", MIN_MEMORY, 2**53)):
            check_fields(self, check_int, name, minimum=least, maximum=most, optional=True)

    @property
    def flows(self) -> int | None:
        """How many flows can run at once; None: any number."""
        most = [self.workers] if self.workers is not None else []
        most += [self.memory_bytes // MIN_MEMORY] if self.memory_bytes is not None else []
        return min(most, default=None)
