"""What a process of a node is told when it starts, and how the node knows that it lives."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch_dpflow.errors import DPFlowError, TransportError
from torch_dpflow.log import SERVICE, LogOptions
from torch_dpflow.remote.access.cluster_address import NODE_SOCKET
from torch_dpflow.remote.access.connection_file import ConnectionFile
from torch_dpflow.remote.rpc import ClientOptions, RpcClient, RpcServer
from torch_dpflow.remote.transport import Listener, TransportOptions, listen
from torch_dpflow.remote.wire.node import Beat, Standing

__all__ = ["SERVICE", "ClusterPlace", "Heart", "ServicePost", "ask_in", "serve", "subjects_of"]

T = TypeVar("T")
#: How often a process says that it lives, seconds.
BEAT_S = 1.0
#: A process whose main thread has not come round for so long does not count as alive, seconds.
STUCK_S = 30.0
#: How long a server waits for a message before it looks at what else is due, seconds.
TURN_S = 0.1
#: How old the figures may be that it has for people, seconds: to gather them costs more than a turn.
STATUS_S = 0.5
#: FLOW@VERSION/router, FLOW@VERSION/shard-000 or FLOW@VERSION/shard-000/worker-0: the id of a flow's process.
_ID = re.compile(r"(?P<flow>[^@]+@\d+)/(router|(?P<shard>shard-\d+)(/worker-(?P<worker>\d+))?)")


@dataclass(frozen=True, kw_only=True)
class ClusterPlace:
    """Where the processes of one node meet.

    Args:
        directory: private to the node's user; sockets lie in it.
        host: the address of this host on which services listen over tcp; None: ipc only.
        keys: for tcp; None where all is ipc, which needs none. Held here and not read from the connection file, which
            may vanish while processes start.
        log: how its processes log.
        token: by which services know the shards and workers that the node has started.
    """

    directory: str
    host: str | None = None
    keys: ConnectionFile | None = field(default=None, repr=False)
    log: LogOptions = field(default_factory=LogOptions)
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    @property
    def node_address(self) -> str:
        """Where the node listens; always on this host."""
        return f"ipc://{self.directory}/{NODE_SOCKET}"

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
        """For whoever connects."""
        return TransportOptions(keys=None if self.keys is None else self.keys.client_keys())

    def server_transport(self) -> TransportOptions:
        """For whoever listens."""
        return TransportOptions(keys=None if self.keys is None else self.keys.server_keys())

    def connect(self, address: str, *, timeout_s: float = 30.0) -> RpcClient:
        """A client of the service at `address`, for calls whose payload is small."""
        options = ClientOptions(timeout_s=timeout_s, shared_bytes=0)
        return RpcClient(address, options=options, transport=self.client_transport())


@dataclass(frozen=True, kw_only=True)
class ServicePost:
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

    def listen(self, address: str = "") -> Listener:
        """Listen where the process before this one did, if there was one; else at `address`, if given.

        Where somebody else has a port by now it takes another: the node hears of it, and tells who needs it.
        """
        options = self.place.server_transport()
        for chosen in filter(None, (self.address, address)):
            try:
                return listen(chosen, options=options)
            except TransportError as error:
                SERVICE.warning("%s listens elsewhere: %s", self.id, error, extra=subjects_of(self.id))
        return listen(self.place.address_for(self.id), options=options)


def subjects_of(id: str) -> dict[str, str | None]:
    """What log lines of or about the process of this id are about, by field: see `torch_dpflow.log`."""
    parts = _ID.fullmatch(id)
    return {} if parts is None else parts.groupdict()


class Heart:
    """A thread that tells the node that this process lives, for as long as its main thread comes round.

    A process that the node does not want any more is ended.

    Args:
        address: where the process listens; empty where it does not.
        hear: called with settings that have changed, in the heart's thread.
        patience_s: how long the main thread may be away.
    """

    def __init__(
        self,
        post: ServicePost,
        address: str,
        *,
        hear: Callable[[bytes], None] | None = None,
        patience_s: float = STUCK_S,
    ) -> None:
        self._post = post
        self._address = address
        self._hear = hear
        self._settings = post.settings
        #: Figures for people. Replaced by the main thread, which alone may look at what it is at.
        self.status: dict[str, Any] = {}
        self._patience_s = patience_s
        self._turned = time.monotonic()
        self._news = threading.Event()
        threading.Thread(target=self._run, name="dpflow-heart", daemon=True).start()

    def say(self, status: dict[str, Any]) -> None:
        """Tell the node of this at once. Any thread may call."""
        self.status = status
        self._news.set()

    def turned(self) -> None:
        """The main thread has come round."""
        self._turned = time.monotonic()

    def _run(self) -> None:
        post = self._post
        with post.place.connect(post.place.node_address) as node:
            while True:
                if time.monotonic() - self._turned < self._patience_s:
                    beat = Beat(post.id, post.incarnation, self._address, self.status)
                    # Else the node is busy; where it is gone this process ends of itself.
                    with suppress(DPFlowError):
                        self._obey(node.call("beat", beat, reply_type=Standing, timeout_s=BEAT_S).body)
                self._news.wait(BEAT_S)
                self._news.clear()

    def _obey(self, standing: Standing) -> None:
        if not standing.wanted:
            os._exit(0)
        if standing.settings != self._settings:
            self._settings = standing.settings
            if self._hear is not None:
                self._hear(standing.settings)


def serve(
    post: ServicePost,
    server: RpcServer,
    status: Callable[[], dict[str, Any]],
    turn: Callable[[], None],
    *,
    settle: Callable[[bytes], None] | None = None,
    turn_s: float = TURN_S,
    heart: Heart | None = None,
) -> None:
    """Serve until the process ends.

    turn: called between messages, at least every `turn_s` seconds. settle: called with settings that have changed.
    Both in this thread, as `status`, whose figures are for people. heart: of a process that has one already.
    """

    def hear(settings: bytes) -> None:
        if settle is not None:
            server.post(lambda: settle(settings))

    heart = heart or Heart(post, server.address, hear=hear)
    due = status_due = 0.0
    while True:
        server.step(turn_s)
        now = time.monotonic()
        if now >= due:
            due = now + turn_s
            heart.turned()
            turn()
        if now >= status_due:
            status_due = now + STATUS_S
            stats = server.stats()
            heart.status = {**status(), "malformed": stats.malformed, "strangers": stats.strangers}


def ask_in(server: RpcServer, question: Callable[[], T]) -> T:
    """What `question` returns, called in the server's thread, while this one waits. Raises what it raises."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)

    server.post(ask)
    return answer.result()
