"""The test double speaks OSS's protocol: the vendor's own clients work against it and get the vendor's errors."""

from __future__ import annotations

import base64
import hashlib
import signal
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import requests

from tests.datasets.storage.servers import BUCKET
from tests.later import Later
from tests.new_process import Interpreter
from tests.support.oss_server import Fault, OSSServer
from tests.support.oss_server.messages import OSSError, Request
from tests.support.oss_server.signatures import check_signature, sign_v1

oss2, ossfs = Later("oss2"), Later("ossfs")
NAMES = ["a/1", "a/2", "a/b/3", "b/ü +&=.bin", "c"]


@pytest.fixture(params=["v1", "v4"])
def bucket(request: pytest.FixtureRequest, oss: OSSServer) -> Iterator[oss2.Bucket]:
    """The vendor's client with each version of signatures."""
    kind = {"v1": oss2.Auth, "v4": oss2.AuthV4}[request.param]
    bucket = oss2.Bucket(kind(oss.key_id, oss.secret), oss.endpoint, BUCKET, region="cn-hangzhou")
    yield bucket
    bucket.session.session.close()


@pytest.fixture
def files(oss: OSSServer) -> Iterator[ossfs.OSSFileSystem]:
    """The vendor's file system."""
    files = ossfs.OSSFileSystem(**oss.storage_options(), skip_instance_cache=True)
    yield files
    files._session.session.close()


@pytest.mark.parametrize("name", NAMES)
def test_gives_back_what_was_put(bucket: oss2.Bucket, name: str) -> None:
    bucket.put_object(name, b"0123456789", headers={"Content-Type": "text/x"})
    found = bucket.get_object(name)
    assert (found.read(), found.content_type, found.content_length) == (b"0123456789", "text/x", 10)
    assert bucket.get_object(name, byte_range=(2, 5)).read() == b"2345"
    assert bucket.get_object(name, byte_range=(None, 3)).read() == b"789"
    assert bucket.get_object(name, byte_range=(8, None)).read() == b"89"
    assert bucket.head_object(name).etag == hashlib.md5(b"0123456789").hexdigest().upper()
    assert bucket.get_object_meta(name).content_length == 10
    bucket.delete_object(name)
    assert not bucket.object_exists(name)


def test_lists_pages_and_prefixes(bucket: oss2.Bucket) -> None:
    for name in NAMES:
        bucket.put_object(name, b"")
    for iterator in (oss2.ObjectIterator, oss2.ObjectIteratorV2):
        assert [found.key for found in iterator(bucket, max_keys=2)] == NAMES
        top = [(found.key, found.is_prefix()) for found in iterator(bucket, delimiter="/", max_keys=1)]
        assert top == [("a/", True), ("b/", True), ("c", False)]
        inner = [found.key for found in iterator(bucket, prefix="a/", delimiter="/")]
        assert inner == ["a/1", "a/2", "a/b/"]


def test_takes_objects_in_parts(bucket: oss2.Bucket) -> None:
    upload = bucket.init_multipart_upload("parts").upload_id
    parts = [
        oss2.models.PartInfo(number, bucket.upload_part("parts", upload, number, bytes([number]) * 4).etag)
        for number in (1, 2, 3)
    ]
    bucket.complete_multipart_upload("parts", upload, parts)
    assert bucket.get_object("parts").read() == b"\1\1\1\1\2\2\2\2\3\3\3\3"
    with pytest.raises(oss2.exceptions.NoSuchUpload):
        bucket.abort_multipart_upload("parts", upload)


def test_appends_at_the_end_only(bucket: oss2.Bucket) -> None:
    assert bucket.append_object("log", 0, b"one").next_position == 3
    bucket.append_object("log", 3, b"two")
    assert bucket.get_object("log").read() == b"onetwo"
    with pytest.raises(oss2.exceptions.PositionNotEqualToLength):
        bucket.append_object("log", 3, b"three")


def test_overwrites_unless_that_is_forbidden(bucket: oss2.Bucket) -> None:
    bucket.put_object("one", b"1")
    bucket.put_object("one", b"2")
    with pytest.raises(oss2.exceptions.ServerError, match="FileAlreadyExists"):
        bucket.put_object("one", b"3", headers={"x-oss-forbid-overwrite": "true"})
    assert bucket.get_object("one").read() == b"2"


def test_copies_and_deletes_many(bucket: oss2.Bucket) -> None:
    bucket.put_object("one", b"1")
    bucket.copy_object(BUCKET, "one", "two")
    assert bucket.get_object("two").read() == b"1"
    assert bucket.batch_delete_objects(["one", "two"]).deleted_keys == ["one", "two"]
    assert not bucket.list_objects().object_list


