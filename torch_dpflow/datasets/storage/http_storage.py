"""Objects of S3, OSS and web servers, read by GET requests over persistent connections.

The HTTP client is our own because of processor time: a signed GET of 100 kB takes 51 µs in one thread. boto3, oss2 and
s3fs take 8 to 17 times as long (a session, cookies and hooks for each request), obstore 115 to 123 µs. obstore 0.12.1
also hangs in a forked worker once its parent process has used it. Options that only vendors' clients support go
through fsspec.
"""

from __future__ import annotations

import functools
import http.client
import mimetypes
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec

from torch_dpflow.datasets.storage.base import (
    MAX_WAIT_S,
    ByteRange,
    ObjectState,
    ReadOptions,
    conditions,
    is_state_of_fields,
    state_of_fields,
)
from torch_dpflow.datasets.storage.credentials import Credentials
from torch_dpflow.datasets.storage.failures import error_of_status, storage_error
from torch_dpflow.datasets.storage.http_connection import MAX_IDLE, Connections, Response
from torch_dpflow.datasets.storage.proxies import Origin
from torch_dpflow.errors import DPFlowError, StorageError, StorageUnavailableError, TruncatedObjectError
from torch_dpflow.log import DATASETS

_ELEMENT = "<{0}>([^<]{{1,500}})</{0}>"
#: S3 sends these codes with status 400.
_STATUS_OF_CODE = {"RequestTimeout": 408, "ExpiredToken": 403, "InvalidToken": 403}
#: Bytes of an error response that are read.
_MAX_ERROR = 16 * 1024
#: Statuses whose body is the object; 203 comes from proxies.
_WITH_OBJECT = frozenset({200, 203, 206})
#: Values of Content-Encoding that leave the bytes as they are.
_NO_ENCODINGS = frozenset({"", "identity"})
#: An encoding of uploads to S3, which stays behind in the metadata of objects. The bytes should be decoded.
_UPLOADED = "aws-chunked"
#: The beginning of bytes that a server stored without decoding them.
_FRAME = re.compile(rb"[0-9a-fA-F]{1,15}(;chunk-signature=[0-9a-f]{64})?\r\n")
_MAX_FRAME = 98
_PAGES = frozenset({"text/html", "application/xhtml+xml"})
#: The type of a body with several ranges, each with headers of its part.
_IN_PARTS = frozenset({"multipart/byteranges"})
#: Requests of one read: redirects, another region, other keys.
_MAX_REQUESTS = 6
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
#: Bytes read at a time from a body of unknown length, or from a part that is skipped.
_PIECE = 1 << 20


@dataclass(frozen=True)
class GetRequest:
    """A GET request, ready to be sent."""

    origin: Origin
    #: the path in the request line
    target: str
    headers: Mapping[str, str] = field(repr=False)
    #: the credentials that signed it; None: it is not signed
    credentials: Credentials | None = None
    #: the region to which it is sent; "" if unknown, or if the service has no regions
    region: str = ""


@dataclass(frozen=True)
class ErrorResponse:
    """Response with an error instead of an object. `body` is the first 16 KiB; names of headers are in lower case."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes

    def element(self, name: str) -> str:
        """Return the text of an element of the body, which is XML from S3 and OSS; "" if the element is missing."""
        match = re.search(_ELEMENT.format(name).encode(), self.body)
        return match[1].decode("utf-8", "replace").strip() if match else ""

    @property
    def meaning(self) -> int:
        """The HTTP status that fits the error code in the body; the response's status for other or missing codes."""
        return _STATUS_OF_CODE.get(self.element("Code"), self.status)

    def error(self, span: ByteRange) -> StorageError:
        message = self.element("Message")
        code = f"{self.status} {self.element('Code') or self.reason}" + (f": {message}" if message else "")
        text = f"{span}: the storage answered {code}"
        known = error_of_status(self.meaning, text)
        if isinstance(known, StorageUnavailableError):
            known.retry_after_s = _seconds(self.headers.get("retry-after", ""))
        if known is not None:
            return known
        region = self.headers.get("x-amz-bucket-region")
        if region:
            text += f"; the bucket is in region {region}"
        elif 300 <= self.status < 400:
            text += f"; after {_MAX_REQUESTS} redirects, or to an address that is not followed: give the last address"
        return StorageError(text)


