"""Responses of HTTP/1.1 servers."""

from __future__ import annotations

import functools
import http.client
import re

from torch_dpflow.datasets.storage.timed_socket import TimedSocket

_STATUS_LINE = re.compile(r"HTTP/1\.([0-9]) ([1-9][0-9][0-9])(?: (.*))?")
_FIELD_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: Digits of a length, as many as no object has.
_MAX_DIGITS = 19
#: A chunk's size, perhaps with spaces, and extensions, which are ignored.
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n\0]*)?\r\n")
#: Lines of the trailer section of a chunked body, at most.
_MAX_TRAILERS = 100


class MalformedResponseError(http.client.HTTPException):
    """A response that RFC 9112 does not allow, or whose framing is ambiguous: where its body ends is a guess."""


class Response:
    """A response whose head has been read, strictly by RFC 9112.

    `http.client` parses heads as e-mails, which takes most of a GET's processor time; here some splits do.

    Raises:
        http.client.HTTPException: the server does not speak HTTP/1, or the connection ended in the head.
        MalformedResponseError: see there.
    """

    def __init__(self, source: TimedSocket) -> None:
        self._source = source
        self.status = 100
        while 100 <= self.status < 200:
            self._parse(source.read_head().decode("latin-1"))
            if self.status == 101:
                raise MalformedResponseError("the server changes to another protocol (101), unrequested")
        self._chunk_left = 0
        self._is_chunked = "transfer-encoding" in self.fields
        if self._is_chunked:
            self._check_chunked()
        #: Bytes of the body that have not been read; None if the head has no length.
        self.left = 0 if self.status in (204, 304) else self._length()
        #: Whether the whole body has been read.
        self.is_read = self.left == 0
        self._is_last = self._is_last_of_connection()

    def _parse(self, head: str) -> None:
        head = head.replace("\r\n", "\n")
        if "\r" in head or "\0" in head:
            raise MalformedResponseError("the head has a carriage return or a null byte within a line")
        status_line, *lines = head[:-2].split("\n")
        match = _STATUS_LINE.fullmatch(status_line)
        if match is None:
            raise http.client.BadStatusLine(status_line[:100])
        minor, status, reason = match.groups()
        self._is_old, self.status, self.reason = minor == "0", int(status), (reason or "").strip()
        #: by lower-case name
        self.fields: dict[str, str] = {}
        last = ""
        for line in lines:
            name, colon, value = line.partition(":")
            key = _field_name(name) if colon else ""
            if key:
                last, value = key, value.strip(" \t")
                self.fields[key] = f"{self.fields[key]}, {value}" if key in self.fields else value
            elif last and line[:1] in (" ", "\t"):  # continues the line before
                self.fields[last] = f"{self.fields[last]} {line.strip()}".strip()
            else:
                raise MalformedResponseError(f"the head has a line that is no field: {line[:100]!r}")

    def _check_chunked(self) -> None:
        """Check that the body has chunks, and nothing else says where it ends.

        With a length beside them RFC 9112 (6.1) suspects an attack. Version 1.0 has no chunks (6.1), and two codings
        "chunked" may not be (7.1), nor one that was not requested.
        """
        codings, length = self.fields["transfer-encoding"], self.fields.get("content-length")
        elements = [element for part in codings.split(",") if (element := part.strip(" \t").lower())]
        if self._is_old or length is not None or elements != ["chunked"]:
            raise MalformedResponseError(
                f"Transfer-Encoding {codings[:100]!r} with Content-Length {str(length)[:100]!r} in "
                f"HTTP/1.{0 if self._is_old else 1} does not say where the body ends"
            )

    def _length(self) -> int | None:
        text = self.fields.get("content-length")
        if text is None:
            return None
        if not (
            text.isdecimal() and len(text) < _MAX_DIGITS
        ):  # a text in Latin-1 has no other digits than ASCII's
            values = {value.strip(" \t") for value in text.split(",")}  # the same one twice is allowed (6.3)
            text = values.pop()
            if values or not (text.isdecimal() and len(text) < _MAX_DIGITS):
                raise MalformedResponseError(
                    f"Content-Length {self.fields['content-length'][:100]!r} is no single number"
                )
        return int(text)

    def _is_last_of_connection(self) -> bool:
        if self.left is None and not self._is_chunked:
            return True
        connection = self.fields.get("connection", "").lower()
        return "close" in connection or (self._is_old and "keep-alive" not in connection)

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
            if not self._chunk_left and self._exactly(2) != b"\r\n":
                raise MalformedResponseError("a chunk of the answer is longer than its size")
        return b"".join(parts)

    def _begin_chunk(self) -> None:
        size = _CHUNK_SIZE.fullmatch(self._source.read_line())
        if size is None:
            raise MalformedResponseError("a chunk of the answer does not say how long it is")
        self._chunk_left = int(size[1], 16)
        if not self._chunk_left:
            self._skip_trailers()
            self.is_read = True

    def _skip_trailers(self) -> None:
        for _ in range(_MAX_TRAILERS):
            if self._source.read_line() in (b"\r\n", b"\n"):
                return
        raise MalformedResponseError(f"more than {_MAX_TRAILERS} fields follow the last chunk of the answer")

    def _exactly(self, count: int) -> bytes:
        data = self._source.read(count)
        if len(data) < count:
            raise http.client.IncompleteRead(data, count - len(data))
        return data


@functools.lru_cache(maxsize=512)
def _field_name(text: str) -> str:
    """The name of a field in lower case; "" if it is none. Cached: responses of one server have the same names."""
    return text.lower() if _FIELD_NAME.fullmatch(text) else ""
