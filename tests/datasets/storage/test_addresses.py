"""URLs with hosts, users, passwords and archives: they work or are refused, and no password is written or told."""

from __future__ import annotations

import asyncio
import io
import pickle
import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec.asyn
import pytest
from fsspec.archive import AbstractArchiveFileSystem

from tests.datasets.samples_source import Numbered, numbers, publish
from tests.datasets.storage.ftp_server import FTPServer
from tests.datasets.storage.web_server import WebServer, reply, serve_ranges
from torch_dpflow.datasets import DatasetStore, Draft, open_dataset
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.folders import ImageFolderImporter
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.importers.listing import ListingImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.archives import prepare_archive
from torch_dpflow.datasets.storage.urls import (
    check_url,
    file_system_of,
    join_url,
    split_login,
    split_name,
    without_login,
)
from torch_dpflow.datasets.versions import delete, prune, verify
from torch_dpflow.errors import (
    DPFlowError,
    ObjectMissingError,
    OptionError,
    SourceError,
    StorageError,
    StorageUnavailableError,
)
from torch_dpflow.flows.flow import load_flow

SECRET = "pa:ss wörd/@"
ESCAPED = "pa%3Ass%20w%C3%B6rd%2F%40"
ONCE = ReadOptions(attempts=1, deadline_s=10.0)


@pytest.fixture(scope="session", autouse=True)
def loop() -> None:
    """fsspec's loop and its resolver live as long as the session."""
    loop = fsspec.asyn.get_loop()
    asyncio.run_coroutine_threadsafe(loop.getaddrinfo("127.0.0.1", 0), loop).result()


@pytest.fixture
def ftp() -> Iterator[FTPServer]:
    with FTPServer("me", SECRET) as server:
        yield server


@pytest.mark.parametrize(
    ("url", "clean", "login"),
    [
        ("sftp://me:se@cret@h:22/a", "sftp://h:22/a", {"username": "me", "password": "se@cret"}),
        ("ftp://me@h/a@b", "ftp://h/a@b", {"username": "me"}),
        ("https://me:%40@h/a?x=y@z", "https://h/a?x=y@z", {"username": "me", "password": "@"}),
        ("hdfs://me@h/a", "hdfs://h/a", {"user": "me"}),
        ("zip://a::http://me:x@h/a.zip", "zip://a::http://h/a.zip", {"username": "me", "password": "x"}),
        ("abfs://box@account.dfs.core.windows.net/a", None, {}),
        ("github://org:repo@main/a", None, {}),
        ("s3://bucket/a:b@c", None, {}),
        ("/folder/a:b@c", None, {}),
        ("file:///folder/a:b@c", None, {}),
        ("memory://a:b@c/d", None, {}),
    ],
)
def test_users_and_passwords_become_options(url: str, clean: str | None, login: dict[str, str]) -> None:
    assert split_login(url) == (clean or url, login)
    assert without_login(url) == (clean or url)


def test_a_password_where_there_can_be_none_is_refused_and_not_told() -> None:
    for use in (lambda url: Files(url), lambda url: ObjectReader().read(url)):
        with pytest.raises(OptionError, match=r"s3://bucket/x was given with a user and a password") as caught:
            use("s3://key:hidden@bucket/x")
        assert "hidden" not in _everything_told(caught.value)


def _everything_told(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("/a/b", "file"),
        ("s3://b/a::b", "s3"),
        ("s3://b/zip://x", "s3"),
        ("sftp://h:22/a", "sftp://h:22"),
        ("gs://bucket/a", "gs://bucket"),
        ("zip://a/b::s3://b/x.zip", "zip://::s3://b/x.zip"),
        ("zip://a::/x.zip", "zip://::/x.zip"),
    ],
)
def test_a_url_names_its_file_system(url: str, name: str) -> None:
    assert file_system_of(url) == name


def test_urls_are_joined_inside_archives() -> None:
    assert join_url("zip://::file:///x.zip", "a/b") == "zip://a/b::file:///x.zip"
    assert join_url("zip://a::tar://x.zip::s3://b/y.tar", "b") == "zip://a/b::tar://x.zip::s3://b/y.tar"
    assert join_url("s3://b/a::b", "c") == "s3://b/a::b/c"
    assert split_name("zip://a/b.csv::/x.zip") == ("zip://a::/x.zip", "b.csv")
    assert split_name("zip://b.csv::/x.zip") == ("zip://::/x.zip", "b.csv")
    assert split_name("b.csv") == (".", "b.csv")


