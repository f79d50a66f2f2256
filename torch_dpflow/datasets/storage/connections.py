"""Persistent HTTP connections."""

from __future__ import annotations

import socket
import ssl
import time
import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch_dpflow.datasets.storage.responses import Response
from torch_dpflow.datasets.storage.timed_socket import TimedSocket
from torch_dpflow.errors import OptionError

#: Seconds after which an idle connection is not used again: load balancers drop theirs after about a minute.
LONGEST_IDLE_S = 30.0


class Origin(NamedTuple):
    """The server of a connection."""

    is_tls: bool
    host: str
    port: int

    @property
    def host_header(self) -> str:
        """The Host header of requests to it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


class Connections:
    """Idle connections of one process, the last used first. Thread-safe.

    A stack, not one connection for each thread: threads are short-lived, and at most as many connections are used at
    once as reads overlap.

    Args:
        tls: makes the context of TLS connections, when the first one is made.
    """

    def __init__(self, tls: Callable[[], ssl.SSLContext] = ssl.create_default_context) -> None:
        # Appending to a list and popping from it are atomic.
        self._idle: dict[Origin, list[tuple[float, KeepAliveConnection]]] = {}
        self._make_context = tls
        self._context: ssl.SSLContext | None = None
        weakref.finalize(self, _close_all, self._idle)

    def take(self, origin: Origin) -> KeepAliveConnection | None:
        """An open connection that was used recently, if there is one."""
        idle = self._idle.get(origin)
        while idle:
            try:
                since, connection = idle.pop()
            except IndexError:
                return None  # another thread was faster
            if time.monotonic() - since < LONGEST_IDLE_S:
                return connection
            connection.close()
        return None

    def make(self, origin: Origin) -> KeepAliveConnection:
        """A new one; it connects with its first request."""
        if origin.is_tls and self._context is None:
            self._context = self._make_context()
        return KeepAliveConnection(origin, self._context if origin.is_tls else None)

    def give_back(self, origin: Origin, connection: KeepAliveConnection) -> None:
        """Keep it for the next request; its last response has been read to the end."""
        self._idle.setdefault(origin, []).append((time.monotonic(), connection))

    def close(self) -> None:
        """Close all idle connections."""
        _close_all(self._idle)


def _close_all(idle: dict[Origin, list[tuple[float, KeepAliveConnection]]]) -> None:
    for connections in idle.values():
        while connections:
            connections.pop()[1].close()


class KeepAliveConnection:
    """One connection, made by its first request; for its time limits see `TimedSocket`."""

    def __init__(self, origin: Origin, context: ssl.SSLContext | None) -> None:
        self._origin = origin
        self._tls = context
        self._socket: TimedSocket | None = None

    def get(self, target: str, headers: Mapping[str, str], silence_s: float, deadline: float) -> Response:
        """Send a GET, whose `target` is escaped already, and read the head of its response."""
        head = _head(self._origin.host_header, target, headers)
        if self._socket is None:
            self._socket = self._connect(silence_s, deadline)
        self._socket.limit(silence_s, deadline)
        self._socket.send(head)
        return Response(self._socket)

    def _connect(self, silence_s: float, deadline: float) -> TimedSocket:
        wait_s = min(silence_s, deadline - time.monotonic())
        if wait_s <= 0:
            raise TimeoutError("the deadline has passed")
        raw = socket.create_connection((self._origin.host, self._origin.port), wait_s)
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                raw = self._tls.wrap_socket(raw, server_hostname=self._origin.host)
        except BaseException:
            raw.close()
            raise
        return TimedSocket(raw)

    def close(self) -> None:
        """Close it; the rest of its last response is lost."""
        if self._socket is not None:
            self._socket.close()


def _head(host: str, target: str, headers: Mapping[str, str]) -> bytes:
    fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n{fields}\r\n"
    if head.count("\n") + head.count("\r") != 2 * (len(headers) + 4):
        raise OptionError(f"a header for {host} has a line break in it; look at keys, tokens and `headers`")
    return head.encode("latin-1")