def test_answers_with_the_vendors_errors(bucket: oss2.Bucket, oss: OSSServer) -> None:
    with pytest.raises(oss2.exceptions.NoSuchKey):
        bucket.get_object("missing")
    with pytest.raises(oss2.exceptions.NotFound):
        bucket.head_object("missing")
    bucket.put_object("short", b"123")
    with pytest.raises(oss2.exceptions.ServerError, match="InvalidRange"):
        bucket.get_object("short", byte_range=(5, 9))
    with pytest.raises(oss2.exceptions.ServerError, match="InvalidDigest"):
        bucket.put_object("x", b"1", headers={"Content-MD5": base64.b64encode(b"0" * 16).decode()})
    bucket.bucket_name = "missing"
    with pytest.raises(oss2.exceptions.NoSuchBucket):
        bucket.get_object("short")


@pytest.mark.parametrize(
    ("key", "secret", "code"),
    [("test-key-id", "wrong", "SignatureDoesNotMatch"), ("stranger", "test-secret", "InvalidAccessKeyId")],
)
@pytest.mark.parametrize("kind", ["Auth", "AuthV4"])
def test_turns_wrong_signatures_down(oss: OSSServer, kind: str, key: str, secret: str, code: str) -> None:
    bucket = oss2.Bucket(getattr(oss2, kind)(key, secret), oss.endpoint, BUCKET, region="cn-hangzhou")
    with pytest.raises(oss2.exceptions.ServerError, match=code):
        bucket.get_object("x")
    bucket.session.session.close()


def test_turns_unsigned_requests_down(oss: OSSServer) -> None:
    answer = requests.get(f"{oss.endpoint}/{BUCKET}/x", timeout=150)
    assert (answer.status_code, "<Code>AccessDenied</Code>" in answer.text) == (403, True)


def test_wants_the_token_that_belongs_to_the_key(oss: OSSServer) -> None:
    oss.token = "temporary"
    oss.buckets.create("other")
    bucket = oss2.Bucket(oss2.StsAuth(oss.key_id, oss.secret, "temporary"), oss.endpoint, BUCKET)
    bucket.put_object("x", b"1")
    bucket.auth = oss2.Auth(oss.key_id, oss.secret)
    with pytest.raises(oss2.exceptions.ServerError, match="InvalidSecurityToken"):
        bucket.get_object("x")
    bucket.session.session.close()


def test_a_signature_is_good_for_minutes() -> None:
    request = Request(method="GET", bucket="b", key="k", params={}, headers={"date": "Fri, 01 Mar 2024 12:00:00 GMT"})
    signed = Request(
        method="GET",
        bucket="b",
        key="k",
        params={},
        headers={**request.headers, "authorization": f"OSS id:{sign_v1(request, 's')}"},
    )
    then = datetime(2024, 3, 1, 12, 0, tzinfo=timezone.utc)
    check_signature(signed, {"id": "s"}, now=then + timedelta(minutes=14))
    with pytest.raises(OSSError, match="RequestTimeTooSkewed"):
        check_signature(signed, {"id": "s"}, now=then + timedelta(minutes=16))


def test_is_a_file_system(files: ossfs.OSSFileSystem) -> None:
    files.pipe(f"{BUCKET}/deep/one.bin", b"hello world")
    with files.open(f"{BUCKET}/deep/large.bin", "wb") as file:
        file.write(b"y" * (11 << 20))
    assert files.cat(f"{BUCKET}/deep/one.bin") == b"hello world"
    assert files.info(f"{BUCKET}/deep/large.bin")["size"] == 11 << 20
    assert files.find(BUCKET) == [f"{BUCKET}/deep/large.bin", f"{BUCKET}/deep/one.bin"]
    files.rm(f"{BUCKET}/deep", recursive=True)
    assert not files.find(BUCKET)


def test_a_fault_hits_the_object_and_the_times_it_is_meant_for(oss: OSSServer, bucket: oss2.Bucket) -> None:
    bucket.put_object("one", b"1")
    bucket.put_object("two", b"2")
    oss.faults.add(Fault.FORBIDDEN, key="one", times=1)
    assert bucket.get_object("two").read() == b"2"
    with pytest.raises(oss2.exceptions.AccessDenied):
        bucket.get_object("one")
    assert bucket.get_object("one").read() == b"1"


def test_corrupts_one_bit(oss: OSSServer, bucket: oss2.Bucket) -> None:
    bucket.put_object("one", bytes(100))
    oss.faults.add(Fault.CORRUPT)
    assert sorted(bucket.get_object("one").read())[-2:] == [0, 1]


def test_serves_a_folder_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/x.bin").write_bytes(b"content")
    command = [sys.executable, "-m", "tests.support.oss_server", "--folder", str(tmp_path)]
    with Interpreter(command) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        bucket = oss2.Bucket(oss2.Auth("test-key-id", "test-secret"), endpoint, "data")
        assert bucket.get_object("deep/x.bin").read() == b"content"
        bucket.session.session.close()
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
