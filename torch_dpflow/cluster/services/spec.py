"""The specification that a process of a node is started with: which process it is, and where its node is."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from torch_dpflow.cluster.security.cluster_address import NODE_SOCKET
from torch_dpflow.cluster.security.connection_file import ConnectionFile
from torch_dpflow.errors import TransportError
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient
from torch_dpflow.ipc.transport import Listener, TransportOptions, listen
from torch_dpflow.log import SERVICE, LogOptions
from torch_dpflow.remote.launchers.contract import PlatformSpec

#: The name of the keeper's socket.
KEEPER_SOCKET = "keeper"
#: FLOW:vN/router, FLOW:vN/shard-000 or FLOW:vN/shard-000/worker-0: the id of a flow's process. Of a node
#: that has joined, shards are FLOW:vN/shard-NODE-000.
_ID = re.compile(r"(?P<flow>[^:]+:v\d+)/(router|(?P<shard>shard-[\w.-]+)(/worker-(?P<worker>\d+))?)")


@dataclass(frozen=True, kw_only=True)
class MemberPlace:
    """Where the workers of a cluster's flows run, if its node does not start them."""

    #: Of the platform. Its settings, which may hold keys, are the keeper's alone.
    name: str
    #: Where they call their shards: see `RemoteWorkers`.
    listen_at: str = ""
    #: How many all flows may have together.
    most_workers: int


@dataclass(frozen=True, kw_only=True)
class ClusterPlace:
    """Where the processes of one node meet.

    Args:
        directory: private to the node's user; sockets lie in it.
        host: the address of this host on which services listen over tcp; None: ipc only.
        keys: for tcp; None where all is ipc, which needs none. Held here and not read from the connection file, which
            may vanish while processes start.
        log: how its processes log.
        token: proves to services that the node has started a shard or worker.
        members: where workers run; None: the node starts them.
    """

    directory: str
    host: str | None = None
    keys: ConnectionFile | None = field(default=None, repr=False)
    log: LogOptions = field(default_factory=LogOptions)
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    members: MemberPlace | None = None

    @property
    def node_address(self) -> str:
        """Where the node listens; always on this host."""
        return f"ipc://{self.directory}/{NODE_SOCKET}"

    @property
    def keeper_address(self) -> str:
        """Where the keeper listens; always on this host, so that only this user can reach it."""
        return f"ipc://{self.directory}/{KEEPER_SOCKET}"

    @property
    def cluster(self) -> str:
        """The first part of its members' names, 8 hexadecimal digits."""
        return hashlib.sha256(self.token.encode()).hexdigest()[:8]

    def address_for(self, id: str) -> str:
        """Where a process of this id is to listen."""
        if self.host is not None:
            return f"tcp://{self.host}:0"
        return f"ipc://{self.directory}/{hashlib.sha256(id.encode()).hexdigest()[:16]}"

    def remove_socket(self, id: str) -> None:
        """Remove what a process of this id, which has ended, has listened on."""
        scheme, _, path = self.address_for(id).partition("://")
        if scheme == "ipc":
            Path(path).unlink(missing_ok=True)

    def client_transport(self) -> TransportOptions:
        """Options for connecting."""
        return TransportOptions(keys=None if self.keys is None else self.keys.client_keys())

    def server_transport(self) -> TransportOptions:
        """Options for listening."""
        return TransportOptions(keys=None if self.keys is None else self.keys.server_keys())

    def connect(self, address: str, *, timeout_s: float = 30.0) -> RpcClient:
        """A client of the service at `address`, for calls whose payload is small."""
        options = ClientOptions(timeout_s=timeout_s, shared_bytes=0)
        return RpcClient(address, options=options, transport=self.client_transport())


@dataclass(frozen=True, kw_only=True)
class ServiceSpec:
    """Which process of a node this is."""

    id: str
    role: str
    incarnation: int
    #: For the role, msgpack; the settings as they are when it starts.
    arguments: bytes
    settings: bytes
    #: Where the process before it listened; empty for the first.
    address: str
    place: ClusterPlace
    #: Where workers run; only a keeper has it.
    platform: PlatformSpec | None = None

    def listen(self, address: str = "") -> Listener:
        """Listen where the process before this one did, if there was one; else at `address`, if given.

        If another process has the port by now, it takes another one, which its heartbeats report.
        """
        options = self.place.server_transport()
        for chosen in filter(None, (self.address, address)):
            try:
                return listen(chosen, options=options)
            except TransportError as error:
                SERVICE.warning("%s listens elsewhere: %s", self.id, error, extra=subjects_of(self.id))
        return listen(self.place.address_for(self.id), options=options)


def subjects_of(id: str) -> dict[str, str | None]:
    """The fields of log lines about the process with this id: see `torch_dpflow.log`."""
    parts = _ID.fullmatch(id)
    return {} if parts is None else parts.groupdict()
