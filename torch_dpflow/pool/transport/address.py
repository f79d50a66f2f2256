"""Address of a pool server, and the keys for reaching it."""

from __future__ import annotations

import os
import socket
import stat
import struct
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from torch_dpflow._core.checks import check_flag, check_path, check_tcp_address
from torch_dpflow.cluster.security.connection_file import ConnectionFile, read_key_file
from torch_dpflow.errors import OptionError

#: The environment variable with the default `address` of clients and servers.
ADDRESS_VARIABLE = "DPFLOW_POOL"
#: The environment variable with the default `connection` of clients and servers.
CONNECTION_VARIABLE = "DPFLOW_POOL_CONNECTION"
_TCP = "tcp://"
_SOCKET = "socket"
#: Kernel limit for the path of a Unix socket, bytes.
_MAX_PATH_BYTES = 107
_PEER = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, kw_only=True)
class PoolAddress:
    """Address of a pool server: a directory on this host, or a TCP port on any host."""

    #: Directory of the Unix socket; None if the server is reached at `host` and `port`.
    directory: Path | None = None
    host: str = ""
    port: int = 0
    #: Path of the connection file with the cluster's keys.
    connection: str | None = None
    #: Whether bytes are sent unencrypted, once both sides have proved by HMAC that they have the keys.
    trust_network: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return str(self.directory) if self.directory else f"{_TCP}{host}:{self.port}"

    def at(self, address: str) -> PoolAddress:
        """Return the address of another server of the same cluster, given as tcp://HOST:PORT."""
        host, port = _host_port(address)
        return replace(self, directory=None, host=host, port=port)

    def keys(self) -> ConnectionFile:
        """Return the keys in the file `connection`. Raises OptionError if there is no such file, or it is not valid."""
        if self.connection is None:
            raise OptionError(
                f"{self} is reached over a network, so both sides have to authenticate; give the file that "
                f"`dpflow keygen` has written: connection=, --connection or {CONNECTION_VARIABLE}"
            )
        return read_key_file(self.connection)


#: Address as users pass it: a directory, tcp://HOST:PORT, or "auto".
AddressLike: TypeAlias = str | os.PathLike[str] | PoolAddress


def find_address(
    address: AddressLike = "auto",
    connection: str | os.PathLike[str] | None = None,
    *,
    trust_network: bool = False,
) -> PoolAddress:
    """Convert an address as users give it to a `PoolAddress`.

    Args:
        address: a directory or tcp://HOST:PORT; "auto": the value of `DPFLOW_POOL`, or else this user's default
            directory. A `PoolAddress` is returned unchanged.
        connection: path of the connection file; None: the value of `DPFLOW_POOL_CONNECTION`, if set.

    Raises OptionTypeError or OptionError if an argument is not allowed.
    """
    if isinstance(address, PoolAddress):
        return address
    named = (os.environ.get(ADDRESS_VARIABLE) or address) if address == "auto" else address
    if not (isinstance(named, str) and named.startswith(_TCP)):
        where = PoolAddress(directory=find_directory(named))
    else:
        host, port = _host_port(named)
        where = PoolAddress(host=host, port=port)
    file = connection if connection is not None else os.environ.get(CONNECTION_VARIABLE) or None
    return replace(
        where,
        connection=None if file is None else os.path.abspath(check_path("connection", file)),
        trust_network=check_flag("trust_network", trust_network),
    )


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    return int(_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])


def find_directory(address: str | os.PathLike[str] = "auto") -> Path:
    """Return a pool's directory. "auto": the directory in `DPFLOW_POOL`, or else this user's default on this host.

    Raises OptionTypeError if `address` is not a path, OptionError if it is a URL, or too long for a socket.
    """
    if address == "auto":
        folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        address = os.environ.get(ADDRESS_VARIABLE) or Path(folder) / f"dpflow-pool-{os.getuid()}"
    address = check_path("address", address, '"auto" or the path of a directory')
    if address == "" or "://" in address:
        raise OptionError(
            f'address={address!r}: a server needs a directory of this host; give "auto" or a path here, and the '
            "address for other hosts as --listen or listen="
        )
    found = Path(address).absolute()
    if len(os.fsencode(found / _SOCKET)) > _MAX_PATH_BYTES:
        raise OptionError(
            f"address={str(found)!r} is too long for a socket; give a path of at most "
            f"{_MAX_PATH_BYTES - len(_SOCKET) - 1} bytes"
        )
    return found


def socket_path(directory: Path) -> str:
    return str(directory / _SOCKET)


def check_private(directory: Path) -> None:
    """Raise OptionError if this is no directory, or is another user's or open to others; OSError if it is missing."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OptionError(
            f"{directory} must be a directory of this user that no other user may enter (mode 0700); remove it, or "
            "give another address"
        )


def _host_port(address: str) -> tuple[str, int]:
    check_tcp_address("address", address)
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    if not host or port == "*":
        raise OptionError(f"address={address!r}: must be tcp://HOST:PORT, with the name or number of a host")
    return host.removeprefix("[").removesuffix("]"), int(port)
