"""A cluster on this machine: a node with a directory of its own, and the file by which jobs find it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from torch_dpflow.directory import PrivateDirectory
from torch_dpflow.errors import OptionError
from torch_dpflow.remote.cluster_address import default_connection_file
from torch_dpflow.remote.services.coordinator import CoordinatorArguments
from torch_dpflow.remote.services.node import COORDINATOR, Node
from torch_dpflow.remote.services.post import ClusterPlace
from torch_dpflow.remote.transport.curve import (
    ConnectionFile,
    create_cluster,
    read_connection_file,
    write_connection_file,
)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """How a cluster is to be.

    Args:
        connection_file: where to leave the file by which jobs find it. None: where "auto" looks.
        state: a state store's address; None: one that goes with the cluster.
        listen: tcp://HOST:PORT, with keys; None: sockets on this machine that only this user can reach.
        keys: a connection file whose keys to take; None: new ones are drawn.

    Raises:
        OptionError: `listen` is no such address.
    """

    connection_file: str | None = None
    state: str | None = None
    listen: str | None = None
    keys: str | None = None

    def __post_init__(self) -> None:
        if self.listen is not None:
            _host_of(self.listen)

    @property
    def path(self) -> Path:
        """Of the connection file."""
        return Path(self.connection_file or default_connection_file()).absolute()


class LocalCluster:
    """Owns a node's directory and its connection file; `serve` runs the node.

    Raises:
        OptionError: the connection file cannot be written, or `keys` cannot be read.
        TransportError: the address cannot be had.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self._path = options.path
        self._directory = PrivateDirectory()
        try:
            folder = self._directory.path
            place = ClusterPlace(
                directory=folder,
                host=None if options.listen is None else _host_of(options.listen),
                connection_file=str(self._path),
            )
            self.address = options.listen or place.address_for(COORDINATOR)
            self._write(options.keys)
            arguments = CoordinatorArguments(options.state or f"{folder}/state", options.listen or "")
            self.node = Node(place, msgspec.msgpack.encode(arguments))
        except BaseException:
            self._directory.remove()
            raise

    def serve(self) -> None:
        """Run the node until it is told to stop; then nothing is left."""
        try:
            self.node.serve()
        finally:
            self._remove_connection_file()
            self._directory.remove()

    def _write(self, keys: str | None) -> None:
        connection = create_cluster(self.address) if keys is None else read_connection_file(keys)
        connection.server_keys()
        try:
            write_connection_file(self._path, msgspec.structs.replace(connection, address=self.address))
        except OSError as error:
            raise OptionError(f"connection file {os.fspath(self._path)!r}: {error.strerror}") from error

    def _remove_connection_file(self) -> None:
        """Unless another cluster has put its own there."""
        try:
            found: ConnectionFile = read_connection_file(self._path)
        except OptionError:
            return
        if found.address == self.address:
            self._path.unlink(missing_ok=True)


def _host_of(listen: str) -> str:
    parts = urlsplit(listen)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or not port:
        raise OptionError(f"listen={listen!r}: must be tcp://HOST:PORT, with the port above 0")
    return parts.netloc.rpartition(":")[0]
