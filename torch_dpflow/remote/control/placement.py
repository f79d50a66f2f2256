"""Which processes a flow takes, and how its shards come and go while jobs read.

A shard that is to go is kept until its jobs have gone to the others: its router deals its keys anew, it answers
what jobs wait for and tells all others to ask elsewhere, and says in its status when nobody counts on it any
more. All of that is read off what runs, so a coordinator that starts anew goes on where the last one was.
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


def launches_of(spec: FlowSpec, part: Part, processes: Sequence[ProcessView]) -> list[Launch]:
    """The processes of one flow: a router, its shards and their workers, dealt evenly, and shards that drain.

    part: what the flow has of the cluster. processes: what runs, of any flow.
    """
    # What may change while they run is no argument, or they would be replaced.
    lasting = msgspec.structs.replace(spec, shards=1, workers=1)
    router = f"{spec.instance}/router"
    shards = [f"{spec.instance}/shard-{place:03}" for place in range(part.shards)]
    draining = [view for view in processes if _drains(view, spec, shards)]
    lent = _workers_of(draining, processes)[: max(0, part.workers - part.shards)]
    dealt = _deal(part.workers - len(lent), part.shards)
    room = part.memory_bytes // (part.shards + len(draining))
    launches = [Launch(router, "router", _encode(lasting), _encode(RouterSettings(shards)))]
    for shard, workers in zip(shards, dealt):
        launches.append(_shard(shard, router, lasting, workers, room))
        launches += [_worker(shard, number) for number in range(workers)]
    launches += [_shard(view.id, router, lasting, 0, room) for view in draining]
    return launches + [_worker(shard, number) for shard, number in lent]


def _drains(view: ProcessView, spec: FlowSpec, wanted: Sequence[str]) -> bool:
    """Whether this is a shard of the flow that is to go and that jobs may count on still."""
    return (
        view.role == "shard"
        and view.id.rpartition("/")[0] == spec.instance
        and view.id not in wanted
        and not view.status.get("drained", False)
    )


def _workers_of(draining: Sequence[ProcessView], processes: Sequence[ProcessView]) -> list[tuple[str, int]]:
    """The workers of shards that own keys still: their shard and number."""
    shards = {view.id for view in draining if view.status.get("keys")}
    found = [view.id.rpartition("/worker-") for view in processes if view.role == "worker"]
    return sorted((shard, int(number)) for shard, _, number in found if shard in shards)


def _shard(id: str, router: str, spec: FlowSpec, workers: int, memory_bytes: int) -> Launch:
    settings = ShardSettings(workers, memory_bytes)
    return Launch(id, "shard", _encode(ShardArguments(router, spec)), _encode(settings))


def _worker(shard: str, number: int) -> Launch:
    return Launch(f"{shard}/worker-{number}", "worker", _encode(WorkerArguments(shard, number)))


def _deal(total: int, parts: int) -> list[int]:
    return [(place + 1) * total // parts - place * total // parts for place in range(parts)]
