"""Samplers: which samples a job reads, in which order, and how jobs come to read the same ones. Pure."""

if __name__ != "torch_dpflow.samplers":
    raise ImportError(
        f"{__name__!r} was imported from the repository's root; import 'torch_dpflow.samplers' instead "
        "(a second copy of its classes would unpickle nowhere)"
    )

from torch_dpflow.samplers.group import Draw, SamplingGroup
from torch_dpflow.samplers.ranks import GlobalBatches, RankShares, RankSlices
from torch_dpflow.samplers.registry import STRATEGIES, sampling_group
from torch_dpflow.samplers.sampler import DynaGCSSampler

__all__ = [
    "STRATEGIES",
    "Draw",
    "DynaGCSSampler",
    "GlobalBatches",
    "RankShares",
    "RankSlices",
    "SamplingGroup",
    "sampling_group",
]
