"""Description of a flow that a job registers, and bodies of the calls to a coordinator."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec

from torch_dpflow._core.checks import check_fields, check_int, check_number, check_seconds
from torch_dpflow.cluster.messages.node import FlowImports
from torch_dpflow.errors import OptionError
from torch_dpflow.ipc.messages.content_parts import (
    MAX_IGNORED,
    SCRIPT_PART,
    ContentParts,
    Pattern,
    describe_differences,
    differences,
    ignoring,
    is_ignored,
)
from torch_dpflow.ipc.messages.fields import Body, Count, Name, Seconds, Text

#: Maximum number of samples, shards and workers of a flow.
MAX_SIZE, MAX_SHARDS, MAX_WORKERS = 2**31 - 1, 256, 4096
#: Minimum memory of the cache of a shard (bytes).
MIN_MEMORY = 1 << 20
#: Minimum time for which services outlive their last job (seconds).
MIN_IDLE_S = 3.0
#: Fields of which each shard needs a part.
_OF_EVERY_SHARD = ("workers", "memory_bytes")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class FlowSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Description of a flow, with which a job registers it: name, version, content, and options."""

    name: Name
    #: Version of the flow's definition; users raise it with each change.
    version: Count
    size: Count
    #: SHA-256 of the content of the flow (dataset, stages) in hexadecimal, under which it is stored.
    content: Name
    #: Values that all descriptions of one version must share, by name; differences are shown to users.
    fingerprint: Annotated[dict[Name, Text], msgspec.Meta(max_length=64)]
    #: Whether loading a sample twice returns the same value.
    repeatable: bool = False
    #: Number of shards; None: the number that the jobs' reading speed needs.
    shards: Count | None = None
    #: Number of workers of all shards together.
    workers: Count = 2
    #: Memory for samples of all shards together (bytes).
    memory_bytes: Count = 1 << 30
    #: Cache policy, or "none".
    policy: Name = "alsd"
    strategy: Name = "shared-log"
    #: Number of samples that the caches hold, for strategies that use it; 0: the number that the shards report, or a
    #: tenth of all samples before they report.
    cache_samples: Count = 0
    #: Seeds the random draws of the sampling group.
    seed: Count = 0
    #: How long services outlive the last job (seconds).
    idle_s: Seconds = 600.0
    #: Whether the dataset has a per-draw stage after the cacheable stage.
    staged: bool = False
    #: Timeout of loading one sample, after which its worker is killed as hung (seconds); None: no timeout.
    task_timeout_s: Seconds | None = None
    #: Digests of the parts of its content, equal in all descriptions of one version except for parts in `ignore`.
    parts: ContentParts = {}
    #: Patterns of names of parts that may differ between jobs.
    ignore: Annotated[tuple[Pattern, ...], msgspec.Meta(max_length=MAX_IGNORED)] = ()
    #: Name of the script that registers the flow, for messages.
    script: Name = SCRIPT_PART
    #: Modules that its workers import, which descriptions of one version may state differently. None: not known.
    imports: FlowImports | None = None

    @property
    def instance(self) -> str:
        """Name of this version of the flow, unique among all flows and versions."""
        return f"{self.name}:v{self.version}"

    def check(self) -> None:
        """Raise OptionError or OptionTypeError if the value of a field is not allowed."""
        if not _NAME.fullmatch(self.name):
            raise OptionError(
                f"flow={self.name!r}: 1 to 100 of the characters A-Z a-z 0-9 . _ / - are allowed, a letter or digit "
                "first"
            )
        flow, shards = f"flow {self.name!r}: ", self.shards or 1
        for name, least, most in (
            ("version", 1, 2**53),
            ("size", 1, MAX_SIZE),
            ("shards", 1, min(MAX_SHARDS, self.size)),
            ("workers", shards, MAX_WORKERS),
            ("memory_bytes", MIN_MEMORY * shards, 2**53),
            ("cache_samples", 0, self.size),
        ):
            of_shards = f"with {shards} shards, " if name in _OF_EVERY_SHARD and shards > 1 else ""
            value = getattr(self, name)
            if value is not None:
                check_int(f"{flow}{of_shards}{name}", value, minimum=least, maximum=most)
        check_number(f"{flow}idle_s", self.idle_s, minimum=MIN_IDLE_S, unit="seconds")
        if self.task_timeout_s is not None:
            check_seconds(f"{flow}task_timeout_s", self.task_timeout_s)
        check_algorithms(self.policy, self.strategy, self.size)
        if not _DIGEST.fullmatch(self.content):
            raise OptionError(f"flow {self.name!r}: content={self.content!r} is no SHA-256 in hexadecimal")

    def difference(self, other: FlowSpec) -> str:
        """Return how fingerprint and parts differ from the registered ones in `other`, for display; empty if equal."""
        differing: list[str] = []
        for name in dict.fromkeys([*self.fingerprint, *other.fingerprint]):
            here, there = self.fingerprint.get(name, "absent"), other.fingerprint.get(name, "absent")
            if here != there:
                differing.append(f"{name} is {here}, registered is {there}")
        found = differences(self.parts, other.parts, self.ignore)
        found |= {path: "ignored by the job that registered it" for path in found if is_ignored(path, other.ignore)}
        if found:
            advice = f"if they do not affect samples, give {ignoring(found, self.script)}"
            differing += [describe_differences(found, self.script), advice]
        return "; ".join(differing)


