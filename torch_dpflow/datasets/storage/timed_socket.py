"""A socket with a limit for each wait, and a deadline for all of them."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import struct
import sys
import time

#: Bytes to receive if the length is unknown: a head and the beginning of a body.
_FIRST = 16 << 10
#: Most bytes received at once; a server may announce more than it has.
_PIECE = 8 << 20
#: Bytes of the longest record of TLS, at which a receive ends.
_TLS_PIECE = 16 << 10
_LONGEST_HEAD = 64 << 10
_END_OF_LINE = re.compile(rb"\n")
_END_OF_HEAD = re.compile(rb"\n\r?\n")


class TimedSocket:
    """A connection on which each wait is limited, and all of them end at a deadline.

    A socket's own timeout restarts with every byte, so a server that sends one now and then could delay a
    reader for days.

    Raises TimeoutError in every method.
    """

    def __init__(self, raw: socket.socket) -> None:
        self._raw = raw
        is_tls = isinstance(raw, ssl.SSLSocket)
        # With a Python timeout, each call polls first and releases the GIL twice: among 16 threads
        # that costs more than receiving 100 kB.
        self._is_timed_by_kernel = sys.platform == "linux" and not is_tls
        # One large receive instead of ten small ones, between which other threads would run.
        self._flags = 0 if is_tls else socket.MSG_WAITALL
        self._piece = _TLS_PIECE if is_tls else _PIECE
        if self._is_timed_by_kernel:
            raw.settimeout(None)
        self._silence_s = self._deadline = self._wait_s = 0.0
        #: Received bytes that have not been read.
        self._early = b""

    def limit(self, silence_s: float, deadline: float) -> None:
        """End each wait after `silence_s` (after twice that if some bytes have come), and all at `deadline`."""
        self._silence_s, self._deadline = silence_s, deadline

    @property
    def is_at_rest(self) -> bool:
        """Whether everything that was received has been read."""
        return not self._early

    def send(self, data: bytes) -> None:
        self._set_wait()
        try:
            self._raw.sendall(data)
        except BlockingIOError as error:
            raise TimeoutError("the server takes no bytes") from error

    def read_head(self) -> bytes:
        """The bytes up to the first empty line. Raises http.client.HTTPException if there is none."""
        return self._read_to(_END_OF_HEAD, "head of the answer")

    def read_line(self) -> bytes:
        """The bytes up to the end of the line. Raises http.client.HTTPException if there is none."""
        return self._read_to(_END_OF_LINE, "line of the answer")

    def _read_to(self, end: re.Pattern[bytes], what: str) -> bytes:
        data, self._early = self._early or self._receive(_FIRST), b""
        while (match := end.search(data)) is None:
            more = self._receive(_FIRST)
            if not more:
                raise http.client.RemoteDisconnected(f"the connection ended within the {what}")
            data += more
            if len(data) > _LONGEST_HEAD:
                raise http.client.LineTooLong(what)
        self._early = data[match.end() :]
        return data[: match.end()]

    def read(self, count: int) -> bytes:
        """The next `count` bytes; fewer if the connection ends before."""
        first, self._early = self._early[:count], self._early[count:]
        missing = count - len(first)
        if not missing:
            return first
        parts = [first]
        while missing and (part := self._receive(min(missing, self._piece), self._flags)):
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _receive(self, count: int, flags: int = 0) -> bytes:
        self._set_wait()
        try:
            return self._raw.recv(count, flags)
        except BlockingIOError as error:
            raise TimeoutError("the server sends no bytes") from error

    def _set_wait(self) -> None:
        """Limit the next wait; makes a system call only if the limit changes."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        wait_s = min(self._silence_s, left)
        if wait_s == self._wait_s:
            return
        self._wait_s = wait_s
        if not self._is_timed_by_kernel:
            self._raw.settimeout(wait_s)
            return
        timeval = struct.pack("@ll", int(wait_s), max(1, int(wait_s % 1 * 1e6)))  # zero would mean no limit
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def close(self) -> None:
        self._raw.close()
