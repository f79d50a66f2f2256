"""Where a server of the pool is, and how both sides prove who they are."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from torch_dpflow._core.checks import check_flag, check_tcp_address
from torch_dpflow.cluster.security.connection_file import ConnectionFile, read_key_file
from torch_dpflow.errors import OptionError
from torch_dpflow.pool.messages.protocol import ADDRESS_VARIABLE, find_directory

#: The environment variable with the default `connection` of clients and servers.
CONNECTION_VARIABLE = "DPFLOW_POOL_CONNECTION"
_TCP = "tcp://"


@dataclass(frozen=True, kw_only=True)
class PoolAddress:
    """Where a server of the pool is: on this host by a directory, on any host by a port."""

    #: The directory of its socket; None: it is at `host` and `port`.
    directory: Path | None = None
    host: str = ""
    port: int = 0
    #: The file with the cluster's keys.
    connection: str | None = None
    #: Whether bytes travel as they are, and keys are only proved.
    trust_network: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return str(self.directory) if self.directory else f"{_TCP}{host}:{self.port}"

    def at(self, address: str) -> PoolAddress:
        """Another server of the same cluster, at tcp://HOST:PORT."""
        host, port = _host_port(address)
        return replace(self, directory=None, host=host, port=port)

    def keys(self) -> ConnectionFile:
        """The keys of the cluster. Raises OptionError: there is no such file, or it has none."""
        if self.connection is None:
            raise OptionError(
                f"{self} is reached over a network, so both sides have to prove who they are; give the file that "
                f"`dpflow keygen` has written: connection=, --connection or {CONNECTION_VARIABLE}"
            )
        return read_key_file(self.connection)


#: What users give: a directory, tcp://HOST:PORT, or "auto".
AddressLike: TypeAlias = str | os.PathLike[str] | PoolAddress


def find_address(
    address: AddressLike = "auto",
    connection: str | os.PathLike[str] | None = None,
    *,
    trust_network: bool = False,
) -> PoolAddress:
    """What users have given, or what `DPFLOW_POOL` and `DPFLOW_POOL_CONNECTION` name.

    Raises OptionTypeError, OptionError: it is neither a directory nor tcp://HOST:PORT.
    """
    if isinstance(address, PoolAddress):
        return address
    named = (os.environ.get(ADDRESS_VARIABLE) or address) if address == "auto" else address
    if not (isinstance(named, str) and named.startswith(_TCP)):
        where = PoolAddress(directory=find_directory(named))
    else:
        host, port = _host_port(named)
        where = PoolAddress(host=host, port=port)
    file = connection if connection is not None else os.environ.get(CONNECTION_VARIABLE)
    return replace(
        where,
        connection=None if file is None else os.path.abspath(file),
        trust_network=check_flag("trust_network", trust_network),
    )


def _host_port(address: str) -> tuple[str, int]:
    check_tcp_address("address", address)
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    if not host or port == "*":
        raise OptionError(f"address={address!r}: must be tcp://HOST:PORT, with the name or number of a host")
    return host.removeprefix("[").removesuffix("]"), int(port)
