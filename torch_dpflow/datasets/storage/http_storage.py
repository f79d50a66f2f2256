"""Objects of S3 and OSS over connections that stay open: one signed GET each, and little else."""

from __future__ import annotations

import http.client
import re
import time
from typing import NoReturn

from torch_dpflow.datasets.storage.base import ByteRange
from torch_dpflow.datasets.storage.connections import Connections, KeepAliveConnection
from torch_dpflow.datasets.storage.failures import BY_STATUS, storage_error
from torch_dpflow.datasets.storage.options import ReadOptions
from torch_dpflow.datasets.storage.services import Request, Service
from torch_dpflow.errors import (
    AccessDeniedError,
    DPFlowError,
    StorageError,
    TruncatedObjectError,
)

#: Bytes of an error's text that are looked at.
_LONGEST_ERROR = 16 * 1024
_CODE = re.compile(rb"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{1,500})</Message>")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
#: S3 answers these with status 400.
_STATUS_OF_CODE = {"RequestTimeout": 408, "ExpiredToken": 403, "InvalidToken": 403}


class HttpStorage:
    """Reads objects through signed GETs of one service. Thread-safe."""

    is_remote = True

    def __init__(self, service: Service, options: ReadOptions) -> None:
        self._service = service
        self._options = options
        self._connections = Connections()

    def fetch(self, span: ByteRange, deadline: float) -> bytes:
        if span.length is not None and span.length > self._options.longest:
            raise StorageError(f"{span}: {span.length} bytes are above the limit of {self._options.longest}")
        try:
            try:
                return self._fetch(self._service.request(span.url), span, deadline)
            except AccessDeniedError:
                if not self._service.renew():
                    raise
            return self._fetch(self._service.request(span.url), span, deadline)
        except DPFlowError:
            raise
        except Exception as error:
            raise storage_error(span, error) from error

    def _fetch(self, request: Request, span: ByteRange, deadline: float) -> bytes:
        headers = dict(request.headers)
        if not span.is_whole:
            headers["range"] = f"bytes={span.start}-{'' if span.stop is None else span.stop - 1}"
        connection = self._connections.take(request.origin)
        is_used = connection is not None
        if connection is None:
            connection = self._connections.make(request.origin)
        connection.limit(self._options.timeout_s, deadline)
        try:
            response = connection.get(request.target, headers)
        except (ConnectionError, http.client.RemoteDisconnected):
            connection.close()
            if is_used and time.monotonic() < deadline:
                # The server closed it while it was idle: not a failure of the storage, so no attempt is lost.
                return self._fetch(request, span, deadline)
            raise
        except BaseException:
            connection.close()
            raise
        return self._take_answer(request, span, connection, response)

    def _take_answer(
        self,
        request: Request,
        span: ByteRange,
        connection: KeepAliveConnection,
        response: http.client.HTTPResponse,
    ) -> bytes:
        is_done = False
        try:
            is_refused = response.status not in (200, 206)
            data = response.read(_LONGEST_ERROR) if is_refused else self._read_body(span, response)
            is_done = response.isclosed() and not response.will_close
            if is_refused:
                _refuse(span, response, data)
        finally:
            if is_done:
                self._connections.give_back(request.origin, connection)
            else:
                connection.close()
        return data

    def _read_body(self, span: ByteRange, response: http.client.HTTPResponse) -> bytes:
        longest = self._options.longest
        if response.length is not None and response.length > longest:
            raise StorageError(f"{span}: {response.length} bytes are above the limit of {longest}")
        if response.length is None:
            data = response.read(longest + 1)
            if len(data) > longest:
                raise StorageError(f"{span}: the answer is longer than the limit of {longest} bytes")
        else:
            data = response.read()
        if span.is_whole:
            return data
        if response.status == 200:  # a server that knows no ranges
            return _cut(span, data)
        _check_range(span, response.getheader("Content-Range", ""))
        if span.length is not None and len(data) != span.length:
            raise TruncatedObjectError(f"{span}: the object gave only {len(data)} bytes of {span.length}")
        return data

    def node(self, url: str) -> str:
        return self._service.origin(url).host

    def close(self) -> None:
        self._connections.close()


def _cut(span: ByteRange, data: bytes) -> bytes:
    stop = len(data) if span.stop is None else span.stop
    if stop > len(data) or span.start > len(data):
        raise TruncatedObjectError(f"{span}: the object has only {len(data)} bytes")
    return data[span.start : stop]


def _check_range(span: ByteRange, header: str) -> None:
    match = _CONTENT_RANGE.fullmatch(header)
    if match is None or int(match[1]) != span.start:
        raise StorageError(f"{span}: the server answered with another range: {header[:100]!r}")


def _refuse(span: ByteRange, response: http.client.HTTPResponse, body: bytes) -> NoReturn:
    """Raise what an answer other than 200 or 206 means."""
    status = response.status
    code, message = _text(_CODE, body), _text(_MESSAGE, body)
    told = f"{status} {code or response.reason}" + (f": {message}" if message else "")
    text = f"{span}: the storage answered {told}"
    known = BY_STATUS.get(_STATUS_OF_CODE.get(code, status))
    if known is not None:
        raise known[0](f"{text}; {known[1]}")
    region = response.getheader("x-amz-bucket-region")
    raise StorageError(f"{text}; the bucket lies in region {region}" if region else text)


def _text(pattern: re.Pattern[bytes], body: bytes) -> str:
    match = pattern.search(body)
    return match[1].decode("utf-8", "replace").strip() if match else ""
