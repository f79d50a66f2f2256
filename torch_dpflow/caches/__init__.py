"""caches"""

if __name__ != "torch_dpflow.caches":
    raise ImportError(
        f"{__name__!r} was imported from the repository's root; import 'torch_dpflow.caches' instead "
        "(a second copy of its classes would unpickle nowhere)"
    )

from torch_dpflow.caches.dataset import ALSDCache
from torch_dpflow.caches.policy import Policy, PolicyStatistics
from torch_dpflow.caches.registry import POLICIES, make_policy
from torch_dpflow.caches.store import CacheStatistics

__all__ = ["ALSDCache", "CacheStatistics", "POLICIES", "Policy", "PolicyStatistics", "make_policy"]
