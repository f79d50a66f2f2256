"""HTTP responses: a body whose end is certain is read, any other is an error, and never a sample."""

from __future__ import annotations

import io
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.storage.web_server import Answer, WebServer, raw, reply, serve_ranges, then
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.failures import with_retries
from torch_dpflow.errors import (
    ChecksumError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedObjectError,
)

DATA = bytes(range(256)) * 400


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer(serve_ranges(DATA)) as server:
        yield server


@pytest.fixture
def reader(patient: ReadOptions) -> Iterator[ObjectReader]:
    with ObjectReader(options=patient) as reader:
        yield reader


def _chunked(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DATA), DATA))


def test_a_chunked_body_is_read(web: WebServer, reader: ObjectReader) -> None:
    web.answer = _chunked
    assert reader.read(f"{web.url}/x") == DATA
    assert reader.read(f"{web.url}/x", 7, 100) == DATA[7:100]


def _without_size(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n")


def _with_hints(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\nContent-Length:\n 5\n\nhello")


#: Responses whose body ends where only a guess can say, or before it should. The connection ends behind each.
_AMBIGUOUS = {
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunked, chunked": b"Transfer-Encoding: chunked, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "compressed": b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "unknown coding": b"Transfer-Encoding: xchunked\r\n\r\nhello",
    "empty coding": b"Transfer-Encoding:\r\nContent-Length: 5\r\n\r\nhello",
    "chunked and a length": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 3\r\n\r\nhello",
    "two lengths in one": b"Content-Length: 5, 3\r\n\r\nhello",
    "a length twice, cut": b"Content-Length: 50\r\nContent-Length: 50\r\n\r\n01234567890123456789",
    "a signed length": b"Content-Length: +5\r\n\r\nhello",
    "a negative length": b"Content-Length: -5\r\n\r\nhello",
    "a hexadecimal length": b"Content-Length: 0x5\r\n\r\nhello",
    "a length with underscore": b"Content-Length: 0_5\r\n\r\nhello",
    "a length with a unit": b"Content-Length: 5 bytes\r\n\r\nhello",
    "an empty length": b"Content-Length:\r\n\r\nhello",
    "a folded length": b"Content-Length: 5\r\n 0\r\n\r\nhello",
    "a length with a no-break space": b"Content-Length: 5\xa0\r\n\r\nhello",
    "a space before the colon": b"Content-Length : 5\r\n\r\nhello world",
    "a field without a colon": b"Content-Length 5\r\n\r\nhello world",
    "a field without a name": b": 5\r\nContent-Length: 5\r\n\r\nhello",
    "a fold of nothing": b" Content-Length: 5\r\n\r\nhello world",
    "a carriage return": b"X: y\rContent-Length: 3\r\nContent-Length: 5\r\n\r\nhello",
    "a null byte": b"X: \0\r\nContent-Length: 5\r\n\r\nhello",
    "a longer chunk": b"Transfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n0\r\n\r\n",
    "a chunk longer by a chunk": b"Transfer-Encoding: chunked\r\n\r\n1\r\nh\n3\r\nell\r\n1\r\no\r\n0\r\n\r\n",
    "a shorter chunk": b"Transfer-Encoding: chunked\r\n\r\n7\r\nhello\r\n0\r\n\r\n",
    "a chunk of 5g": b"Transfer-Encoding: chunked\r\n\r\n5g\r\nhello\r\n0\r\n\r\n",
    "a chunk of 0x5": b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "a chunk of +5": b"Transfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
    "a chunk without carriage return": b"Transfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
    "no last chunk": b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    "no end of the trailers": b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n",
}


def _then_right(*faults: Answer) -> Answer:
    """What a server does that answers wrong at first."""
    return then(serve_ranges(DATA), *faults)


@pytest.mark.parametrize("scheme", ["http", "s3", "oss"])
def test_a_body_whose_end_is_ambiguous_is_tried_again(web: WebServer, scheme: str) -> None:
    options = {} if scheme == "http" else {"endpoint": web.url, "anon": True}
    with ObjectReader(options, options=ReadOptions(backoff_s=0.0)) as reader:
        for name, fields in _AMBIGUOUS.items():
            web.answer = _then_right(*[raw(b"HTTP/1.1 200 OK\r\n" + fields)] * 2)
            before = len(web.requests)
            url = f"{web.url}/x" if scheme == "http" else f"{scheme}://data/x"
            assert reader.read(url) == DATA, name
            assert len(web.requests) == before + 3, name


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/2 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 +20 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"ICY 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    ],
)
def test_a_head_that_is_not_of_http_1_is_tried_again(web: WebServer, response: bytes) -> None:
    web.answer = _then_right(raw(response))
    with ObjectReader(options=ReadOptions(backoff_s=0.0)) as reader:
        assert reader.read(f"{web.url}/x") == DATA


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        b"Content-Length: 5, 5\r\n\r\nhello",
        b"Transfer-Encoding: , Chunked\r\n\r\n5 ; a=b\r\nhello\r\n0\r\nX: y\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0000005  \r\nhello\r\n00\r\n\r\n",
    ],
)
def test_unusual_framing_that_is_allowed_is_read(web: WebServer, reader: ObjectReader, fields: bytes) -> None:
    web.answer = lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + fields) and None
    assert [reader.read(f"{web.url}/x") for _ in range(2)] == [b"hello"] * 2


