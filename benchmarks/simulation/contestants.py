"""Samplers and cache policies by name, as the simulator's options call them."""

from torch_dpflow.caches import registry
from torch_dpflow.caches.policy import Policy
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.registry import STRATEGIES, sampling_group

#: not a policy: the sampler's own directory decides what stays
DIRECTORY = "directory"

SAMPLER_NAMES = tuple(STRATEGIES)
#: OPT is not among them: it has to be told the whole stream, and stands beside every result anyway
POLICY_NAMES = (DIRECTORY, *(name for name in registry.POLICIES if name != "opt"))


def make_group(sampler: str, samples: int, *, capacity: int, seed: int) -> SamplingGroup:
    """A new sampling group; `capacity` in samples matters to those with a directory."""
    return sampling_group(sampler, samples, capacity=capacity, seed=seed)


def has_directory(sampler: str) -> bool:
    """Whether the sampler says itself what is loaded and what is given up."""
    return STRATEGIES[sampler].keeps_directory


def make_policy(policy: str, slots: int, samples: int) -> Policy:
    """A new policy for a cache of `slots` samples out of `samples`."""
    return registry.make_policy(policy, max_items=slots, keys=samples)
