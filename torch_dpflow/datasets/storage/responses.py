"""Responses of HTTP/1.1 servers."""

from __future__ import annotations

import http.client
import re

from torch_dpflow.datasets.storage.timed_socket import TimedSocket

_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")


class Response:
    """A response whose head has been read.

    `http.client` parses heads as e-mails, which takes most of a GET's processor time; here some splits do.

    Raises:
        http.client.HTTPException: the server does not speak HTTP/1, or the connection ended in the head.
    """

    def __init__(self, source: TimedSocket) -> None:
        self._source = source
        self.status = 100
        while 100 <= self.status < 200:
            self._parse(source.read_head().decode("latin-1"))
        self._is_chunked = self.fields.get("transfer-encoding", "").lower() == "chunked"
        self._chunk_left = 0
        #: Bytes of the body that have not been read; None if the head has no length.
        self.left = 0 if self.status in (204, 304) else self._length()
        #: Whether the whole body has been read.
        self.is_read = self.left == 0
        self._is_last = self._is_last_of_connection()

    def _parse(self, head: str) -> None:
        status_line, *lines = head.split("\n")
        version, _, status = status_line.strip().partition(" ")
        code, _, reason = status.partition(" ")
        if not version.startswith("HTTP/1.") or len(code) != 3 or not code.isdecimal():
            raise http.client.BadStatusLine(status_line[:100])
        self._version, self.status, self.reason = version, int(code), reason.strip()
        #: by lower-case name
        self.fields: dict[str, str] = {}
        last = ""
        for line in lines:
            if line[:1] in (" ", "\t"):  # continues the line before
                self.fields[last] = f"{self.fields.get(last, '')} {line.strip()}".strip()
                continue
            name, _, value = line.partition(":")
            last, value = name.strip().lower(), value.strip()
            self.fields[last] = f"{self.fields[last]}, {value}" if last in self.fields else value

    def _length(self) -> int | None:
        text = self.fields.get("content-length", "")
        return int(text) if text.isdecimal() and text.isascii() and not self._is_chunked else None

    def _is_last_of_connection(self) -> bool:
        if self.left is None and not self._is_chunked:
            return True
        connection = self.fields.get("connection", "").lower()
        return "close" in connection or (self._version == "HTTP/1.0" and "keep-alive" not in connection)

    @property
    def leaves_connection(self) -> bool:
        """Whether its connection can be used again: the response has been read, and no bytes follow it."""
        return self.is_read and not self._is_last and self._source.is_at_rest

    def read(self, count: int) -> bytes:
        """The next `count` bytes of the body, fewer only at its end.

        Raises:
            http.client.IncompleteRead: the connection ended before the body did.
        """
        if self._is_chunked:
            return self._read_chunks(count)
        if self.left is None:
            data = self._source.read(count)
            self.is_read = len(data) < count
            return data
        data = self._exactly(min(count, self.left))
        self.left -= len(data)
        self.is_read = not self.left
        return data

    def _read_chunks(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count and not self.is_read:
            if not self._chunk_left:
                self._begin_chunk()
                continue
            part = self._exactly(min(count, self._chunk_left))
            parts.append(part)
            count -= len(part)
            self._chunk_left -= len(part)
            if not self._chunk_left:
                self._source.read_line()
        return b"".join(parts)

    def _begin_chunk(self) -> None:
        size = _CHUNK_SIZE.match(self._source.read_line())
        if size is None:
            raise http.client.HTTPException("a chunk of the answer does not say how long it is")
        self._chunk_left = int(size[0], 16)
        if not self._chunk_left:
            while self._source.read_line().strip():
                pass  # trailing headers
            self.is_read = True

    def _exactly(self, count: int) -> bytes:
        data = self._source.read(count)
        if len(data) < count:
            raise http.client.IncompleteRead(data, count - len(data))
        return data
