"""File systems of fsspec's that are not known to bear several threads are read by one at a time."""

from __future__ import annotations

import io
import math
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.datasets.storage.web_server import WebServer, reply, serve_ranges, then
from torch_dpflow.datasets.describing import by_groups, span_of
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.spec import SampleMeta
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.file_systems import _locks, open_file_system
from torch_dpflow.errors import StorageError, StorageTimeoutError

COUNT = 100


def _content(number: int) -> bytes:
    return bytes([number]) * 20_000


@pytest.fixture
def tar(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "data.tar"
    with tarfile.open(path, "w") as archive:
        for number in range(COUNT):
            info = tarfile.TarInfo(f"{number}.bin")
            info.size = 20_000
            archive.addfile(info, io.BytesIO(_content(number)))
    return {"fo": str(path)}


def test_sixteen_threads_read_a_tar_right(tar: dict[str, Any]) -> None:
    spans = [ByteRange(f"tar://{number}.bin") for number in range(COUNT)]
    with ObjectReader(tar) as reader:
        for _ in range(3):
            assert reader.read_many(spans) == [_content(number) for number in range(COUNT)]


def test_checksums_of_a_tar_are_taken_right(tar: dict[str, Any]) -> None:
    places = [
        (f"tar://{number}.bin", SampleMeta(path="x", meta=b"{}"))  # type: ignore[arg-type]
        for number in range(COUNT)
    ]
    with ObjectReader(tar) as reader:
        found = by_groups(reader.read_each, [span_of(url, sample) for url, sample in places])
        assert list(found) == [_content(number) for number in range(COUNT)]
        looks = by_groups(reader.look_each, [ByteRange(url) for url, _ in places])
        assert {look.size for look in looks} == {20_000}  # type: ignore[union-attr]


class Fragile(fsspec.AbstractFileSystem):
    """Notes whether two threads are in it at once; what is said to be "slow" waits for `gate`."""

    protocol = "fragile"
    cachable = False
    overlaps = 0
    left = threading.Event()
    gate = threading.Event()
    extra = b""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inside = threading.Semaphore(1)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        if not self.inside.acquire(blocking=False):
            Fragile.overlaps += 1
            return b"wrong"
        try:
            if "slow" in path:
                Fragile.gate.wait(150)
            return bytes(range(100))[start:end] + Fragile.extra
        finally:
            self.inside.release()
            if "slow" in path:
                Fragile.left.set()

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": len(self.cat_file(path))}


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> type[Fragile]:
    fsspec.register_implementation("fragile", Fragile, clobber=True)
    monkeypatch.setattr(Fragile, "overlaps", 0)
    monkeypatch.setattr(Fragile, "extra", b"")
    monkeypatch.setattr(Fragile, "left", threading.Event())
    monkeypatch.setattr(Fragile, "gate", threading.Event())
    return Fragile


def test_threads_and_looks_share_the_turn_of_a_file_system(fragile: type[Fragile]) -> None:
    spans = [ByteRange(f"fragile://{number}") for number in range(30)]
    with (
        ObjectReader() as reader,
        ThreadPoolExecutor(3) as many,
    ):
        reads = [many.submit(reader.read_many, spans) for _ in range(2)]
        sizes = [look.size for look in reader.look_each(spans)]  # type: ignore[union-attr]
        assert [read.result() for read in reads] == [[bytes(range(100))] * 30] * 2
    assert (set(sizes), fragile.overlaps) == ({100}, 0)


def test_a_file_system_that_hangs_holds_itself_alone(fragile: type[Fragile], tmp_path: Path) -> None:
    """Others that serve one call at a time, of other readers and kinds, are read meanwhile, and afterwards."""
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("x", b"content")
    files = fsspec.filesystem("memory")
    files.pipe_file("/hangs/data.zip", (tmp_path / "data.zip").read_bytes())
    impatient = ReadOptions(attempts=1, deadline_s=0.2)
    others = [
        f"zip://x::file://{tmp_path}/data.zip",
        "zip://x::memory://hangs/data.zip",
        "memory://hangs/data.zip",
    ]
    with ObjectReader(options=impatient) as reader, ObjectReader() as other:
        with pytest.raises(StorageTimeoutError):
            reader.read("fragile://host/slow")
        assert [len(other.read(url)) for url in others[:2]] == [7, 7]
        assert other.read(others[2]) == (tmp_path / "data.zip").read_bytes()
        assert other.look_each([ByteRange(others[0])])[0].size == 7  # type: ignore[union-attr]
        with pytest.raises(StorageTimeoutError):
            reader.read("fragile://host/b")  # this one waits, as a second call could return wrong bytes
        fragile.gate.set()
        assert fragile.left.wait(150)
        assert reader.read("fragile://host/b") == bytes(range(100))
    files.rm("/hangs", recursive=True)
    assert fragile.overlaps == 0


def test_an_archive_takes_its_turn_in_what_it_lies_in(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("x", b"content")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/lies/data.zip", (tmp_path / "data.zip").read_bytes())
    in_memory = open_file_system("zip://x::memory://lies/data.zip", {}, 60)[0]
    on_disk = open_file_system(f"zip://x::file://{tmp_path}/data.zip", {}, 60)[0]
    assert [len(_locks(one)) for one in (in_memory, on_disk, memory)] == [2, 1, 1]
    assert _locks(in_memory)[1:] == _locks(memory)
    assert _locks(on_disk) != _locks(in_memory)[:1]
    assert _locks(on_disk) == _locks(on_disk)
    assert _locks(fsspec.filesystem("file")) == []
    memory.rm("/lies", recursive=True)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e10, 5.0])
