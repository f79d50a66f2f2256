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
    NodeJoin,
    NodeJoined,
    NodeOrders,
    NodeReport,
    Running,
)
from torch_dpflow.cluster.messages.shard import ShardSettings
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


#: What a joined node may be told to run: all else is the cluster's own host's.
JOINED_ROLES = ("shard", "worker")
_NAME = re.compile(NODE_NAME, re.ASCII)


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of a node that joins a cluster.

    Args:
        join: the path of the cluster's connection file, with the key by which services listen: the one that `dpflow up`
            has written, or that of its keys with the cluster's address.
        name: tells it from the cluster's other nodes; None: this host's.
        listen: the IP address of this host by which jobs reach it; None: the one by which it reaches the cluster.
        preload: as of `ClusterOptions`.
        log: how its processes log.
        silence_s: it ends when no coordinator has answered for so long, seconds.

    Raises:
        OptionError: a file, name, address or module is not usable.
    """

    join: str
    name: str | None = None
    listen: str | None = None
    preload: Sequence[str] = ()
    log: LogOptions = field(default_factory=LogOptions)
    silence_s: float = SILENCE_S

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
        """What it is called."""
        return socket.gethostname() if self.name is None else self.name


class JoiningNode:
    """A node of another host's cluster; `serve` runs it. At most one in a process.

    Raises:
        OptionError: the connection file cannot be used, or the cluster's own host alone can reach it, or it could not
            reach this one.
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
            # Before it joins: a node that imports answers nobody, and on a loaded host for longer than its lease.
            platform.begin()
            place = ClusterPlace(
                directory=self._directory.path,
                host=f"[{self.address}]" if ":" in self.address else self.address,
                keys=keys,
                log=options.log,
            )
            self._node = Node(place, [], platform, roles=JOINED_ROLES)
            self._link = HeadLink(joining, self.cluster, place, silence_s=options.silence_s)
        except BaseException:
            end_fork_server()
            self._directory.remove()
            raise

    def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Join, and run the node until it has left, or the cluster ends. Sets up this process's logging by the options.

        ready: called once, in this thread, when it has joined.
        Raises UsageError with the cluster's reason where that refuses the node, or does not answer, or not any more.
        """
        write_lines(self._log, {"process": f"node {self.name}", "pid": os.getpid()})
        try:
            # Not before `stop` may be called: who has joined and is ended by a signal is waited for by the cluster.
            if self._link.start(self._node):
                ready()
            self._node.serve()
        finally:
            self._link.close()
            self._directory.remove()
        if self._link.failure:
            raise UsageError(self._link.failure)

    def stop(self) -> None:
        """Leave the cluster: end once jobs have left the shards here. Called again: end at once.

        Any thread may call, and signal handlers.
        """
        if self._link.leaves:
            self._node.stop()
        self._link.leave()


def own_address(cluster: str, listen: str | None) -> str:
    """The address of this host at which a joined node's services listen.

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
        socket.create_server(
            (str(host), 0), family=socket.AF_INET6 if host.version == 6 else socket.AF_INET
        ).close()
    except OSError as error:
        raise OptionError(
            f"--listen {str(host)!r}: {error.strerror or error}; give an address of this host"
        ) from error


def _keys_of(path: str) -> ConnectionFile:
    keys = read_connection_file(path)
    if keys.sends_code:
        raise OptionError(
            f"--join {path!r}: that cluster's workers run on a platform and call its own host, so it has no nodes; "
            "start it by `dpflow up --listen tcp://ADDRESS:PORT` without --platform"
        )
    if not keys.address.startswith("tcp://"):
        raise OptionError(
            f"--join {path!r}: that cluster can be reached on its own host only; start it by `dpflow up --listen "
            "tcp://ADDRESS:PORT`"
        )
    try:
        parts = urlsplit(keys.address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, 1
    if not port:
        raise OptionError(
            f"--join {path!r}: it has keys, but no cluster's address, as `dpflow keygen` writes it; give the "
            "connection file that `dpflow up` has written"
        )
    if not host:
        raise OptionError(
            f"--join {path!r}: its address {keys.address!r:.80} is not tcp://ADDRESS:PORT; give the connection file "
            "that `dpflow up` has written"
        )
    try:
        keys.server_keys()
    except OptionError as error:
        raise OptionError(f"--join {path!r}: {error}") from error
    return keys