def check_algorithms(policy: str, strategy: str, size: int = 1) -> None:
    """Raise OptionError for an unknown `policy` or `strategy`, or a strategy that cannot order `size` samples."""
    # Imported here: the private loader imports this module and needs neither samplers nor caches.
    from torch_dpflow.caches.policy_registry import POLICIES
    from torch_dpflow.samplers.strategy_registry import STRATEGIES, check_strategy

    if policy not in (*POLICIES, "none"):
        raise OptionError(f"policy={policy!r} is not one of {[*sorted(POLICIES), 'none']}")
    most = STRATEGIES[check_strategy(strategy)].max_flow
    if size > most:
        raise OptionError(
            f"strategy={strategy!r} with {size:,} samples: at most {most:,} are allowed, as it passes over all samples "
            'when an epoch begins; use strategy="shared-log" or "independent"'
        )


#: Maximum bytes of the content of a flow (the pickled dataset), and of one piece of it.
MAX_CONTENT_BYTES, CONTENT_PIECE_BYTES = 1 << 30, 4 << 20
#: Maximum number of states in the history of a flow.
MAX_LIFE = 32
#: Maximum number of ended jobs of which a cluster keeps a record.
MAX_ENDED = 256

Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class ContentPiece(Body):
    """To a coordinator: a piece of a flow's content, in a frame.

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
    """To a coordinator: a job begins to read this flow. Answered with the address of the flow's router."""

    flow: Name
    version: Count


class Scale(Body):
    """To a coordinator: set the number of shards of a flow, and of the workers of all its shards together.

    None: no change, except that each shard gets at least one worker. "auto": the number of shards that the jobs'
    reading speed needs. Answered with `FlowView`.
    """

    #: With or without a version: see `FlowRegistry.find`.
    flow: Name
    shards: Count | Literal["auto"] | None
    workers: Count | None = None


class Part(Body):
    """Part of a cluster that a flow gets: processes and memory."""

    shards: Count
    #: Number of workers, and bytes of memory, of all the flow's shards together.
    workers: Count
    memory_bytes: Count


class LifeStep(Body):
    """State of a flow's life cycle, and when the flow entered it."""

    state: Name
    #: How long ago the flow entered the state (seconds).
    age_s: Seconds