@pytest.mark.parametrize("deadline_s", [math.inf, 1e10, 5.0])
def test_any_number_of_seconds_is_a_limit(
    timeout_s: float, deadline_s: float, fragile: type[Fragile], tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("x", b"content")
    limits = ReadOptions(timeout_s=timeout_s, deadline_s=deadline_s, backoff_s=1e-9)
    failing = lambda handler: reply(handler, 503)  # noqa: E731
    with WebServer(then(serve_ranges(b"content"), failing)) as web, ObjectReader(options=limits) as reader:
        for url in (
            f"zip://x::file://{tmp_path}/data.zip",
            f"{web.url}/x",
            f"file://{tmp_path}/data.zip",
            "fragile://b",
        ):
            assert reader.read(url)
            assert reader.look_each([ByteRange(url)])[0].size  # type: ignore[union-attr]
        assert Files(f"zip://::file://{tmp_path}/data.zip", read_options=limits).children()[0].name == "x"


def test_more_bytes_than_were_asked_for_are_refused(fragile: type[Fragile]) -> None:
    fragile.extra = b"more"
    with ObjectReader() as reader, pytest.raises(StorageError, match="14 bytes where 10 were requested"):
        reader.read("fragile://x", 5, 15)


def test_a_zip_is_read_right(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for number in range(COUNT):
            archive.writestr(f"{number}.bin", _content(number))
    spans = [ByteRange(f"zip://{number}.bin") for number in range(COUNT)]
    with ObjectReader({"fo": str(tmp_path / "data.zip")}) as reader:
        assert reader.read_many(spans) == [_content(number) for number in range(COUNT)]


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads that take turns after every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_of_two_who_create_a_file_in_memory_one_succeeds(eager_switches: None) -> None:
    files = Files("memory://created-at-once")

    def create(number: int) -> bool:
        try:
            files.create(f"{number}.bin", b"x")
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        created = list(pool.map(create, (number // 2 for number in range(2000))))
    assert sum(created) == 1000


def test_memory_is_listed_while_another_thread_removes(eager_switches: None) -> None:
    files = Files("memory://listed-while-removed")
    ended = threading.Event()

    def change() -> None:
        for _ in range(100):
            for number in range(20):
                files.write(f"folder/{number}.bin", b"x")
            files.remove("folder")
        ended.set()

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        while not ended.is_set() and not changing.done():
            assert len(files.children("folder")) <= 20
        changing.result()
