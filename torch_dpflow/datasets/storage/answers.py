"""Reads exactly the bytes of a range from a server's response."""

from __future__ import annotations

import functools
import re

from torch_dpflow.datasets.storage.base import ByteRange
from torch_dpflow.datasets.storage.responses import Response
from torch_dpflow.errors import StorageError, StorageUnavailableError, TruncatedObjectError
from torch_dpflow.log import DATASETS

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
#: Bytes read at a time from a body of unknown length, or of which a part is skipped.
_PIECE = 1 << 20


def read_object(response: Response, span: ByteRange, longest: int) -> bytes:
    """The bytes of `span` from a response with status 200 or 206.

    Raises:
        TruncatedObjectError: the object is shorter than the range, or than its known size.
        ChecksumError: it is longer than its known size.
        StorageError: the response is longer than `longest`.
        StorageUnavailableError: the response has another range.
        StorageUnavailableError, http.client.IncompleteRead: the connection ended before the body did.
    """
    if response.status == 206:
        return _read_range(response, span, longest)
    if span.size is not None:
        span.check_size(response.left)
    if span.is_whole:
        data = _read_body(response, span, longest)
        if span.size is not None:
            span.check_size(len(data))
        return data
    return _cut_out(response, span, longest)


def _read_range(response: Response, span: ByteRange, longest: int) -> bytes:
    header = response.fields.get("content-range", "")
    match = _CONTENT_RANGE.fullmatch(header)
    start, stop = (int(match[1]), int(match[2]) + 1) if match else (0, 0)
    is_rest = match is not None and match[3] in ("*", str(stop))
    is_asked = stop <= span.stop if span.stop is not None else is_rest
    if start != span.start or stop <= start or not is_asked:
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
            raise StorageError(f"{span}: the answer is longer than the limit of {longest} bytes")
        return data
    if response.left > longest:
        raise StorageError(f"{span}: {response.left} bytes are above the limit of {longest}")
    return response.read(response.left)


def _cut_out(response: Response, span: ByteRange, longest: int) -> bytes:
    """The range from the whole object, which a server without support for ranges sends."""
    size = response.left
    if size is not None and max(span.start, span.stop or 0) > size:
        raise TruncatedObjectError(f"{span}: the object has only {size} bytes")
    stop = span.stop or size
    if (stop or span.start) > longest:
        raise StorageError(
            f"{span}: the server knows no ranges, and the range ends above the limit of {longest} bytes; "
            "serve the data by one that does"
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
    if span.start + len(data) > longest:
        raise StorageError(f"{span}: the answer is longer than the limit of {longest} bytes")
    return data


def _ended(span: ByteRange, count: int) -> StorageUnavailableError:
    # Without a length in the header a short object looks the same, but is less likely.
    return StorageUnavailableError(f"{span}: the connection ended after {count} bytes of the object")


@functools.lru_cache(maxsize=64)
def _warn_of_cost(server: str) -> None:
    DATASETS.warning(
        "%s knows no ranges: for a part of an object everything before it is read too; serve packs by a server that "
        "knows them",
        server,
    )


def _take(response: Response, count: int) -> bytes:
    """The next `count` bytes of a body, fewer if it ends."""
    parts: list[bytes] = []
    while count and (part := response.read(min(count, _PIECE))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
