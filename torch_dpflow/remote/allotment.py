"""What each flow has of a cluster whose workers and memory are limited. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch_dpflow.errors import OptionError
from torch_dpflow.remote.flow_spec import MAX_WORKERS, MIN_MEMORY, FlowSpec
from torch_dpflow.remote.protocol import Part


@dataclass(frozen=True, kw_only=True)
class ClusterLimits:
    """The most that all flows of a cluster have together.

    Args:
        workers: processes that load; None: as many as the flows ask for.
        memory_bytes: room for samples, bytes; None: as much as they ask for.

    Raises:
        OptionError: less than one flow needs, or more than can be.
    """

    workers: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, least, most in (("workers", 1, MAX_WORKERS), ("memory_bytes", MIN_MEMORY, 2**53)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise OptionError(f"{name}={value}: {least} to {most} are allowed")

    @property
    def flows(self) -> int | None:
        """How many flows can run at once; None: any number."""
        most = [self.workers] if self.workers is not None else []
        most += [self.memory_bytes // MIN_MEMORY] if self.memory_bytes is not None else []
        return min(most, default=None)


def parts_of(
    specs: Sequence[FlowSpec], limits: ClusterLimits, *, unread: Collection[str] = ()
) -> list[Part | None]:
    """The part of each flow, by max-min fairness; None where there is nothing left for it.

    No flow gets more than it asks for, and what one leaves goes to the others. Each shard has a worker at least,
    so a flow with fewer workers than shards has fewer shards.

    unread: instances that nobody reads; where workers are scarce each keeps one.
    """
    wishes = [spec.workers for spec in specs]
    if limits.workers is not None and sum(wishes) > limits.workers:
        wishes = [1 if spec.instance in unread else spec.workers for spec in specs]
    workers = max_min(wishes, limits.workers)
    memory = max_min([spec.memory_bytes for spec in specs], limits.memory_bytes)
    return [_part(spec, *has) for spec, has in zip(specs, zip(workers, memory))]


def max_min(wishes: Sequence[int], total: int | None) -> list[int]:
    """Max-min fair parts of `total`, or the wishes themselves where they fit or there is no limit."""
    if total is None or sum(wishes) <= total:
        return [*wishes]
    parts = [0] * len(wishes)
    left = total
    modest_first = sorted(range(len(wishes)), key=lambda place: wishes[place])
    for served, place in enumerate(modest_first):
        parts[place] = min(wishes[place], left // (len(wishes) - served))
        left -= parts[place]
    return parts


def _part(spec: FlowSpec, workers: int, memory_bytes: int) -> Part | None:
    shards = min(spec.shards, workers, memory_bytes // MIN_MEMORY)
    return Part(shards, workers, memory_bytes) if shards else None
