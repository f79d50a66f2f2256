"""Samplers: which samples a job reads, in which order, and how jobs come to read the same ones. Pure."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "torch_dpflow.samplers":
    raise ImportError(
        f"{__name__!r} was imported from the repository's root; import 'torch_dpflow.samplers' instead "
        "(a second copy of its classes would unpickle nowhere)"
    )

if TYPE_CHECKING:
    from torch_dpflow.samplers.group import Draw, SamplingGroup
    from torch_dpflow.samplers.ranks import GlobalBatches, RankShares, RankSlices
    from torch_dpflow.samplers.registry import STRATEGIES, sampling_group
    from torch_dpflow.samplers.sampler import DynaGCSSampler

__all__ = [
    "Draw",
    "DynaGCSSampler",
    "GlobalBatches",
    "RankShares",
    "RankSlices",
    "STRATEGIES",
    "SamplingGroup",
    "sampling_group",
]

# Imported when they are first asked for: services choose by name, and do without torch.
_HOMES = {
    "Draw": "group",
    "DynaGCSSampler": "sampler",
    "GlobalBatches": "ranks",
    "RankShares": "ranks",
    "RankSlices": "ranks",
    "STRATEGIES": "registry",
    "SamplingGroup": "group",
    "sampling_group": "registry",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{home}"), name)
