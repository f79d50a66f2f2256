"""Objects of web servers: the right bytes or an error, whatever the server makes of a request."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Iterator
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import fsspec.asyn
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.contracts.storages import Put, StorageContract
from tests.datasets.storage.web_server import Answer, WebServer, raw, reply, serve_ranges, then
from torch_dpflow.datasets import DatasetStore, Draft, open_dataset
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.folders import ImageFolderImporter
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions, Storage, open_storage
from torch_dpflow.datasets.storage.proxies import Origin
from torch_dpflow.datasets.storage.web_service import WebService
from torch_dpflow.errors import (
    AccessDeniedError,
    ChecksumError,
    ObjectMissingError,
    OptionError,
    SourceError,
    StorageError,
    StorageUnavailableError,
    TruncatedObjectError,
)

DATA = bytes(range(256)) * 400


@pytest.fixture(scope="session", autouse=True)
def loop() -> None:
    """fsspec's loop lives as long as the session."""
    fsspec.asyn.get_loop()


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
def reader(patient: ReadOptions) -> Iterator[ObjectReader]:
    with ObjectReader(options=patient) as reader:
        yield reader


class TestWeb(StorageContract):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        storage = open_storage("http", {}, ReadOptions())
        yield storage
        storage.close()

    @pytest.fixture(params=["none", "etag", "weak", "date", "weak-date"])
    def put(self, request: pytest.FixtureRequest) -> Iterator[Put]:
        files: dict[str, tuple[bytes, dict[str, str]]] = {}

        def answer(handler: BaseHTTPRequestHandler) -> None:
            found = files.get(handler.path)
            return reply(handler, 404) if found is None else serve_ranges(found[0], **found[1])(handler)

        def headers(number: int) -> dict[str, str]:
            date = formatdate(1_700_000_000 + number, usegmt=True)
            return {
                "none": {},
                "etag": {"ETag": f'"{number}"', "Last-Modified": date},
                "weak": {"ETag": f'W/"{number}"'},
                "date": {"Last-Modified": date},
                "weak-date": {"ETag": 'W/"same"', "Last-Modified": date},
            }[request.param]

        with WebServer(answer) as server:

            def put(name: str, data: bytes) -> str:
                files[f"/{quote(name)}"] = data, headers(len(data) + data[:1].count(255))
                return f"{server.url}/{quote(name)}"

            yield put


def test_a_server_without_ranges_gives_the_right_bytes(plain: str, tmp_path: Path, reader: ObjectReader) -> None:
    (tmp_path / "pack.bin").write_bytes(DATA)
    url = f"{plain}/pack.bin"
    spans = [ByteRange(url, start, start + 100) for start in (0, 5000, 90_001)]
    assert reader.read_many(spans) == [DATA[span.start : span.stop] for span in spans]
    assert reader.read(url, 90_001) == DATA[90_001:]
    assert reader.read(url) == DATA
    with pytest.raises(TruncatedObjectError, match="only 102400 bytes"):
        reader.read(url, 102_000, 102_500)


def test_names_of_classes_are_those_of_the_directories(plain: str, tmp_path: Path) -> None:
    names = ["a b", "a-b", "ä", "z", "100%", "b#c", "q?x", "a%20c"]
    for name in names:
        (tmp_path / name).mkdir()
        for image in ("2 ü.jpg", "2%2.jpg", "1#.jpg"):
            (tmp_path / name / image).write_bytes(f"{name}/{image}".encode())
    local = [item.meta for item in ImageFolderImporter(tmp_path).items()]
    store = DatasetStore.create("memory://classes-of-a-web-server")
    draft = Draft(store, "core/x", "v1")
    draft.add("train", ImageFolderImporter(plain))
    assert draft.publish().variants["train"].info["classes"] == sorted(names)
    reader = DatasetReader(store.open("core/x"))
    assert [meta for _, meta in reader.__getitems__([*range(24)])] == local
    order = [f"{name}/{image}" for name in sorted(names) for image in ("1#.jpg", "2 ü.jpg", "2%2.jpg")]
    assert [data.decode() for data, _ in reader.__getitems__([*range(24)])] == order
    reader.close()


