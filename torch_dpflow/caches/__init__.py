"""Which samples stay in memory: the cache policies, and `ALSDCache`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "torch_dpflow.caches":
    raise ImportError(
        f"{__name__!r} was imported from the repository's root; import 'torch_dpflow.caches' instead "
        "(a second copy of its classes would unpickle nowhere)"
    )

if TYPE_CHECKING:
    from torch_dpflow.caches.dataset import ALSDCache
    from torch_dpflow.caches.policy import Policy, PolicyStatistics
    from torch_dpflow.caches.registry import POLICIES, make_policy
    from torch_dpflow.caches.store import CacheStatistics

__all__ = [
    "ALSDCache",
    "CacheStatistics",
    "POLICIES",
    "Policy",
    "PolicyStatistics",
    "make_policy",
]

# Imported when they are first asked for: services choose by name, and do without torch.
_HOMES = {
    "ALSDCache": "dataset",
    "CacheStatistics": "store",
    "POLICIES": "registry",
    "Policy": "policy",
    "PolicyStatistics": "policy",
    "make_policy": "registry",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{home}"), name)
