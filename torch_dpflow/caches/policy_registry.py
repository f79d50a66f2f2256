"""Cache policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch_dpflow.caches.alsd import ALSD, UseDistance
from torch_dpflow.caches.past_reads import LFU, LRU, MinIO
from torch_dpflow.caches.policy import Policy
from torch_dpflow.caches.refcnt import RefCnt
from torch_dpflow.errors import OptionError

#: The function (a class or partial) that makes each policy, by name.
POLICIES: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {
        "alsd": ALSD,
        "alsd-mean": partial(ALSD, aggregate="mean"),
        "lfu": LFU,
        "lru": LRU,
        "minio": MinIO,
        "refcnt": RefCnt,
        "use-distance": UseDistance,
    }
)


def make_policy(
    name: str,
    *,
    max_items: int | None = None,
    max_bytes: int | None = None,
    keys: int | None = None,
    **options: Any,
) -> Policy:
    """Make a policy by name, with the arguments of `Policy`. options: further arguments of this policy.

    Raises OptionError for an unknown name, and the errors of the policy.
    """
    if name not in POLICIES:
        raise OptionError(f"policy={name!r} is not one of {sorted(POLICIES)}")
    return POLICIES[name](max_items=max_items, max_bytes=max_bytes, keys=keys, **options)