class WorkerSeconds(Body):
    """Running time of a flow's workers (seconds): in total, and the part of each job."""

    #: Includes time of jobs that have left, and time without readers.
    total: Seconds
    by_job: dict[Name, Seconds]
    #: Price of one worker for an hour, from the platform's settings; 0 if not set.
    price_per_hour: Seconds = 0.0


class CostRequest(Body):
    """To a coordinator: return the worker-seconds of a flow. Answered with `Cost`."""

    flow: Name
    #: Name of the process that reads, as in `JobId`.
    job: Name


class Cost(Body):
    """Worker-seconds of a flow since its services started, and the part of one job."""

    flow_s: Seconds
    job_s: Seconds


class EndedJob(Body):
    """Record of a job that has left its flow."""

    flow: Name
    #: Name of the process that read, as in `JobId`.
    job: Name
    #: When it left, in seconds since 1970.
    at: Count
    samples: Count
    #: How long it waited for batches, and how long it read in all (seconds).
    stall_s: Seconds
    reading_s: Seconds
    #: What last limited the job's speed, as in `FlowView`; "job" if it hardly waited for data.
    limited_by: Text


class FlowView(Body):
    """State of a flow, as its coordinator reports it."""

    spec: FlowSpec
    state: Name
    jobs: Count
    #: Whether a higher version is registered; this version is then removed soon after its last job has left.
    replaced: bool
    #: The latest states, oldest first; the last state is the present one.
    life: Annotated[list[LifeStep], msgspec.Meta(max_length=MAX_LIFE)]
    #: None while its services do not run.
    part: Part | None
    #: Name of what limits the speed of the flow's jobs, such as "workers" or "storage"; empty if not known.
    limited_by: Text = ""
    #: Worker-seconds since its services started; None: not known.
    workers_s: WorkerSeconds | None = None
    #: Seconds until its services end if no job starts to read; None if it has jobs or no services, or is `replaced`.
    idle_in_s: Seconds | None = None


class AutoscaleLimits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bounds of autoscaling: minimum and maximum number of workers, of all flows together or of one flow or loader."""

    least: int
    most: int
    #: Minimum time for which a job that pauses keeps its workers (seconds).
    hold_s: float = 120.0


class NodeLimits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bounds of the number of nodes that a platform runs. The number follows the demand of jobs."""

    least: int
    most: int
    #: Number of workers that one node runs.
    workers_each: int
    #: How long nodes that are not needed stay (seconds).
    hold_s: float = 120.0

    def clamp(self, nodes: int) -> int:
        return max(self.least, min(nodes, self.most))


@dataclass(frozen=True, kw_only=True)
class ClusterLimits:
    """Limits of all flows of a cluster together.

    Args:
        workers: maximum number of processes that load; None: the number that the flows request.
        memory_bytes: maximum memory for samples (bytes); None: the memory that the flows request.
        autoscale: bounds between which the number of workers follows the demand of jobs; None: no autoscaling.
        shards: maximum number of shards, each of which needs a port for remote workers; None: any number.

    Raises OptionError: `workers` or `memory_bytes` is below the needs of one flow, or above what can be used.
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
        """Maximum number of flows that can run at once; None: any number."""
        most = [one for one in (self.workers, self.shards) if one is not None]
        most += [self.memory_bytes // MIN_MEMORY] if self.memory_bytes is not None else []
        return min(most, default=None)


class CoordinatorArguments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Arguments of a coordinator's process."""

    #: The state store's address.
    state: str
    #: Owner of the lease of the state store: see `StateStore.renew`.
    owner: str
    limits: ClusterLimits
    #: Address at which to listen; empty for any free port, or a socket in the node's directory.
    address: str = ""
    #: HOST:PORT at which to serve metrics; empty for none.
    metrics: str = ""
    #: As in `WorkerSeconds`.
    price_per_hour: float = 0.0
    #: Limits of the number of nodes that a platform runs; None: no platform runs nodes.
    nodes: NodeLimits | None = None
