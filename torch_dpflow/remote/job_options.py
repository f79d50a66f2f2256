"""What a job asks for beside its data."""

from __future__ import annotations

from dataclasses import dataclass

from torch_dpflow.errors import OptionError


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
        OptionError: a number is out of range.
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
        if not 1 <= self.ready < self.asked:
            raise OptionError(f"ready={self.ready}, asked={self.asked}: 1 <= ready < asked is required")
        if self.budget_bytes < 1 or self.patience_s <= 0:
            raise OptionError(
                f"budget_bytes={self.budget_bytes}, patience_s={self.patience_s}: must be above 0"
            )
        if self.name is not None and not 1 <= len(self.name) <= 100:
            raise OptionError(f"name={self.name!r}: 1 to 100 characters are allowed")
