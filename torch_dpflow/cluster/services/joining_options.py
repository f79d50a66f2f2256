"""Options of a joining node, with checks of the cluster's keys and of the node's own address."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from torch_dpflow._core.checks import is_loopback
from torch_dpflow.cluster.messages.node import NODE_NAME
from torch_dpflow.cluster.monitoring.page_access import listen_at
from torch_dpflow.cluster.security.connection_file import ConnectionFile, read_connection_file
from torch_dpflow.errors import OptionError
from torch_dpflow.log import LogOptions

_NAME = re.compile(NODE_NAME, re.ASCII)


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of a node that joins a cluster.

    Args:
        join: the cluster's connection file, or its path. The file must contain the server key: use the file that
            `dpflow up` writes, or a key file to which the cluster's address was added.
        name: name of the node, unique in the cluster; None: the name of this host.
        listen: IP address at which jobs reach this host; None: the address from which this host connects to the
            cluster.
        processors: number of processors that the node may use; None: the number that this process may use.
        log: log settings of the node's processes.

    Raises OptionError if the name is invalid. `keys_of` checks `join`, and `own_address` checks `listen`.
    """

    join: str | ConnectionFile
    name: str | None = None
    listen: str | None = None
    processors: int | None = None
    log: LogOptions = field(default_factory=LogOptions)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.node_name):
            given = "--name" if self.name is not None else "the name of this host is"
            raise OptionError(
                f"{given} {self.node_name!r:.80}: give --name of at most 63 letters, digits, dots, hyphens and "
                "underscores, beginning with a letter or digit"
            )

    @property
    def node_name(self) -> str:
        return socket.gethostname() if self.name is None else self.name

    @property
    def node_processors(self) -> int:
        """Number of processors that the node may use."""
        return len(os.sched_getaffinity(0)) if self.processors is None else self.processors


def own_address(cluster: str, listen: str | None) -> str:
    """Return the IP address of this host at which the services of a joined node listen.

    cluster: the coordinator's address. listen: the wanted IP address; None: the one from which this host connects to
        `cluster`. Raises OptionError if jobs cannot reach this host by the address, or no address is found.
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


def keys_of(join: str | ConnectionFile) -> ConnectionFile:
    """Return the connection file `join`, which is given as an object or by its path.

    Raises OptionError if it cannot be read, or its address or keys do not allow a node to join the cluster.
    """
    keys, error = join if isinstance(join, ConnectionFile) else read_connection_file(join), ""
    start, give = ("start it by `dpflow up --listen tcp://ADDRESS:PORT`", "give the file that `dpflow up` has written")
    try:
        parts = urlsplit(keys.address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, 1
    if not keys.address.startswith("tcp://"):
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
        raise OptionError(f"--join {keys.address if join is keys else join!r}: {error}")
    return keys
