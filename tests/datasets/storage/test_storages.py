"""Every storage does what the contract says: on disk, in memory, and against servers of OSS and S3."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import _registry

from tests.contracts.storages import PrivateStorageContract, Put, StorageContract
from tests.datasets.storage.servers import BUCKET, S3_KEYS, s3_client
from tests.support.oss_server import OSSServer, StoredObject
from torch_dpflow.datasets.storage import ByteRange, ReadOptions, Storage, open_storage
from torch_dpflow.datasets.storage.file_systems import FsspecStorage
from torch_dpflow.datasets.storage.http_storage import HttpStorage
from torch_dpflow.datasets.storage.local import LocalStorage
from torch_dpflow.errors import (
    AccessDeniedError,
    MissingExtraError,
    ObjectMissingError,
    OptionError,
    OptionTypeError,
    StorageError,
)

_folders = itertools.count()
_PATIENT = ReadOptions()


def opened(scheme: str, options: dict[str, Any], kind: type) -> Storage:
    storage = open_storage(scheme, options, _PATIENT)
    assert type(storage) is kind
    return storage


class TestLocal(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return opened("file", {}, LocalStorage)

    @pytest.fixture(params=["file://", ""], ids=["url", "path"])
    def put(self, request: pytest.FixtureRequest, tmp_path: Path) -> Put:
        def put(name: str, data: bytes) -> str:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            return f"{request.param}{path}"

        return put

    def test_says_that_a_directory_is_no_object(self, storage: Storage, tmp_path: Path) -> None:
        with pytest.raises(ObjectMissingError, match="directory"):
            storage.fetch(ByteRange(str(tmp_path)), time.monotonic() + 9)

    @pytest.mark.parametrize("stop", [None, 5])
    def test_waits_for_nothing_that_is_no_file(self, storage: Storage, tmp_path: Path, stop: int | None) -> None:
        os.mkfifo(tmp_path / "fifo")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "socket"))
            for path in (tmp_path / "fifo", tmp_path / "socket"):
                with pytest.raises(StorageError, match="give a regular file"):
                    storage.fetch(ByteRange(str(path), 0, stop), time.monotonic() + 9)

    def test_refuses_what_is_above_the_limit(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"12345")
        storage = open_storage("file", {}, ReadOptions(longest=4))
        with pytest.raises(StorageError, match="5 bytes are above the limit of 4"):
            storage.fetch(ByteRange(str(tmp_path / "x")), time.monotonic() + 9)


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return opened("memory", {}, FsspecStorage)

    @pytest.fixture
    def put(self) -> Iterator[Put]:
        files = fsspec.filesystem("memory")
        root = f"/storage-{next(_folders)}"

        def put(name: str, data: bytes) -> str:
            files.pipe_file(f"{root}/{name}", data)
            return f"memory:/{root}/{name}"

        yield put
        files.rm(root, recursive=True)


class OSSContract(PrivateStorageContract):
    @pytest.fixture
    def put(self, oss: OSSServer) -> Put:
        def put(name: str, data: bytes) -> str:
            oss.buckets.put(BUCKET, name, StoredObject(data=data, content_type="application/octet-stream"))
            return f"oss://{BUCKET}/{name}"

        return put


class TestOSS(OSSContract):
    """Our own client, with signatures of both versions, with permanent and with temporary keys.

    `test_signing.py` compares the signatures of all four pairs with the vendor's.
    """

    @pytest.fixture(params=["v1", "v4-token"])
    def options(self, request: pytest.FixtureRequest, oss: OSSServer) -> dict[str, Any]:
        version, _, token = request.param.partition("-")
        oss.token = "temporary" if token else None
        return oss.storage_options() | ({"region": "cn-hangzhou"} if version == "v4" else {})

    @pytest.fixture
    def storage(self, options: dict[str, Any]) -> Iterator[Storage]:
        storage = opened("oss", options, HttpStorage)
        yield storage
        storage.close()

    @pytest.fixture
    def strange(self, options: dict[str, Any]) -> Iterator[Storage]:
        storage = opened("oss", options | {"secret": "wrong"}, HttpStorage)
        yield storage
        storage.close()


class TestOSSThroughOssfs(OSSContract):
    """The vendor's client, which reads where options are given that ours does not know."""

    @pytest.fixture
    def storage(self, oss: OSSServer) -> Iterator[Storage]:
        with ossfs_storage(oss.storage_options()) as storage:
            yield storage

    @pytest.fixture
    def strange(self, oss: OSSServer) -> Iterator[Storage]:
        with ossfs_storage(oss.storage_options() | {"secret": "wrong"}) as storage:
            yield storage