def test_unusual_heads_are_understood(web: WebServer, reader: ObjectReader) -> None:
    web.answer = _with_hints
    assert [reader.read(f"{web.url}/x") for _ in range(2)] == [b"hello"] * 2
    web.answer = _without_size
    with pytest.raises(StorageUnavailableError, match="does not say how long it is"):
        reader.read(f"{web.url}/x")
    web.answer = lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: " + bytes(1 << 20)) and None
    with pytest.raises(StorageUnavailableError, match="head of the response"):
        reader.read(f"{web.url}/x")


def test_what_comes_behind_an_answer_is_not_taken_for_the_next(web: WebServer) -> None:
    web.answer = lambda handler: reply(handler, 200, DATA[:200], content_length=100)
    with ObjectReader(options=ReadOptions(attempts=1)) as reader:
        assert [reader.read(f"{web.url}/x") for _ in range(3)] == [DATA[:100]] * 3


def _endless(status: int) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.send_response(status)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(DATA)
        except OSError:
            handler.wfile = io.BytesIO()  # nothing more goes to a client that has gone

    return answer


def test_a_body_without_an_end_stops_at_the_bound(web: WebServer) -> None:
    web.answer = _endless(200)
    with ObjectReader(options=ReadOptions(longest=1_000_000)) as reader:
        with pytest.raises(StorageError, match="longer than the limit of 1000000 bytes"):
            reader.read(f"{web.url}/x")
        assert reader.read(f"{web.url}/x", 256, 612) == DATA[256:612]
        with pytest.raises(StorageError, match="limit of 1000000"):
            reader.read(f"{web.url}/x", 5_000_000, 5_000_100)
    web.answer = _endless(500)
    with ObjectReader(options=ReadOptions(attempts=1)) as reader, pytest.raises(StorageUnavailableError):
        reader.read(f"{web.url}/x")


@pytest.mark.parametrize(
    ("start", "stop", "content_range"),
    [
        (0, None, "bytes 0-19/*"),
        (0, None, "bytes 0-19/21"),
        (0, None, "bytes 1-20/21"),
        (0, None, "*/20"),
        (5, None, "bytes 5-24/*"),
        (5, None, "bytes 5-24/30"),
    ],
)
def test_a_part_of_an_unknown_whole_is_not_taken_for_the_rest(
    web: WebServer, reader: ObjectReader, start: int, stop: int | None, content_range: str
) -> None:
    web.answer = lambda handler: reply(handler, 206, DATA[:20], content_range=content_range)
    with pytest.raises(StorageUnavailableError, match="another range"):
        reader.read(f"{web.url}/x", start, stop)
    if "*" in content_range and content_range[0] == "b":  # the dataset has the size
        (found,) = reader.read_each([ByteRange(f"{web.url}/x", start, stop, size=start + 20)])
        assert found == DATA[:20]


_KEPT = [b"Connection: keep-alive\r\n", b"Connection: Keep-Alive, x\r\n", b"Keep-Alive: timeout=5\r\n"]


@pytest.mark.parametrize("fields", _KEPT)
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_kept_connection_that_ends_is_no_end_of_a_body(
    web: WebServer, reader: ObjectReader, fields: bytes, version: bytes
) -> None:
    _check_unknown_end(web, reader, raw(b"HTTP/%b 200 OK\r\n%b\r\nhello" % (version, fields)))


def _check_unknown_end(web: WebServer, reader: ObjectReader, answer: Answer) -> None:
    """`answer` sends "hello" without a length, and may have been cut."""
    web.answer, url = answer, f"{web.url}/x"
    for start in (0, 2):
        with pytest.raises(StorageUnavailableError, match="ended after 5 bytes of a response without a length"):
            reader.read(url, start)
    assert reader.read(url, 1, 4) == b"ell"
    sizes = [reader.read_each([ByteRange(url, size=size)])[0] for size in (5, 6)]
    assert sizes[0] == b"hello"
    assert isinstance(sizes[1], StorageUnavailableError | TruncatedObjectError)


