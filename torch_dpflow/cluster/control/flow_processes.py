"""The processes of each flow, and the division of a cluster among flows. Pure functions.

A shard drains before it is removed: the router assigns its keys to other shards, and the shard runs on until no job
reads from it any more, which it reports in its status. It answers pending requests, and refuses new requests as stale.
All state is read from the running processes, so a restarted coordinator continues.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from torch_dpflow.cluster.messages.coordinator import MIN_MEMORY, ClusterLimits, FlowSpec, Part
from torch_dpflow.cluster.messages.node import Launch, ProcessView
from torch_dpflow.cluster.messages.router import RouterSettings
from torch_dpflow.cluster.messages.shard import ShardArguments, ShardSettings, WorkerArguments

_encode = msgspec.msgpack.encode


def launches_of(
    spec: FlowSpec,
    part: Part,
    processes: Sequence[ProcessView],
    *,
    has_platform: bool = False,
    lingering: int = 0,
    limited_by: str = "",
    nodes: Sequence[str] = ("",),
    is_unread: bool = False,
) -> list[Launch]:
    """Return the processes that should run for a flow: its router, its shards with their workers, and draining shards.

    part: numbers of shards and of workers, and the memory, that the flow gets.
    processes: the running processes of this flow, or of all flows.
    has_platform: whether a platform runs the shards' workers. If not, the shards' nodes run them.
    lingering: number of workers on nodes that keep running for now, even if `part` and the shards' settings have fewer.
    limited_by: name of what limits the flow, which the router reports to jobs.
    nodes: names of the nodes among which shards, with their workers, are divided. The empty name is the cluster's own
        node, which always runs the router.
    is_unread: whether no job reads the flow. A worker that then fails at its start is not started again.
    """
    router = f"{spec.instance}/router"
    hosts = _hosts(spec, part.shards, nodes)
    shards = [*hosts]
    draining = [view for view in processes if _drains(view, spec, shards)]
    hosts.update((view.id, view.node) for view in draining)
    lent = _workers_of(draining, processes)
    if has_platform:  # one worker for each draining shard that still owns keys
        lent = sorted((view.id, 0) for view in draining if view.status.get("keys"))
    serving = _owners(spec, shards, draining, processes)
    # Workers that stay until others can serve, and workers of a node that takes no more shards: its processors are of
    # no use to other flows.
    extra = [one for one in lent if one[0] in serving or hosts[one[0]] not in nodes]
    lent = [one for one in lent if one not in extra][: max(0, part.workers - part.shards)]
    divided = _divide(part.workers - len(lent), part.shards)
    staying = _divide(max(lingering - len(lent), 0), part.shards)
    # Arguments hold nothing that may change while a process runs: a process with other arguments is replaced.
    lasting = msgspec.structs.replace(spec, shards=1, workers=1)
    arguments = _encode(ShardArguments(router, lasting))
    memory_bytes = part.memory_bytes // (part.shards + len(draining))
    imports = spec.imports if part.workers > 1 else None

    def shard_of(id: str, workers: int) -> Launch:
        return Launch(id, "shard", arguments, _encode(ShardSettings(workers, memory_bytes)), hosts[id])

    def worker(shard: str, number: int) -> Launch:
        own = _encode(WorkerArguments(shard, number))
        id = f"{shard}/worker-{number}"
        return Launch(id, "worker", own, node=hosts[shard], needed=not is_unread, imports=imports)

    launches = [Launch(router, "router", _encode(lasting), _encode(RouterSettings(serving, limited_by)))]
    for shard, workers, stay in zip(shards, divided, staying):
        launches.append(shard_of(shard, workers))
        if not has_platform:
            launches += [worker(shard, number) for number in range(max(workers, stay))]
    kept = {shard for shard, _ in lent} if has_platform else set()
    launches += [shard_of(view.id, int(view.id in kept)) for view in draining]
    return launches if has_platform else launches + [worker(shard, number) for shard, number in (*lent, *extra)]


def _hosts(spec: FlowSpec, shards: int, nodes: Sequence[str]) -> dict[str, str]:
    """Return the node of each shard of a flow, by the shard's id.

    Shards are numbered on each node separately. When a node leaves, shards of other nodes keep their ids and their
    caches.
    """
    found: dict[str, str] = {}
    for place in range(shards):
        node, number = nodes[place % len(nodes)], place // len(nodes)
        found[f"{spec.instance}/shard-{node}-{number:03}" if node else f"{spec.instance}/shard-{number:03}"] = node
    return found


def _owners(
    spec: FlowSpec, wanted: list[str], draining: Sequence[ProcessView], processes: Sequence[ProcessView]
) -> list[str]:
    """Return the shards that should own keys: the wanted shards, and draining shards until all wanted shards listen.

    So jobs continue to read while a flow moves to a node whose first process is still importing torch.
    """
    owners = [view.id for view in draining if view.status.get("keys") and view.runs]
    listening = [view.id for view in processes if view.id in wanted and view.address and view.runs]
    if not owners or len(listening) == len(wanted):
        return wanted
    return [*owners, *listening]


def _drains(view: ProcessView, spec: FlowSpec, wanted: Sequence[str]) -> bool:
    """Return whether a process is a draining shard of the flow: not wanted, but jobs may still read from it."""
    return (
        view.role == "shard"
        and view.id.rpartition("/")[0] == spec.instance
        and view.id not in wanted
        and not view.status.get("drained", False)
    )


def _workers_of(draining: Sequence[ProcessView], processes: Sequence[ProcessView]) -> list[tuple[str, int]]:
    """Return (shard, worker number) of each worker of draining shards that still own keys."""
    shards = {view.id for view in draining if view.status.get("keys")}
    found = [view.id.rpartition("/worker-") for view in processes if view.role == "worker"]
    return sorted((shard, int(number)) for shard, _, number in found if shard in shards)


def _divide(total: int, parts: int) -> list[int]:
    return [(place + 1) * total // parts - place * total // parts for place in range(parts)]


def flow_parts(
    specs: Sequence[FlowSpec],
    limits: ClusterLimits,
    *,
    unread: Collection[str] = (),
    targets: Sequence[int] | None = None,
) -> list[Part | None]:
    """Return each flow's part of the cluster, by max-min fairness; None for a flow if nothing is left for it.

    No flow gets more than it requests. A flow that gets fewer workers than it has shards gets one shard for each
    worker. A flow that needs no workers now keeps its shards, because a change of their number moves keys.

    specs: descriptions of the flows, with their present numbers of shards.
    unread: `FlowSpec.instance` of the flows without jobs. These flows get no workers if workers are scarce, and one
        shard if shards are scarce.
    targets: with autoscaling, the target number of workers of each flow, 0 while no job reads; None: no autoscaling.
    """
    requests = [spec.workers for spec in specs] if targets is None else [*targets]
    if targets is None and limits.workers is not None and sum(requests) > limits.workers:
        requests = [0 if spec.instance in unread else spec.workers for spec in specs]
    workers = max_min(requests, limits.workers)
    requested = [spec.shards or 1 for spec in specs]
    wanted = requested
    if limits.shards is not None and sum(requested) > limits.shards:
        wanted = [1 if spec.instance in unread else many for spec, many in zip(specs, requested)]
    shards = max_min(wanted, limits.shards)
    memory = max_min([spec.memory_bytes for spec in specs], limits.memory_bytes)
    is_needed = [targets is None and needs > 0 for needs in requests]
    shards = [min(many, has) if has or needed else many for many, has, needed in zip(shards, workers, is_needed)]
    return [_part(*has) for has in zip(shards, workers, memory)]


def spread(part: Part, nodes: int) -> Part:
    """Return a flow's part with at least one shard for each node, or as many as its workers and memory allow."""
    most = min(nodes, part.workers or nodes)
    return msgspec.structs.replace(part, shards=max(part.shards, min(most, part.memory_bytes // MIN_MEMORY)))


def max_min(requests: Sequence[int], total: int | None) -> list[int]:
    """Return max-min fair parts of `total`; the requests themselves if they fit, or if `total` is None."""
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