def test_a_store_on_ftp_keeps_no_password(ftp: FTPServer) -> None:
    store = DatasetStore.create(f"ftp://me:{ESCAPED}@{ftp.host}/datasets")
    assert store.url == f"ftp://{ftp.host}/datasets"
    stored = publish(store, Numbered(22))
    with ObjectReader(stored.options) as reader:
        assert reader.read(f"{stored.url}/versions/v1.json")[:10] == b'{"kind":"d'
    copy = pickle.loads(pickle.dumps(stored))
    for reading in (DatasetReader(stored), DatasetReader(copy)):
        assert reading.__getitems__([*range(22)]) == numbers(22)
        reading.close()
    assert list(verify(stored, data=True)) == []
    assert not [name for name, data in ftp.files.items() if b"pa" in data and b"@" in data]
    assert SECRET not in repr(stored) + repr(store)
    for wrong in ("", "me:wrong@"):
        with pytest.raises(DPFlowError) as caught:
            DatasetStore(f"ftp://{wrong}{ftp.host}/datasets", read_options=ONCE)
        assert "wrong" not in _everything_told(caught.value)


def test_data_on_ftp_is_imported_and_read_with_the_options_alone(ftp: FTPServer, tmp_path: Path) -> None:
    ftp.files = {f"/images/{kind}/{n}?#.jpg": bytes([n]) * 50 for kind in "ab" for n in range(4)}
    root = f"ftp://me:{ESCAPED}@{ftp.host}/images"
    store = DatasetStore.create(str(tmp_path / "datasets"))
    draft = Draft(store, "core/images", "v1")
    draft.add("train", ImageFolderImporter(root), checksum="crc32")
    draft.publish()
    written = b"".join(path.read_bytes() for path in (tmp_path / "datasets").rglob("*.json"))
    assert f"ftp://{ftp.host}/images".encode() in written
    assert b"pa" + b"%3A" not in written
    assert SECRET.encode() not in written
    stored = store.open("core/images")
    reader = DatasetReader(stored, storage_options={"username": "me", "password": SECRET})
    assert [data for data, _ in reader.__getitems__([*range(8)])] == [bytes([n]) * 50 for n in (*range(4),) * 2]
    reader.close()


def test_a_draft_keeps_no_password(tmp_path: Path) -> None:
    store = DatasetStore.create(str(tmp_path / "datasets"))

    def items() -> Iterator[Item]:
        yield Item(path="a", length=1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Draft(store, "core/x", "v1").add(
            "train", IterableImporter(items(), root="sftp://me:hidden@host/data"), shard_size=1
        )
    drafts = [path.read_text() for path in (tmp_path / "datasets").rglob("*.json")]
    assert any("sftp://host/data" in text for text in drafts)
    assert not any("hidden" in text or "me:" in text for text in drafts)
    with pytest.raises(SourceError, match="'http://h/x' was given with a user") as caught:
        Item(path="http://me:hidden@h/x")
    assert "hidden" not in _everything_told(caught.value)


def test_two_users_of_one_web_server_and_errors_without_passwords() -> None:
    def answer(handler: Any) -> None:
        data = handler.headers.get("Authorization", "none").encode()
        serve_ranges(data)(handler) if handler.path == "/x" else reply(handler, 403)

    with WebServer(answer) as server, ObjectReader() as reader:
        host = server.url.partition("://")[2]
        found = reader.read_many([ByteRange(f"http://{user}{host}/x") for user in ("a:hidden@", "b:hidden@", "")])
        assert len({*found}) == 3
        assert found[2] == b"none"
        with pytest.raises(DPFlowError) as caught:
            reader.read(f"http://a:hidden@{host}/y")
        assert "hidden" not in _everything_told(caught.value)
        with pytest.raises(DPFlowError, match="is no data-load-flow file") as caught:
            load_flow(f"http://a:hidden@{host}/x")
        assert "hidden" not in _everything_told(caught.value)
        with pytest.raises(DPFlowError) as caught:
            reader.read("http://a:hidden@/y")
        assert "hidden" not in _everything_told(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://h/a\tb.jpg",
        "http://h/a\nb.jpg",
        "http://h/a.jpg\n",
        "https://h/a\r\nb.jpg",
        "http://h/a\0b",
        "http://h/a\x7fb",
        "http://h/a\x85b",
        "http://h/a?x=\t",
        "http://h\t/a",
        "http://h h/a",
        "http://h\u3000/a",
        "http:// h/a",
        "s3://bu cket/a",
        "s3://bucket\t/a",
        "oss://bucket\n/a",
        "ftp://h/a\r\nb",
        "hdfs://h/a\tb",
        "sftp://h h/a",
        "zip://a b::http://h/a\tb.zip",
    ],
)
def test_a_control_character_in_a_url_is_refused_before_anything_is_read(url: str, tmp_path: Path) -> None:
    for use in (lambda url: ObjectReader().read(url), lambda url: Files(url)):
        with pytest.raises(OptionError, match=r"has (a|whitespace or a) control"):
            use(url)
    draft = Draft(DatasetStore.create(str(tmp_path)), "core/x", "v1")
    with pytest.raises(SourceError, match=r"has (a|whitespace or a) control"):
        draft.add("train", IterableImporter([Item(path=url, length=1)]))


