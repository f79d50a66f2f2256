"""Node that joins the cluster of another host, and runs shards of flows with the workers of these shards.

`dpflow node --join` starts such a node. A platform can start it too, for example in a Ray actor: see `node_fleet`.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from torch_dpflow._core.clocks import HEARTBEAT_S, START_S
from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow._core.descriptors import raise_limit
from torch_dpflow._core.threads import PeriodicCall, repeat
from torch_dpflow._version import __version__
from torch_dpflow.cluster.messages.node import Desire, Launch, NodeAssignment, NodeJoin, NodeJoined, NodeReport, Running
from torch_dpflow.cluster.messages.shard import ShardSettings
from torch_dpflow.cluster.security.connection_file import Cluster, ConnectionFile, keys_hint, node_proof
from torch_dpflow.cluster.services.joining_options import NodeOptions, keys_of, own_address
from torch_dpflow.cluster.services.node import Node
from torch_dpflow.cluster.services.node_host import (
    WISHED_DESCRIPTORS,
    fork_platform,
    keep_fork_server_in,
    private_directory,
    stopped_by_signals,
)
from torch_dpflow.cluster.services.service import ClusterPlace, DesiredProcesses
from torch_dpflow.errors import DPFlowError, ErrorKind, MessageError, RemoteCallError, UsageError
from torch_dpflow.ipc.memory.headroom import Headroom
from torch_dpflow.ipc.transport import TransportOptions
from torch_dpflow.log import SERVICE, LogOptions, write_lines
from torch_dpflow.remote.shipping.compatibility import versions_here
from torch_dpflow.workers.fork_server import end_fork_server

#: Timeouts (seconds): of one call to the coordinator, of joining, and of a coordinator that stops answering later.
ANSWER_S, JOIN_S, SILENCE_S = 3 * HEARTBEAT_S, START_S / 2, START_S
#: How long jobs may take to leave the shards of a node that leaves (seconds).
LEAVE_S = START_S
#: Roles that a joined node may be assigned; all others run on the cluster's own host.
JOINED_ROLES = ("shard", "worker")
_POLL_S = 0.02
#: Maximum number of processes that a node starts under one generation.
_MAX_STARTS = 1 << 20


class Joining:
    """Request by which this node joins a cluster, for the first time or again.

    Args:
        cluster: address of the cluster, and the keys for a connection to it.
        keys: the cluster's key file with the server key, by which this node proves that it may join.
        name: name of this node.
        address: address of this host, for display.
        processors: number of processors of this host, which limits the number of shards.
    """

    def __init__(self, cluster: Cluster, keys: ConnectionFile, name: str, address: str, processors: int = 1) -> None:
        self._cluster, self.name = cluster, name
        self._body = NodeJoin(
            name, secrets.token_hex(16), __version__, versions_here(), node_proof(keys, name), address, processors
        )

    def join(self, timeout_s: float = JOIN_S, *, is_over: Callable[[], bool] = lambda: False) -> NodeJoined:
        """Join the cluster, with repeated attempts, and return the coordinator's answer.

        timeout_s: how long to repeat attempts (seconds). is_over: returns whether to stop before that.

        Raises UsageError if the cluster refuses the node, with the reason, or if all attempts have failed.
        """

        def check(error: DPFlowError, is_late: bool) -> None:
            is_late, address = is_late or is_over(), self._cluster.address
            if isinstance(error, MessageError):  # the cluster has another release
                raise UsageError(str(error)) from error
            if isinstance(error, RemoteCallError) and (is_late or error.kind is not ErrorKind.OVERLOADED):
                raise UsageError(error.text) from error
            if is_late:
                text = f"no cluster answers at {address} within {timeout_s:g} s; is it up?"
                raise UsageError(f"{text} {keys_hint(address)}".strip()) from error

        with self._cluster.connect(timeout_s=ANSWER_S) as coordinator:
            joined: NodeJoined = repeat(
                lambda: coordinator.call("join_node", self._body, reply_type=NodeJoined).body, check, timeout_s
            )
            return joined


class CoordinatorLink:
    """Thread that reports to the coordinator, and makes the local node run the processes that the coordinator assigns.

    If the node's lease has expired, or the cluster was restarted, the link joins again after all local processes have
    ended.

    Args:
        joining: the request by which the node joins.
        cluster: address and keys of the cluster.
        place: settings of the local node and its processes.
    """

    def __init__(self, joining: Joining, cluster: Cluster, place: ClusterPlace) -> None:
        self._joining = joining
        self._coordinator = cluster.connect(timeout_s=ANSWER_S)
        self._local = place.connect(place.node_address, timeout_s=10.0)
        #: Set by `start`.
        self._node: Node
        self._joined: NodeJoined
        #: Time without an answer of a coordinator, and when this time was last updated (seconds).
        self._silent_s, self._counted_at = 0.0, time.monotonic()
        self._seen = 0
        self._desired = DesiredProcesses(self._local)
        #: Memory of the local shards about which a warning was logged (bytes).
        self._warned_of = 0
        #: Whether the node should leave, and when it started to (seconds).
        self.leaves, self._leaves_since = False, 0.0
        self.has_joined = False
        self._closes = False
        #: The error because of which the node ends; empty if there is none.
        self.failure = ""
        # Without a pause: the node answers as soon as anything changes, or after half a second.
        self._thread = PeriodicCall(
            self._turn, 0.0, "dpflow-coordinator", what="the report to the cluster", on_error=self._on_error
        )

    def start(self, node: Node) -> bool:
        """Join and start the thread; if joining fails, stop the node. Return whether the node has joined. Call once."""
        self._node = node
        self.has_joined = self._join()
        if self.has_joined:
            self._thread.start()
        return self.has_joined

    def leave(self) -> None:
        """Let the node stop once its shards have no jobs, or after `LEAVE_S`. Any thread or signal handler may call."""
        self.leaves = True

    def close(self) -> None:
        """Stop the thread, and report to the cluster that the node has ended, if it has joined."""
        self._closes = True
        self._thread.stop()
        self._local.close()
        try:
            if self._thread.ident is not None:  # it has joined
                self._thread.join()
                self._report("gone", Running(0, []))
        except DPFlowError:
            pass  # the node's lease expires
        finally:
            self._coordinator.close()

    # -- in the thread ---------------------------------------------------------------------------------------

    def _turn(self) -> None:
        running: Running = self._local.call("changes", self._seen, reply_type=Running).body
        if self.leaves and not self._leaves_since:
            self._leaves_since = time.monotonic()
            SERVICE.info("the node leaves once jobs have left its shards")
        assigned = self._report("leaving" if self._leaves_since else "here", running)
        self._seen = running.revision
        self._silent_s, self._counted_at = 0.0, time.monotonic()
        if assigned.ends:
            SERVICE.info("the cluster ends")
            self._node.stop()
        elif not assigned.is_known:
            self._join_again()
        else:
            if assigned.leaves:
                self.leave()
            if self._desired.send(assigned.desire):
                self._warn_of_memory(assigned.desire.launches)
            self._stop_when_drained(assigned, running)

    def _report(self, standing: Literal["here", "leaving", "gone"], running: Running) -> NodeAssignment:
        joined = self._joined
        report = NodeReport(self._joining.name, joined.generation, joined.token, standing, running.processes)
        assigned: NodeAssignment = self._coordinator.call("report_node", report, reply_type=NodeAssignment).body
        return assigned

    def _warn_of_memory(self, launches: Sequence[Launch]) -> None:
        """Warn if the shards of this node may use more memory than its host has; once for each total."""
        shards = [one.settings for one in launches if one.role == "shard"]
        share = sum(msgpack_decoder(ShardSettings).decode(one).memory_bytes for one in shards)
        total = Headroom().total()
        if share > total and share != self._warned_of:
            SERVICE.warning(
                "shards here may hold %s bytes of samples, and this node has %s: the memory of a cluster is divided "
                "evenly among its nodes; give it less (`dpflow up --memory`, memory_bytes= of jobs), or add nodes",
                f"{share:,}",
                f"{total:,}",
            )
        self._warned_of = share

    def _stop_when_drained(self, assigned: NodeAssignment, running: Running) -> None:
        if not self._leaves_since:
            return
        is_late = time.monotonic() - self._leaves_since >= LEAVE_S
        if is_late:
            SERVICE.warning("the node ends although jobs read from its shards: they have not left in time")
        if is_late or not (assigned.desire.launches or running.processes):
            self._node.stop()

    def _join_again(self) -> None:
        """Stop all processes, and join the cluster once more."""
        SERVICE.warning(
            "the cluster has expired this node, or was started again; stopping all processes, joining again"
        )
        self._desired.send(Desire([]))
        while not (self._node.is_vacant or self._closes):
            time.sleep(_POLL_S)
        if self._join():
            SERVICE.info("joined again")

    def _join(self) -> bool:
        """Join the cluster; if that fails or the node is leaving, stop the node. Return whether it has joined."""
        try:
            if not self._is_over():
                self._joined = self._joining.join(is_over=self._is_over)
                self._node.begin(self._joined.token, self._joined.generation * _MAX_STARTS)
                return True
        except UsageError as error:
            if not self._is_over():
                self._fail(str(error))
        self._node.stop()
        return False

    def _is_over(self) -> bool:
        return self.leaves or self._closes

    def _on_error(self, error: Exception) -> None:
        if self._closes:
            return
        now = time.monotonic()
        # While this node itself was suspended, it has not waited.
        self._silent_s += min(now - self._counted_at, 2 * ANSWER_S)
        self._counted_at = now
        if self._silent_s >= SILENCE_S:
            self._fail(f"the cluster has not answered for {self._silent_s:.0f} s ({error})")
        elif self._leaves_since and now - self._leaves_since >= LEAVE_S:
            self._node.stop()
        else:
            SERVICE.warning("the cluster does not answer, retrying (%s)", error)

    def _fail(self, why: str) -> None:
        self.failure = f"node {self._joining.name!r} has ended: {why}" if self.has_joined else why
        self._node.stop()


class JoiningNode:
    """Node of this host in the cluster of another host. `serve` runs it. Create at most one in a process.

    Raises:
        OptionError: `keys_of` or `own_address` refuses an option, or no directory for sockets can be made.
    """

    def __init__(self, options: NodeOptions) -> None:
        keys = keys_of(options.join)
        self.cluster = Cluster(address=keys.address, transport=TransportOptions(keys=keys.client_keys()))
        self.name, self.address = options.node_name, own_address(keys.address, options.listen)
        self._log = options.log
        raise_limit(WISHED_DESCRIPTORS)
        joining = Joining(self.cluster, keys, self.name, self.address, options.node_processors)
        self._platform = fork_platform()
        self._directory = private_directory()
        keep_fork_server_in(self._directory.path)
        try:
            place = ClusterPlace(
                directory=self._directory.path,
                host=f"[{self.address}]" if ":" in self.address else self.address,
                keys=keys,
                log=options.log,
            )
            self._node = Node(place, [], self._platform, roles=JOINED_ROLES)
            self._link = CoordinatorLink(joining, self.cluster, place)
        except BaseException:
            end_fork_server()
            self._directory.remove()
            raise

    def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Join, and run the node until it has left or the cluster ends. Sets up the logging of this process.

        ready: called once, in this thread, when the node has joined.

        Raises UsageError if the cluster refuses the node, with the reason, or stops answering.
        """
        write_lines(self._log, {"process": f"node {self.name}", "pid": os.getpid()})
        try:
            # Before it joins: jobs would wait for shards of a host that imports.
            self._platform.begin()
            # Join only once `stop` can be called: the cluster waits for a joined node that a signal ends.
            if self._link.start(self._node):
                ready()
            self._node.serve()
        finally:
            self._link.close()
            self._directory.remove()
        if self._link.failure:
            raise UsageError(self._link.failure)

    def stop(self) -> None:
        """Make `serve` return once the local shards have no jobs, or after `LEAVE_S`; on a second call, at once.

        Any thread and any signal handler may call.
        """
        if self._link.leaves:
            self._node.stop()
        self._link.leave()
        if not self._link.has_joined:
            self._platform.interrupt()


class NodeLaunchSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Launch spec of a node that a platform runs: everything that it receives at its start, as msgpack."""

    name: str
    #: With the cluster's address and its server key.
    keys: ConnectionFile
    processors: int
    log: LogOptions


def run(launch_spec: bytes) -> int:
    """Run a node until it has left or the cluster ends; return its exit code. launch_spec: a `NodeLaunchSpec`."""
    spec = msgpack_decoder(NodeLaunchSpec).decode(launch_spec)
    given = {name: getattr(spec, name) for name in ("name", "processors", "log")}
    try:
        node = JoiningNode(NodeOptions(join=spec.keys, **given))
        with stopped_by_signals(node.stop):
            node.serve()
    except DPFlowError as error:
        print(error, file=sys.stderr)  # the platform reports the last output
        return 1
    finally:
        end_fork_server()
    return 0