@contextmanager
def ossfs_storage(options: dict[str, Any]) -> Iterator[Storage]:
    storage = opened("oss", options | {"skip_instance_cache": True}, FsspecStorage)
    yield storage
    storage._files._session.session.close()  # type: ignore[attr-defined]


class S3Contract(StorageContract):
    """The server checks no signatures; test_signing.py compares ours with botocore's."""

    @pytest.fixture
    def put(self, s3_endpoint: str) -> Iterator[Put]:
        client = s3_client(s3_endpoint)
        folder = f"folder-{next(_folders)}"

        def put(name: str, data: bytes) -> str:
            client.put_object(Bucket=BUCKET, Key=f"{folder}/{name}", Body=data)
            return f"s3://{BUCKET}/{folder}/{name}"

        yield put
        client.close()


class TestS3(S3Contract):
    @pytest.fixture
    def storage(self, s3_endpoint: str) -> Iterator[Storage]:
        storage = opened("s3", S3_KEYS | {"endpoint_url": s3_endpoint}, HttpStorage)
        yield storage
        storage.close()

    def test_says_what_a_bucket_that_is_not_there_is(self, storage: Storage) -> None:
        with pytest.raises(ObjectMissingError, match="NoSuchBucket"):
            storage.fetch(ByteRange("s3://no-such-bucket/x"), time.monotonic() + 9)

    def test_asks_for_credentials(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(AccessDeniedError, match="no credentials were found; set AWS_ACCESS_KEY_ID"):
            open_storage("s3", {}, _PATIENT).fetch(ByteRange("s3://bucket/x"), time.monotonic() + 9)


@pytest.mark.slow  # a new session of aiobotocore for each test
class TestS3ThroughS3fs(S3Contract):
    """The vendor's client, which reads where options are given that ours does not know."""

    @pytest.fixture
    def storage(self, s3_endpoint: str) -> Iterator[Storage]:
        options = S3_KEYS | {"endpoint_url": s3_endpoint, "skip_instance_cache": True}
        storage = FsspecStorage("s3", options, _PATIENT)
        yield storage
        files = storage._files
        if files._s3 is not None:
            files.close_session(files.loop, files._s3)


def test_names_the_schemes_that_nobody_knows() -> None:
    with pytest.raises(OptionError, match="nonsense://"):
        open_storage("nonsense", {}, _PATIENT)


@pytest.mark.parametrize(
    ("scheme", "package", "extra"),
    [("https", "aiohttp", "http"), ("s3", "s3fs", "s3"), ("oss", "ossfs", "oss")],
)
def test_names_our_extra_for_a_scheme(monkeypatch: pytest.MonkeyPatch, scheme: str, package: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.delitem(_registry, scheme, raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install 'torch_dpflow\[{extra}\]'"):
        FsspecStorage(scheme, {}, _PATIENT)


def test_says_how_to_install_what_a_scheme_needs() -> None:
    with pytest.raises(MissingExtraError, match="adlfs"):
        open_storage("abfs", {}, _PATIENT)


def test_asks_for_the_endpoint_of_oss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OSS_ENDPOINT", raising=False)
    with pytest.raises(OptionError, match="OSS_ENDPOINT"):
        open_storage("oss", {"key": "k", "secret": "s"}, _PATIENT)


@pytest.mark.parametrize("url", ["oss://", "oss://bucket", "oss://bucket/"])
def test_wants_a_bucket_and_a_key(oss: OSSServer, url: str) -> None:
    with pytest.raises(OptionError, match="give a bucket and a key"):
        open_storage("oss", oss.storage_options(), _PATIENT).fetch(ByteRange(url), time.monotonic() + 9)


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (5, 4), (-2, -1)])
def test_refuses_what_is_no_range(start: int, stop: int | None) -> None:
    with pytest.raises(OptionError, match="are no range"):
        ByteRange("file:///x", start, stop)


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout_s": 0},
        {"deadline_s": -1},
        {"attempts": 0},
        {"backoff_s": -0.1},
        {"concurrency": 0},
        {"timeout_s": "x"},
        {"deadline_s": None},
        {"attempts": 1.5},
        {"merge_gap": "x"},
        {"longest": True},
    ],
)
def test_refuses_limits_that_are_none(wrong: dict[str, float]) -> None:
    with pytest.raises((OptionError, OptionTypeError), match=next(iter(wrong))):
        ReadOptions(**wrong)  # type: ignore[arg-type]
