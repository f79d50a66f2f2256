"""Archives: each member is read as unpacking would give it, or the archive is refused."""

from __future__ import annotations

import bz2
import gzip
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_dpflow.datasets.importers.folders import ImageFolderImporter
from torch_dpflow.datasets.storage import ObjectReader, ReadOptions
from torch_dpflow.errors import ChecksumError, SourceError, StorageError


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tuple[tarfile.TarInfo, io.BytesIO]:
    member, data = tarfile.TarInfo(name), name.encode() if kind == tarfile.REGTYPE else b""
    member.type, member.linkname, member.size = kind, target, len(data)
    return member, io.BytesIO(data)


def _tar(path: Path, *members: tuple[tarfile.TarInfo, io.BytesIO], mode: Any = "w") -> str:
    """An archive of files that have their own names as content; returns its address."""
    with tarfile.open(path, mode) as tar:
        for member, data in members:
            tar.addfile(member, data)
    return f"tar://::file://{path}"


def _images(root: str | Path) -> list[tuple[Any, Any]]:
    return [(item.path, item.meta["class"]) for item in ImageFolderImporter(root).items()]


@pytest.fixture
def pets(tmp_path: Path) -> tuple[Path, str]:
    """A tar archive of two blocks for each of two images, and its address."""
    return tmp_path / "a.tar", _tar(tmp_path / "a.tar", _member("cat/0.jpg"), _member("dog/0.jpg"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data[:1024], "has no end mark after byte 1024"),
        (lambda data: data[:1300], "has no end mark after byte 1024"),
        (lambda data: data[:2048], "has no end mark after byte 2048"),
        (lambda data: data[:2500], "has no end mark after byte 2048"),
        (lambda data: data[:1600], "unexpected end of data"),
        (lambda data: data[:1024] + b"X" + data[1025:], "has a damaged header at byte 1024"),
        (lambda data: data[:1024] + bytes(512) + data[1024:], "another archive follows"),
        (lambda data: data[:1024] + bytes(20 << 10) + data[1024:], "another archive follows"),
        (lambda data: data + bytes(3 << 20) + data, "another archive follows"),
    ],
)
def test_a_tar_archive_that_may_have_lost_members_is_refused(
    pets: tuple[Path, str], change: Callable[[bytes], bytes], told: str
) -> None:
    path, address = pets
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StorageError, match=rf"a\.tar.*{told}"):
        _images(address)


@pytest.mark.parametrize("end", [512, 1024, 3 << 20])
def test_a_tar_archive_ends_with_any_number_of_zeros(pets: tuple[Path, str], end: int) -> None:
    path, address = pets
    path.write_bytes(path.read_bytes()[:2048] + bytes(end))
    assert _images(address) == [("cat/0.jpg", "cat"), ("dog/0.jpg", "dog")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tgz", lambda data: data),
        ("a.tar.gz", lambda data: gzip.compress(data)[:-6] + b"12" + gzip.compress(data)[-4:]),
        ("a.tar.gz", lambda data: gzip.compress(data)[:-20]),
        ("a.tar.bz2", lambda data: b"BZh9" + bytes(50) + bz2.compress(data)),
        ("a.tar.xz", lambda data: data),
    ],
)
def test_damage_of_a_compressed_archive_is_no_lost_connection(
    pets: tuple[Path, str], tmp_path: Path, name: str, content: Callable[[bytes], bytes]
) -> None:
    (tmp_path / name).write_bytes(content(pets[0].read_bytes()))
    with pytest.raises(StorageError, match="the archive is damaged or cut, or compressed otherwise than its name says"):
        _images(f"tar://::file://{tmp_path}/{name}")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("target", ["dog", "dog/0.jpg", "../dog", "nowhere"])
