"""Which samples stay in memory: the cache policies, and `ALSDCache`."""

from typing import TYPE_CHECKING

from torch_dpflow._core.lazy import lazy_names

if TYPE_CHECKING:
    from torch_dpflow.caches.dataset import ALSDCache
    from torch_dpflow.caches.policy import Policy, PolicyStatistics
    from torch_dpflow.caches.policy_registry import POLICIES, make_policy
    from torch_dpflow.caches.store import CacheStatistics

__all__ = [
    "ALSDCache",
    "CacheStatistics",
    "POLICIES",
    "Policy",
    "PolicyStatistics",
    "make_policy",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "dataset": ["ALSDCache"],
        "policy": ["Policy", "PolicyStatistics"],
        "policy_registry": ["POLICIES", "make_policy"],
        "store": ["CacheStatistics"],
    },
)
