"""The dataset store on object storages: the same as on a disk, with their own means of atomicity."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import _registry

from tests.datasets.samples_source import Numbered, content, contents, numbers, publish
from tests.datasets.storage.servers import BUCKET, S3_KEYS, s3_client
from tests.later import Later
from tests.support.oss_server import Fault, OSSServer, StoredObject
from torch_dpflow.datasets import DatasetStore, Draft, verify
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.folders import ImageFolderImporter
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.storage import ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.file_systems import fsspec_options
from torch_dpflow.datasets.versions import copy, delete, prune
from torch_dpflow.errors import (
    AccessDeniedError,
    ChecksumError,
    DatasetNotFoundError,
    MissingExtraError,
    OptionError,
    PublishedError,
    StorageError,
)

oss2: Any = Later("oss2")

_names = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def servers_first(s3_endpoint: str) -> None:
    """What lives as long as the session is not left behind by the test that first asks for it."""


Address = tuple[str, dict[str, Any]]


@pytest.fixture
def s3_address(s3_endpoint: str) -> Iterator[Address]:
    options = {**S3_KEYS, "endpoint_url": s3_endpoint}
    yield f"s3://{BUCKET}/store-{next(_names)}/datasets", options
    _close_s3(options)


def _close_s3(options: dict[str, Any]) -> None:
    files = fsspec.filesystem("s3", **fsspec_options("s3", options))
    if files._s3 is not None:
        files.close_session(files.loop, files._s3)
    type(files).clear_instance_cache()


@pytest.fixture
def oss_address(s3_endpoint: str, oss: OSSServer) -> Iterator[Address]:
    """After the S3 server, which has fsspec's thread started once for all."""
    yield f"oss://{BUCKET}/datasets", oss.storage_options()
    _close_oss(oss.storage_options())


def _close_oss(options: dict[str, Any]) -> None:
    files = fsspec.filesystem("oss", **options)
    files._session.session.close()
    type(files).clear_instance_cache()  # those of other threads


def _put_s3(options: dict[str, Any], bucket: str, key: str, data: bytes) -> None:
    client = s3_client(options["endpoint_url"])
    client.put_object(Bucket=bucket, Key=key, Body=data)
    client.close()


def _put_oss(options: dict[str, Any], bucket: str, key: str, data: bytes) -> None:
    auth = oss2.Auth(options["key"], options["secret"])
    session = oss2.Session()
    oss2.Bucket(auth, options["endpoint"], bucket, session=session).put_object(key, data)
    session.session.close()


@pytest.fixture(params=["s3_address", "oss_address"])
def address(request: pytest.FixtureRequest, s3_endpoint: str) -> Address:
    """The URL of a store that does not exist, and what it takes to reach it."""
    found: Address = request.getfixturevalue(request.param)
    return found


def test_a_store_is_the_same_as_on_a_disk(address: Address) -> None:
    url, options = address
    with pytest.raises(DatasetNotFoundError, match="no dataset store at"):
        DatasetStore(url, **options)
    store = DatasetStore.create(url, **options)
    first = publish(store, Numbered(10))
    second = publish(store, Numbered(5, first=10), version="v2", parent="v1", shard_size=None)
    assert (store.ids(), store.versions("core/numbers")) == (["core/numbers"], ["v1", "v2"])
    assert store.drafts("core/numbers") == []
    assert contents(first) == numbers(10)
    assert contents(DatasetStore(url, **options).open("core/numbers:v2:train")) == numbers(15)
    assert list(verify(second, data=True)) == []
    with pytest.raises(PublishedError):
        Draft(store, "core/numbers", "v2")


#: Keys of objects that no path names.
UNNAMED = (
    "cat//1.jpg",
    "cat/deep//1.jpg",
    "/cat/1.jpg",
    "cat/./1.jpg",
    "./cat/1.jpg",
    "cat/../1.jpg",
    "cat/..",
    "cat/2.jpg/",
    "cat///",
)


def test_keys_that_no_path_names_are_not_left_out_of_an_import(address: Address) -> None:
    url, options = address
    files = Files(url, options)
    files.filesystem.pipe_file(files._full("cat/0.jpg"), b"0")
    bucket, _, folder = url.partition("://")[2].partition("/")
    put = _put_s3 if url.startswith("s3") else _put_oss
    for marker in ("", "cat/", "dog/", "dog/deep/"):  # those that consoles make
        put(options, bucket, f"{folder}/{marker}", b"")
    put(options, bucket, f"{folder}/dog/1.jpg", b"1")
    found = [(item.path, item.meta["class"]) for item in ImageFolderImporter(url, options=options).items()]
    assert found == [("cat/0.jpg", "cat"), ("dog/1.jpg", "dog")]
    for number, key in enumerate(UNNAMED):
        files.filesystem.pipe_file(files._full(f"{number}/cat/0.jpg"), b"0")
        put(options, bucket, f"{folder}/{number}/{key}", b"2")
        with pytest.raises(StorageError, match="keys that no path names"):
            pytest.fail(f"{key}: {[*ImageFolderImporter(f'{url}/{number}', options=options).items()]}")
        with ObjectReader(options) as reader:
            assert reader.read(f"{url}/{number}/{key}") == b"2", key


