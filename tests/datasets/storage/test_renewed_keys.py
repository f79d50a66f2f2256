"""Keys that expire while many threads read are renewed once, and nobody is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.datasets.storage.servers import BUCKET
from tests.datasets.storage.signed_s3 import SignedS3
from tests.datasets.storage.web_server import WebServer, reply
from tests.support.oss_server import OSSServer, StoredObject
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, credentials
from torch_dpflow.datasets.storage.credentials import Credentials
from torch_dpflow.errors import AccessDeniedError, StorageUnavailableError

DATA = bytes(range(200))
OLD = Credentials("old-key", "old-secret", "old-token")
NEW = Credentials("new-key", "new-secret", "new-token")
SPANS = [ByteRange(f"s3://data/{number}", 10, 20) for number in range(64)]


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without keys."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def s3() -> SignedS3:
    return SignedS3(DATA, OLD)


@pytest.fixture
def server(s3: SignedS3) -> Iterator[WebServer]:
    with WebServer(s3) as server:
        yield server


@pytest.fixture
def reader(server: WebServer) -> Iterator[ObjectReader]:
    with ObjectReader({"endpoint": server.url}) as reader:
        yield reader


def _write_keys(home: Path, keys: Credentials) -> None:
    (home / ".aws").mkdir(exist_ok=True)
    (home / ".aws/credentials").write_text(
        f"[default]\naws_access_key_id={keys.key_id}\naws_secret_access_key={keys.secret}\n"
        f"aws_session_token={keys.token}\n"
    )


def test_keys_of_a_file_that_was_renewed_are_taken_at_once(s3: SignedS3, reader: ObjectReader, tmp_path: Path) -> None:
    """However lately they were looked up: each time is a renewal of the file, and none is waited for."""
    for keys in (OLD, NEW, OLD):
        _write_keys(tmp_path, keys)
        s3.accepted = keys
        assert reader.read_many(SPANS) == [DATA[10:20]] * 64


def test_keys_of_the_environment_too(s3: SignedS3, reader: ObjectReader, monkeypatch: pytest.MonkeyPatch) -> None:
    for keys in (OLD, NEW):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys.key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys.secret)
        monkeypatch.setenv("AWS_SESSION_TOKEN", str(keys.token))
        s3.accepted = keys
        assert reader.read_many(SPANS) == [DATA[10:20]] * 64


def test_keys_that_appear_after_the_first_read(s3: SignedS3, reader: ObjectReader, tmp_path: Path) -> None:
    with pytest.raises(AccessDeniedError, match="no credentials were found"):
        reader.read_many(SPANS)
    _write_keys(tmp_path, OLD)
    assert reader.read_many(SPANS) == [DATA[10:20]] * 64


def test_a_key_that_stays_refused_is_asked_with_once(
    s3: SignedS3, server: WebServer, reader: ObjectReader, tmp_path: Path
) -> None:
    _write_keys(tmp_path, NEW)
    with pytest.raises(AccessDeniedError, match="ExpiredToken"):
        reader.read_many(SPANS)
    assert len(server.requests) == 64


def test_keys_of_oss_too(oss: OSSServer, tmp_path: Path) -> None:
    for number in range(64):
        oss.buckets.put(BUCKET, f"{number}", StoredObject(data=DATA, content_type="x"))
    spans = [ByteRange(f"oss://{BUCKET}/{number}") for number in range(64)]
    with ObjectReader({"endpoint": oss.endpoint}) as reader:
        for secret in ("one", "another"):
            oss.secret = secret
            (tmp_path / ".ossutilconfig").write_text(
                f"[Credentials]\naccessKeyID={oss.key_id}\naccessKeySecret={secret}\n"
            )
            assert reader.read_many(spans) == [DATA] * 64


class _Role:
    """Gives out a container's role: `keys`, good for so many hours."""

    def __init__(self) -> None:
        self.keys, self.hours = OLD, 1
        self.is_broken = False

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        until = datetime.now(timezone.utc) + timedelta(hours=self.hours)
        told = {
            "AccessKeyId": self.keys.key_id,
            "SecretAccessKey": self.keys.secret,
            "Token": self.keys.token,
            "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        status = 400 if self.is_broken else 200
        reply(handler, status, json.dumps(told).encode(), content_type="application/json")


@pytest.fixture
def role() -> _Role:
    return _Role()


@pytest.fixture
def metadata(role: _Role, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    with WebServer(role) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", server.url)
        yield server


def _let_time_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an hour would, but for those that are good for several."""
    for limit in ("_advisory_refresh_timeout", "_mandatory_refresh_timeout"):
        monkeypatch.setattr(f"botocore.credentials.RefreshableCredentials.{limit}", 2 * 3600)


def test_a_role_is_renewed_once_before_it_expires(
    s3: SignedS3,
    server: WebServer,
    reader: ObjectReader,
    role: _Role,
    metadata: WebServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reader.read_many(SPANS) == [DATA[10:20]] * 64
    s3.accepted, role.keys, role.hours = NEW, NEW, 6
    _let_time_pass(monkeypatch)
    assert reader.read_many(SPANS) == [DATA[10:20]] * 64
    assert (len(metadata.requests), len(server.requests)) == (2, 128)


def test_a_role_whose_keys_were_withdrawn_is_looked_up_once(
    s3: SignedS3,
    reader: ObjectReader,
    role: _Role,
    metadata: WebServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reader.read_many(SPANS) == [DATA[10:20]] * 64
    s3.accepted, role.keys = NEW, NEW
    with pytest.raises(AccessDeniedError):  # a look-up may ask many servers, so not with every refusal
        reader.read_many(SPANS)
    monkeypatch.setattr(credentials, "_LOOK_UP_AGAIN_S", 0.0)
    assert reader.read_many(SPANS) == [DATA[10:20]] * 64
    assert len(metadata.requests) == 2


def test_a_role_that_cannot_be_renewed_is_a_failure_that_may_pass(
    role: _Role,
    reader: ObjectReader,
    metadata: WebServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0)
    caplog.set_level(logging.CRITICAL, "botocore")  # a kept record keeps frames with open sockets
    assert reader.read("s3://data/x", 10, 20) == DATA[10:20]
    role.is_broken = True
    _let_time_pass(monkeypatch)
    with pytest.raises(StorageUnavailableError, match=r"s3://data/x.*could not be renewed"):
        reader._opened.get().place("s3://data/x").storage.fetch(ByteRange("s3://data/x"), float("inf"))
