"""What a job asks for beside its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.options import check_whole_number

#: Longest time that an option may name.
MAX_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job asks for beside its data. Those marked (flow) count for the job that starts the flow.

    Args:
        name: by which it is known; drawn where it is None. Two jobs that live must not have the same.
        shards: (flow) shard processes.
        memory_bytes: (flow) room for samples of all shards together, bytes.
        policy: (flow) cache policy, or "none".
        strategy: (flow) how the jobs' orders are brought together: "shared-log" (DynaGCS), "joader", "coordl"
            and what else `torch_dpflow.samplers.STRATEGIES` has.
        cache_samples: (flow) how many samples the caches hold, as the strategy is to take it; 0: a tenth.
        repeatable: (flow) loading a sample twice gives the same. None: where the dataset is an `ALSDCache`
            without a transform.
        idle_s: (flow) how long its services outlive the last job, seconds.
        fingerprint: (flow) stands for the dataset's content where jobs that make the same one are told that
            theirs differ; see `torch_dpflow.remote.fingerprint`.
        ready: batches that are put together ahead of need (P_L).
        asked: batches that shards are told of ahead of need (P_R), more than `ready`.
        budget_bytes: most bytes of batches under way, but for one batch.
        patience_s: how long the cluster may be away before a call gives up, seconds.

    Raises:
        OptionError: a value is out of range or unknown.
        OptionTypeError: a value is of the wrong type.
    """

    name: str | None = None
    shards: int = 1
    memory_bytes: int = 1 << 30
    policy: str = "alsd"
    strategy: str = "shared-log"
    cache_samples: int = 0
    repeatable: bool | None = None
    idle_s: float = 600.0
    fingerprint: str | None = None
    ready: int = 2
    asked: int = 8
    budget_bytes: int = 512 << 20
    patience_s: float = 120.0

    def __post_init__(self) -> None:
        for name, minimum in (("shards", 1), ("memory_bytes", 1), ("cache_samples", 0), ("ready", 1)):
            check_whole_number(name, getattr(self, name), minimum=minimum)
        check_whole_number("asked", self.asked, minimum=self.ready + 1)
        check_whole_number("budget_bytes", self.budget_bytes, minimum=1)
        for name in ("idle_s", "patience_s"):
            _check_seconds(name, getattr(self, name))
        for name in ("name", "fingerprint"):
            _check_name(name, getattr(self, name))
        if self.repeatable not in (True, False, None):
            raise OptionTypeError(f"repeatable={self.repeatable!r}: give True, False or None")
        _check_algorithms(self.policy, self.strategy)


def _check_algorithms(policy: str, strategy: str) -> None:
    # Imported here: a loader of one job alone, which imports this class, has no use for samplers and caches.
    from torch_dpflow.caches.registry import POLICIES
    from torch_dpflow.samplers.registry import check_strategy

    if policy not in (*POLICIES, "none") or policy == "opt":
        raise OptionError(f"policy={policy!r} is not one of {[*sorted(set(POLICIES) - {'opt'}), 'none']}")
    check_strategy(strategy)


def _check_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionTypeError(f"{name}={value!r} is a {type(value).__name__}; give seconds")
    if not 0 < value <= MAX_SECONDS:
        raise OptionError(f"{name}={value!r} is out of range; give seconds above 0 and up to {MAX_SECONDS:g}")


def _check_name(field: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise OptionTypeError(f"{field}={value!r} is a {type(value).__name__}; give text or None")
    if not (1 <= len(value) <= 100 and value.isprintable()):
        raise OptionError(f"{field}={value!r}: 1 to 100 printable characters are allowed")
