"""Calls from nodes on other hosts, by which they join, report their processes, and receive the processes to run."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from torch_dpflow._core.clocks import LEASE_S
from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow._core.threads import SuspendAwareClock
from torch_dpflow._version import __version__
from torch_dpflow.cluster.control.node_table import NodeScaling, NodeTable
from torch_dpflow.cluster.messages.coordinator import NodeLimits
from torch_dpflow.cluster.messages.node import (
    Desire,
    FleetTarget,
    NodeAssignment,
    NodeFleet,
    NodeJoin,
    NodeJoined,
    NodeRecord,
    NodeReport,
)
from torch_dpflow.cluster.security.connection_file import ConnectionFile, is_proved
from torch_dpflow.cluster.services.coordinator import Coordinator
from torch_dpflow.cluster.services.service import COORDINATOR, ClusterPlace
from torch_dpflow.cluster.services.state_store import WriteBehindStore
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import OverloadedError
from torch_dpflow.ipc.rpc import IncomingCall, Result, RpcServer
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.shipping.compatibility import unfit, versions_here

#: The lease of a node expires this long after its latest report (seconds).
NODE_LEASE_S = 2 * LEASE_S
#: Maximum number of nodes that join under one coordinator: the generations of the next one are above.
_MAX_JOINS = 1 << 12
#: Methods of the coordinator for nodes and about nodes, with the types of their arguments.
NODE_METHODS: dict[str, Any] = {
    "join_node": NodeJoin,
    "report_node": NodeReport,
    "node_fleet": NodeFleet,
    "nodes": None,
}


def node_table(place: ClusterPlace, incarnation: int) -> NodeTable:
    """Return an empty table for a cluster's nodes. incarnation: the coordinator's incarnation."""
    return NodeTable(place.cluster, generations=incarnation * _MAX_JOINS, lease_s=NODE_LEASE_S)


class JoinedNodes:
    """Part of a coordinator that answers calls from and about joined nodes. The coordinator's thread drives it.

    Args:
        server: server of the coordinator, at which the methods are registered.
        store: stores the nodes, for a restarted coordinator.
        place: settings of the cluster. Without keys, or with a platform for workers, no node can join.
        table: table of the joined nodes, which this object updates.
        limits: limits of the number of nodes that a platform runs; None: no platform runs nodes.
    """

    def __init__(
        self,
        server: RpcServer,
        store: WriteBehindStore,
        place: ClusterPlace,
        table: NodeTable,
        coordinator: Coordinator,
        *,
        limits: NodeLimits | None = None,
    ) -> None:
        self._store, self._place = store, place
        self._scaling = None if limits is None else NodeScaling(limits)
        #: Nodes that should leave, as fewer are needed.
        self._leaving: Collection[str] = ()
        self._clock = SuspendAwareClock()
        self._table, self._coordinator = table, coordinator
        #: Whether the cluster ends, and the nodes to which that was reported.
        self._ends, self._notified = False, set[str]()
        self._restore()
        for name, body in NODE_METHODS.items():
            server.register(name, getattr(self, f"_on_{name}"), body_type=body)

    def poll(self) -> None:
        """Remove nodes whose leases have expired. Call this at least once a second."""
        self._note_lost(self._table.tick(self._clock()), f"has expired: no report for {NODE_LEASE_S:g} s")

    def _note_lost(self, lost: Sequence[NodeRecord], why: str) -> None:
        for record in lost:
            text = "node %s at %s %s; other shards receive its keys"
            SERVICE.warning(text, record.name, record.address, why)
            self._store.delete(_key(record.name))
        if lost:
            self._coordinator.changed()

    def end(self) -> None:
        """Notify each node, in the answer to its next report, that the cluster ends."""
        self._ends = True

    def all_notified(self) -> bool:
        """Return whether all nodes have been notified since `end` was called."""
        return {node.name for node in self._table.views(self._clock())} <= self._notified

    def _restore(self) -> None:
        for key in self._store.find(_key("")):
            try:
                record = msgpack_decoder(NodeRecord).decode(self._store.get(key) or b"")
            except msgspec.MsgspecError:
                record = None
            if record is None or not self._table.restore(record, self._clock()):
                self._store.delete(key)

    def _on_join_node(self, call: IncomingCall) -> Result:
        join: NodeJoin = call.body
        self._check(join)
        record = self._table.join(join.name, join.process, join.address, join.processors, self._clock())
        self._store.put(_key(record.name), msgspec.msgpack.encode(record))
        SERVICE.info("node %s at %s has joined (%d processors)", join.name, join.address, join.processors)
        self._coordinator.changed()
        return Result(NodeJoined(record.generation, self._place.token))

    def _check(self, join: NodeJoin) -> None:
        """Raise UsageError if the node that requests to join cannot be part of this cluster."""
        if not is_proved(self._keys, join.name, join.proof):
            raise UsageError(
                f"node {join.name!r} does not have the server key of this cluster: give --join the "
                "connection file that `dpflow up` has written, or the file of its --keys, and not one for jobs"
            )
        if join.release != __version__:
            raise UsageError(
                f"node {join.name!r} has torch_dpflow {join.release:.40} and the cluster {__version__}: install "
                f"torch_dpflow=={__version__} there, or start the cluster with the other"
            )
        reason = unfit(join.versions, versions_here())
        if reason:
            raise UsageError(f"node {join.name!r} cannot load what jobs of this cluster describe: {reason}")
        if self._place.worker_platform is not None:
            raise UsageError(
                f"the workers of the cluster run on platform {self._place.worker_platform.name!r} and connect to "
                "its own host: start it without --platform to have nodes join"
            )
        if self._ends:
            raise UsageError("the cluster ends")

    @property
    def _keys(self) -> ConnectionFile:
        if self._place.keys is None:
            raise UsageError(
                "the cluster can be reached on its own host only: start it by `dpflow up --listen tcp://ADDRESS:PORT`"
            )
        return self._place.keys

    def _on_report_node(self, call: IncomingCall) -> Result:
        report: NodeReport = call.body
        if not self._is_ours(report.token):
            return Result(NodeAssignment(False))
        if self._ends:
            self._notified.add(report.name)
            return Result(NodeAssignment(True, ends=True))
        if report.standing == "gone":
            self._remove(report)
            return Result(NodeAssignment(False))
        was_usable = self._table.usable
        name = report.name
        if not self._table.report(name, report.generation, report.standing, report.processes, self._clock()):
            return Result(NodeAssignment(False))
        if self._table.usable != was_usable:
            SERVICE.info("node %s leaves; its shards end once jobs have left them", name)
            self._coordinator.changed()
        launches = self._coordinator.assigned_to(name)
        if launches is None:
            raise OverloadedError("the coordinator has just started and does not know yet what runs; retry")
        desire = Desire(launches, self._addresses())
        return Result(NodeAssignment(True, leaves=name in self._leaving, desire=desire))

    def _on_node_fleet(self, call: IncomingCall) -> Result:
        fleet: NodeFleet = call.body
        if self._scaling is None or not self._is_ours(fleet.token):
            raise UsageError("only the provisioner of a cluster with nodes on a platform may report them")
        if self._coordinator.assigned_to("") is None:
            raise OverloadedError("the coordinator has just started and does not know yet what runs; retry")
        if self._ends:
            return Result(FleetTarget(0, [], ends=True))
        self._leaving = frozenset(fleet.leaving)
        self._note_lost(self._table.remove_ended(fleet.prefix, fleet.nodes), "has ended on its platform")
        now = self._clock()
        joined = [node.name for node in self._table.views(now) if node.name in fleet.nodes]
        # Computed for one host: the number of workers then does not depend on how many nodes run.
        parts = self._coordinator.parts(hosts=1).values()
        workers = sum(part.workers for part in parts if part is not None)
        return Result(FleetTarget(self._scaling.wanted(workers, len(joined), now), joined))

    def _is_ours(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._place.token.encode())

    def _addresses(self) -> dict[str, str]:
        """Return the addresses of coordinator and routers by process id. Processes of joined nodes connect to them."""
        called = (view for view in self._coordinator.observed if view.role in (COORDINATOR, "router"))
        return {view.id: view.address for view in called if view.address}

    def _remove(self, report: NodeReport) -> None:
        record = self._table.remove(report.name, report.generation)
        if record is not None:
            SERVICE.info("node %s at %s has left", record.name, record.address)
            self._store.delete(_key(record.name))
            self._coordinator.changed()

    def _on_nodes(self, call: IncomingCall) -> Result:
        return Result(self._table.views(self._clock()))


def _key(name: str) -> str:
    return f"node/{name}"
