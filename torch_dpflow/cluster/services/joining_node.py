"""A node that joins the cluster of another host: `dpflow node --join`. It runs shards of flows and their workers."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.checks import is_loopback
from torch_dpflow._core.descriptors import raise_limit
from torch_dpflow._core.threads import PeriodicCall
from torch_dpflow._version import __version__
from torch_dpflow.cluster.messages.node import (
    NODE_NAME,
    Desire,
    Launch,
    NodeAssignment,
    NodeJoin,
    NodeJoined,
    NodeReport,
    Running,
)
from torch_dpflow.cluster.messages.shard import ShardSettings
from torch_dpflow.cluster.monitoring.page_access import listen_at
from torch_dpflow.cluster.security.connection_file import (
    Cluster,
    ConnectionFile,
    keys_hint,
    node_proof,
    read_connection_file,
)
from torch_dpflow.cluster.services.node import (
    WISHED_DESCRIPTORS,
    Node,
    check_installed,
    fork_platform,
    keep_fork_server_in,
    private_directory,
)
from torch_dpflow.cluster.services.service import ClusterPlace
from torch_dpflow.errors import DPFlowError, ErrorKind, OptionError, RemoteCallError, UsageError
from torch_dpflow.ipc.memory.headroom import Headroom
from torch_dpflow.ipc.transport import TransportOptions
from torch_dpflow.log import SERVICE, LogOptions, write_lines
from torch_dpflow.remote.shipping.compatibility import versions_here
from torch_dpflow.workers.local_platform import end_fork_server

#: Timeouts, seconds: of one call to the coordinator, of joining, and of a coordinator that stops answering later.
ANSWER_S, JOIN_S, SILENCE_S = 3.0, 30.0, 60.0
#: How long jobs may take to leave the shards of a node that leaves, seconds.
LEAVE_S = 60.0
#: Roles that a joined node may be assigned; all others run on the cluster's own host.
JOINED_ROLES = ("shard", "worker")
_POLL_S = 0.02
#: Most processes that a node starts under one generation.
_MAX_STARTS = 1 << 20
_NAME = re.compile(NODE_NAME, re.ASCII)


class Joining:
    """The call that joins a cluster; repeatable.

    Args:
        cluster: how its coordinator is reached.
        keys: of the cluster, with the server key.
        name: of this node.
        address: of this host, for display.
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

    def join(self, timeout_s: float = JOIN_S, *, is_over: Callable[[], bool] = lambda: False) -> NodeJoined:
        """Join the cluster, or stop trying once `is_over` returns true.

        Raises UsageError with the cluster's reason if it refuses, or if it does not answer in time.
        """
        deadline, backoff = time.monotonic() + timeout_s, Backoff()
        address = self._cluster.address
        with self._cluster.connect(timeout_s=ANSWER_S) as coordinator:
            while True:
                try:
                    joined: NodeJoined = coordinator.call("join_node", self._body, reply_type=NodeJoined).body
                    return joined
                except RemoteCallError as error:
                    is_late = is_over() or time.monotonic() >= deadline
                    if is_late or error.kind is not ErrorKind.OVERLOADED:
                        raise UsageError(error.text) from error
                except DPFlowError as error:
                    if is_over() or time.monotonic() >= deadline:
                        text = f"no cluster answers at {address} within {timeout_s:g} s; is it up?"
                        raise UsageError(f"{text} {keys_hint(address)}".strip()) from error
                time.sleep(backoff.pause_s())


