"""What a job reads, how it reads it, and by what services know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_dpflow.cluster.client.options import Replica
from torch_dpflow.cluster.messages.router import JobRank
from torch_dpflow.cluster.security.connection_file import Cluster
from torch_dpflow.samplers.indices import IndexArray, Indices


@dataclass(frozen=True, kw_only=True)
class FlowDefinition:
    """The flow that a job reads; the same in all jobs that read it.

    Args:
        name: 1 to 100 of the characters A-Z a-z 0-9 . _ / -.
        dataset: map-style, with a length. cloudpickle carries it to the workers, once for each version. Of an
            `ALSDCache` or a `TwoStageDataset` the flow caches what the cacheable stage gives.
        version: raise it with every change of the dataset.
        workers: processes that load; counts for the job that starts the flow.
        worker_init_fn: called in each worker, as by torch.
    """

    name: str
    dataset: Any
    version: int = 1
    workers: int = 2
    worker_init_fn: Callable[[int], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class JobReading:
    """Which samples of a flow a job reads, in which order and in which batches.

    Args:
        batch_size, drop_last, collate_fn: as of torch's loader; collate_fn=None is torch's default.
        seed: decides, with the epoch, the job's own order and its random draws.
        indices: the samples that the job reads; None: all.
        replica: which rank of a job of several ranks this is; all ranks must give the same `JobOptions.name`, `seed`
            and `indices`. None: it is the whole job.
        cacheable_only: read the output of the cacheable stage instead of samples.
        side: counts the processes' own readers of one rank, which read side by side; from 1 on.
        independence: share of the job's picks, 0 to 1, that ignore what other jobs have loaded; as of `DynaGCSSampler`.
    """

    batch_size: int = 1
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    seed: int = 0
    indices: Indices | None = None
    replica: Replica | None = None
    cacheable_only: bool = False
    side: int = 1
    independence: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """A job as its services know it, the same for as long as it lives."""

    flow: str
    version: int
    name: str
    seed: int
    #: Samples of the flow.
    size: int
    batch_size: int
    drop_last: bool = False
    #: Its samples; None: all of the flow.
    indices: IndexArray | None = None
    #: By place in the job's dataset, the sample of the flow; None: the same number.
    places: IndexArray | None = None
    #: Which part of the job this process reads; None: all of it.
    rank: JobRank | None = None
    #: Whether it reads the output of the cacheable stage.
    cacheable_only: bool = False
    #: Whether its flow caches samples for jobs that read them later.
    caches: bool = False
    #: Which of several readers of a rank it is.
    side: int = 1
    #: As of `JobReading` and `JobOptions`.
    independence: float = 0.0
    weight: float = 1.0

    @property
    def instance(self) -> str:
        """The name and version of what it reads, as in `FlowSpec`."""
        return f"{self.flow}:v{self.version}"

    @property
    def reader(self) -> str:
        """The name of this process at the services."""
        if self.rank is None:
            return self.name
        return f"{self.name}/{self.rank.rank}" + (f"~{self.side}" if self.side > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Failover:
    """How a job moves to the cluster that takes the place of its own."""

    #: Finds the cluster that the job's address names now; None where it names none.
    find: Callable[[], Cluster | None]
    #: Registers the job's flow with a cluster within so many seconds; False if another cluster has replaced that one.
    register: Callable[[Cluster, float], bool]
