"""Description of a flow that a job registers, and its checks."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from torch_dpflow._core.checks import check_int, check_number, check_seconds
from torch_dpflow.errors import OptionError
from torch_dpflow.ipc.messages.fields import Count, Name, Seconds, Text

#: Most samples, shards and workers of a flow.
MAX_SIZE, MAX_SHARDS, MAX_WORKERS = 2**31 - 1, 256, 4096
#: Least memory of the cache of a shard, bytes.
MIN_MEMORY = 1 << 20
#: Least time for which services outlive their last job, seconds; a router reports its jobs once a second.
MIN_IDLE_S = 3.0
#: Fields of which each shard needs a part.
_OF_EVERY_SHARD = ("workers", "memory_bytes")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class FlowSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A named, versioned description of loading.

    Raises OptionError from `check`.
    """

    name: Name
    #: Counts the flow's definitions.
    version: Count
    #: Number of samples.
    size: Count
    #: SHA-256 of the content of the flow (dataset, stages) in hexadecimal, under which it is stored.
    content: Name
    #: Values that all descriptions of one version must share, by name; differences are shown to people.
    fingerprint: Annotated[dict[Name, Text], msgspec.Meta(max_length=64)]
    #: Whether loading a sample twice returns the same.
    repeatable: bool = False
    shards: Count = 1
    #: Of all shards together.
    workers: Count = 2
    #: Memory for samples of all shards together, bytes.
    memory_bytes: Count = 1 << 30
    #: Cache policy, or "none".
    policy: Name = "alsd"
    #: Sampling strategy.
    strategy: Name = "shared-log"
    #: How many samples the caches hold, for strategies that follow residency; 0: a tenth of all.
    cache_samples: Count = 0
    #: Seeds the random draws of the sampling group.
    seed: Count = 0
    #: How long services outlive the last job, seconds.
    idle_s: Seconds = 600.0
    #: Whether the dataset has a per-draw stage behind the cacheable one.
    staged: bool = False
    #: Timeout of loading one sample, after which its worker is killed as hung, seconds; None: no timeout.
    task_timeout_s: Seconds | None = None

    @property
    def instance(self) -> str:
        """Name of this version of the flow, unique among all flows and versions."""
        return f"{self.name}:v{self.version}"

    def check(self) -> None:
        """Raise OptionError unless services can run with every field.

        Otherwise they would fail at the start and be restarted forever.
        """
        check_flow_name(self.name)
        flow = f"flow {self.name!r}: "
        for name, least, most in (
            ("version", 1, 2**53),
            ("size", 1, MAX_SIZE),
            ("shards", 1, min(MAX_SHARDS, self.size)),
            ("workers", self.shards, MAX_WORKERS),
            ("memory_bytes", MIN_MEMORY * self.shards, 2**53),
            ("cache_samples", 0, self.size),
        ):
            of_shards = f"with {self.shards} shards, " if name in _OF_EVERY_SHARD and self.shards > 1 else ""
            check_int(f"{flow}{of_shards}{name}", getattr(self, name), minimum=least, maximum=most)
        check_number(f"{flow}idle_s", self.idle_s, minimum=MIN_IDLE_S, unit="seconds")
        if self.task_timeout_s is not None:
            check_seconds(f"{flow}task_timeout_s", self.task_timeout_s)
        check_algorithms(self.policy, self.strategy)
        if not _DIGEST.fullmatch(self.content):
            raise OptionError(f"flow {self.name!r}: content={self.content!r} is no SHA-256 in hexadecimal")

    def difference(self, other: FlowSpec) -> str:
        """Return how the descriptions differ, for display; empty if they agree."""
        differing: list[str] = []
        for name in dict.fromkeys([*self.fingerprint, *other.fingerprint]):
            here, there = self.fingerprint.get(name, "absent"), other.fingerprint.get(name, "absent")
            if here != there:
                differing.append(f"{name} is {here}, registered is {there}")
        return "; ".join(differing)


def check_algorithms(policy: str, strategy: str) -> None:
    """Raise OptionError unless these name a cache policy, or "none", and a sampling strategy."""
    # Imported here: the private loader imports this module and needs neither samplers nor caches.
    from torch_dpflow.caches.policy_registry import POLICIES
    from torch_dpflow.samplers.strategy_registry import check_strategy

    if policy not in (*POLICIES, "none"):
        raise OptionError(f"policy={policy!r} is not one of {[*sorted(POLICIES), 'none']}")
    check_strategy(strategy)


def check_flow_name(name: str) -> None:
    """Raise OptionError unless this is a valid name of a flow."""
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"flow={name!r}: 1 to 100 of the characters A-Z a-z 0-9 . _ / - are allowed, a letter or digit first"
        )