@pytest.mark.parametrize(
    "url",
    [
        "/a\tb",
        "file:///a\nb",
        "s3://bucket/a\tb c",
        "oss://bucket/a\nb",
        "zip://a b\tc::/x.zip",
        "http://h/a b",
    ],
)
def test_names_that_nothing_parses_may_have_tabs(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize("url", ["ftp://", "ftp:///x", "tar://x", "zip://x"])
def test_an_address_without_what_it_needs_is_refused(url: str) -> None:
    with pytest.raises((OptionError, StorageError, ImportError)):
        ObjectReader(options=ONCE).read(f"{url}/y")


@pytest.mark.parametrize("url", ["http://[::1", "http://h:x", "http://h:65536"])
def test_an_address_with_a_broken_host_is_refused(url: str) -> None:
    for use in (lambda url: Files(url).read("x"), lambda url: ObjectReader().read(f"{url}/x")):
        with pytest.raises(OptionError, match="correct the host or the port"):
            use(url)


@pytest.mark.parametrize("url", ["zip://x::a.zip", "dir://x::a"])
def test_a_relative_path_behind_an_address_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match=f"{url} names the archive or folder by a relative path"):
        Files(url)


@pytest.mark.parametrize("url", ["simplecache::s3://bucket/d", "filecache::http://h/d"])
def test_caches_of_fsspec_are_refused(url: str) -> None:
    for use in (lambda url: Files(url), lambda url: ObjectReader().read(f"{url}/x")):
        with pytest.raises(OptionError, match="caches are not supported"):
            use(url)


def test_data_in_an_archive_is_imported_and_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("lists/all.csv", "path,label\n" + "".join(f"../{n}.bin,{n}\n" for n in range(9)))
        for number in range(30):
            archive.writestr(f"data/{number % 2}/{number:02}.jpg", bytes([number]) * 10)
    root = f"zip://data::file://{tmp_path}/data.zip"
    store = DatasetStore.create(str(tmp_path / "datasets"))
    draft = Draft(store, "core/images", "v1")
    draft.add("train", ImageFolderImporter(root), checksum="crc32")
    draft.publish()
    stored = store.open("core/images")
    reader = DatasetReader(stored)
    order = [*range(0, 30, 2), *range(1, 30, 2)]
    assert [data for data, _ in reader.__getitems__([*range(30)])] == [bytes([n]) * 10 for n in order]
    assert list(verify(stored, data=True)) == []
    reader.close()
    with pytest.raises(ObjectMissingError), ObjectReader() as objects:
        objects.read(f"zip://no::file://{tmp_path}/data.zip")
    listing = ListingImporter(f"zip://lists/all.csv::file://{tmp_path}/data.zip")
    assert [item.path for item in listing.items()] == [f"../{n}.bin" for n in range(9)]


#: The same tree as several tools spell it: `tar -C dir .`, absolute names, and joined paths.
_SPELLED = ["./", "./cat/", "./cat/0.jpg", "cat/1.jpg", "/cat/2.jpg", "cat//3.jpg", "./dog/./0.jpg"]
_PLAIN = ["cat/0.jpg", "cat/1.jpg", "cat/2.jpg", "cat/3.jpg", "dog/0.jpg"]


