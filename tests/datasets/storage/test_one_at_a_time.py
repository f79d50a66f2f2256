"""File systems of fsspec's that are not known to bear several threads are read by one at a time."""

from __future__ import annotations

import io
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

from torch_dpflow.datasets.describing import Objects
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.spec import SampleMeta
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
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
    with Objects(tar) as objects:
        assert list(objects.contents(places)) == [_content(number) for number in range(COUNT)]
        assert {look.size for look in objects.looks([ByteRange(url) for url, _ in places])} == {20_000}  # type: ignore[union-attr]


class Fragile(fsspec.AbstractFileSystem):
    """Notes whether two threads are in it at once; what is said to be "slow" waits for `gate`."""

    protocol = "fragile"
    cachable = False
    inside = threading.Semaphore(1)
    overlaps = 0
    entered = threading.Event()
    gate = threading.Event()
    extra = b""

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        if not Fragile.inside.acquire(blocking=False):
            Fragile.overlaps += 1
            return b"wrong"
        try:
            if "slow" in path:
                Fragile.entered.set()
                Fragile.gate.wait(60)
            return bytes(range(100))[start:end] + Fragile.extra
        finally:
            Fragile.inside.release()

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": len(self.cat_file(path))}


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> type[Fragile]:
    fsspec.register_implementation("fragile", Fragile, clobber=True)
    monkeypatch.setattr(Fragile, "overlaps", 0)
    monkeypatch.setattr(Fragile, "extra", b"")
    monkeypatch.setattr(Fragile, "entered", threading.Event())
    monkeypatch.setattr(Fragile, "gate", threading.Event())
    return Fragile


def test_two_readers_and_a_look_at_sizes_share_the_turn(fragile: type[Fragile]) -> None:
    spans = [ByteRange(f"fragile://{number}") for number in range(30)]
    with (
        ObjectReader() as one,
        ObjectReader() as other,
        Objects({}) as objects,
        ThreadPoolExecutor(3) as many,
    ):
        reads = [many.submit(reader.read_many, spans) for reader in (one, other)]
        sizes = [look.size for look in objects.looks(spans)]  # type: ignore[union-attr]
        assert [read.result() for read in reads] == [[bytes(range(100))] * 30] * 2
    assert (set(sizes), fragile.overlaps) == ({100}, 0)


def test_who_waits_behind_a_read_that_hangs_ends_at_its_deadline(fragile: type[Fragile]) -> None:
    impatient = ReadOptions(attempts=1, deadline_s=0.2)
    with ObjectReader() as patient, ObjectReader(options=impatient) as reader, ThreadPoolExecutor(1) as other:
        slow = other.submit(patient.read, "fragile://slow")
        assert fragile.entered.wait(60)
        with pytest.raises(StorageTimeoutError):
            reader.read("fragile://b")
        fragile.gate.set()
        assert slow.result() == bytes(range(100))
        assert patient.read("fragile://b") == bytes(range(100))
    assert fragile.overlaps == 0


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