def test_a_folder_that_no_path_names_is_refused(address: Address) -> None:
    url, options = address
    with pytest.raises(StorageError, match="keys that no path names"):
        list(ImageFolderImporter(url.replace("/datasets", "//datasets"), options=options).items())


def _overwrite(address: Address, path: str, data: bytes, oss: OSSServer) -> None:
    """Write an object again, at a later second."""
    url, options = address
    bucket, _, folder = url.partition("://")[2].partition("/")
    if url.startswith("s3"):
        _put_s3(options, bucket, f"{folder}/{path}", data)
    else:
        later = datetime.now(timezone.utc) + timedelta(seconds=5)
        new = StoredObject(data=data, content_type="x", modified=later)
        oss.buckets.put(bucket, f"{folder}/{path}", new)


def test_an_object_that_was_overwritten_after_its_import_is_not_given_out(
    address: Address, oss: OSSServer, tmp_path: Path
) -> None:
    url, options = address
    files = Files(url, options)
    for name in ("cat/0.jpg", "cat/1.jpg"):
        files.filesystem.pipe_file(files._full(name), name.encode())
    store = DatasetStore.create(str(tmp_path))
    draft = Draft(store, "core/cats", "v1")
    draft.add("train", ImageFolderImporter(url, options=options))
    draft.publish()
    stored = store.open("core/cats")
    shard = stored.shard(0)
    assert (shard.format, all(sample.revision for sample in shard.samples)) == (2, True)
    limits = ReadOptions(backoff_s=0.0)
    reader = DatasetReader(stored, storage_options=options, read_options=limits)
    assert [data for data, _ in reader.__getitems__([0, 1])] == [b"cat/0.jpg", b"cat/1.jpg"]
    assert list(verify(stored, data=True, options=options)) == []
    _overwrite(address, "cat/1.jpg", b"CAT/1.jpg", oss)
    assert reader[0][0] == b"cat/0.jpg"
    with pytest.raises(ChecksumError, match=r"cat/1\.jpg: .*412.*written again after the dataset was"):
        reader[1]
    (problem,) = verify(stored, data=True, options=options)
    assert (problem.sample, "written again after the dataset was" in problem.what) == (1, True)
    trusting = DatasetReader(stored, storage_options=options, check=False)
    assert trusting[1][0] == b"CAT/1.jpg"
    for one in (reader, trusting):
        one.close()


def test_objects_in_the_store_or_with_checksums_have_no_revision(address: Address) -> None:
    url, options = address
    files = Files(url, options)
    files.filesystem.pipe_file(files._full("core/cats/data/cat/0.jpg"), b"0")
    files.filesystem.pipe_file(files._full("cats/cat/0.jpg"), b"0")
    store = DatasetStore.create(url, **options)
    draft = Draft(store, "core/cats", "v1")
    draft.add("own", ImageFolderImporter(f"{url}/core/cats/data", options=options))  # a copy has another ETag
    draft.add("checked", ImageFolderImporter(f"{url}/cats", options=options), checksum="crc32")
    draft.publish()
    for variant in ("own", "checked"):
        shard = store.open(f"core/cats:v1:{variant}").shard(0)
        assert (shard.format, shard.samples[0].revision) == (1, None)


def test_an_import_goes_on_and_is_discarded(address: Address) -> None:
    url, options = address
    store = DatasetStore.create(url, **options)

    def breaking() -> Iterator[Any]:
        yield from numbers(6)
        raise KeyboardInterrupt

    draft = Draft(store, "core/numbers", "v1")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            draft.add("train", IterableImporter(breaking(), name="numbered"), shard_size=4)
        draft.discard()
    with pytest.raises(KeyboardInterrupt):
        draft.add("train", IterableImporter(breaking(), name="numbered"), shard_size=4)
    source = Numbered(9)
    draft.add("train", IterableImporter(source, name="numbered"), shard_size=4)
    draft.publish()
    assert source.asked == [3, 4, 5, 6, 7, 8]
    assert contents(store.open("core/numbers")) == numbers(9)


def test_versions_are_copied_and_deleted(address: Address, tmp_path: Path) -> None:
    url, options = address
    here, there = DatasetStore.create(tmp_path / "here"), DatasetStore.create(url, **options)
    publish(here, Numbered(6))
    publish(here, Numbered(3, first=6), version="v2", parent="v1")
    for version in ("v1", "v2"):
        copy(here, "core/numbers", version, there)
    Draft(there, "core/numbers", "v3").add("train", IterableImporter(Numbered(3)))
    assert delete(there, "core/numbers", "v1") == ["v1"]
    assert contents(there.open("core/numbers:v2")) == numbers(9)
    assert prune(there, "core/numbers") == 2
    back = DatasetStore.create(tmp_path / "back")
    copy(there, "core/numbers", "v2", back)
    assert contents(back.open("core/numbers")) == numbers(9)
    delete(there, "core/numbers")
    assert there.ids() == []