def _pack(path: Path, names: list[str], compression: str = "") -> str:
    """An archive of files that have their own names as content; returns its address."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, "" if name.endswith("/") else name)
        return f"zip://::file://{path}"
    mode: Any = f"w:{compression}"
    with tarfile.open(path, mode) as tar:
        for name in names:
            member, data = tarfile.TarInfo(name), name.encode()
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            member.size = 0 if member.isdir() else len(data)
            tar.addfile(member, io.BytesIO(data))
    return f"tar://::file://{path}"


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        ("a.tar", ""),
        ("a.tar.gz", "gz"),
        ("a.tgz", "gz"),
        ("a.TGZ", "gz"),
        ("a.tbz2", "bz2"),
        ("a.txz", "xz"),
        ("a.zip", ""),
    ],
)
def test_members_of_an_archive_are_found_however_they_are_spelled(tmp_path: Path, name: str, compression: str) -> None:
    importer = ImageFolderImporter(_pack(tmp_path / name, _SPELLED, compression))
    found = list(importer.items())
    assert [item.path for item in found] == _PLAIN
    assert [item.meta["label"] for item in found] == [0, 0, 0, 0, 1]
    draft = Draft(DatasetStore.create(str(tmp_path / "datasets")), "core/x", "v1")
    draft.add("train", importer)
    draft.publish()
    reader = DatasetReader(DatasetStore(str(tmp_path / "datasets")).open("core/x"))
    assert [reader[number][0].decode() for number in range(5)] == [one for one in _SPELLED if one[-1] != "/"]
    reader.close()


@pytest.mark.parametrize("name", ["a.tar", "a.tgz", "a.zip"])
@pytest.mark.parametrize("wrong", ["../cat/1.jpg", "cat/../../1.jpg", "cat/.."])
def test_members_that_lead_out_of_an_archive_are_refused(tmp_path: Path, name: str, wrong: str) -> None:
    address = _pack(tmp_path / name, ["cat/0.jpg", wrong], "gz" if name == "a.tgz" else "")
    with pytest.raises(StorageError, match=re.escape(f"has a member of the name {wrong!r}, which leads out")):
        list(ImageFolderImporter(address).items())


class _Archive(AbstractArchiveFileSystem):  # type: ignore[misc]
    """As fsspec's libarchive, which cannot rename members."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names

    def _get_dirs(self) -> None:
        self.dir_cache = {name: {"name": name, "type": "file", "size": 1} for name in self._names}


def test_other_archives_are_read_where_their_names_are_plain() -> None:
    prepare_archive(_Archive("cat/", "cat/0.jpg"), "libarchive://::a.rar")
    for wrong in ("./cat/0.jpg", "cat//0.jpg", "/cat/0.jpg", "../0.jpg"):
        with pytest.raises(StorageError, match=f"has a member of the name '{wrong}'"):
            prepare_archive(_Archive("cat/1.jpg", wrong), "libarchive://::a.rar")


def test_an_archive_that_another_one_follows_is_refused(tmp_path: Path) -> None:
    address = _pack(tmp_path / "a.tar", ["cat/0.jpg"])
    _pack(tmp_path / "b.tar", ["cat/1.jpg"])
    with (tmp_path / "a.tar").open("ab") as file:
        file.write((tmp_path / "b.tar").read_bytes())
    with pytest.raises(StorageError, match="another archive follows the end of this one"):
        list(ImageFolderImporter(address).items())


def test_a_store_that_was_copied_into_an_archive_is_read(tmp_path: Path) -> None:
    publish(DatasetStore.create(str(tmp_path / "datasets")), Numbered(22))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in (tmp_path / "datasets").rglob("*"):
            archive.write(path, path.relative_to(tmp_path))
    store = DatasetStore(f"zip://datasets::file://{tmp_path}/all.zip")
    (name,) = store.ids()
    reader = DatasetReader(store.open(name))
    assert reader.__getitems__([*range(22)]) == numbers(22)
    reader.close()
    for change in (
        lambda: DatasetStore.create(f"zip://new::file://{tmp_path}/all.zip"),
        lambda: publish(store, Numbered(3), version="v2"),
        lambda: delete(store, name),
    ):
        with pytest.raises(StorageError, match=r"all\.zip: archives are read only; unpack it"):
            change()
    assert prune(store, name) == 0
    assert list(verify(store.open(name), data=True)) == []


def test_a_path_with_colons_is_a_path(tmp_path: Path) -> None:
    store = DatasetStore.create(str(tmp_path / "a::b"))
    reader = DatasetReader(publish(store, Numbered(3)))
    assert reader.__getitems__([2, 0]) == [numbers(3)[2], numbers(3)[0]]
    reader.close()


def test_an_archive_behind_a_web_server_with_a_password(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("a.bin", b"inside")
    data = (tmp_path / "data.zip").read_bytes()

    def answer(handler: Any) -> None:
        is_known = "Authorization" in handler.headers
        serve_ranges(data)(handler) if is_known else reply(handler, 401)

    with WebServer(answer) as server, ObjectReader() as reader:
        host = server.url.partition("://")[2]
        assert reader.read(f"zip://a.bin::http://me:x@{host}/data.zip") == b"inside"


def test_a_storage_that_refuses_connections_takes_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the directory that was given is requested."""
    looked: list[str] = []
    monkeypatch.setattr(Files, "exists", lambda files, path: looked.append(path))
    once = {"connect_timeout": 5, "retries": {"max_attempts": 0}}
    options = {"key": "x", "secret": "y", "endpoint_url": "http://127.0.0.1:1", "config_kwargs": once}
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    with pytest.raises(StorageUnavailableError, match=r"^s3://b2/tar: .*connection failed"):
        open_dataset("s3://b2/tar/s-*.tar", storage_options=options, read_options=ReadOptions(attempts=1))
    assert looked == []
