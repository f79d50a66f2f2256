"""A coordinator's calls for nodes on other hosts: they join, report what they run, and are told what to run."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from torch_dpflow._core.threads import SuspendAwareClock
from torch_dpflow._version import __version__
from torch_dpflow.cluster.control.node_table import NodeTable
from torch_dpflow.cluster.messages.node import (
    Launch,
    NodeJoin,
    NodeJoined,
    NodeOrders,
    NodeRecord,
    NodeReport,
    ProcessView,
)
from torch_dpflow.cluster.security.connection_file import ConnectionFile, is_proved
from torch_dpflow.cluster.services.service import COORDINATOR, ClusterPlace
from torch_dpflow.cluster.services.state_store import WriteBehindStore
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.errors import OverloadedError
from torch_dpflow.ipc.rpc import IncomingCall, Result, RpcServer
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.shipping.compatibility import unfit, versions_here

#: A node that has not reported for so long is given up, seconds. As long as the lease of a node's own processes.
NODE_LEASE_S = 10.0
#: How many nodes may join while one coordinator lives: the next one's generations are above this one's.
_MOST_JOINS = 1 << 12
#: What a coordinator is called for by nodes, and about them: as of `coordinator.METHODS`.
NODE_METHODS: dict[str, tuple[Any, bool]] = {
    "join_node": (NodeJoin, True),
    "report_node": (NodeReport, False),
    "nodes": (None, False),
}


class JoinedNodes:
    """The joined nodes of a cluster. The coordinator's thread drives it.

    Args:
        server: methods are registered with it.
        store: where they are kept for the next coordinator.
        place: of the cluster; without keys, or with a platform for workers, nodes are refused.
        incarnation: of the coordinator.
    """

    def __init__(
        self, server: RpcServer, store: WriteBehindStore, place: ClusterPlace, *, incarnation: int
    ) -> None:
        self._store, self._place = store, place
        self._clock = SuspendAwareClock()
        self._table = NodeTable(place.cluster, generations=incarnation * _MOST_JOINS, lease_s=NODE_LEASE_S)
        self._orders: Callable[[str], list[Launch] | None] = lambda _: None
        self._observed: Callable[[], Sequence[ProcessView]] = list
        self._changed: Callable[[], None] = lambda: None
        #: Whether the cluster ends, and the nodes that have been told.
        self._ends, self._told = False, set[str]()
        self._restore()
        for name, (body, remembered) in NODE_METHODS.items():
            server.register(name, getattr(self, f"_on_{name}"), body_type=body, remembered=remembered)

    def use(
        self,
        orders: Callable[[str], list[Launch] | None],
        observed: Callable[[], Sequence[ProcessView]],
        changed: Callable[[], None],
    ) -> None:
        """To be called once, before any call comes.

        orders: what a node is to run; None while that is not known. observed: what the cluster's own node runs.
        changed: called where nodes come, leave and go.
        """
        self._orders, self._observed, self._changed = orders, observed, changed

    @property
    def hosts(self) -> list[str]:
        """The nodes that take shards: those that have joined, sorted; the cluster's own, "", while there is none."""
        return self._table.usable or [""]

    @property
    def processes(self) -> list[ProcessView]:
        """What they run."""
        return self._table.processes

    def poll(self) -> None:
        """Apply leases. At least once a second, since they do not expire while this is not called."""
        lost = self._table.tick(self._clock())
        for record in lost:
            text = "node %s at %s is given up: no report for %g s; its shards' keys go to others"
            SERVICE.warning(text, record.name, record.address, NODE_LEASE_S)
            self._store.delete(_key(record.name))
        if lost:
            self._changed()

    def end(self) -> None:
        """Tell them that the cluster ends, with the answers to their next reports."""
        self._ends = True

    def all_told(self) -> bool:
        """After `end`: whether all have been told."""
        return {node.name for node in self._table.views(self._clock())} <= self._told

    def _restore(self) -> None:
        for key in self._store.find(_key("")):
            try:
                record = msgspec.msgpack.decode(self._store.get(key) or b"", type=NodeRecord)
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
        self._changed()
        return Result(NodeJoined(record.generation, self._place.token))

    def _check(self, join: NodeJoin) -> None:
        """Raise UsageError unless such a node may be one of this cluster."""
        if not is_proved(self._keys, join.name, join.proof):
            raise UsageError(
                f"node {join.name!r} has not the key by which this cluster's services listen: give --join the "
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
        if self._place.members is not None:
            raise UsageError(
                f"the cluster's workers run on platform {self._place.members.name!r} and call its own host: start it "
                "without --platform to have nodes join"
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
        is_ours = hmac.compare_digest(report.token.encode(), self._place.token.encode())
        if not is_ours:
            return Result(NodeOrders(False))
        if self._ends:
            self._told.add(report.name)
            return Result(NodeOrders(True, ends=True))
        if report.standing == "gone":
            self._remove(report)
            return Result(NodeOrders(False))
        was_usable = self._table.usable
        name = report.name
        if not self._table.report(name, report.generation, report.standing, report.processes, self._clock()):
            return Result(NodeOrders(False))
        if self._table.usable != was_usable:
            SERVICE.info("node %s leaves; its shards end once their jobs have left them", name)
            self._changed()
        launches = self._orders(name)
        if launches is None:
            raise OverloadedError(
                "the coordinator has just started and does not know yet what runs; call again"
            )
        return Result(NodeOrders(True, launches=launches, elsewhere=self._addresses()))

    def _addresses(self) -> dict[str, str]:
        """Where the processes listen that those of joined nodes call."""
        called = (view for view in self._observed() if view.role in (COORDINATOR, "router"))
        return {view.id: view.address for view in called if view.address}

    def _remove(self, report: NodeReport) -> None:
        record = self._table.remove(report.name, report.generation)
        if record is not None:
            SERVICE.info("node %s at %s has left", record.name, record.address)
            self._store.delete(_key(record.name))
            self._changed()

    def _on_nodes(self, call: IncomingCall) -> Result:
        return Result(self._table.views(self._clock()))


def _key(name: str) -> str:
    return f"node/{name}"
