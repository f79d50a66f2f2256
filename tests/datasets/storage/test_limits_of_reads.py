"""Limits that reads keep: connections and descriptors, what servers ask for, entries of the disk cache, signatures."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path

import pytest

from tests.datasets.storage.web_server import WebServer, raw, reply, serve_ranges
from torch_dpflow.datasets import open_dataset
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.disk_cache import DiskCache, _counts_in
from torch_dpflow.datasets.storage.failures import with_retries
from torch_dpflow.datasets.storage.http_connection import MAX_IDLE
from torch_dpflow.datasets.storage.urls import printable_url, unsigned
from torch_dpflow.errors import DPFlowError, StorageError, StorageUnavailableError


class ManyServers:
    """As many web servers as there are `ports`, in one thread. Counts their open connections."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.ports: list[int] = []
        self.open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
        self.open.discard(writer)
        writer.close()

    async def _start(self) -> None:
        self._servers = [await asyncio.start_server(self._answer, "127.0.0.1", 0) for _ in range(self.count)]
        self.ports = [server.sockets[0].getsockname()[1] for server in self._servers]

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        while self.open:
            await asyncio.sleep(0.001)

    def __enter__(self) -> ManyServers:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def test_idle_connections_have_one_bound_over_all_servers() -> None:
    with ManyServers(MAX_IDLE + 40) as servers, ObjectReader() as reader:
        for _ in range(2):
            for port in servers.ports:
                assert reader.read(f"http://127.0.0.1:{port}/x") == b"x"
        while len(servers.open) > MAX_IDLE:  # closing takes a moment to arrive
            threading.Event().wait(0.001)
        kept = len(servers.open)
        for port in servers.ports[-MAX_IDLE:]:  # the servers that were used last
            reader.read(f"http://127.0.0.1:{port}/x")
        assert len(servers.open) == kept == MAX_IDLE


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let the process open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def test_running_out_of_descriptors_is_an_error_at_once() -> None:
    with WebServer(serve_ranges(b"x")) as web, ObjectReader() as reader, no_descriptors():
        (error,) = reader.read_each([ByteRange(f"{web.url}/x")])
        assert type(error) is StorageError  # not one that is tried again
        assert "ulimit -n" in str(error)
        assert web.requests == []


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("8", 8.0, 8.0),
        (formatdate(4_102_444_800, usegmt=True), 1e6, 1e6),  # far away
        (formatdate(0, usegmt=True), 0.0, 0.0),
        ("soon", 0.0, 0.0),
        ("-3", 0.0, 0.0),
    ],
)
def test_what_a_server_asks_for_is_in_its_error(status: int, header: str, least: float, most: float) -> None:
    once = ReadOptions(attempts=1)
    with (
        WebServer(lambda handler: reply(handler, status, Retry_After=header)) as web,
        ObjectReader(options=once) as reader,
        pytest.raises(StorageUnavailableError) as raised,
    ):
        reader.read(f"{web.url}/x")
    cause = raised.value.__cause__
    assert isinstance(cause, StorageUnavailableError)
    assert least <= cause.retry_after_s <= most


@pytest.mark.parametrize(("asked_s", "begins"), [(0.0, (0.0, 0.2)), (8.0, (8.0, 8.2)), (500.0, (99.0, 99.9))])
def test_a_server_is_left_alone_as_long_as_it_asks(asked_s: float, begins: tuple[float, float]) -> None:
    """The second attempt is not before; if that is beyond the deadline, one attempt is shortly before the deadline."""
    now = [0.0]
    at: list[float] = []

    def attempt(deadline: float) -> bytes:
        at.append(now[0])
        error = StorageUnavailableError("busy")
        error.retry_after_s = asked_s
        raise error

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(StorageUnavailableError):
        with_retries(attempt, ReadOptions(deadline_s=100.0), sleep=sleep, clock=lambda: now[0])
    assert at[0] == 0.0
    assert begins[0] <= at[1] <= begins[1]
    assert all(later - earlier >= asked_s for earlier, later in itertools.pairwise(at[:-1]))
    assert at[-1] < 100.0


