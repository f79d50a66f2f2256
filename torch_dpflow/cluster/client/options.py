"""Options and descriptions of a flow and of the jobs that read it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_dpflow._core.checks import check_fields, check_flag, check_int, check_number, check_seconds
from torch_dpflow.cluster.messages.coordinator import (
    MAX_SHARDS,
    MAX_SIZE,
    MIN_IDLE_S,
    MIN_MEMORY,
    check_algorithms,
)
from torch_dpflow.cluster.messages.router import JobRank
from torch_dpflow.cluster.security.connection_file import Cluster
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.ipc.messages.content_parts import MAX_IGNORED, MAX_PATH
from torch_dpflow.ipc.messages.fields import MAX_RANKS, UNNAMED
from torch_dpflow.options import Code
from torch_dpflow.samplers.indices import IndexArray, Indices

DEFAULT_MEMORY_BYTES = 1 << 30
#: Largest size in an option (bytes).
MAX_BYTES = 2**53
#: Longest name of a job, characters.
MAX_NAME = 100


def draw_name() -> str:
    """Return a random name, for a job whose options contain no name."""
    return UNNAMED + secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Rank of this process in a job of several ranks, each of which reads its part of a common order.

    Args:
        rank: number of this rank, starting at 0.
        num_replicas: number of ranks of the job.
        drop_last: drop samples that do not divide evenly among the ranks, instead of reading some samples twice.

    Raises:
        OptionError: a value is out of range.
        OptionTypeError: a value is of the wrong type.
    """

    rank: int
    num_replicas: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_fields(self, check_int, "num_replicas", minimum=1, maximum=MAX_RANKS)
        check_fields(self, check_int, "rank", minimum=0, maximum=self.num_replicas - 1)
        check_fields(self, check_flag, "drop_last")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a job and of its flow. Options marked (flow) take effect in the job that starts the flow.

    Args:
        name: the job's name, which no other running job may have; None: a random name. The name of a job that died is
            free at once for a job on the same host, and after 15 s for a job on another. All ranks of one job have the
            same name. A loader that is iterated again during an iteration is a separate job, with "~2" and so on
            appended to the name.
        shards: (flow) number of shard processes, each of which serves samples in one thread. None: the number that the
            jobs' reading speed needs, within the limits of workers, memory and processors.
        memory_bytes: (flow) memory for samples of all shards together (bytes). None: the capacity of the `ALSDCache`
            around the dataset if it is in bytes, plus 256 MiB for samples in transit; otherwise 1 GiB.
        policy: (flow) cache policy, or "none". None: the policy of the `ALSDCache` around the dataset, else "alsd".
        strategy: (flow) how the jobs' orders are coordinated: "shared-log" (DynaGCS), "joader", "coordl", or another of
            `torch_dpflow.samplers.STRATEGIES`.
        cache_samples: (flow) number of samples that the strategy assumes to be cached. 0: the capacity of the
            `ALSDCache` if it is a number of samples; otherwise the number that fits by the mean size of recent samples,
            and a tenth of all samples while no size is known.
        repeatable: (flow) whether loading a sample twice gives the same value, so that it may be cached. None: True if
            the dataset is an `ALSDCache`. If the `ALSDCache` has a `transform`, the transform's input is cached, and a
            worker runs the transform for each job and epoch.
        idle_s: (flow) how many seconds the services outlive the last job, at least 3.
        task_timeout_s: (flow) time limit of a worker for one sample, and for its start, in which it fetches and
            unpickles the dataset (seconds); None: no limit. A worker that takes longer is killed and replaced. Its
            sample is tried three times before it fails. Choose a limit well above the slowest sample and the start.
        ignore: parts of the dataset and code that may differ between the jobs of a flow, such as "train.args.lr". The
            error that refuses a job lists their names. `*` and `?` are wildcards. The workers get these parts from the
            job that starts the flow; a later job with other values is refused if it does not ignore them. None: no
            part. Attributes of an `argparse.Namespace` whose names appear nowhere in the code are neither compared nor
            sent, except with an empty list; reading such an attribute in a worker raises UsageError.
        fingerprint: (flow) text that identifies the dataset's content, compared instead of the content itself.
        weight: weight of the job, relative to other jobs, when the cache decides what to evict (alpha in the thesis's
            equation 3-5). Used by the policies "use-distance" and "alsd-mean".
        ready: number of batches that are collated ahead of need (P_L in the thesis).
        requested: number of batches that are requested from shards ahead of need (P_R in the thesis), more than
            `ready`. A sampler whose order may change while it is read is drawn only as far ahead as torch draws it.
        budget_bytes: maximum bytes of batches in transit; a single batch may be larger.
        reconnect_timeout_s: number of seconds after which a call fails if the cluster is unreachable, or if the flow's
            platform has lost all workers.

    Raises:
        OptionError: a value is out of range or unknown.
        OptionTypeError: a value is of the wrong type.
    """

    name: str | None = None
    shards: int | None = None
    memory_bytes: int | None = None
    policy: str | None = None
    strategy: str = "shared-log"
    cache_samples: int = 0
    repeatable: bool | None = None
    idle_s: float = 600.0
    task_timeout_s: float | None = 600.0
    ignore: Sequence[str] | None = None
    fingerprint: str | None = None
    weight: float = 1.0
    ready: int = 2
    requested: int = 8
    budget_bytes: int = 512 << 20
    reconnect_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        check_fields(self, check_int, "shards", minimum=1, maximum=MAX_SHARDS, optional=True)
        check_fields(self, check_int, "cache_samples", minimum=0, maximum=MAX_SIZE)
        min_bytes = MIN_MEMORY * (self.shards or 1)
        check_fields(self, check_int, "memory_bytes", minimum=min_bytes, maximum=MAX_BYTES, optional=True)
        check_fields(self, check_int, "ready", "requested", "budget_bytes", minimum=1)
        if self.requested <= self.ready:
            raise OptionError(
                f"ready={self.ready}, requested={self.requested}: requested must be greater than ready; give "
                f"requested={self.ready + 1} or more, or a smaller ready"
            )
        check_fields(self, check_seconds, "idle_s", "reconnect_timeout_s")
        check_fields(self, check_number, "weight", exclusive=True)
        if self.idle_s < MIN_IDLE_S:
            raise OptionError(f"idle_s={self.idle_s:g}: give at least {MIN_IDLE_S:g} seconds")
        check_fields(self, check_seconds, "task_timeout_s", optional=True)
        for name in ("name", "fingerprint"):
            _check_name(name, getattr(self, name))
        _check_ignore(self.ignore)
        if not isinstance(self.repeatable, bool | None):
            raise OptionTypeError(f"repeatable={self.repeatable!r}: give True, False or None")
        _check_algorithms(self.policy, self.strategy)


def _check_algorithms(policy: str | None, strategy: str) -> None:
    for name, value in (("policy", policy), ("strategy", strategy)):
        if not isinstance(value, str) and (name, value) != ("policy", None):
            raise OptionTypeError(f"{name}={value!r} is of type {type(value).__name__}; give its name")
    check_algorithms("none" if policy is None else policy, strategy)


def _check_ignore(ignore: Any) -> None:
    if ignore is None:
        return
    if isinstance(ignore, str) or not isinstance(ignore, Sequence) or not all(isinstance(one, str) for one in ignore):
        raise OptionTypeError(f'ignore={ignore!r:.200}: give a list of names of parts, such as ["train.args.lr"]')
    if len(ignore) > MAX_IGNORED or not all(1 <= len(one) <= MAX_PATH for one in ignore):
        raise OptionError(
            f"ignore={ignore!r:.200}: at most {MAX_IGNORED} names of 1 to {MAX_PATH} characters are allowed; * stands "
            "for any characters"
        )


def _check_name(field: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise OptionTypeError(f"{field}={value!r} is of type {type(value).__name__}; give text or None")
    if not (1 <= len(value) <= MAX_NAME and value.isprintable()):
        raise OptionError(f"{field}={value!r}: 1 to {MAX_NAME} printable characters are allowed")


@dataclass(frozen=True, kw_only=True)
class FlowDefinition:
    """Definition of a flow, the same in all jobs that read it.

    Args:
        name: 1 to 100 of the characters A-Z a-z 0-9 . _ / -, a letter or digit first.
        dataset: a map-style dataset with a length. It is sent to the workers by cloudpickle, once for each version. For
            an `ALSDCache` or a `TwoStageDataset` the flow caches the output of the cacheable stage.
        version: number of this definition; raise it with every change of the dataset.
        workers: number of processes that load; takes effect in the job that starts the flow.
        worker_init_fn: called in each worker with the worker's number, as in torch.
        code: which of the user's own modules are sent, as in `LoaderOptions`.
    """

    name: str
    dataset: Any
    version: int = 1
    workers: int = 2
    worker_init_fn: Callable[[int], Any] | None = None
    code: Code = "auto"


@dataclass(frozen=True, kw_only=True)
class JobReading:
    """Samples of a flow that a job reads, with their order and batches.

    Args:
        batch_size, drop_last, collate_fn: as in torch's loader; collate_fn=None is torch's default.
        seed: together with the epoch, the seed of the job's own order and of its random draws.
        indices: the samples that the job reads; None: all.
        replica: rank of this process in the job; all ranks must have the same `JobOptions.name`, `seed` and `indices`.
            None: the process is the whole job.
        cacheable_only: read the output of the cacheable stage instead of samples.
        side: number of this reader, starting at 1, if one rank has several readers at the same time.
        independence: share of the job's picks, 0 to 1, that ignore what other jobs have loaded; as in `DynaGCSSampler`.
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
class JobDescription(JobReading):
    """Description of a job, constant while the job lives. `indices` are numbers of the flow's samples."""

    flow: str
    version: int
    name: str
    #: Number of samples of the flow.
    size: int
    indices: IndexArray | None = None
    #: The flow's sample number for each position in the job's dataset; None: the same numbers.
    places: IndexArray | None = None
    #: Rank of this process in the job; None: the process is the whole job.
    rank: JobRank | None = None
    #: Whether the flow caches samples for jobs that read these later.
    caches: bool = False
    weight: float = 1.0

    @cached_property
    def instance(self) -> str:
        """Name and version of the job's flow, as in `FlowSpec`."""
        return f"{self.flow}:v{self.version}"

    @cached_property
    def reader(self) -> str:
        """Name of this process at the services: NAME, or for a rank NAME/RANK, with ~SIDE if `side` is above 1."""
        if self.rank is None:
            return self.name
        return f"{self.name}/{self.rank.rank}" + (f"~{self.side}" if self.side > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Failover:
    """Functions by which a job moves to the cluster that has replaced its present cluster."""

    #: Finds the cluster that the job's address names now; None if it names none.
    find: Callable[[], Cluster | None]
    #: Registers the job's flow with a cluster within the given number of seconds. Returns False if another cluster has
    #: replaced that cluster.
    register: Callable[[Cluster, float], bool]
