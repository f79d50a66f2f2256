"""Where credentials are looked for, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_dpflow.datasets.storage.credentials import Credentials, find_oss_credentials, find_s3_credentials
from torch_dpflow.datasets.storage.http_storage import ErrorResponse
from torch_dpflow.datasets.storage.object_stores import OSSService, S3Service
from torch_dpflow.errors import OptionError


@pytest.fixture
def files(home: Path) -> Path:
    """A home directory with the vendors' files."""
    (home / ".aws").mkdir()
    (home / ".aws/credentials").write_text(
        "[default]\naws_access_key_id = file\naws_secret_access_key = s1\n"
        "[work]\naws_access_key_id = work\naws_secret_access_key = s2\naws_session_token = t2\n"
    )
    (home / ".aws/config").write_text("[default]\nregion = eu-north-1\n[profile work]\nregion = eu-west-3\n")
    (home / ".ossutilconfig").write_text(
        "[Credentials]\nlanguage=EN\nendpoint=oss-cn-beijing.aliyuncs.com\naccessKeyID=util\naccessKeySecret=s3\n"
    )
    return home


def test_s3_options_come_first_then_the_environment(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "env")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t")
    found = find_s3_credentials({"key": "option", "secret": "s", "token": "t"})
    assert found == Credentials("option", "s", "t")
    assert find_s3_credentials({}) == Credentials("env", "s", "t")


def test_s3_profiles(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_s3_credentials({}) == Credentials("file", "s1")
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert find_s3_credentials({}) == Credentials("work", "s2", "t2")


def test_oss_order(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_oss_credentials({}) == Credentials("util", "s3")
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_ID", "fc")
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "s")
    monkeypatch.setenv("ALIBABA_CLOUD_SECURITY_TOKEN", "t")
    assert find_oss_credentials({}) == Credentials("fc", "s", "t")
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "oss")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "s")
    assert find_oss_credentials({}) == Credentials("oss", "s")
    assert find_oss_credentials({"key": "k", "secret": "x"}) == Credentials("k", "x")


def test_nothing_is_found_where_nothing_is(home: Path) -> None:
    assert find_s3_credentials({}) is None
    assert find_oss_credentials({}) is None


def test_broken_files_of_other_tools_are_passed_over(files: Path) -> None:
    for name in (".ossutilconfig", ".aws/config", ".aws/credentials"):
        (files / name).write_bytes(b"\xff\xfe no section")
    assert find_oss_credentials({}) is None
    assert find_s3_credentials({}) is None


def test_secrets_are_not_printed() -> None:
    assert "hidden" not in repr(Credentials("id", "hidden", "hidden too"))


@pytest.mark.parametrize(
    ("options", "host", "target"),
    [
        ({}, "data.s3.eu-north-1.amazonaws.com", "/a%20b"),
        ({"region": "us-west-2"}, "data.s3.us-west-2.amazonaws.com", "/a%20b"),
        ({"endpoint_url": "http://localhost:9000"}, "localhost", "/data/a%20b"),
        ({"endpoint_url": "https://minio.lan", "addressing_style": "virtual"}, "data.minio.lan", "/a%20b"),
    ],
)
def test_s3_addresses(files: Path, options: dict[str, str], host: str, target: str) -> None:
    request = S3Service(options).request("s3://data/a b")
    assert (request.origin.host, request.target) == (host, target)


def test_a_bucket_with_dots_stays_in_the_path(files: Path) -> None:
    request = S3Service({}).request("s3://my.data/x")
    assert (request.origin.host, request.target) == ("s3.eu-north-1.amazonaws.com", "/my.data/x")


def test_oss_addresses(files: Path) -> None:
    virtual = OSSService({}).request("oss://data/a b")
    assert (virtual.origin, virtual.target) == ((True, "data.oss-cn-beijing.aliyuncs.com", 443), "/a%20b")
    path = OSSService({"endpoint": "http://127.0.0.1:8080"}).request("oss://data/a b")
    assert (path.origin, path.target) == ((False, "127.0.0.1", 8080), "/data/a%20b")


@pytest.mark.parametrize("endpoint", ["ftp://host", "https://", "http://host/path"])
def test_refuses_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(OptionError, match="endpoint"):
        OSSService({"endpoint": endpoint})


def test_anonymous_requests_carry_no_signature(files: Path) -> None:
    assert S3Service({"anon": True}).request("s3://data/x").headers == {}
    service = S3Service({"anon": True})
    refusal = ErrorResponse(403, "Forbidden", {}, b"")
    assert service.follow("s3://data/x", service.request("s3://data/x"), refusal) is None
