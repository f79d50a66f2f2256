"""Divides a cluster's limited shards, workers and memory among its flows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from torch_dpflow.cluster.messages.coordinator import ClusterLimits, Part
from torch_dpflow.cluster.messages.flow_spec import MIN_MEMORY, FlowSpec


def parts_of(
    specs: Sequence[FlowSpec],
    limits: ClusterLimits,
    *,
    unread: Collection[str] = (),
    targets: Sequence[int] | None = None,
) -> list[Part | None]:
    """The part of each flow, by max-min fairness; None if nothing is left for it.

    No flow gets more than it requests, and what one leaves goes to the others. Each shard has at least one worker, so
    a flow with fewer workers than shards gets fewer shards.

    unread: instances without jobs; if workers or shards are scarce, each keeps one.
    targets: how many workers each is to have, if not as many as it requests; shards may have none then.
    """
    requests = [spec.workers for spec in specs] if targets is None else [*targets]
    if targets is None and limits.workers is not None and sum(requests) > limits.workers:
        requests = [1 if spec.instance in unread else spec.workers for spec in specs]
    workers = max_min(requests, limits.workers)
    wanted = [spec.shards for spec in specs]
    if limits.shards is not None and sum(wanted) > limits.shards:
        wanted = [1 if spec.instance in unread else spec.shards for spec in specs]
    shards = max_min(wanted, limits.shards)
    memory = max_min([spec.memory_bytes for spec in specs], limits.memory_bytes)
    if targets is None:
        shards = [*map(min, shards, workers)]
    return [_part(*has) for has in zip(shards, workers, memory)]


def spread(part: Part, nodes: int, *, may_rest: bool) -> Part:
    """A flow's part with a shard for each node at least, if there is a worker and the least memory for each.

    may_rest: whether shards may have no worker: their number is that of the nodes then, whatever workers there are, as
    each change of it has keys change their shards.
    """
    most = nodes if may_rest else min(nodes, part.workers)
    return msgspec.structs.replace(part, shards=max(part.shards, min(most, part.memory_bytes // MIN_MEMORY)))


def max_min(requests: Sequence[int], total: int | None) -> list[int]:
    """Max-min fair parts of `total`, or the requests themselves if they fit or there is no limit."""
    if total is None or sum(requests) <= total:
        return [*requests]
    parts = [0] * len(requests)
    left = total
    smallest_first = sorted(range(len(requests)), key=lambda place: requests[place])
    for served, place in enumerate(smallest_first):
        parts[place] = min(requests[place], left // (len(requests) - served))
        left -= parts[place]
    return parts


def _part(shards: int, workers: int, memory_bytes: int) -> Part | None:
    shards = min(shards, memory_bytes // MIN_MEMORY)
    return Part(shards, workers, memory_bytes) if shards else None