class CoordinatorLink:
    """Thread that reports to the coordinator, and makes the local node run the processes that it assigns.

    If the cluster has expired the node, or was started anew, the link joins again once nothing runs here.

    Args:
        joining: joins the cluster.
        cluster: how its coordinator is reached.
        place: of the node's own processes.
    """

    def __init__(
        self,
        joining: Joining,
        cluster: Cluster,
        place: ClusterPlace,
    ) -> None:
        self._joining = joining
        self._coordinator = cluster.connect(timeout_s=ANSWER_S)
        self._local = place.connect(place.node_address, timeout_s=10.0)
        #: Set by `start`.
        self._node: Node
        self._joined: NodeJoined
        #: Time without an answer of a coordinator, and when that was last added up, seconds.
        self._silent_s, self._counted_at = 0.0, time.monotonic()
        self._seen = 0
        self._applied: Desire | None = None
        #: Memory of the local shards about which a warning was logged, bytes.
        self._warned_of = 0
        #: Whether the node is to leave, and when it started to, seconds.
        self.leaves, self._leaves_since = False, 0.0
        self._closes = False
        #: Why the node has ended; empty if it was stopped.
        self.failure = ""
        # Without a pause: the node answers as soon as anything changes, or after half a second.
        self._thread = PeriodicCall(
            self._turn, 0.0, "dpflow-coordinator", what="the report to the cluster", on_error=self._on_error
        )

    def start(self, node: Node) -> bool:
        """Join and start the thread, or else stop the node. Return whether it has joined. To be called once."""
        self._node = node
        try:
            self._joined = self._joining.join(is_over=lambda: self.leaves)
        except UsageError as error:
            if not self.leaves:
                self.failure = str(error)
            node.stop()
            return False
        node.begin(self._joined.token, self._joined.generation * _MAX_STARTS)
        self._thread.start()
        return True

    def leave(self) -> None:
        """Stop the node once jobs have left its shards. Any thread may call, and signal handlers."""
        self.leaves = True

    def close(self) -> None:
        """Stop the thread, and report to the cluster that the node is gone."""
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
            self._apply(assigned)
            self._stop_when_drained(assigned, running)

    def _report(self, standing: Literal["here", "leaving", "gone"], running: Running) -> NodeAssignment:
        joined = self._joined
        report = NodeReport(self._joining.name, joined.generation, joined.token, standing, running.processes)
        assigned: NodeAssignment = self._coordinator.call("report_node", report, reply_type=NodeAssignment).body
        return assigned

    def _apply(self, assigned: NodeAssignment) -> None:
        desire = Desire(assigned.launches, assigned.elsewhere)
        if desire != self._applied:
            self._warn_of_memory(assigned.launches)
            self._local.call("desire", desire)
            self._applied = desire

    def _warn_of_memory(self, launches: Sequence[Launch]) -> None:
        """Log once for each amount that shards here may hold more than this host has."""
        shards = [one.settings for one in launches if one.role == "shard"]
        share = sum(msgspec.msgpack.decode(one, type=ShardSettings).memory_bytes for one in shards)
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
        if is_late or not (assigned.launches or running.processes):
            self._node.stop()

    def _join_again(self) -> None:
        """Stop all processes, and join the cluster once more."""
        SERVICE.warning("the cluster has expired this node, or was started anew; stopping all processes, joining again")
        self._local.call("desire", Desire([]))
        self._applied = None
        while not (self._node.is_vacant or self._closes):
            time.sleep(_POLL_S)
        try:
            if not self.leaves:
                self._joined = self._joining.join(is_over=lambda: self.leaves or self._closes)
        except UsageError as error:
            if not (self.leaves or self._closes):
                self._fail(str(error))
                return
        if self.leaves or self._closes:
            self._node.stop()
            return
        self._node.begin(self._joined.token, self._joined.generation * _MAX_STARTS)
        SERVICE.info("joined again")

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
        self.failure = f"node {self._joining.name!r} has ended: {why}"
        self._node.stop()


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of a node that joins a cluster.

    Args:
        join: path of the cluster's connection file with the server key: the file that `dpflow up` has written, or that
            of its keys with the cluster's address.
        name: unique among the cluster's nodes; None: the name of this host.
        listen: the IP address of this host by which jobs reach it; None: the one by which it reaches the cluster.
        preload: as for `ClusterOptions`.
        log: how its processes log.

    Raises:
        OptionError: a file, name, address or module is not usable.
    """

    join: str
    name: str | None = None
    listen: str | None = None
    preload: Sequence[str] = ()
    log: LogOptions = field(default_factory=LogOptions)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.node_name):
            given = "--name" if self.name is not None else "the name of this host is"
            raise OptionError(
                f"{given} {self.node_name!r:.80}: give --name of at most 63 letters, digits, dots, hyphens and "
                "underscores, beginning with a letter or digit"
            )
        for module in self.preload:
            check_installed(module)

    @property
    def node_name(self) -> str:
        """The name of the node."""
        return socket.gethostname() if self.name is None else self.name


class JoiningNode:
    """A node of the cluster of another host; `serve` runs it. At most one in a process.

    Raises:
        OptionError: the connection file cannot be used, only the cluster's own host can reach it, or the cluster could
            not reach this host.
    """

    def __init__(self, options: NodeOptions) -> None:
        keys = _keys_of(options.join)
        self.cluster = Cluster(address=keys.address, transport=TransportOptions(keys=keys.client_keys()))
        self.name, self.address = options.node_name, own_address(keys.address, options.listen)
        self._log = options.log
        raise_limit(WISHED_DESCRIPTORS)
        joining = Joining(self.cluster, keys, self.name, self.address)
        platform = fork_platform(options.preload)
        self._directory = private_directory()
        keep_fork_server_in(self._directory.path)
        try:
            # Before it joins: a node that imports does not answer, on a loaded host for longer than its lease.
            platform.begin()
            place = ClusterPlace(
                directory=self._directory.path,
                host=f"[{self.address}]" if ":" in self.address else self.address,
                keys=keys,
                log=options.log,
            )
            self._node = Node(place, [], platform, roles=JOINED_ROLES)
            self._link = CoordinatorLink(joining, self.cluster, place)
        except BaseException:
            end_fork_server()
            self._directory.remove()
            raise

    def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Join, and run the node until it has left or the cluster ends. Sets up the logging of this process.

        ready: called once, in this thread, when it has joined.
        Raises UsageError with the cluster's reason if the cluster refuses the node or stops answering.
        """
        write_lines(self._log, {"process": f"node {self.name}", "pid": os.getpid()})
        try:
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
        """Leave the cluster once jobs have left the local shards; on a second call, at once.

        Any thread may call, and signal handlers.
        """
        if self._link.leaves:
            self._node.stop()
        self._link.leave()


