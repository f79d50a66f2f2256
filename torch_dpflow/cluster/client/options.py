"""The options of a job that reads a shared flow."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from torch_dpflow._core.checks import check_fields, check_flag, check_int, check_number, check_seconds
from torch_dpflow.cluster.messages.flow_spec import (
    MAX_SHARDS,
    MAX_SIZE,
    MIN_IDLE_S,
    MIN_MEMORY,
    check_algorithms,
)
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.ipc.messages.fields import MAX_RANKS, UNNAMED

#: Memory for samples by default, bytes.
DEFAULT_MEMORY_BYTES = 1 << 30
#: Most bytes of an option.
MAX_BYTES = 2**53
#: Longest name of a job, characters.
MAX_NAME = 100


def draw_name() -> str:
    """A random name for a job without one."""
    return UNNAMED + secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Which rank of a job with several ranks a process is: each reads its part of one order.

    Args:
        rank: from 0 on.
        num_replicas: how many ranks there are.
        drop_last: leave out samples that do not divide evenly, instead of reading some twice.

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
    """How a job is read and its flow is served. Those marked (flow) count for the job that starts the flow.

    Args:
        name: the job's name; None: a random one. No other running job may have it. The name of a job that died is free
            at once for a job of the same host, and after 15 s for one of another. All ranks of one job have the same
            name. If a loader is iterated again during an iteration, that is a job of its own, with "~2" and so on
            appended to the name.
        shards: (flow) shard processes.
        memory_bytes: (flow) memory for samples of all shards together, bytes. None: the bytes of the `ALSDCache` around
            the dataset and 256 MiB for samples on their way; without one, 1 GiB.
        policy: (flow) cache policy, or "none". None: that of the `ALSDCache`, else "alsd".
        strategy: (flow) how the jobs' orders are coordinated: "shared-log" (DynaGCS), "joader", "coordl"
            and what else `torch_dpflow.samplers.STRATEGIES` has.
        cache_samples: (flow) how many samples the caches hold, for the strategy; 0: as many as fit into
            `memory_bytes` by the size of the latest, and a tenth of all before the first is loaded.
        repeatable: (flow) whether loading a sample twice gives the same, so that it may be cached. None: True if the
            dataset is an `ALSDCache`; if that has a `transform`, its input is cached, and a worker runs the transform
            for each job and epoch.
        idle_s: (flow) how long its services outlive the last job, seconds, at least 3.
        task_timeout_s: (flow) how long a worker may take for one sample, or for its start, in which it fetches and
            unpickles the dataset, seconds; None: no limit. A worker that takes longer is killed and replaced, and the
            sample counts as its cause: it is tried three times before it fails. Choose it well above the slowest
            sample and the start.
        fingerprint: (flow) identifies the dataset's content, if equal datasets are reported as different; see
            `torch_dpflow.cluster.client.fingerprint`.
        weight: how much the job counts when the cache decides what to evict, relative to other jobs (alpha in the
            thesis's equation 3-5). Used by the policies "use-distance" and "alsd-mean".
        ready: batches that are collated ahead of need (P_L).
        asked: batches that are requested from shards ahead of need (P_R), more than `ready`. A sampler whose order may
            change while it is read is drawn no further ahead than torch draws it.
        budget_bytes: most bytes of batches under way, but for one batch.
        patience_s: how long the cluster, or all workers that a platform runs for the flow, may be away before a call
            fails, seconds.

    Raises:
        OptionError: a value is out of range or unknown.
        OptionTypeError: a value is of the wrong type.
    """

    name: str | None = None
    shards: int = 1
    memory_bytes: int | None = None
    policy: str | None = None
    strategy: str = "shared-log"
    cache_samples: int = 0
    repeatable: bool | None = None
    idle_s: float = 600.0
    task_timeout_s: float | None = 600.0
    fingerprint: str | None = None
    weight: float = 1.0
    ready: int = 2
    asked: int = 8
    budget_bytes: int = 512 << 20
    patience_s: float = 120.0

    def __post_init__(self) -> None:
        check_fields(self, check_int, "shards", minimum=1, maximum=MAX_SHARDS)
        check_fields(self, check_int, "cache_samples", minimum=0, maximum=MAX_SIZE)
        least_bytes = MIN_MEMORY * self.shards
        check_fields(self, check_int, "memory_bytes", minimum=least_bytes, maximum=MAX_BYTES, optional=True)
        check_fields(self, check_int, "ready", "asked", "budget_bytes", minimum=1)
        if self.asked <= self.ready:
            raise OptionError(
                f"ready={self.ready}, asked={self.asked}: more must be asked for than is put together; give "
                f"asked={self.ready + 1} or more, or a smaller ready"
            )
        check_fields(self, check_seconds, "idle_s", "patience_s")
        check_fields(self, check_number, "weight", exclusive=True)
        if self.idle_s < MIN_IDLE_S:
            raise OptionError(f"idle_s={self.idle_s:g}: give at least {MIN_IDLE_S:g} seconds")
        check_fields(self, check_seconds, "task_timeout_s", optional=True)
        for name in ("name", "fingerprint"):
            _check_name(name, getattr(self, name))
        if not isinstance(self.repeatable, bool | None):
            raise OptionTypeError(f"repeatable={self.repeatable!r}: give True, False or None")
        _check_algorithms(self.policy, self.strategy)


def _check_algorithms(policy: str | None, strategy: str) -> None:
    for name, value in (("policy", policy), ("strategy", strategy)):
        if not isinstance(value, str) and (name, value) != ("policy", None):
            raise OptionTypeError(f"{name}={value!r} is of type {type(value).__name__}; give its name")
    check_algorithms("none" if policy is None else policy, strategy)


def _check_name(field: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise OptionTypeError(f"{field}={value!r} is of type {type(value).__name__}; give text or None")
    if not (1 <= len(value) <= MAX_NAME and value.isprintable()):
        raise OptionError(f"{field}={value!r}: 1 to {MAX_NAME} printable characters are allowed")
