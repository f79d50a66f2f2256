"""HTTP connections that stay open between requests, and that no server can hold up for ever."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

#: Seconds after which an idle connection is not used again: load balancers drop theirs after about a minute.
LONGEST_IDLE_S = 30.0


class Origin(NamedTuple):
    """Where a connection leads."""

    is_tls: bool
    host: str
    port: int


class Connections:
    """Idle connections of one process, the last used first. Thread-safe.

    A stack, not one connection for each thread: threads come and go, and no more connections are in use at
    once than reads overlap.

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
        """An open connection that was used lately, if there is one."""
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
        """Keep it for the next request; its last answer has been read to the end."""
        self._idle.setdefault(origin, []).append((time.monotonic(), connection))

    def close(self) -> None:
        """Close those that are idle."""
        _close_all(self._idle)


def _close_all(idle: dict[Origin, list[tuple[float, KeepAliveConnection]]]) -> None:
    for connections in idle.values():
        while connections:
            connections.pop()[1].close()


class KeepAliveConnection(http.client.HTTPConnection):
    """One connection of `http.client` whose every wait, for headers too, ends at a deadline."""

    def __init__(self, origin: Origin, context: ssl.SSLContext | None) -> None:
        super().__init__(origin.host, origin.port)
        self._tls = context
        self._limits = _Limits()
        if origin.is_tls:
            self.default_port = http.client.HTTPS_PORT

    def limit(self, silence_s: float, deadline: float) -> None:
        """Let each wait of the next request end after `silence_s`, and all of them at `deadline`."""
        self._limits.silence_s, self._limits.deadline = silence_s, deadline

    def connect(self) -> None:
        raw = socket.create_connection((self.host, self.port), self._limits.wait_s())
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                raw = self._tls.wrap_socket(raw, server_hostname=self.host)
        except BaseException:
            raw.close()
            raise
        self.sock = _LimitedSocket(raw, self._limits)

    def get(self, target: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Send a GET and read the head of its answer."""
        self.request("GET", target, headers=dict(headers))
        return self.getresponse()


class _Limits:
    """How long a connection may wait now."""

    silence_s = 0.0
    deadline = 0.0

    def wait_s(self) -> float:
        """Seconds that the next wait may take. Raises TimeoutError when there are none left."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return min(self.silence_s, left)


class _LimitedSocket:
    """What `http.client` uses of a socket, with a limit on every wait.

    A socket's own timeout starts anew with every byte, so a server that sends one now and then could hold a
    reader up for days.
    """

    def __init__(self, raw: socket.socket, limits: _Limits) -> None:
        self._raw = raw
        self._limits = limits
        self._open_files = 0
        self._is_closed = False

    def sendall(self, data: Any) -> None:
        self._raw.settimeout(self._limits.wait_s())
        self._raw.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        self._open_files += 1
        return io.BufferedReader(_LimitedFile(self._raw, self._limits, self._file_closed))

    def close(self) -> None:
        # As with a real socket: http.client closes it before the last answer is read.
        self._is_closed = True
        if not self._open_files:
            self._raw.close()

    def _file_closed(self) -> None:
        self._open_files -= 1
        if self._is_closed and not self._open_files:
            self._raw.close()


class _LimitedFile(io.RawIOBase):
    def __init__(self, raw: socket.socket, limits: _Limits, closed: Callable[[], None]) -> None:
        self._raw = raw
        self._limits = limits
        self._tell_closed = closed

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._tell_closed()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._raw.settimeout(self._limits.wait_s())
        return self._raw.recv_into(buffer)
