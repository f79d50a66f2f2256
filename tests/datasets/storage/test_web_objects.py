"""Objects of web servers: the right bytes or an error, whatever the server makes of a request."""

from __future__ import annotations

import base64
import http.server
import io
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.datasets.storage.web_server import Answer, WebServer, reply, serve_ranges
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions, Storage, open_storage
from torch_dpflow.errors import (
    AccessDeniedError,
    ObjectMissingError,
    OptionError,
    StorageError,
    StorageUnavailableError,
    TruncatedObjectError,
)
from torch_dpflow.testing.storages import Put, StorageContract

DATA = bytes(range(256)) * 400


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


class _QuietServer(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Nothing: a reader that has what it wants goes away in the middle of the rest."""


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[str]:
    """The URL of Python's own server of files, which knows no ranges."""
    handler = partial(_Quiet, directory=str(tmp_path))
    server = _QuietServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer(serve_ranges(DATA)) as server:
        yield server


@pytest.fixture
def reader(impatient: ReadOptions) -> Iterator[ObjectReader]:
    with ObjectReader(options=impatient) as reader:
        yield reader


class TestWeb(StorageContract):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        storage = open_storage("http", {}, ReadOptions())
        yield storage
        storage.close()

    @pytest.fixture
    def put(self) -> Iterator[Put]:
        files: dict[str, bytes] = {}

        def answer(handler: BaseHTTPRequestHandler) -> None:
            data = files.get(handler.path)
            return reply(handler, 404) if data is None else serve_ranges(data)(handler)

        with WebServer(answer) as server:

            def put(name: str, data: bytes) -> str:
                files[f"/{quote(name)}"] = data
                return f"{server.url}/{quote(name)}"

            yield put


def test_a_server_without_ranges_gives_the_right_bytes(
    plain: str, tmp_path: Path, reader: ObjectReader
) -> None:
    (tmp_path / "pack.bin").write_bytes(DATA)
    url = f"{plain}/pack.bin"
    spans = [ByteRange(url, start, start + 100) for start in (0, 5000, 90_001)]
    assert reader.read_many(spans) == [DATA[span.start : span.stop] for span in spans]
    assert reader.read(url, 90_001) == DATA[90_001:]
    assert reader.read(url) == DATA
    with pytest.raises(TruncatedObjectError, match="only 102400 bytes"):
        reader.read(url, 102_000, 102_500)


def test_an_object_of_the_length_of_the_range_is_not_taken_for_it(plain: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    with ObjectReader() as reader, pytest.raises(TruncatedObjectError):
        reader.read(f"{plain}/x", 5, 15)


def test_names_with_spaces_and_hashes_are_escaped(plain: str, tmp_path: Path, reader: ObjectReader) -> None:
    (tmp_path / "a b#ü.bin").write_bytes(b"x")
    assert reader.read(f"{plain}/a b#ü.bin") == b"x"


@pytest.mark.parametrize(
    "content_range",
    ["bytes 0-99/102400", "bytes 100-198/102400", "bytes 100-299/102400", "100-199", "bytes 100-99/9", ""],
)
def test_another_range_than_was_asked_for_is_refused(
    web: WebServer, reader: ObjectReader, content_range: str
) -> None:
    web.answer = lambda handler: reply(handler, 206, DATA[:100], content_range=content_range)
    with pytest.raises(StorageError, match="another range"):
        reader.read(f"{web.url}/x", 100, 200)


@pytest.mark.parametrize("content_range", ["bytes 0-99/102400", "bytes 1-100/101"])
def test_a_part_is_not_taken_for_the_whole(web: WebServer, reader: ObjectReader, content_range: str) -> None:
    web.answer = lambda handler: reply(handler, 206, DATA[:100], content_range=content_range)
    with pytest.raises(StorageError, match="another range"):
        reader.read(f"{web.url}/x")


def _disconnect(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def _cut(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    reply(handler, 200, DATA[:5000], content_length=len(DATA))


def _cut_range(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    reply(handler, 206, DATA[10:20], content_length=90, content_range=f"bytes 10-99/{len(DATA)}")


def _cut_chunks(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"1000\r\n" + DATA[:4096] + b"\r\n1000\r\n" + DATA[:10])


def _chunked(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DATA), DATA))


def _until_the_end(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(DATA[:5000])


def _cut_head(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")


@pytest.mark.parametrize("fault", [_disconnect, _cut_head, _cut, _cut_range, _cut_chunks, _until_the_end])
def test_a_dropped_connection_is_tried_again(web: WebServer, fault: Answer) -> None:
    faults = [fault, fault]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        (faults.pop() if faults else serve_ranges(DATA))(handler)

    web.answer = answer
    patient = ReadOptions(attempts=5, backoff_s=0.001)
    with ObjectReader(options=patient) as reader:
        assert reader.read(f"{web.url}/x", 10, 100_000) == DATA[10:100_000]
    assert not faults


@pytest.mark.parametrize("fault", [_disconnect, _cut, _cut_chunks])
def test_a_connection_that_always_drops_is_an_error(
    web: WebServer, reader: ObjectReader, fault: Answer
) -> None:
    web.answer = fault
    with pytest.raises(StorageUnavailableError, match=r"attempt 3 of 3"):
        reader.read(f"{web.url}/x")
    assert len(web.requests) == 3


def test_a_chunked_body_is_read(web: WebServer, reader: ObjectReader) -> None:
    web.answer = _chunked
    assert reader.read(f"{web.url}/x") == DATA
    assert reader.read(f"{web.url}/x", 7, 100) == DATA[7:100]


def _without_size(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n")


def _with_hints(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\nContent-Length:\n 5\n\nhello"
    )


def _zipped(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello")


@pytest.mark.parametrize("part", [(), (0, 3)])
def test_an_encoding_that_was_not_asked_for_is_refused(
    web: WebServer, reader: ObjectReader, part: tuple[int, ...]
) -> None:
    web.answer = _zipped
    with pytest.raises(StorageError, match="in the encoding 'gzip', though asked for none"):
        reader.read(f"{web.url}/x", *part)


def test_unusual_heads_are_understood(web: WebServer, reader: ObjectReader) -> None:
    web.answer = _with_hints
    assert [reader.read(f"{web.url}/x") for _ in range(2)] == [b"hello"] * 2
    web.answer = _without_size
    with pytest.raises(StorageUnavailableError, match="does not say how long it is"):
        reader.read(f"{web.url}/x")
    web.answer = lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: " + bytes(1 << 20)) and None
    with pytest.raises(StorageUnavailableError, match="head of the answer"):
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


def test_redirects_are_followed_and_given_headers_stay_at_home(web: WebServer, reader: ObjectReader) -> None:
    with WebServer(lambda handler: reply(handler, 302, location=f"{web.url}/far?x=1")) as other:
        options = {"headers": {"X-Api-Key": "k"}, "username": "u", "password": "pö"}
        with ObjectReader(options) as private:
            assert private.read(f"{other.url}/x", 5, 9) == DATA[5:9]
        other.answer = lambda handler: (
            reply(handler, 307, location="near") if handler.path == "/deep/x" else serve_ranges(DATA)(handler)
        )
        assert reader.read(f"{other.url}/deep/x", 5, 9) == DATA[5:9]
    home, *_ = other.requests
    assert home["x-api-key"] == "k"
    assert base64.b64decode(home["authorization"].removeprefix("Basic ")).decode() == "u:pö"
    assert (web.requests[0]["path"], web.requests[0]["range"]) == ("/far?x=1", "bytes=5-8")
    assert not {"x-api-key", "authorization"} & web.requests[0].keys()
    assert other.requests[-1]["path"] == "/deep/near"


@pytest.mark.parametrize("location", ["/x", "ftp://127.0.0.1/x", "http://", "file:///etc/passwd"])
def test_redirects_that_lead_nowhere_end(web: WebServer, reader: ObjectReader, location: str) -> None:
    web.answer = lambda handler: reply(handler, 301, location=location)
    with pytest.raises(StorageError, match="301"):
        reader.read(f"{web.url}/x")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, AccessDeniedError), (404, ObjectMissingError), (410, StorageError), (204, StorageError)],
)
def test_other_answers_are_errors(
    web: WebServer, reader: ObjectReader, status: int, kind: type[StorageError]
) -> None:
    web.answer = lambda handler: reply(handler, status)
    with pytest.raises(kind, match=str(status)):
        reader.read(f"{web.url}/x")
    assert len(web.requests) == 1


def test_options_that_nobody_knows_are_refused() -> None:
    with pytest.raises(OptionError, match=r"no option \['secret'\]; give headers"):
        open_storage("https", {"secret": "s"}, ReadOptions())