def _seconds(retry_after: str) -> float:
    """Return the seconds that a server requests to wait, given as a number or a date; 0 if it requests none."""
    if retry_after.isascii() and retry_after.isdecimal():
        return min(float(retry_after), MAX_WAIT_S)
    try:
        date = parsedate_to_datetime(retry_after).timestamp()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(date - time.time(), 0.0), MAX_WAIT_S)


class Service(Protocol):
    """Interface to S3, OSS or web servers for `HttpStorage`: an object's server, requests that read it, TLS context."""

    #: Whether compressed bodies, and web pages instead of images, are errors. False if users set the headers.
    checks_encoding: bool

    def origin(self, url: str) -> Origin:
        """Return the server of an object. It stays the same after `follow` has returned a request to another server."""

    def request(self, url: str) -> GetRequest:
        """Return a request for the whole object, to be sent within minutes. Object stores sign it, unless anonymous.

        Raises AccessDeniedError if it must be signed and no credentials were found, OptionError for a malformed URL.
        """

    def follow(self, url: str, request: GetRequest, refusal: ErrorResponse) -> GetRequest | None:
        """Return the next request to send after the response `refusal` to `request`; None if none can succeed.

        The next request follows a redirect, goes to the server of another region, or has other credentials.
        """

    def tls(self) -> ssl.SSLContext:
        """Return the TLS context for connections to the servers. Raises OptionError for missing certificates."""


T = TypeVar("T")
_Take = Callable[[Response, ByteRange], T]


class HttpStorage:
    """Storage of S3, OSS or web servers, read by the GETs that `service` returns. Thread-safe."""

    is_remote = True

    def __init__(self, service: Service, options: ReadOptions) -> None:
        self._service = service
        self._options = options
        self._connections = Connections(service.tls, max(MAX_IDLE, options.concurrency))

    def fetch(self, span: ByteRange, deadline: float) -> bytes:
        if (length := span.length or 0) > self._options.longest:
            raise StorageError(f"{span}: {length} bytes are above the limit of {self._options.longest}")
        return self._get(span, deadline, self._content)

    def look(self, span: ByteRange, deadline: float) -> ObjectState:
        # A GET, as presigned URLs allow no HEAD; of one byte, so that the answer has the size of the whole object.
        try:
            return self._get(msgspec.structs.replace(span, start=0, stop=1), deadline, _state)
        except TruncatedObjectError:  # an empty object has no first byte
            return self._get(msgspec.structs.replace(span, start=0, stop=None), deadline, _state)

    def _get(self, span: ByteRange, deadline: float, take: _Take[T]) -> T:
        """Request the object, and return the result of `take` for the response. Raises StorageError."""
        try:
            request = self._service.request(span.url)
            for left in reversed(range(_MAX_REQUESTS)):
                found = self._send(request, span, deadline, take)
                if not isinstance(found, ErrorResponse):
                    return found
                following = self._service.follow(span.url, request, found) if left else None
                if following is None:
                    raise found.error(span)
                request = following
        except DPFlowError:
            raise
        except Exception as error:
            raise storage_error(span, error) from error
        raise AssertionError("the last response ends the loop")

    def _send(self, request: GetRequest, span: ByteRange, deadline: float, take: _Take[T]) -> T | ErrorResponse:
        headers = dict(request.headers)
        if not span.is_whole:
            headers["range"] = f"bytes={span.start}-{'' if span.stop is None else span.stop - 1}"
        if span.state is not None:
            headers.update(conditions(span.state))
        connection = self._connections.take(request.origin)
        try:
            response = connection.get(request.target, headers, self._options.timeout_s, deadline)
        except (ConnectionError, http.client.BadStatusLine):
            connection.close()
            if connection.is_used and time.monotonic() < deadline:
                # The server closed it while it was idle, or sent more than announced. That is not a failure of the
                # storage, so it does not count as an attempt.
                return self._send(request, span, deadline, take)
            raise
        except BaseException:
            connection.close()
            raise
        is_reusable = False
        try:
            if response.status in _WITH_OBJECT:
                if self._service.checks_encoding:
                    _check_headers(response, span)
                # Not all servers obey conditions, and a weak ETag has none.
                if span.state is not None and not is_state_of_fields(span.state, response.fields):
                    raise span.replaced(state_of_fields(response.fields))
                found: T | ErrorResponse = take(response, span)
            else:
                body = response.read(_MAX_ERROR)
                found = ErrorResponse(response.status, response.reason, response.fields, body)
            is_reusable = response.leaves_connection
        finally:
            if is_reusable:
                self._connections.give_back(request.origin, connection)
            else:
                connection.close()
        return found

    def _content(self, response: Response, span: ByteRange) -> bytes:
        """Read exactly the bytes of `span` from a response with status 200 or 206.

        Raises:
            TruncatedObjectError: the object is shorter than the range, or than its known size.
            ChecksumError: the object is longer than its known size.
            StorageError: the response is longer than `ReadOptions.longest`, or the object has frames of its upload.
            StorageUnavailableError: the response has another range.
            StorageUnavailableError, http.client.IncompleteRead: the connection ended before the body did.
        """
        longest = self._options.longest
        if response.status == 206:
            data = _read_range(response, span, longest)
        elif span.is_whole:
            span.check_size(response.left)
            data = _read_body(response, span, longest)
            _check_end(response, span, len(data))
            span.check_size(len(data))
        else:
            span.check_size(response.left)
            data = _cut_out(response, span, longest)
        if "content-encoding" in response.fields:
            _check_frames(response, span, data)
        return data

    def node(self, url: str) -> str:
        return self._service.origin(url).host_header  # two servers of one host have different ports

    def close(self) -> None:
        self._connections.close()