def test_links_of_a_tar_archive_are_refused_by_name(tmp_path: Path, kind: bytes, target: str) -> None:
    address = _tar(tmp_path / "a.tar", _member("dog/0.jpg"), _member("cat/1.jpg", kind, target))
    with pytest.raises(StorageError, match=r"has a link 'cat/1\.jpg'; pack the files instead"):
        _images(address)
    with ObjectReader() as objects, pytest.raises(StorageError, match="has a link"):
        objects.read(f"tar://dog/0.jpg::file://{tmp_path}/a.tar")


def test_what_is_no_file_in_a_tar_archive_is_named(tmp_path: Path) -> None:
    address = _tar(tmp_path / "a.tar", _member("cat/0.jpg"), _member("cat/1.jpg", tarfile.FIFOTYPE, ""))
    with pytest.raises(StorageError, match=r"cat/1\.jpg.*a pipe or a device"):
        _images(address)
    with ObjectReader() as objects, pytest.raises(StorageError, match="a pipe or a device"):
        objects.read(f"tar://cat/1.jpg::file://{tmp_path}/a.tar")


def test_a_later_volume_of_a_tar_archive_is_refused(tmp_path: Path) -> None:
    member, data = _member("cat/0.jpg")
    member.type = b"M"
    with pytest.raises(StorageError, match=r"begins within the file 'cat/0\.jpg'"):
        _images(_tar(tmp_path / "a.tar", (member, data)))


def _zip(path: Path, system: int, *names: str, mode: int = 0) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            member = zipfile.ZipInfo(name)
            member.create_system, member.external_attr = system, mode << 16
            archive.writestr(member, name)
    return f"zip://::file://{path}"


@pytest.mark.parametrize("system", [0, 3, 10, 14])
def test_backslashes_of_a_zip_archive_are_refused(tmp_path: Path, system: int) -> None:
    with pytest.raises(StorageError, match=r"name 'cat.*0\.jpg', whose backslash divides it on Windows alone"):
        _images(_zip(tmp_path / "b.zip", system, "cat\\0.jpg", "dog/0.jpg"))


def test_links_of_a_zip_archive_are_no_samples(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"has a link 'cat/0\.jpg'; pack the files"):
        _images(_zip(tmp_path / "a.zip", 3, "cat/0.jpg", mode=stat.S_IFLNK | 0o777))


def test_a_zip_archive_that_another_one_precedes_is_refused(tmp_path: Path) -> None:
    _zip(tmp_path / "a.zip", 3, "cat/0.jpg")
    address = _zip(tmp_path / "b.zip", 3, "dog/0.jpg")
    data = (tmp_path / "b.zip").read_bytes()
    (tmp_path / "b.zip").write_bytes(b"#!/bin/sh\n" + data)  # it unpacks itself
    assert _images(address) == [("dog/0.jpg", "dog")]
    (tmp_path / "b.zip").write_bytes((tmp_path / "a.zip").read_bytes() + data)
    with pytest.raises(StorageError, match="another archive precedes this one"):
        _images(address)


def test_an_empty_tar_archive_has_no_classes(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        _images(_tar(tmp_path / "a.tar"))


@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_that_is_written_again_is_noticed(tmp_path: Path, kind: str, *, is_in_place: bool) -> None:
    def write(name: str, content: bytes) -> bytes:
        path = tmp_path / name
        if kind == "zip":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("a.bin", content)
        else:
            entry = tarfile.TarInfo("a.bin")
            entry.size = len(content)
            _tar(path, (entry, io.BytesIO(content)))
        return path.read_bytes()

    write("data", b"old" * 100)
    with ObjectReader(options=ReadOptions(attempts=1)) as reader:
        url = f"{kind}://a.bin::file://{tmp_path}/data"
        assert reader.read(url, 100, 200) == (b"old" * 100)[100:200]
        new = write("new", b"new" * 100)
        if is_in_place:
            (tmp_path / "data").write_bytes(new)
        else:
            (tmp_path / "new").replace(tmp_path / "data")
        with pytest.raises(ChecksumError, match="written again"):
            reader.read(url, 100, 200)
