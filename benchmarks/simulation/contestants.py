"""Samplers and cache policies by name, as the simulator's options call them."""

from collections.abc import Mapping

from benchmarks.simulation.dynagcs_letter import DynaGCSLetterGroup
from torch_dpflow.caches import policy_registry
from torch_dpflow.caches.policy import Policy
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.strategy_registry import STRATEGIES

#: not a policy: the sampler's own directory decides what stays
DIRECTORY = "directory"

#: what jobs may choose, and DynaGCS to the letter
GROUPS: Mapping[str, type[SamplingGroup]] = {
    **STRATEGIES,
    DynaGCSLetterGroup.strategy: DynaGCSLetterGroup,
}
SAMPLER_NAMES = tuple(GROUPS)
#: OPT is not among them: it has to be told the whole stream, and stands beside every result anyway
POLICY_NAMES = (DIRECTORY, *policy_registry.POLICIES)


def make_group(sampler: str, samples: int, *, capacity: int, seed: int) -> SamplingGroup:
    """A new sampling group; `capacity` in samples matters to those with a directory."""
    return GROUPS[sampler](samples, capacity=capacity, seed=seed)


def has_directory(sampler: str) -> bool:
    """Whether the sampler says itself what is loaded and what is given up."""
    return GROUPS[sampler].keeps_directory


def make_policy(policy: str, slots: int, samples: int) -> Policy:
    """A new policy for a cache of `slots` samples out of `samples`."""
    return policy_registry.make_policy(policy, max_items=slots, keys=samples)
