"""A client's side of TLS that reads from its socket in large pieces.

`ssl.SSLSocket` makes two calls of the kernel for each 16 KiB, and waits for its turn as often.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any, TypeVar, cast

_PIECE_BYTES = 256 << 10
T = TypeVar("T")


class TLSStream:
    """A connected socket with TLS over it, as much of a socket as its users need. It owns the socket.

    Raises OSError, ssl.SSLError too: the handshake fails.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, server_name: str) -> None:
        self._socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._piece = memoryview(bytearray(_PIECE_BYTES))
        self._fed(self._tls.do_handshake)
        self._flush()

    @property
    def has_bytes(self) -> bool:
        """Whether something has come that the socket does not tell of."""
        return bool(self._tls.pending() or self._incoming.pending)

    def fileno(self) -> int:
        return self._socket.fileno()

    def getsockname(self) -> Any:
        return self._socket.getsockname()

    def getpeername(self) -> Any:
        return self._socket.getpeername()

    def sendall(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[self._tls.write(view) :]
        self._flush()

    def recv(self, count: int) -> bytes:
        return self._fed(lambda: self._tls.read(count))

    def recv_into(self, view: memoryview) -> int:
        """Fill all of `view`, or as much as comes before the connection ends; return the number of bytes."""
        read, size, at = self._tls.read, len(view), 0
        while at < size:
            if not self.has_bytes:  # `ssl` takes longer to say so than to look
                self._feed()
            try:
                came = cast(int, read(size - at, view[at:]))
            except ssl.SSLWantReadError:
                self._feed()
                continue
            if not came:
                break
            at += came
        return at

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        self._socket.setsockopt(level, option, value)

    def close(self) -> None:
        self._socket.close()

    def _fed(self, act: Callable[[], T]) -> T:
        """What this gives, once enough has come for it; as for an end of the connection where that has ended."""
        while True:
            try:
                return act()
            except ssl.SSLWantReadError:
                self._feed()

    def _feed(self) -> None:
        """Take what has come, or wait for it."""
        self._flush()
        came = self._socket.recv_into(self._piece)
        if came:
            self._incoming.write(self._piece[:came])
        else:
            self._incoming.write_eof()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._socket.sendall(self._outgoing.read())
