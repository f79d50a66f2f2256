"""A node that joins a cluster of another host: `dpflow node --join`. It runs shards of flows, and their workers."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from torch_dpflow._core.descriptors import raise_limit
from torch_dpflow.cluster.messages.joined_node import NODE_NAME
from torch_dpflow.cluster.security.cluster_address import Cluster
from torch_dpflow.cluster.security.connection_file import ConnectionFile, read_connection_file
from torch_dpflow.cluster.services.head_link import SILENCE_S, HeadLink, Joining
from torch_dpflow.cluster.services.host_processes import (
    check_installed,
    fork_platform,
    keep_fork_server_in,
    private_directory,
)
from torch_dpflow.cluster.services.node import WISHED_DESCRIPTORS, Node
from torch_dpflow.cluster.services.spec import ClusterPlace
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.ipc.transport import TransportOptions, is_loopback
from torch_dpflow.log import LogOptions, write_lines
from torch_dpflow.workers.local_platform import end_fork_server

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
