"""Which processes a flow needs, and how shards are added and removed while jobs read.

A shard that is to be removed first drains: the router assigns its keys to the others, the shard answers pending
requests and refuses new ones as stale, and its status reports when no job reads from it any more. Ending it first would
send jobs in circles. All state is read from the running processes, so a restarted coordinator continues.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from torch_dpflow.remote.wire.coordinator import Part
from torch_dpflow.remote.wire.flow_spec import FlowSpec
from torch_dpflow.remote.wire.node import Launch, ProcessView
from torch_dpflow.remote.wire.router import RouterSettings
from torch_dpflow.remote.wire.shard import ShardArguments, ShardSettings
from torch_dpflow.remote.wire.worker import WorkerArguments

_encode = msgspec.msgpack.encode


def launches_of(
    spec: FlowSpec,
    part: Part,
    processes: Sequence[ProcessView],
    *,
    has_platform: bool = False,
    lingering: int = 0,
    limited_by: str = "",
) -> list[Launch]:
    """The processes of one flow: a router, its shards with their workers, evenly distributed, and draining shards.

    part: the flow's part of the cluster. processes: the running ones, of any flow. has_platform: whether shards have
    their workers from a platform, and not from the node. lingering: so many workers stay for now, of which shards
    know that some will go. limited_by: for jobs.
    """
    # Arguments hold nothing that may change while a process runs: a process with other arguments is replaced.
    lasting = msgspec.structs.replace(spec, shards=1, workers=1)
    router = f"{spec.instance}/router"
    shards = [f"{spec.instance}/shard-{place:03}" for place in range(part.shards)]
    draining = [view for view in processes if _drains(view, spec, shards)]
    lent = _members_of(draining) if has_platform else _workers_of(draining, processes)
    lent = lent[: max(0, part.workers - part.shards)]
    divided = _divide(part.workers - len(lent), part.shards)
    memory_bytes = part.memory_bytes // (part.shards + len(draining))
    launches = [Launch(router, "router", _encode(lasting), _encode(RouterSettings(shards, limited_by)))]
    staying = _divide(max(lingering - len(lent), 0), part.shards)
    for shard, workers, stay in zip(shards, divided, staying):
        launches.append(_shard(shard, router, lasting, workers, memory_bytes))
        if not has_platform:
            launches += [_worker(shard, number) for number in range(max(workers, stay))]
    if has_platform:
        kept = {shard for shard, _ in lent}
        return launches + [
            _shard(view.id, router, lasting, int(view.id in kept), memory_bytes) for view in draining
        ]
    launches += [_shard(view.id, router, lasting, 0, memory_bytes) for view in draining]
    return launches + [_worker(shard, number) for shard, number in lent]


def _drains(view: ProcessView, spec: FlowSpec, wanted: Sequence[str]) -> bool:
    """Whether this is a shard of the flow that is to be removed and that jobs may still read from."""
    return (
        view.role == "shard"
        and view.id.rpartition("/")[0] == spec.instance
        and view.id not in wanted
        and not view.status.get("drained", False)
    )


def _workers_of(draining: Sequence[ProcessView], processes: Sequence[ProcessView]) -> list[tuple[str, int]]:
    """The workers of shards that still own keys: their shard and number."""
    shards = {view.id for view in draining if view.status.get("keys")}
    found = [view.id.rpartition("/worker-") for view in processes if view.role == "worker"]
    return sorted((shard, int(number)) for shard, _, number in found if shard in shards)


def _members_of(draining: Sequence[ProcessView]) -> list[tuple[str, int]]:
    """One worker of each shard that still owns keys."""
    return sorted((view.id, 0) for view in draining if view.status.get("keys"))


def _shard(id: str, router: str, spec: FlowSpec, workers: int, memory_bytes: int) -> Launch:
    settings = ShardSettings(workers, memory_bytes)
    return Launch(id, "shard", _encode(ShardArguments(router, spec)), _encode(settings))


def _worker(shard: str, number: int) -> Launch:
    return Launch(f"{shard}/worker-{number}", "worker", _encode(WorkerArguments(shard, number)))


def _divide(total: int, parts: int) -> list[int]:
    return [(place + 1) * total // parts - place * total // parts for place in range(parts)]