def test_an_object_of_the_length_of_the_range_is_not_taken_for_it(plain: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    with ObjectReader() as reader, pytest.raises(TruncatedObjectError):
        reader.read(f"{plain}/x", 5, 15)


def test_names_with_spaces_and_hashes_are_escaped(plain: str, tmp_path: Path, reader: ObjectReader) -> None:
    (tmp_path / "a b#ü.bin").write_bytes(b"x")
    assert reader.read(f"{plain}/a b#ü.bin") == b"x"


@pytest.mark.parametrize(
    "content_range",
    [
        *("bytes 0-99/102400", "bytes 100-198/102400", "bytes 100-299/102400", "100-199", "bytes 100-99/9"),
        *("", "bytes 100-199/150"),
    ],
)
def test_another_range_than_was_asked_for_is_refused(web: WebServer, reader: ObjectReader, content_range: str) -> None:
    web.answer = lambda handler: reply(handler, 206, DATA[:100], content_range=content_range)
    with pytest.raises(StorageError, match="another range"):
        reader.read(f"{web.url}/x", 100, 200)


def test_a_body_in_parts_is_no_range(web: WebServer, reader: ObjectReader) -> None:
    how = {"content_range": "bytes 100-199/102400", "content_type": "multipart/byteranges; boundary=x"}
    web.answer = lambda handler: reply(handler, 206, DATA[:100], **how)
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
def test_a_connection_that_always_drops_is_an_error(web: WebServer, reader: ObjectReader, fault: Answer) -> None:
    web.answer = fault
    with pytest.raises(StorageUnavailableError, match=r"attempt 3 of 3"):
        reader.read(f"{web.url}/x")
    assert len(web.requests) == 3


_LISTING = b'<a href="cat/">cat</a><a href="0.jpg">0.jpg</a>'


def test_listings_wait_for_a_server_that_is_away_too(web: WebServer) -> None:
    away = [_disconnect, lambda handler: reply(handler, 503)] * 4
    page = partial(reply, status=200, body=_LISTING, content_type="text/html")
    files = Files(web.url, read_options=ReadOptions(backoff_s=0.001, longest_backoff_s=0.01))
    web.answer = then(page, *away)
    assert [child.name for child in files.children()] == ["0.jpg", "cat"]
    web.answer = then(page, *away)
    assert files.exists("cat")
    web.answer = then(partial(reply, status=404), *away)
    assert not files.exists("dog")
    web.answer = then(serve_ranges(b""), *away)
    assert files.exists("empty.jpg")
    files.close()


def test_a_server_that_is_away_has_not_lost_its_files(web: WebServer) -> None:
    web.answer = lambda handler: reply(handler, 503)
    files = Files(web.url, read_options=ReadOptions(attempts=2, backoff_s=0.0))
    for look in (lambda: files.exists("cat"), lambda: files.children()):
        with pytest.raises(StorageUnavailableError, match="503"):
            look()
    files.close()


def test_a_look_at_an_object_waits_for_a_server_that_is_away(web: WebServer) -> None:
    with ObjectReader() as reader:
        web.answer = then(serve_ranges(DATA), lambda handler: reply(handler, 503))
        assert reader.look_each([ByteRange(f"{web.url}/x.jpg")]) == [(len(DATA), None)]
        for status, kind in ((404, ObjectMissingError), (403, AccessDeniedError)):
            web.answer = lambda handler, status=status: reply(handler, status)  # type: ignore[misc]
            (found,) = reader.look_each([ByteRange(f"{web.url}/x.jpg")])
            assert isinstance(found, kind)


def test_a_server_that_is_away_for_longer_is_waited_for(web: WebServer) -> None:
    web.answer = then(serve_ranges(DATA), *[_disconnect, lambda handler: reply(handler, 503)] * 8)
    with ObjectReader(options=ReadOptions(backoff_s=0.001, longest_backoff_s=0.01)) as reader:
        assert reader.read(f"{web.url}/x") == DATA
    assert len(web.requests) == 17


@pytest.mark.parametrize("status", [425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529])
def test_statuses_that_pass_are_tried_again(web: WebServer, status: int) -> None:
    web.answer = then(serve_ranges(DATA), lambda handler: reply(handler, status))
    with ObjectReader(options=ReadOptions(backoff_s=0.0)) as reader:
        assert reader.read(f"{web.url}/x") == DATA


def test_an_object_that_a_proxy_passes_on_is_read(web: WebServer, reader: ObjectReader) -> None:
    web.answer = lambda handler: reply(handler, 203, DATA)
    assert reader.read(f"{web.url}/x") == DATA
    assert reader.read(f"{web.url}/x", 5, 9) == DATA[5:9]


@pytest.mark.parametrize("encoding", ["", "Identity", "aws-chunked", "aws-chunked, identity", ","])
def test_an_encoding_that_changes_nothing_is_read(web: WebServer, reader: ObjectReader, encoding: str) -> None:
    web.answer = lambda handler: reply(handler, 200, DATA, content_encoding=encoding)
    assert reader.read(f"{web.url}/x") == DATA


def _zipped(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello")


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: %d\r\n\r\n%b",
        b"X: %d\r\n\r\n%b",
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n",
    ],
)
@pytest.mark.parametrize(("wrong", "kind"), [(DATA[:-1], TruncatedObjectError), (DATA + b"x", ChecksumError)])
def test_an_object_of_another_length_than_its_dataset_says_is_tried_again(
    web: WebServer, tmp_path: Path, fields: bytes, wrong: bytes, kind: type[StorageError]
) -> None:
    store = DatasetStore.create(str(tmp_path))
    draft = Draft(store, "core/x", "v1")
    draft.add("train", IterableImporter([Item(path="x", length=len(DATA))], root=web.url))
    draft.publish()
    fault = raw(b"HTTP/1.1 200 OK\r\n" + fields % (len(wrong), wrong))
    reader = DatasetReader(store.open("core/x"), read_options=ReadOptions(backoff_s=0.0))
    web.answer = then(serve_ranges(DATA), fault, fault)
    assert reader[0][0] == DATA
    assert len(web.requests) == 3
    web.answer = fault
    with pytest.raises(kind, match=rf"/x: the object has {len(wrong)} bytes, its dataset says {len(DATA)}"):
        reader[0]
    assert len(web.requests) == 3 + 5  # it may have been replaced: not until the deadline
    reader.close()