@pytest.mark.parametrize("fields", [b"", b"Connection: close\r\n"])
def test_a_body_that_the_connection_ends_is_read(web: WebServer, reader: ObjectReader, fields: bytes) -> None:
    web.answer = raw(b"HTTP/1.1 200 OK\r\n" + fields + b"\r\nhello")
    assert reader.read(f"{web.url}/x") == b"hello"
    web.answer = then(serve_ranges(DATA), *[raw(b"HTTP/1.1 200 OK\r\n\r\nhello")] * 2)
    with ObjectReader(options=ReadOptions(backoff_s=0.0)) as patient:
        assert patient.read_each([ByteRange(f"{web.url}/x", size=len(DATA))]) == [DATA]


def _over_tls(is_closed: bool, response: bytes) -> Answer:
    """Writes bytes over TLS, and then ends it, or only cuts the connection."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.wfile.write(response)
        connection: Any = handler.connection
        if is_closed:
            connection.setblocking(False)  # the other side's own end is not waited for
            with suppress(OSError):
                connection.unwrap()
        else:
            socket.socket.shutdown(connection, socket.SHUT_RDWR)

    return answer


def test_a_cut_of_tls_is_no_end_of_a_body(certificate: Path, tls: ssl.SSLContext, patient: ReadOptions) -> None:
    open_end, length = b"HTTP/1.1 200 OK\r\n\r\nhello", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    with (
        WebServer(_over_tls(False, open_end), tls) as web,
        ObjectReader({"verify": str(certificate)}, options=patient) as reader,
    ):
        _check_unknown_end(web, reader, web.answer)
        for whole in (_over_tls(True, open_end), _over_tls(True, length), _over_tls(False, length)):
            web.answer = whole
            assert [reader.read(f"{web.url}/x") for _ in range(2)] == [b"hello"] * 2
        web.answer = _over_tls(False, length[:-1])
        with pytest.raises(StorageUnavailableError, match="the connection ended before the object did"):
            reader.read(f"{web.url}/x")
        web.answer = _over_tls(False, b"HTTP/1.1 200 OK\r\nContent-Le")
        with pytest.raises(StorageUnavailableError, match="the connection ended within the head"):
            reader.read(f"{web.url}/x")


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("signature", [b"", b";chunk-signature=" + b"0a" * 32])
def test_frames_of_an_upload_are_no_sample(web: WebServer, patient: ReadOptions, scheme: str, signature: bytes) -> None:
    framed = b"5%b\r\nhello\r\n0%b\r\n\r\n" % (signature, signature)
    options = {} if scheme == "http" else {"endpoint": web.url, "anon": True}
    url = f"{web.url}/x" if scheme == "http" else "s3://data/x"

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.end_headers, end = (  # type: ignore[method-assign]
            lambda: (handler.send_header("Content-Encoding", "aws-chunked"), end()),
            handler.end_headers,
        )
        serve_ranges(framed)(handler)

    web.answer = answer
    with ObjectReader(options, options=patient) as reader:
        for part in ((), (0, 9), (3, 9)):
            with pytest.raises(StorageError, match="stored the frames of the upload with the bytes"):
                reader.read(url, *part)
        framed = b"hello\r\n" * 20
        assert reader.read(url) == framed
        assert reader.read_each([ByteRange(url, 3, 9, size=140)]) == [framed[3:9]]
        assert isinstance(reader.read_each([ByteRange(url, 3, 9, size=100)])[0], ChecksumError)


def test_a_timeout_at_the_deadline_does_not_hide_the_cause() -> None:
    now = [0.0]
    errors = [StorageUnavailableError("a wrong length"), StorageTimeoutError("slow"), StorageTimeoutError("late")]

    def attempt(deadline: float) -> bytes:
        now[0] += 1.0
        raise errors.pop(0)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    options = ReadOptions(attempts=3, deadline_s=60.0)
    with pytest.raises(StorageTimeoutError, match=r"late \(attempt 3 of 3.*\); an earlier attempt: a wrong length"):
        with_retries(attempt, options, sleep=sleep, clock=lambda: now[0])
    errors += [StorageTimeoutError("slow"), StorageTimeoutError("late")]
    with pytest.raises(StorageTimeoutError, match=r"late \(attempt 2 of 2, [0-9.]+ s\)$"):
        with_retries(attempt, ReadOptions(attempts=2), sleep=sleep, clock=lambda: now[0])
