"""Nodes that have joined a cluster, and how many nodes a platform should run. A pure state machine.

A node's states::

    join ──> HERE ──report "leaving"──> LEAVING ──"gone"──> (removed)
               └────── no report for lease_s ─────────────> (removed: its next report is refused, so it joins again)

A name belongs to one node at a time. A node that joins again under its name has a higher generation, and its processes
have higher incarnations. Routers therefore treat them as successors of the earlier processes. A restarted coordinator
waits one lease for the nodes in its store. Otherwise it would assign their keys to other shards, and back a second
later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from torch_dpflow.cluster.messages.coordinator import NodeLimits
from torch_dpflow.cluster.messages.node import MAX_NODES, NodeRecord, NodeView, ProcessView
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import OverloadedError
from torch_dpflow.ipc.rpc.leases import Expiry

HERE, LEAVING, AWAITED = "here", "leaving", "awaited"


@dataclass(slots=True)
class _JoinedNode:
    record: NodeRecord
    standing: str = HERE
    processes: list[ProcessView] = field(default_factory=list)


class NodeTable:
    """Table of joined nodes. Not thread-safe.

    Times are seconds on one monotonic clock, which should stand still while the coordinator is suspended.

    Args:
        cluster: id of the cluster, for records.
        generations: nodes get generations above this number, which grows with each coordinator process of a cluster.
        lease_s: time without a report after which a node is removed (seconds).
    """

    def __init__(self, cluster: str, *, generations: int, lease_s: float) -> None:
        self._cluster, self._lease_s = cluster, lease_s
        #: Renewed by reports, joining and restoring.
        self._leases: Expiry[str] = Expiry(lease_s)
        self._generation = generations
        self._nodes: dict[str, _JoinedNode] = {}

    def restore(self, record: NodeRecord, now: float) -> bool:
        """Add a node from the state store; return False if it is of another cluster, or its name is in the table."""
        if record.cluster != self._cluster or record.name in self._nodes:
            return False
        self._generation = max(self._generation, record.generation)
        self._nodes[record.name] = _JoinedNode(record, AWAITED)
        self._leases.renew(record.name, now)
        return True

    def join(self, name: str, process: str, address: str, processors: int, now: float) -> NodeRecord:
        """Register a node. Idempotent: a repeated request of the same process returns the same answer.

        Raises:
            OverloadedError: another node has the name, and may still run.
            UsageError: the maximum number of nodes is reached.
        """
        other = self._nodes.get(name)
        if other is not None and other.record.process == process:
            self._leases.renew(name, now)
            return other.record
        if other is not None:
            raise OverloadedError(
                f"a node called {name!r} at {other.record.address} is in the cluster, last report "
                f"{now - self._leases.renewed_at(name):.1f} s ago: give another --name. A node that was killed is "
                f"removed after {self._lease_s:g} s"
            )
        if len(self._nodes) >= MAX_NODES:
            raise UsageError(f"the cluster has {MAX_NODES} nodes, the most there may be")
        self._generation += 1
        record = NodeRecord(self._cluster, name, process, self._generation, address, processors)
        self._nodes[name] = _JoinedNode(record)
        self._leases.renew(name, now)
        return record

    def report(self, name: str, generation: int, standing: str, processes: Sequence[ProcessView], now: float) -> bool:
        """Record a node's report; return whether the node belongs to the cluster.

        If not, it has left or been removed, and must join again.
        """
        node = self._nodes.get(name)
        if node is None or node.record.generation != generation:
            return False
        self._leases.renew(name, now)
        node.standing = LEAVING if LEAVING in (node.standing, standing) else HERE
        node.processes = [msgspec.structs.replace(one, node=name) for one in processes if _is_own(one, name)]
        return True

    def remove(self, name: str, generation: int) -> NodeRecord | None:
        """Remove a node that has ended, and return its record; None if it no longer belonged to the cluster."""
        node = self._nodes.get(name)
        if node is None or node.record.generation != generation:
            return None
        return self._removed(name)

    def remove_ended(self, prefix: str, running: Collection[str]) -> list[NodeRecord]:
        """Remove the nodes whose names begin with `prefix`, except those in `running`; return their records."""
        ended = [name for name in self._nodes if name.startswith(prefix) and name not in running]
        return [self._removed(name) for name in ended]

    def tick(self, now: float) -> list[NodeRecord]:
        """Remove nodes whose leases have expired; return their records."""
        return [self._removed(name) for name in self._leases.expire(now)]

    def _removed(self, name: str) -> NodeRecord:
        self._leases.drop(name)
        return self._nodes.pop(name).record

    @property
    def usable(self) -> dict[str, int]:
        """Number of processors of each node that accepts shards, sorted by the node's name."""
        return {name: node.record.processors for name, node in sorted(self._nodes.items()) if node.standing != LEAVING}

    @property
    def processes(self) -> list[ProcessView]:
        """Processes of all nodes, by their latest reports."""
        return [view for node in self._nodes.values() for view in node.processes]

    def views(self, now: float) -> list[NodeView]:
        """Return the nodes for display, by name."""
        return [
            NodeView(
                name,
                node.record.address,
                node.record.processors,
                node.standing,
                max(0.0, now - self._leases.renewed_at(name)),
                sum(view.role == "shard" for view in node.processes),
                sum(view.role == "worker" for view in node.processes),
            )
            for name, node in sorted(self._nodes.items())
        ]


def _is_own(view: ProcessView, node: str) -> bool:
    """Return whether this node may run such a process: one of its shards, or a worker of one of them."""
    id = view.id.rpartition("/worker-")[0] if view.role == "worker" else view.id
    return view.role in ("shard", "worker") and id.rpartition("/")[2].startswith(f"shard-{node}-")


@dataclass(slots=True)
class NodeScaling:
    """State machine that decides how many nodes a platform should run for the workers of all flows.

    The number rises at once. It falls only to the highest need of the latest `hold_s` seconds, because a node that
    leaves loses its shards' caches. Times are seconds on one monotonic clock.
    """

    limits: NodeLimits
    #: The present number; 0 before the first call.
    _count: int = field(default=0, init=False)
    #: Since when fewer are enough, and the greatest number that was needed since then; None: they are not.
    _less: tuple[float, int] | None = field(default=None, init=False)

    def wanted(self, workers: int, running: int, now: float) -> int:
        """Return how many nodes should run now, if all flows together need `workers` workers.

        running: number of running nodes, used only in the first call: an earlier coordinator may have started them.
        """
        limits = self.limits
        needed = limits.clamp(-(-workers // limits.workers_each))
        count = self._count or limits.clamp(running)
        if needed >= count:
            self._count, self._less = needed, None
            return needed
        since, most = self._less or (now, needed)
        self._less = since, max(most, needed)
        if now - since >= limits.hold_s:
            count, self._less = max(most, needed), None
        self._count = count
        return count