def test_a_web_page_in_the_place_of_an_image_is_refused(web: WebServer) -> None:
    page = b"<!doctype html>"
    faults = [
        lambda handler: reply(handler, 200, page, content_type="text/html; charset=utf-8"),
        lambda handler: reply(handler, 200, page, content_type="Application/XHTML+xml"),
    ]
    with ObjectReader(options=ReadOptions(backoff_s=0.0)) as reader:
        for name in ("a.jpg", "a.PNG?size=1", "a.flac", "a.mp4"):
            web.answer = then(serve_ranges(DATA), *faults)
            assert reader.read(f"{web.url}/{name}") == DATA
        web.answer = faults[0]
        for name in ("a.html", "a", "a.txt", "image?name=a.jpg"):
            assert reader.read(f"{web.url}/{name}") == page
    with (
        ObjectReader(options=ReadOptions(attempts=1)) as reader,
        pytest.raises(StorageUnavailableError, match=r"a web page \(text/html\) .* promises image/jpeg"),
    ):
        reader.read(f"{web.url}/a.jpg", 0, 5)
    with ObjectReader({"endpoint": web.url, "anon": True}) as reader:  # S3's type is what an upload has said
        assert reader.read("s3://data/a.jpg") == page


@pytest.mark.parametrize("part", [(), (0, 3)])
def test_an_encoding_that_was_not_asked_for_is_refused(
    web: WebServer, reader: ObjectReader, part: tuple[int, ...]
) -> None:
    web.answer = _zipped
    with pytest.raises(StorageError, match="in the encoding 'gzip', though none was requested"):
        reader.read(f"{web.url}/x", *part)


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


