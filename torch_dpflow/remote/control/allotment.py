"""What each flow has of a cluster whose workers and memory are limited. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch_dpflow.remote.wire.coordinator import ClusterLimits, Part
from torch_dpflow.remote.wire.flow_spec import MIN_MEMORY, FlowSpec


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