def _state(response: Response, span: ByteRange) -> ObjectState:
    """Return size and state of an object from a response with its first byte, or with all bytes, which are not read."""
    size = response.left
    if response.status == 206:
        match = _CONTENT_RANGE.fullmatch(response.fields.get("content-range", ""))
        size = None if match is None or match[3] == "*" else int(match[3])
        _take(response, span.length or 0)
    span.check_size(size)
    return ObjectState(size, state_of_fields(response.fields))


def _check_headers(response: Response, span: ByteRange) -> None:
    """Check that the headers describe the object's own bytes.

    Raises:
        StorageError: the body is compressed.
        StorageUnavailableError: the body is a web page instead of an image, a sound or a video.
    """
    if _encodings(response) - _NO_ENCODINGS - {_UPLOADED}:
        raise StorageError(
            f"{span}: the server sent it in the encoding {response.fields['content-encoding'][:100]!r}, though none "
            "was requested; have it send the bytes as they are"
        )
    media_type = _media_type(response)
    if media_type in _PAGES:
        expected = mimetypes.guess_type(urlsplit(span.url).path)[0] or ""
        if expected.startswith(("image/", "audio/", "video/")):
            raise StorageUnavailableError(
                f"{span}: the server sent a web page ({media_type}) where the name promises {expected}: often a login "
                "or an error page with status 200; open the URL in a browser, or correct the server's Content-Type"
            )


def _media_type(response: Response) -> str:
    return response.fields.get("content-type", "").partition(";")[0].strip().lower()


def _encodings(response: Response) -> set[str]:
    encoding = response.fields.get("content-encoding")
    return set() if encoding is None else {part.strip().lower() for part in encoding.split(",")}


def _check_frames(response: Response, span: ByteRange, data: bytes) -> None:
    """Raise StorageError if the object contains, or may contain, the frames of a chunked upload.

    Frames are seen at the object's start. In other parts, and in short parts, only a size that the dataset records can
    exclude them.
    """
    if _UPLOADED not in _encodings(response):
        return
    has_frames = span.start == 0 and _FRAME.match(data) is not None
    is_seen = span.is_whole or (span.start == 0 and len(data) >= _MAX_FRAME)
    if has_frames or (span.size is None and not is_seen):
        raise StorageError(
            f"{span}: its Content-Encoding is {_UPLOADED!r}, and the server {'has' if has_frames else 'may have'} "
            "stored the frames of the upload with the bytes; upload it again without this encoding, or remove the field"
        )


