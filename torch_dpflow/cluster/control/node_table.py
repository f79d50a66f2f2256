"""The nodes that have joined a cluster: a pure state machine of names, leases and generations.

::

    join ──> HERE ──report "leaving"──> LEAVING ──"gone"──> (removed)
               └────── no report for lease_s ─────────────> (removed: its next report is refused, so it joins again)

A name belongs to one node at a time. A node that joins again under its name has a higher generation, and its processes
higher incarnations, so that routers take them for successors of the earlier ones. A restarted coordinator waits for the
nodes in its store for one lease. Otherwise it would give their keys to other shards, and back a second later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from torch_dpflow.cluster.messages.node import MAX_NODES, NodeRecord, NodeView, ProcessView
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.errors import OverloadedError

HERE, LEAVING, AWAITED = "here", "leaving", "awaited"


@dataclass(slots=True)
class _JoinedNode:
    record: NodeRecord
    #: When it last reported, or joined, or was restored, seconds.
    heard: float
    standing: str = HERE
    processes: list[ProcessView] = field(default_factory=list)


class NodeTable:
    """The joined nodes. Not thread-safe.

    Times are seconds on one monotonic clock, which should stand still while the coordinator is suspended.

    Args:
        cluster: id of the cluster, for records.
        generations: nodes get generations above this number; it grows with each coordinator of a cluster.
        lease_s: a node is removed after this long without a report, seconds.
    """

    def __init__(self, cluster: str, *, generations: int, lease_s: float) -> None:
        self._cluster, self._lease_s = cluster, lease_s
        self._generation = generations
        self._nodes: dict[str, _JoinedNode] = {}

    def restore(self, record: NodeRecord, now: float) -> bool:
        """Await a node that an earlier coordinator knew; return whether it can belong to this cluster."""
        if record.cluster != self._cluster or record.name in self._nodes:
            return False
        self._generation = max(self._generation, record.generation)
        self._nodes[record.name] = _JoinedNode(record, now, AWAITED)
        return True

    def join(self, name: str, process: str, address: str, processors: int, now: float) -> NodeRecord:
        """Register a node. Idempotent: a repeated request of its process returns the same answer.

        Raises:
            OverloadedError: another node has its name, and is not known to have ended.
            UsageError: the largest number of nodes is reached.
        """
        other = self._nodes.get(name)
        if other is not None and other.record.process == process:
            other.heard = now
            return other.record
        if other is not None:
            raise OverloadedError(
                f"a node called {name!r} at {other.record.address} is in the cluster, last report "
                f"{now - other.heard:.1f} s ago: give another --name. A node that was killed is "
                f"removed after {self._lease_s:g} s"
            )
        if len(self._nodes) >= MAX_NODES:
            raise UsageError(f"the cluster has {MAX_NODES} nodes, the most there may be")
        self._generation += 1
        record = NodeRecord(self._cluster, name, process, self._generation, address, processors)
        self._nodes[name] = _JoinedNode(record, now)
        return record

    def report(self, name: str, generation: int, standing: str, processes: Sequence[ProcessView], now: float) -> bool:
        """Record a node's report; return whether it belongs to the cluster. A node that leaves does not return."""
        node = self._nodes.get(name)
        if node is None or node.record.generation != generation:
            return False
        node.heard = now
        node.standing = LEAVING if LEAVING in (node.standing, standing) else HERE
        node.processes = [msgspec.structs.replace(one, node=name) for one in processes if _is_own(one, name)]
        return True

    def remove(self, name: str, generation: int) -> NodeRecord | None:
        """Remove a node that has ended; return None if it did not belong to the cluster any more."""
        node = self._nodes.get(name)
        if node is None or node.record.generation != generation:
            return None
        return self._nodes.pop(name).record

    def tick(self, now: float) -> list[NodeRecord]:
        """Expire leases; return the nodes that are removed."""
        lost = [node.record for node in self._nodes.values() if now - node.heard >= self._lease_s]
        for record in lost:
            del self._nodes[record.name]
        return lost

    @property
    def usable(self) -> list[str]:
        """Names of nodes that take shards, sorted."""
        return sorted(name for name, node in self._nodes.items() if node.standing != LEAVING)

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
                max(0.0, now - node.heard),
                sum(view.role == "shard" for view in node.processes),
                sum(view.role == "worker" for view in node.processes),
            )
            for name, node in sorted(self._nodes.items())
        ]

    def validate(self) -> None:
        """Check every invariant; O(nodes), for tests. Raises AssertionError."""
        generations = [node.record.generation for node in self._nodes.values()]
        assert len({*generations}) == len(generations)
        assert max(generations, default=0) <= self._generation
        assert all(node.record.name == name for name, node in self._nodes.items())
        assert all(view.node in self._nodes for view in self.processes)


def _is_own(view: ProcessView, node: str) -> bool:
    """Return whether a node may run such a process: a shard of its own, or a worker of one."""
    id = view.id.rpartition("/worker-")[0] if view.role == "worker" else view.id
    return view.role in ("shard", "worker") and id.rpartition("/")[2].startswith(f"shard-{node}-")