@pytest.mark.parametrize(
    ("location", "path"),
    [
        (b"/far#part", "/far"),
        (b"/far?x=1#part", "/far?x=1"),
        (b"#part", "/near"),
        ("/ä b".encode(), "/%C3%A4%20b"),
        (b"/caf\xe9", "/caf%E9"),
        (b"/100%", "/100%25"),
        (b"/100%/%41%zz?a=%", "/100%25/%41%25zz?a=%25"),
        (b"/a%23b", "/a%23b"),
    ],
)
def test_redirects_may_be_unusual(web: WebServer, reader: ObjectReader, location: bytes, path: str) -> None:
    redirect = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: %b\r\n\r\n" % location
    web.answer = then(serve_ranges(DATA), lambda handler: handler.wfile.write(redirect) and None)
    assert reader.read(f"{web.url}/near", 5, 9) == DATA[5:9]
    assert web.requests[-1]["path"] == path


def test_a_host_with_umlauts_is_looked_up_by_its_ascii_name() -> None:
    origin = WebService({}).origin("http://bücher.example:81/x")
    assert origin == Origin(False, "xn--bcher-kva.example", 81)


@pytest.mark.parametrize("url", ["http://h:x/a", "http://h:99999/a", f"http://{'ü' * 80}/a"])
def test_a_host_or_port_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="correct the host or the port"):
        WebService({}).origin(url)


def test_a_percent_sign_alone_is_escaped(web: WebServer, reader: ObjectReader) -> None:
    assert reader.read(f"{web.url}/100%/%41 %4?a=50%&b=%2F", 5, 9) == DATA[5:9]
    assert web.requests[-1]["path"] == "/100%25/%41%20%254?a=50%25&b=%2F"


@pytest.mark.parametrize("location", ["/x", "ftp://127.0.0.1/x", "http://", "file:///etc/passwd"])
def test_redirects_that_lead_nowhere_end(web: WebServer, reader: ObjectReader, location: str) -> None:
    web.answer = lambda handler: reply(handler, 301, location=location)
    with pytest.raises(StorageError, match="301"):
        reader.read(f"{web.url}/x")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, AccessDeniedError), (404, ObjectMissingError), (410, StorageError), (204, StorageError)],
)
def test_other_answers_are_errors(web: WebServer, reader: ObjectReader, status: int, kind: type[StorageError]) -> None:
    web.answer = lambda handler: reply(handler, status)
    with pytest.raises(kind, match=str(status)):
        reader.read(f"{web.url}/x")
    assert len(web.requests) == 1


def test_options_that_nobody_knows_are_refused() -> None:
    with pytest.raises(OptionError, match=r"no option \['secret'\]; give headers"):
        open_storage("https", {"secret": "s"}, ReadOptions())


def test_pythons_own_server_gives_files_by_their_addresses_and_no_sizes_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    for number in range(2):
        pq.write_table(pa.table({"value": [number, number + 10]}), tmp_path / "served" / f"part-{number}.parquet")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            read = open_dataset(f"{url}/part-{{0..1}}.parquet", index_dir=str(tmp_path))
            assert [row["value"] for row in (read[number] for number in range(4))] == [0, 10, 1, 11]
            with pytest.raises(SourceError, match=r"does not report its size.*give the addresses of the files"):
                open_dataset(f"{url}/", index_dir=str(tmp_path))
        finally:
            server.shutdown()
            thread.join()
