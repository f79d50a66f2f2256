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

from torch_dpflow.errors import OptionError

#: Seconds after which an idle connection is not used again: load balancers drop theirs after about a minute.
LONGEST_IDLE_S = 30.0


class Origin(NamedTuple):
    """Where a connection leads."""

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


class KeepAliveConnection:
    """One connection whose every wait, for headers too, ends at a deadline.

    `http.client` reads the bodies. Requests and heads are made here: there they take most of a GET's processor
    time, in the parser of e-mails.
    """

    def __init__(self, origin: Origin, context: ssl.SSLContext | None) -> None:
        self._origin = origin
        self._tls = context
        self._limits = _Limits()
        self._socket: _LimitedSocket | None = None
        self._response: Response | None = None

    def limit(self, silence_s: float, deadline: float) -> None:
        """Let each wait of the next request end after `silence_s`, and all of them at `deadline`."""
        self._limits.silence_s, self._limits.deadline = silence_s, deadline

    def _connect(self) -> _LimitedSocket:
        raw = socket.create_connection((self._origin.host, self._origin.port), self._limits.wait_s())
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                raw = self._tls.wrap_socket(raw, server_hostname=self._origin.host)
        except BaseException:
            raw.close()
            raise
        return _LimitedSocket(raw, self._limits)

    def get(self, target: str, headers: Mapping[str, str]) -> Response:
        """Send a GET, whose `target` is escaped already, and read the head of its answer."""
        head = _head(self._origin.host_header, target, headers)
        if self._socket is None:
            self._socket = self._connect()
        self._socket.sendall(head)
        self._response = Response(self._socket)  # type: ignore[arg-type]
        self._response.begin()
        return self._response

    def close(self) -> None:
        """Close it, and what is left of its last answer."""
        if self._socket is not None:
            self._socket.close()
        if self._response is not None:
            self._response.close()


def _head(host: str, target: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"GET {target} HTTP/1.1", f"Host: {host}", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise OptionError(f"a header for {host} has a line break in it; look at keys, tokens and `headers`")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Response(http.client.HTTPResponse):
    """An answer whose head is parsed by a few splits."""

    #: by lower-case name
    fields: dict[str, str]

    def begin(self) -> None:
        """Read the head. Raises http.client.HTTPException."""
        version, status, reason = self._read_status()  # type: ignore[attr-defined]
        while status == 100:
            http.client._read_headers(self.fp)  # type: ignore[attr-defined]
            version, status, reason = self._read_status()  # type: ignore[attr-defined]
        if not version.startswith("HTTP/1."):
            raise http.client.UnknownProtocol(version)
        self.version = 10 if version == "HTTP/1.0" else 11
        self.status, self.reason = status, reason.strip()
        lines = http.client._read_headers(self.fp)  # type: ignore[attr-defined]
        if not lines[-1]:
            raise http.client.RemoteDisconnected("the connection ended within the head of the answer")
        self.fields = _parsed(lines)
        self.headers = self.msg = self.fields  # type: ignore[assignment]
        self.chunked = self.fields.get("transfer-encoding", "").lower() == "chunked"
        self.chunk_left = None
        self.length = 0 if status in (204, 304) else self._told_length()
        is_endless = self.length is None and not self.chunked
        self.will_close = is_endless or self._check_close()  # type: ignore[attr-defined]

    def _told_length(self) -> int | None:
        text = self.fields.get("content-length", "")
        return int(text) if text.isdecimal() and text.isascii() and not self.chunked else None

    def getheader(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name.lower(), default)


def _parsed(lines: list[bytes]) -> dict[str, str]:
    fields: dict[str, str] = {}
    last = ""
    for line in lines:
        text = line.decode("latin-1")
        if text[0] in " \t":  # goes on with the line before
            fields[last] = f"{fields.get(last, '')} {text.strip()}"
            continue
        name, _, value = text.partition(":")
        last = name.strip().lower()
        value = value.strip()
        fields[last] = f"{fields[last]}, {value}" if last in fields else value
    return fields


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

    def set_on(self, raw: socket.socket) -> None:
        """Let the next wait of `raw` take no longer; a system call only where that changes."""
        wait_s = self.wait_s()
        if raw.gettimeout() != wait_s:
            raw.settimeout(wait_s)


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
        self._limits.set_on(self._raw)
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
        self._limits.set_on(self._raw)
        return self._raw.recv_into(buffer)
