"""Samplers and cache policies by name, as the simulator's options call them."""

from collections.abc import Callable

from torch_dpflow.caches.alsd import ALSD
from torch_dpflow.caches.lfu import LFU
from torch_dpflow.caches.lru import LRU
from torch_dpflow.caches.minio import MinIO
from torch_dpflow.caches.policy import Policy
from torch_dpflow.caches.refcnt import RefCnt
from torch_dpflow.caches.use_distance import UseDistance
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.registry import STRATEGIES, sampling_group

#: not a policy: the sampler's own directory decides what stays
DIRECTORY = "directory"

#: name -> policy for a cache of so many samples, out of so many
_POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "lru": lambda slots, samples: LRU(max_items=slots),
    "lfu": lambda slots, samples: LFU(max_items=slots),
    "minio": lambda slots, samples: MinIO(max_items=slots),
    "refcnt": lambda slots, samples: RefCnt(max_items=slots, keys=samples),
    "use-distance": lambda slots, samples: UseDistance(max_items=slots, keys=samples),
    "alsd-mean": lambda slots, samples: ALSD(max_items=slots, keys=samples, aggregate="mean"),
    "alsd": lambda slots, samples: ALSD(max_items=slots, keys=samples),
}

SAMPLER_NAMES = tuple(STRATEGIES)
POLICY_NAMES = (DIRECTORY, *_POLICIES)


def make_group(sampler: str, samples: int, *, capacity: int, seed: int) -> SamplingGroup:
    """A new sampling group; `capacity` in samples matters to those with a directory."""
    return sampling_group(sampler, samples, capacity=capacity, seed=seed)


def has_directory(sampler: str) -> bool:
    """Whether the sampler says itself what is loaded and what is given up."""
    return STRATEGIES[sampler].keeps_directory


def make_policy(policy: str, slots: int, samples: int) -> Policy:
    """A new policy for a cache of `slots` samples out of `samples`."""
    return _POLICIES[policy](slots, samples)
