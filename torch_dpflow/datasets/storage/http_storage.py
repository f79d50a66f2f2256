"""Objects of S3, OSS and web servers over persistent connections, by one GET each.

Our own because of processor time: a signed GET of 100 kB takes 51 µs in one thread, with obstore 115 to 123 µs, and one
of 126 kB took oss2 1.2 to 1.4 ms (a session, cookies and hooks for each request). obstore's threads do not survive a
fork. With other options, and with proxies, fsspec reads.
"""

from __future__ import annotations

import http.client
import mimetypes
import time
from urllib.parse import urlsplit

from torch_dpflow.datasets.storage.answers import read_object
from torch_dpflow.datasets.storage.base import ByteRange
from torch_dpflow.datasets.storage.connections import Connections, KeepAliveConnection
from torch_dpflow.datasets.storage.exchanges import ErrorResponse, GetRequest, Service
from torch_dpflow.datasets.storage.failures import storage_error
from torch_dpflow.datasets.storage.options import ReadOptions
from torch_dpflow.datasets.storage.responses import Response
from torch_dpflow.errors import DPFlowError, StorageError, StorageUnavailableError

#: Bytes of an error response that are read.
_LONGEST_ERROR = 16 * 1024
#: Statuses whose body is the object: 203 is one that a proxy has passed on.
_WITH_OBJECT = frozenset({200, 203, 206})
#: Values of Content-Encoding that leave the bytes as they are: "aws-chunked" is what an upload to S3 leaves behind.
_NO_ENCODINGS = frozenset({"", "identity", "aws-chunked"})
_PAGES = frozenset({"text/html", "application/xhtml+xml"})
#: Most requests of one read: redirects, another region, other keys.
_MOST_REQUESTS = 6


class HttpStorage:
    """Reads objects through the GETs of one service. Thread-safe."""

    is_remote = True

    def __init__(self, service: Service, options: ReadOptions) -> None:
        self._service = service
        self._options = options
        self._connections = Connections(service.tls)

    def fetch(self, span: ByteRange, deadline: float) -> bytes:
        if span.length is not None and span.length > self._options.longest:
            raise StorageError(f"{span}: {span.length} bytes are above the limit of {self._options.longest}")
        try:
            return self._get(span, deadline)
        except DPFlowError:
            raise
        except Exception as error:
            raise storage_error(span, error) from error

    def _get(self, span: ByteRange, deadline: float) -> bytes:
        request: GetRequest | None = self._service.request(span.url)
        for left in reversed(range(_MOST_REQUESTS)):
            assert request is not None
            answer = self._fetch(request, span, deadline)
            if isinstance(answer, bytes):
                return answer
            request = self._service.follow(span.url, request, answer) if left else None
            if request is None:
                raise answer.error(span)
        raise AssertionError("the last response ends the loop")

    def _fetch(self, request: GetRequest, span: ByteRange, deadline: float) -> bytes | ErrorResponse:
        headers = dict(request.headers)
        if not span.is_whole:
            headers["range"] = f"bytes={span.start}-{'' if span.stop is None else span.stop - 1}"
        if span.revision is not None:
            headers["if-match" if span.revision[:1] == '"' else "if-unmodified-since"] = span.revision
        connection = self._connections.take(request.origin)
        is_used = connection is not None
        if connection is None:
            connection = self._connections.make(request.origin)
        try:
            response = connection.get(request.target, headers, self._options.timeout_s, deadline)
        except (ConnectionError, http.client.BadStatusLine):
            connection.close()
            if is_used and time.monotonic() < deadline:
                # The server closed it while it was idle, or sent more than announced: not a failure of the
                # storage, so it does not count as an attempt.
                return self._fetch(request, span, deadline)
            raise
        except BaseException:
            connection.close()
            raise
        return self._take_answer(request, span, connection, response)

    def _take_answer(
        self,
        request: GetRequest,
        span: ByteRange,
        connection: KeepAliveConnection,
        response: Response,
    ) -> bytes | ErrorResponse:
        is_done = False
        try:
            if response.status in _WITH_OBJECT:
                if not self._service.notes_encoding:
                    _check_headers(response, span)
                answer: bytes | ErrorResponse = read_object(response, span, self._options.longest)
            else:
                answer = _refusal(response)
            is_done = response.leaves_connection
        finally:
            if is_done:
                self._connections.give_back(request.origin, connection)
            else:
                connection.close()
        return answer

    def node(self, url: str) -> str:
        return self._service.origin(url).host

    def close(self) -> None:
        self._connections.close()


def _check_headers(response: Response, span: ByteRange) -> None:
    """Check that a body is the object's bytes, as far as its headers tell.

    Raises:
        StorageError: it is compressed.
        StorageUnavailableError: it is a web page in the place of an image, a sound or a video.
    """
    encoding = response.fields.get("content-encoding")
    if encoding is not None and {part.strip().lower() for part in encoding.split(",")} - _NO_ENCODINGS:
        raise StorageError(
            f"{span}: the server sent it in the encoding {encoding[:100]!r}, though none was requested; "
            "have it send the bytes as they are"
        )
    media_type = response.fields.get("content-type", "").partition(";")[0].strip().lower()
    if media_type in _PAGES:
        expected = mimetypes.guess_type(urlsplit(span.url).path)[0] or ""
        if expected.startswith(("image/", "audio/", "video/")):
            raise StorageUnavailableError(
                f"{span}: the server sent a web page ({media_type}) where the name promises {expected}: often a login "
                "or an error page with status 200; open the URL in a browser, or correct the server's Content-Type"
            )


def _refusal(response: Response) -> ErrorResponse:
    return ErrorResponse(response.status, response.reason, response.fields, response.read(_LONGEST_ERROR))