def test_of_many_who_create_an_object_at_once_one_succeeds(address: Address) -> None:
    url, options = address
    files = DatasetStore.create(url, **options).files
    together = threading.Barrier(4)
    won: list[int] = []

    def create(number: int) -> None:
        together.wait()
        try:
            files.create("race", b"%d" % number)
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.read("race") == b"%d" % won[0]
    assert len(won) == 1


def test_who_only_reads_needs_no_client_of_the_vendors(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    url, options = address
    publish(DatasetStore.create(url, **options), Numbered(3))
    scheme = url.partition(":")[0]
    with monkeypatch.context() as without:  # undone before the server's fixture closes its clients
        without.setitem(sys.modules, {"s3": "s3fs", "oss": "ossfs"}[scheme], None)
        without.delitem(_registry, scheme)
        stored = DatasetStore(url, **options).open("core/numbers:v1")
        assert [data for data, _ in contents(stored)] == [content(number) for number in range(3)]
        with pytest.raises(MissingExtraError, match=rf"torch_dpflow\[{scheme}\]"):
            stored.files.write("more", b"")


def test_wrong_credentials_are_told(oss_address: Address) -> None:
    url, options = oss_address
    DatasetStore.create(url, **options)
    wrong = {**options, "secret": "another"}
    with pytest.raises(AccessDeniedError, match=r"oss://data/datasets/store\.json.*credentials"):
        DatasetStore(url, **wrong)
    _close_oss(wrong)


def test_who_may_not_list_a_store_is_told(oss: OSSServer, oss_address: Address) -> None:
    url, options = oss_address
    store = DatasetStore.create(url, **options)
    oss.faults.add(Fault.FORBIDDEN)
    with pytest.raises(DatasetNotFoundError, match="none that these credentials may list"):
        store.open("core/numbers")
    oss.faults.add(Fault.FORBIDDEN)
    with pytest.raises(AccessDeniedError, match=r"oss://data/datasets cannot be listed.*right to list"):
        store.ids()


def test_a_bucket_that_is_not_there_is_told(address: Address) -> None:
    url, options = address
    with pytest.raises(StorageError, match=r"://nobucket/ds/store\.json.*bucket"):
        DatasetStore.create(f"{url.partition('://')[0]}://nobucket/ds", **options)


@pytest.mark.parametrize("name", ["endpoint", "endpoint_url"])
def test_an_endpoint_has_two_names_on_every_storage(address: Address, name: str) -> None:
    url, options = address
    named = {name if option.startswith("endpoint") else option: value for option, value in options.items()}
    store = DatasetStore.create(url, **named)
    stored = publish(store, Numbered(3))
    assert contents(stored) == numbers(3)
    assert list(verify(stored, data=True)) == []


def test_options_of_the_vendors_that_are_unknown_are_refused(address: Address) -> None:
    url, options = address
    with pytest.raises(OptionError, match=r"has no option \['colour'\]; give key, secret"):
        DatasetStore.create(url, **options, colour="red")
    twice = {**options, "endpoint": "http://a", "endpoint_url": "http://b"}
    with pytest.raises(OptionError, match="the two mean the same"):
        DatasetStore.create(url, **twice)


def test_keys_of_the_environment_write_too(oss_address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    url, options = oss_address
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", options["secret"])
    DatasetStore.create(url, **options)
    stored = publish(DatasetStore.create(url, endpoint=options["endpoint"]), Numbered(3))
    assert contents(stored) == numbers(3)
    _close_oss(fsspec_options("oss", {"endpoint": options["endpoint"]}))


def test_a_region_and_a_style_of_addresses_are_understood(s3_address: Address) -> None:
    url, options = s3_address
    told = {**options, "region": "us-east-1", "addressing_style": "path"}
    assert DatasetStore.create(url, **told).ids() == []
    _close_s3(told)


@pytest.mark.parametrize("named", ["AWS_PROFILE", "profile"])
def test_a_profile_that_does_not_exist_is_told(
    s3_address: Address, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, options = s3_address
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"endpoint_url": options["endpoint_url"]}
    if named == "profile":
        given[named] = "nobody"
    else:
        monkeypatch.setenv(named, "nobody")
    for use in (
        lambda: DatasetStore(url, **given),
        lambda: [*ImageFolderImporter(url, options=given).items()],
    ):
        with pytest.raises(AccessDeniedError, match=r"\(nobody\) could not be found; name one of ~/.aws/config"):
            use()


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.RESET])
def test_a_listing_that_is_not_answered_is_told(
    oss: OSSServer, oss_address: Address, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_dpflow.datasets.files._LISTING_DEADLINES", 1)
    url, options = oss_address
    DatasetStore.create(url, **options)
    limit_s = 3.0 if fault is Fault.HANG else 60.0
    store = DatasetStore(url, read_options=ReadOptions(timeout_s=limit_s, deadline_s=limit_s, attempts=1), **options)
    oss.faults.add(fault)
    with pytest.raises(StorageError, match="oss://data/datasets"):
        store.ids()