def test_an_entry_is_written_and_read_in_as_many_calls_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call takes 2 GiB at most; here it takes 1,000 bytes."""
    write, pread = os.write, os.pread
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: write(descriptor, parts[0][:1000]))
    monkeypatch.setattr(os, "write", lambda descriptor, part: write(descriptor, part[:1000]))
    monkeypatch.setattr(os, "pread", lambda descriptor, count, at: pread(descriptor, min(count, 1000), at))
    cache = DiskCache(str(tmp_path / "cache"))
    for size in (0, 10, 999, 1000, 1001, 123_456):
        cache.put(str(size), bytes(range(256)) * (size // 256 + 1))
        assert cache.get(str(size)) == bytes(range(256)) * (size // 256 + 1)


@pytest.mark.parametrize("links", [True, False])
def test_two_writers_of_an_entry_count_once(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:  # a file system without hard links replaces, and counts twice until the cache is shown
        monkeypatch.setattr(os, "link", _no_links)
    one, other = DiskCache(str(tmp_path / "cache")), DiskCache(str(tmp_path / "cache"))
    one.put("x", bytes(5000))
    monkeypatch.setattr(os.path, "exists", lambda path: False)  # the other has looked before
    other.put("x", bytes(5000))
    with one._counted() as counts:
        assert counts is not None
        assert sum(_counts_in(counts)) == (8192 if links else 16384)
    assert one.get("x") == bytes(5000)
    assert (one.usage().entries, one.usage().bytes) == (1, 8192)
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if name.startswith(".")]


def _no_links(source: str, target: str) -> None:
    raise PermissionError(1, "no links here")


def test_a_cache_makes_its_directory_with_the_first_entry(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path / "cache"))
    assert cache.get("x") is None
    assert not (tmp_path / "cache").exists()
    with pytest.raises(FileNotFoundError):
        cache.usage()
    cache.put("x", b"content")
    assert cache.get("x") == b"content"
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


SIGNED = {
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=K%2F1&X-Amz-Date=1&X-Amz-Expires=9&X-Amz-SignedHeaders=host"
    "&X-Amz-Signature=SECRET": "",
    "versionId=3&X-Amz-Signature=SECRET&X-Amz-Security-Token=SECRET": "?versionId=3",
    "AWSAccessKeyId=K&Signature=SECRET&Expires=17": "",
    "X-Goog-Algorithm=A&X-Goog-Signature=SECRET": "",
    "GoogleAccessId=K&Expires=17&Signature=SECRET": "",
    "sv=2022&sr=b&sig=SECRET&se=2026-01-01&sp=r": "",
    "snapshot=2&sv=2022&sig=SECRET": "?snapshot=2",
    "OSSAccessKeyId=K&Expires=17&Signature=SECRET&security-token=SECRET": "",
    "x-oss-process=image/resize,w_100&x-oss-signature=SECRET&x-oss-date=3": "?x-oss-process=image/resize,w_100",
    "Policy=P&Signature=SECRET&Key-Pair-Id=K": "",
    "expires=soon&policy=mine": "?expires=soon&policy=mine",  # not signed, so a part of the name
    # Links of no known kind: what distinguishes objects stays.
    "sr=16000&signature=SECRET": "?sr=16000&signature=SECRET",
    "id=7&sig=SECRET": "?id=7&sig=SECRET",
    "policy=A&sig=SECRET": "?policy=A&sig=SECRET",
    "expires=17&Signature=SECRET": "?expires=17&Signature=SECRET",
    "": "?",
}


@pytest.mark.parametrize("query", SIGNED)
def test_a_name_has_no_signature(query: str) -> None:
    for base in ("http://host/a.tar", "https://host/x//a%20b.tar"):
        assert unsigned(f"{base}?{query}") == base + SIGNED[query]
        assert unsigned(base) == base
    for other in (f"s3://bucket/a.tar?{query}", f"file:///a.tar?{query}"):  # there a part of the key
        assert unsigned(other) == other


@pytest.mark.parametrize("query", SIGNED)
def test_no_secret_is_printed(query: str) -> None:
    assert "SECRET" not in printable_url(f"http://host/a.tar?{query}")


def test_a_renewed_signature_finds_the_cache_and_no_error_has_it(tmp_path: Path, patient: ReadOptions) -> None:
    limits = ReadOptions(**{**vars(patient), "cache_dir": tmp_path / "cache"})
    with WebServer(serve_ranges(b"content", ETag='"1"')) as web, ObjectReader(options=limits) as reader:
        span = ByteRange(f"{web.url}/a?sv=1&sig=SECRET1", 0, 5, state='"1"')
        assert reader.read_many([span]) == [b"conte"]
        assert web.requests[0]["path"] == "/a?sv=1&sig=SECRET1"  # the request has it
        web.answer = lambda handler: reply(handler, 403, b"no", location=handler.path)
        renewed = ByteRange(f"{web.url}/a?sv=1&sig=SECRET2", 0, 5, state='"1"')
        assert reader.read_many([renewed]) == [b"conte"]
        (error,) = reader.read_each([ByteRange(f"{web.url}/a?sv=1&sig=SECRET2", 1, 5, state='"1"')])
        assert isinstance(error, StorageError)
        assert "SECRET" not in str(error)
        assert "/a (bytes 1 to 5)" in str(error)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"SECRET" in path.read_bytes()]


@pytest.mark.parametrize("status", [404, 403])
@pytest.mark.parametrize("name", ["a.tar", "a.tfrecord", "a.parquet"])
def test_an_address_that_cannot_be_opened_is_named_without_its_signature(
    name: str, status: int, tmp_path: Path, patient: ReadOptions
) -> None:
    with WebServer(lambda handler: reply(handler, status, b"not of this format")) as web:
        with pytest.raises(DPFlowError, match=f"/{name}") as raised:
            open_dataset([f"{web.url}/{name}?sv=1&sig=SECRET"], index_dir=tmp_path, read_options=patient)
        assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Transfer-Encoding: chunked", b"0000000000000007\r\ncontent\r\n000000000000000000\r\n\r\n"),
        (b"Transfer-Encoding: identity\r\nContent-Length: 7", b"content"),
        (b"Transfer-Encoding: identity, chunked", b"7\r\ncontent\r\n0\r\n\r\n"),
    ],
)
def test_framings_that_old_servers_use(head: bytes, body: bytes, patient: ReadOptions) -> None:
    answer = raw(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body)
    with WebServer(answer) as web, ObjectReader(options=patient) as reader:
        assert reader.read(f"{web.url}/x") == b"content"


def test_a_new_name_is_on_the_disk_once_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[str]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    files = Files(str(tmp_path))
    for put, name in ((files.write, "a/x"), (files.write, "a/x"), (files.create, "a/y"), (files.ensure, "z")):
        synced.clear()
        put(name, b"data")
        file, folder = synced
        assert os.path.dirname(file) == folder == os.path.dirname(f"{tmp_path}/{name}")
        assert (tmp_path / name).read_bytes() == b"data"
