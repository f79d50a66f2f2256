"""Cache policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch_dpflow.caches.alsd import ALSD
from torch_dpflow.caches.lfu import LFU
from torch_dpflow.caches.lru import LRU
from torch_dpflow.caches.minio import MinIO
from torch_dpflow.caches.opt import OPT
from torch_dpflow.caches.policy import Policy
from torch_dpflow.caches.refcnt import RefCnt
from torch_dpflow.caches.use_distance import UseDistance
from torch_dpflow.errors import OptionError

#: Every policy by its name.
POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {policy.name: policy for policy in (ALSD, LFU, LRU, MinIO, OPT, RefCnt, UseDistance)}
)


def make_policy(
    name: str,
    *,
    max_items: int | None = None,
    max_bytes: int | None = None,
    keys: int | None = None,
    **options: Any,
) -> Policy:
    """A new policy of that name.

    `keys`: how many keys there are, for policies that want to know; `options`: what else the policy takes.
    Raises OptionError for an unknown name, and what the policy raises.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise OptionError(f"policy={name!r} is not one of {sorted(POLICIES)}")
    if policy.uses_keys:
        options["keys"] = keys
    return policy(max_items=max_items, max_bytes=max_bytes, **options)