def own_address(cluster: str, listen: str | None) -> str:
    """Return the address of this host at which the services of a joined node listen.

    cluster: the coordinator's address.
    Raises OptionError unless it is one of this host that the cluster and jobs on other hosts can reach.
    """
    parts = urlsplit(cluster)
    address = listen
    try:
        if address is None:
            found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, there = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(there)  # sends nothing: the kernel chooses the route
                address = str(probe.getsockname()[0])
        host = ipaddress.ip_address(address)
    except ValueError:
        raise OptionError(f"--listen {listen!r}: give an IP address of this host") from None
    except OSError as error:
        raise OptionError(
            f"{cluster} cannot be reached: {error.strerror or error}; give --listen the IP address of this host by "
            "which jobs reach it, and a connection file whose address this host knows"
        ) from error
    _check_own(host, cluster)
    return str(host)


def _check_own(host: ipaddress.IPv4Address | ipaddress.IPv6Address, cluster: str) -> None:
    if host.is_unspecified:
        raise OptionError(f"--listen {str(host)!r}: give the address of this host by which jobs reach it")
    if host.is_loopback and not is_loopback(cluster):
        raise OptionError(f"--listen {str(host)!r}: the cluster at {cluster} and its jobs cannot reach it")
    try:
        listen_at(str(host), 0).close()
    except OSError as error:
        raise OptionError(f"--listen {str(host)!r}: {error.strerror or error}; give an address of this host") from error


def _keys_of(path: str) -> ConnectionFile:
    keys, error = read_connection_file(path), ""
    start, give = (
        "start it by `dpflow up --listen tcp://ADDRESS:PORT`",
        "give the file that `dpflow up` has written",
    )
    try:
        parts = urlsplit(keys.address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, 1
    if keys.sends_code:
        where = "run on a platform and connect to its own host"
        error = f"the workers of that cluster {where}, so it has no nodes; {start} without --platform"
    elif not keys.address.startswith("tcp://"):
        error = f"that cluster can be reached on its own host only; {start}"
    elif not port:
        error = f"it has keys, but no cluster's address, as `dpflow keygen` writes it; {give}"
    elif not host:
        error = f"its address {keys.address!r:.80} is not tcp://ADDRESS:PORT; {give}"
    else:
        try:
            keys.server_keys()
        except OptionError as missing:
            error = str(missing)
    if error:
        raise OptionError(f"--join {path!r}: {error}")
    return keys
