"""Samplers: which samples a job reads, in which order, and how jobs share reads. No clocks, threads or sockets."""

from typing import TYPE_CHECKING

from torch_dpflow._core.lazy import lazy_names

if TYPE_CHECKING:
    from torch_dpflow.samplers.block_shuffle import BlockShuffleSampler
    from torch_dpflow.samplers.budget import BudgetBatchSampler
    from torch_dpflow.samplers.group import Draw, SamplingGroup
    from torch_dpflow.samplers.mixture import MixtureSampler, Phase
    from torch_dpflow.samplers.passes import RankShares
    from torch_dpflow.samplers.sampler import DynaGCSSampler
    from torch_dpflow.samplers.strategy_registry import STRATEGIES, sampling_group

__all__ = [
    "BlockShuffleSampler",
    "BudgetBatchSampler",
    "Draw",
    "DynaGCSSampler",
    "MixtureSampler",
    "Phase",
    "RankShares",
    "STRATEGIES",
    "SamplingGroup",
    "sampling_group",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "block_shuffle": ["BlockShuffleSampler"],
        "budget": ["BudgetBatchSampler"],
        "mixture": ["MixtureSampler", "Phase"],
        "group": ["Draw", "SamplingGroup"],
        "passes": ["RankShares"],
        "strategy_registry": ["STRATEGIES", "sampling_group"],
        "sampler": ["DynaGCSSampler"],
    },
)