def _read_range(response: Response, span: ByteRange, longest: int) -> bytes:
    header = response.fields.get("content-range", "")
    match = _CONTENT_RANGE.fullmatch(header)
    start, stop = (int(match[1]), int(match[2]) + 1) if match else (0, 0)
    total = span.size if match is None or match[3] == "*" else int(match[3])
    is_rest = stop == total
    is_requested = stop <= min(span.stop, total or stop) if span.stop is not None else is_rest
    if start != span.start or stop <= start or not is_requested or _media_type(response) in _IN_PARTS:
        raise StorageUnavailableError(f"{span}: the server answered with another range: {header[:100]!r}")
    if match is not None and match[3] != "*":
        span.check_size(int(match[3]))
    data = _read_body(response, span, longest)
    if len(data) != stop - start:
        raise StorageUnavailableError(
            f"{span}: the server answered with another range: {len(data)} bytes as {header[:100]!r}"
        )
    if span.stop is not None and stop < span.stop:
        raise TruncatedObjectError(f"{span}: the object gave only {len(data)} bytes of {span.length}")
    return data


def _read_body(response: Response, span: ByteRange, longest: int) -> bytes:
    if response.left is None:
        data = _take(response, longest + 1)
        if len(data) > longest:
            raise StorageError(f"{span}: the response is longer than the limit of {longest} bytes")
        return data
    if response.left > longest:
        raise StorageError(f"{span}: {response.left} bytes are above the limit of {longest}")
    return response.read(response.left)


def _cut_out(response: Response, span: ByteRange, longest: int) -> bytes:
    """Read the range from the whole object, which a server without support for ranges sends."""
    size = response.left
    if size is not None and max(span.start, span.stop or 0) > size:
        raise TruncatedObjectError(f"{span}: the object has only {size} bytes")
    stop = span.stop or size
    if (stop or span.start) > longest:
        raise StorageError(
            f"{span}: the server does not support range requests, and the range ends above the limit of {longest} "
            "bytes; serve the data by one that does"
        )
    if span.start:
        _warn_of_cost("/".join(str(ByteRange(span.url)).split("/")[:3]))
    skipped = 0
    while skipped < span.start:
        passed = len(response.read(min(span.start - skipped, _PIECE)))
        if not passed:
            raise _ended(span, skipped)
        skipped += passed
    data = _take(response, (longest + 1 if stop is None else stop) - span.start)
    if span.length is not None and len(data) < span.length:
        raise _ended(span, span.start + len(data))
    if span.length is None:
        _check_end(response, span, span.start + len(data))
    if span.start + len(data) > longest:
        raise StorageError(f"{span}: the response is longer than the limit of {longest} bytes")
    return data


def _check_end(response: Response, span: ByteRange, count: int) -> None:
    """Raise StorageUnavailableError if the object may have more than the `count` bytes that were read to its end."""
    if response.is_end_ambiguous and count != span.size:
        raise StorageUnavailableError(
            f"{span}: the connection ended after {count} bytes of a response without a length, without a proper end of "
            "TLS or although the server keeps connections; have the server send Content-Length"
        )


def _ended(span: ByteRange, count: int) -> StorageUnavailableError:
    # A short object without a length in the header looks the same, but is less likely.
    return StorageUnavailableError(f"{span}: the connection ended after {count} bytes of the object")


@functools.lru_cache(maxsize=64)
def _warn_of_cost(server: str) -> None:
    DATASETS.warning(
        "%s does not support range requests: for a part of an object everything before it is read too; serve packs by "
        "a server that supports them",
        server,
    )


def _take(response: Response, count: int) -> bytes:
    """Read the next `count` bytes of a body; fewer if it ends."""
    parts: list[bytes] = []
    while count and (part := response.read(min(count, _PIECE))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
