"""Where a cluster is: its coordinator's address and the keys to talk to it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from torch_dpflow._core.checks import check_path
from torch_dpflow.cluster.security.connection_file import read_connection_file
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient
from torch_dpflow.ipc.transport import TransportOptions, is_loopback

#: The environment variable with the default `address` of `find_cluster`.
ADDRESS_VARIABLE = "DPFLOW_ADDRESS"
#: The name of a node's socket in the directory of its cluster.
NODE_SOCKET = "node"
#: The kernel's limit for the path of a socket, bytes.
LONGEST_SOCKET_PATH = 107


def default_connection_file() -> Path:
    """Where `dpflow up` writes the connection file, and "auto" finds it."""
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(folder) / f"dpflow-connection-{os.getuid()}.json"


def keys_hint(address: str) -> str:
    """What may be wrong with the keys if a cluster does not answer; empty if the address needs none."""
    if not address.startswith("tcp://"):
        return ""
    return (
        "A cluster does not answer clients that have other keys either: use the connection file that `dpflow up` wrote "
        "when it was last started."
    )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """How clients reach a cluster."""

    #: Its coordinator's address.
    address: str
    transport: TransportOptions
    #: Whether its workers run elsewhere, and need the user's modules and nobody's keys.
    sends_code: bool = False

    def connect(
        self, address: str | None = None, *, timeout_s: float = 60.0, shared_bytes: int = 0
    ) -> RpcClient:
        """A client of one of its services; without an address, of the coordinator.

        shared_bytes: most shared memory to lend it, bytes, for calls with large payloads.
        """
        return RpcClient(
            self.address if address is None else address,
            options=ClientOptions(timeout_s=timeout_s, shared_bytes=shared_bytes),
            transport=self.transport,
        )


def find_cluster(address: str | os.PathLike[str] | None = "auto") -> Cluster:
    """The cluster at `address`.

    address: "auto" or None for the one that `DPFLOW_ADDRESS` names, or else the one that this user has started on
        this host; the path of a connection file; or ipc://PATH or tcp://127.0.0.1:PORT without keys.

    Raises OptionError if the connection file does not exist or others may read it; OptionTypeError if `address` is
    neither text nor a path.
    """
    if not isinstance(address, str | os.PathLike | None):
        raise OptionTypeError(
            f'address={address!r} is of type {type(address).__name__}; give "auto" or the path of a connection file'
        )
    if address in (None, "auto"):
        address = os.environ.get(ADDRESS_VARIABLE) or str(default_connection_file())
    assert address is not None
    address = os.fspath(address)
    check_path("address", address)
    if "://" in address:
        _check_direct(address)
        return Cluster(address=address, transport=TransportOptions())
    connection = read_connection_file(address)
    keys = connection.client_keys() if connection.address.startswith("tcp://") else None
    return Cluster(
        address=connection.address,
        transport=TransportOptions(keys=keys),
        sends_code=connection.sends_code,
    )


def _check_direct(address: str) -> None:
    """Raise OptionError unless `address` can be that of a service on this host that needs no keys."""
    scheme, _, rest = address.partition("://")
    try:
        parts = urlsplit(address)
        port = parts.port if parts.netloc == rest else None
    except ValueError:
        port = None
    if scheme == "tcp" and port:
        if not is_loopback(address):
            raise OptionError(
                f"address={address!r} reaches beyond this host, which requires keys; give the connection file that "
                "`dpflow up` has written"
            )
    elif scheme != "ipc" or not 1 <= len(os.fsencode(rest)) <= LONGEST_SOCKET_PATH:
        raise OptionError(
            f"address={address!r}: give the path of a connection file, ipc://PATH of at most "
            f"{LONGEST_SOCKET_PATH} bytes, or tcp://127.0.0.1:PORT"
        )
