"""Who a job is, and how it comes to its cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_dpflow.remote.access.cluster_address import Cluster
from torch_dpflow.remote.wire.router import JobRank
from torch_dpflow.samplers.indices import IndexArray


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """Who a job is, the same for as long as it lives."""

    flow: str
    version: int
    name: str
    seed: int
    batch_size: int
    #: Its samples; None: all of the flow.
    indices: IndexArray | None
    #: Which part of the job this process reads; None: all of it.
    rank: JobRank | None = None
    #: Whether its flow keeps samples for who reads later.
    keeps: bool = False

    @property
    def instance(self) -> str:
        """The name and version of what it reads, as in `FlowSpec`."""
        return f"{self.flow}@{self.version}"

    @property
    def reader(self) -> str:
        """By what services know this process."""
        return self.name if self.rank is None else f"{self.name}/{self.rank.rank}"


@dataclass(frozen=True, kw_only=True)
class Home:
    """How a job comes to its cluster, and to the one that takes its place."""

    #: The cluster that its address names now; None where it names none.
    find: Callable[[], Cluster | None]
    #: Registers the job's flow with a cluster, waiting so many seconds for each answer.
    register: Callable[[Cluster, float], None]
