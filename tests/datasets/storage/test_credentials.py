"""Where credentials are looked for, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_dpflow.datasets.storage.credentials import Credentials, find_oss_credentials, find_s3_credentials
from torch_dpflow.datasets.storage.http_storage import ErrorResponse
from torch_dpflow.datasets.storage.object_stores import OSSService, S3Service
from torch_dpflow.errors import OptionError


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose home directory has the vendors' files."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[default]\naws_access_key_id = file\naws_secret_access_key = s1\n"
        "[work]\naws_access_key_id = work\naws_secret_access_key = s2\naws_session_token = t2\n"
    )
    (tmp_path / ".aws/config").write_text(
        "[default]\nregion = eu-north-1\n[profile work]\nregion = eu-west-3\n"
    )
    (tmp_path / ".ossutilconfig").write_text(
        "[Credentials]\nlanguage=EN\nendpoint=oss-cn-beijing.aliyuncs.com\naccessKeyID=util\naccessKeySecret=s3\n"
    )
    return {"HOME": str(tmp_path)}


def test_s3_options_come_first(home: dict[str, str]) -> None:
    environ = home | {"AWS_ACCESS_KEY_ID": "env", "AWS_SECRET_ACCESS_KEY": "s"}
    found = find_s3_credentials({"key": "option", "secret": "s", "token": "t"}, environ)
    assert found == Credentials("option", "s", "t")


def test_s3_environment_comes_before_files(home: dict[str, str]) -> None:
    environ = home | {"AWS_ACCESS_KEY_ID": "env", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"}
    assert find_s3_credentials({}, environ) == Credentials("env", "s", "t")


def test_s3_profiles(home: dict[str, str]) -> None:
    assert find_s3_credentials({}, home) == Credentials("file", "s1")
    assert find_s3_credentials({}, home | {"AWS_PROFILE": "work"}) == Credentials("work", "s2", "t2")


def test_oss_order(home: dict[str, str]) -> None:
    assert find_oss_credentials({}, home) == Credentials("util", "s3")
    function = {"ALIBABA_CLOUD_ACCESS_KEY_ID": "fc", "ALIBABA_CLOUD_ACCESS_KEY_SECRET": "s"}
    function["ALIBABA_CLOUD_SECURITY_TOKEN"] = "t"
    assert find_oss_credentials({}, home | function) == Credentials("fc", "s", "t")
    own = {"OSS_ACCESS_KEY_ID": "oss", "OSS_ACCESS_KEY_SECRET": "s"}
    assert find_oss_credentials({}, home | function | own) == Credentials("oss", "s")
    assert find_oss_credentials({"key": "k", "secret": "x"}, home | own) == Credentials("k", "x")


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert find_s3_credentials({}, {"HOME": str(tmp_path)}) is None
    assert find_oss_credentials({}, {"HOME": str(tmp_path)}) is None


def test_a_broken_file_is_no_error_of_ours(home: dict[str, str]) -> None:
    Path(home["HOME"], ".ossutilconfig").write_bytes(b"\xff\xfe no section")
    assert find_oss_credentials({}, home) is None


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
def test_s3_addresses(home: dict[str, str], options: dict[str, str], host: str, target: str) -> None:
    request = S3Service(options, home).request("s3://data/a b")
    assert (request.origin.host, request.target) == (host, target)


def test_a_bucket_with_dots_stays_in_the_path(home: dict[str, str]) -> None:
    request = S3Service({}, home).request("s3://my.data/x")
    assert (request.origin.host, request.target) == ("s3.eu-north-1.amazonaws.com", "/my.data/x")


def test_oss_addresses(home: dict[str, str]) -> None:
    virtual = OSSService({}, home).request("oss://data/a b")
    assert (virtual.origin, virtual.target) == ((True, "data.oss-cn-beijing.aliyuncs.com", 443), "/a%20b")
    path = OSSService({"endpoint": "http://127.0.0.1:8080"}, home).request("oss://data/a b")
    assert (path.origin, path.target) == ((False, "127.0.0.1", 8080), "/data/a%20b")


@pytest.mark.parametrize("endpoint", ["ftp://host", "https://", "http://host/path"])
def test_refuses_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(OptionError, match="endpoint"):
        OSSService({"endpoint": endpoint})


def test_anonymous_requests_carry_no_signature(home: dict[str, str]) -> None:
    assert S3Service({"anon": True}, home).request("s3://data/x").headers == {}
    service = S3Service({"anon": True}, home)
    refusal = ErrorResponse(403, "Forbidden", {}, b"")
    assert service.follow("s3://data/x", service.request("s3://data/x"), refusal) is None
