"""A joined node's link to its cluster: joins, reports what runs here, has the node run what the coordinator orders."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.threads import PeriodicCall
from torch_dpflow._version import __version__
from torch_dpflow.cluster.messages.joined_node import NodeJoin, NodeJoined, NodeOrders, NodeReport
from torch_dpflow.cluster.messages.node import Desire, Launch, Running
from torch_dpflow.cluster.messages.shard import ShardSettings
from torch_dpflow.cluster.security.cluster_address import Cluster, keys_hint
from torch_dpflow.cluster.security.connection_file import ConnectionFile
from torch_dpflow.cluster.security.node_proof import node_proof
from torch_dpflow.cluster.services.node import Node
from torch_dpflow.cluster.services.spec import ClusterPlace
from torch_dpflow.errors import DPFlowError, ErrorKind, RemoteCallError, UsageError
from torch_dpflow.ipc.memory.headroom import Headroom
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.shipping.compatibility import versions_here

#: How long a coordinator may take to answer one call, and a node waits for one that does not answer: before it joins,
#: and once it has; seconds.
ANSWER_S, JOIN_S, SILENCE_S = 3.0, 30.0, 60.0
#: How long jobs may take to leave the shards of a node that leaves, seconds.
LEAVE_S = 60.0
#: How often a node that ends what it runs looks whether that has ended, seconds.
_POLL_S = 0.02
#: How many processes a node may start under one generation.
_MOST_STARTS = 1 << 20


class Joining:
    """Joins a cluster, as often as needed.

    Args:
        cluster: how its coordinator is reached.
        keys: of the cluster; with those by which services listen.
        name: of this node.
        address: of this host, for people.
    """

    def __init__(self, cluster: Cluster, keys: ConnectionFile, name: str, address: str) -> None:
        self._cluster, self.name = cluster, name
        self._body = NodeJoin(
            name,
            secrets.token_hex(16),
            __version__,
            versions_here(),
            node_proof(keys, name),
            address,
            len(os.sched_getaffinity(0)),
        )

    def join(self, patience_s: float = JOIN_S, *, is_over: Callable[[], bool] = lambda: False) -> NodeJoined:
        """Join.

        is_over: whether to give up, whatever time there is left.
        Raises UsageError with the cluster's reason if it refuses, or does not answer in time.
        """
        deadline, backoff = time.monotonic() + patience_s, Backoff()
        with self._cluster.connect(timeout_s=ANSWER_S) as head:
            while True:
                try:
                    joined: NodeJoined = head.call("join_node", self._body, reply_type=NodeJoined).body
                    return joined
                except RemoteCallError as error:
                    is_late = is_over() or time.monotonic() >= deadline
                    if is_late or error.kind is not ErrorKind.OVERLOADED:
                        raise UsageError(error.text) from error
                except DPFlowError as error:
                    if is_over() or time.monotonic() >= deadline:
                        raise UsageError(self._unanswered(patience_s)) from error
                time.sleep(backoff.pause_s())

    def _unanswered(self, patience_s: float) -> str:
        address = self._cluster.address
        return (
            f"no cluster answers at {address} within {patience_s:g} s; is it up? {keys_hint(address)}".strip()
        )


class HeadLink:
    """A thread that has a node of this process run what its cluster orders, until that ends or does not answer.

    A cluster that has given the node up, or was started anew, is joined again once nothing runs here any more.

    Args:
        joining: how the cluster is joined.
        cluster: how its coordinator is reached.
        place: of the node's own processes.
        silence_s: the node ends when no coordinator has answered for so long, seconds.
        leave_s: as `LEAVE_S`.
    """

    def __init__(
        self,
        joining: Joining,
        cluster: Cluster,
        place: ClusterPlace,
        *,
        silence_s: float = SILENCE_S,
        leave_s: float = LEAVE_S,
    ) -> None:
        self._joining = joining
        self._silence_s, self._leave_s = silence_s, leave_s
        self._head = cluster.connect(timeout_s=ANSWER_S)
        self._local = place.connect(place.node_address, timeout_s=10.0)
        #: From `start` on.
        self._node: Node
        self._joined: NodeJoined
        #: For how long no coordinator has answered, and until when that was counted, seconds.
        self._silent_s, self._counted_at = 0.0, time.monotonic()
        self._seen = 0
        self._applied: Desire | None = None
        #: What its shards may keep, bytes.
        self._told_of = 0
        #: Whether the node is to leave, and since when it does, seconds.
        self.leaves, self._leaves_since = False, 0.0
        self._closes = False
        #: Why the node has ended, if not because it was told to.
        self.failure = ""
        # Without a pause: the node answers as soon as anything changes, or after half a second.
        self._thread = PeriodicCall(
            self._turn, 0.0, "dpflow-head", what="the report to the cluster", on_error=self._on_error
        )

    def start(self, node: Node) -> bool:
        """Join, and start the thread; otherwise have the node end. To be called once. Returns whether it has joined."""
        self._node = node
        try:
            self._joined = self._joining.join(is_over=lambda: self.leaves)
        except UsageError as error:
            if not self.leaves:
                self.failure = str(error)
            node.stop()
            return False
        node.begin(self._joined.token, self._joined.generation * _MOST_STARTS)
        self._thread.start()
        return True

    def leave(self) -> None:
        """Have the node end once jobs have left its shards. Any thread may call, and signal handlers."""
        self.leaves = True

    def close(self) -> None:
        """Stop the thread, and tell the cluster that the node is gone."""
        self._closes = True
        self._thread.stop()
        self._local.close()
        try:
            if self._thread.ident is not None:  # it has joined
                self._thread.join()
                self._report("gone", Running(0, []))
        except DPFlowError:
            pass  # it gives the node up by itself
        finally:
            self._head.close()

    # -- in the thread ---------------------------------------------------------------------------------------

    def _turn(self) -> None:
        running: Running = self._local.call("changes", self._seen, reply_type=Running).body
        if self.leaves and not self._leaves_since:
            self._leaves_since = time.monotonic()
            SERVICE.info("the node leaves once jobs have left its shards")
        orders = self._report("leaving" if self._leaves_since else "here", running)
        self._seen = running.revision
        self._silent_s, self._counted_at = 0.0, time.monotonic()
        if orders.ends:
            SERVICE.info("the cluster ends")
            self._node.stop()
        elif not orders.is_known:
            self._begin_again()
        else:
            self._apply(orders)
            self._end_when_drained(orders, running)

    def _report(self, standing: Literal["here", "leaving", "gone"], running: Running) -> NodeOrders:
        joined = self._joined
        report = NodeReport(self._joining.name, joined.generation, joined.token, standing, running.processes)
        orders: NodeOrders = self._head.call("report_node", report, reply_type=NodeOrders).body
        return orders

    def _apply(self, orders: NodeOrders) -> None:
        desire = Desire(orders.launches, orders.elsewhere)
        if desire != self._applied:
            self._tell_of_memory(_share(orders.launches))
            self._local.call("desire", desire)
            self._applied = desire

    def _tell_of_memory(self, share: int) -> None:
        """Say once of each share that this host does not have so much."""
        total = Headroom().total()
        if share > total and share != self._told_of:
            SERVICE.warning(
                "shards here may keep %s bytes of samples, and this node has %s: a cluster's memory is divided evenly "
                "among its nodes; give it less (`dpflow up --memory`, memory_bytes= of jobs), or have more nodes",
                f"{share:,}",
                f"{total:,}",
            )
        self._told_of = share

    def _end_when_drained(self, orders: NodeOrders, running: Running) -> None:
        if not self._leaves_since:
            return
        is_late = time.monotonic() - self._leaves_since >= self._leave_s
        if is_late:
            SERVICE.warning("the node ends although jobs read from its shards: they have not left in time")
        if is_late or not (orders.launches or running.processes):
            self._node.stop()

    def _begin_again(self) -> None:
        """End everything, and join the cluster once more."""
        SERVICE.warning("the cluster has given this node up, or was started anew; ending all, joining again")
        self._local.call("desire", Desire([]))
        self._applied = None
        while not (self._node.is_vacant or self._closes):
            time.sleep(_POLL_S)
        try:
            if not self.leaves:
                self._joined = self._joining.join(is_over=lambda: self.leaves or self._closes)
        except UsageError as error:
            if not (self.leaves or self._closes):
                self._end(str(error))
                return
        if self.leaves or self._closes:
            self._node.stop()
            return
        self._node.begin(self._joined.token, self._joined.generation * _MOST_STARTS)
        SERVICE.info("joined again")

    def _on_error(self, error: Exception) -> None:
        if self._closes:
            return
        now = time.monotonic()
        # A node that was suspended itself has not waited meanwhile.
        self._silent_s += min(now - self._counted_at, 2 * ANSWER_S)
        self._counted_at = now
        if self._silent_s >= self._silence_s:
            self._end(f"the cluster has not answered for {self._silent_s:.0f} s ({error})")
        elif self._leaves_since and time.monotonic() - self._leaves_since >= self._leave_s:
            self._node.stop()
        else:
            SERVICE.warning("the cluster does not answer, and is asked again (%s)", error)

    def _end(self, why: str) -> None:
        self.failure = f"node {self._joining.name!r} has ended: {why}"
        self._node.stop()


def _share(launches: Sequence[Launch]) -> int:
    """What shards among these may keep of samples together, bytes."""
    shards = [one.settings for one in launches if one.role == "shard"]
    return sum(msgspec.msgpack.decode(one, type=ShardSettings).memory_bytes for one in shards)
