"""Settings that boto3 honours: bundles of certificates, regions, and doing without TLS."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import fsspec
import pytest

from tests.datasets.storage.signed_s3 import SignedS3
from tests.datasets.storage.web_server import WebServer, reply, serve_ranges
from tests.later import Later
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.credentials import Credentials
from torch_dpflow.datasets.storage.file_systems import FsspecStorage, fsspec_options
from torch_dpflow.datasets.storage.http_storage import ErrorResponse, HttpStorage
from torch_dpflow.datasets.storage.object_reader import open_storage
from torch_dpflow.datasets.storage.object_stores import OSSService, S3Service, needs_vendor
from torch_dpflow.errors import MissingExtraError, OptionError, OptionTypeError, StorageError

boto3: Any = Later("boto3")
configured: Any = Later("botocore.config")
oss2: Any = Later("oss2")

DATA = bytes(range(250))
KEYS = Credentials("key", "secret")
OPTIONS = {"key": "key", "secret": "secret"}
SPANS = [ByteRange(f"s3://data/{number}") for number in range(32)]
_BUNDLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


@pytest.fixture(scope="session", autouse=True)
def servers_first(s3_endpoint: str) -> None:
    """fsspec's thread lives as long as the session."""


@pytest.fixture(autouse=True)
def no_settings(home: Path) -> None:
    """Each test makes its own."""


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*_BUNDLES, "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def _read(server: WebServer, **options: Any) -> bytes:
    with ObjectReader(OPTIONS | {"endpoint": server.url} | options, options=_ONCE) as reader:
        return reader.read("s3://data/x")


_ONCE = ReadOptions(attempts=1)


@pytest.fixture
def server(tls: ssl.SSLContext) -> Iterator[WebServer]:
    with WebServer(SignedS3(DATA, KEYS), tls) as server:
        yield server


@pytest.mark.parametrize("variable", _BUNDLES)
def test_a_bundle_of_the_environment_is_trusted(
    server: WebServer, certificate: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with pytest.raises(StorageError, match="certificate is not trusted"):
        _read(server)
    monkeypatch.setenv(variable, str(certificate))
    assert _read(server) == DATA


def test_a_bundle_of_the_shared_configuration_is_trusted(server: WebServer, certificate: Path, tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/config").write_text(f"[default]\nca_bundle = {certificate}\n")
    assert _read(server) == DATA


def test_the_option_comes_first(server: WebServer, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/no/such/file")
    assert _read(server, verify=str(certificate)) == _read(server, verify=certificate) == DATA
    assert _read(server, verify=False) == DATA
    with pytest.raises(StorageError, match="certificate is not trusted"):
        _read(server, verify=True)


def test_certificates_that_are_not_there_are_named(server: WebServer, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no certificates at '/no/such'.*`verify`"):
        _read(server, verify="/no/such")
    (tmp_path / "empty.pem").touch()
    with pytest.raises(OptionError, match=r"empty\.pem"):
        _read(server, verify=str(tmp_path / "empty.pem"))


def test_web_servers_too(tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with WebServer(serve_ranges(DATA), tls) as server:
        with ObjectReader({"verify": str(certificate)}) as reader:
            assert reader.read(f"{server.url}/x", 5, 9) == DATA[5:9]
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        with ObjectReader() as reader:
            assert reader.read(f"{server.url}/x", 5, 9) == DATA[5:9]


@pytest.mark.parametrize("redirects", [False, True])
def test_a_bucket_in_another_region_is_followed_there(redirects: bool) -> None:
    s3 = SignedS3(DATA, KEYS, region="eu-north-1")
    s3.redirects = redirects
    with (
        WebServer(s3) as server,
        ObjectReader(OPTIONS | {"endpoint": server.url, "region": "us-west-2"}) as reader,
    ):
        assert reader.read_many(SPANS) == [DATA] * 32
        before = len(server.requests)
        assert reader.read_many(SPANS) == [DATA] * 32
        assert len(server.requests) == before + 32  # it is known from then on
        s3.region = "no/region"
        with pytest.raises(StorageError, match=r"301|AuthorizationHeaderMalformed"):
            reader.read("s3://data/x")


def test_without_an_endpoint_another_region_is_another_host() -> None:
    service = S3Service(OPTIONS | {"region": "cn-north-1"})
    assert service.origin("s3://data/x").host == "data.s3.cn-north-1.amazonaws.com.cn"


def test_a_bucket_in_another_region_keeps_its_name_in_the_disk_cache() -> None:
    """Otherwise each process would read again what an earlier one has kept after it was sent to the other region."""
    service = S3Service(OPTIONS)
    storage = HttpStorage(service, ReadOptions())
    before = storage.node("s3://data/x")
    refusal = ErrorResponse(301, "Moved", {"x-amz-bucket-region": "eu-north-1"}, b"")
    followed = service.follow("s3://data/x", service.request("s3://data/x"), refusal)
    assert followed is not None
    assert followed.origin.host == "data.s3.eu-north-1.amazonaws.com"
    assert storage.node("s3://data/x") == before == "data.s3.us-east-1.amazonaws.com"


POINT = "arn:aws:s3:us-west-2:123456789012:accesspoint/mine"
LAMBDA = "arn:aws:s3-object-lambda:eu-west-1:123456789012:accesspoint/mine"
OUTPOST = "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-01/accesspoint/mine"


@pytest.mark.parametrize("region", ["us-east-1", "eu-central-2", "us-gov-west-1", "cn-north-1"])
def test_buckets_are_looked_for_where_botocore_does(region: str) -> None:
    # Else presigned URLs are those of the global endpoint.
    regional = {"us_east_1_regional_endpoint": "regional", "addressing_style": "virtual"}
    client = boto3.client(
        "s3",
        region_name=region,
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        config=configured.Config(signature_version="s3v4", s3=regional),
    )
    with closing(client):
        for bucket in ("data", "my.bucket", "My_Bucket", "a_b", "-x", "ab", "mine-abc-s3alias"):
            expected = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "a b/c+d"})
            parts = urlsplit(expected)
            request = S3Service(OPTIONS | {"region": region}).request(f"s3://{bucket}/a b/c+d")
            assert (request.origin.host, request.target) == (parts.hostname, parts.path), bucket
            scope = parse_qs(parts.query)["X-Amz-Credential"][0].partition("/")[2].partition("/")[2]
            assert f"/{scope}, SignedHeaders=" in request.headers["authorization"]


@pytest.mark.parametrize(
    ("bucket", "region", "config", "host"),
    [
        (POINT, "us-west-2", "", "mine-123456789012.s3-accesspoint.us-west-2.amazonaws.com"),
        (LAMBDA, "eu-west-1", "", "mine-123456789012.s3-object-lambda.eu-west-1.amazonaws.com"),
        (OUTPOST, "us-west-2", "", "mine-123456789012.op-01.s3-outposts.us-west-2.amazonaws.com"),
        ("data", "us-east-1", "use_fips_endpoint = true", "data.s3-fips.us-east-1.amazonaws.com"),
        ("data", "eu-west-1", "s3 =\n  use_dualstack_endpoint = true", "data.s3.dualstack.eu-west-1.amazonaws.com"),
        ("data", "eu-west-1", "s3 =\n  use_accelerate_endpoint = true", "data.s3-accelerate.amazonaws.com"),
        ("data", "us-iso-east-1", "", "data.s3.us-iso-east-1.c2s.ic.gov"),
    ],
)
def test_servers_that_only_botocore_can_name_are_read_by_s3fs(
    bucket: str, region: str, config: str, host: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "config").write_text(f"[default]\n{config}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "config"))
    options = OPTIONS | {"region": region}
    url = f"s3://{bucket}/x"
    address = url.removesuffix("/x") if needs_vendor(bucket) else "s3"
    assert isinstance(open_storage(address, options, ReadOptions()), FsspecStorage)
    files = fsspec.filesystem("s3", **fsspec_options("s3", options))
    assert urlsplit(files.sign(url)).hostname == host
    files.close_session(files.loop, files._s3)
    type(files).clear_instance_cache()


@pytest.mark.parametrize("variable", ["AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT"])
def test_switches_of_aws_are_words_that_botocore_understands(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = OPTIONS | {"endpoint": "https://minio"}
    for value in ("true", "false"):
        monkeypatch.setenv(variable, value)
        assert S3Service(OPTIONS).needs_vendor == (value == "true")
    assert S3Service(options).origin("s3://data/x").host == "minio"
    monkeypatch.setenv(variable, "true")
    with pytest.raises(OptionError, match=r"with the endpoint 'https://minio': only AWS has such endpoints"):
        S3Service(options)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(OptionError, match=f"{variable}='1': give true or false"):
        S3Service(OPTIONS)


@pytest.mark.parametrize(
    ("config", "host", "target"),
    [
        ("s3 =\n  addressing_style = path", "s3.us-east-1.amazonaws.com", "/data/x"),
        ("services = mine\n[services mine]\ns3 =\n  endpoint_url = https://h/p", "h", "/p/data/x"),
        (
            "endpoint_url = https://h\nignore_configured_endpoint_urls = true",
            "data.s3.us-east-1.amazonaws.com",
            "/x",
        ),
    ],
)
def test_settings_of_the_shared_configuration_count(
    tmp_path: Path, config: str, host: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(f"[default]\n{config}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    service = S3Service(OPTIONS)
    request = service.request("s3://data/x")
    assert (request.origin.host, request.target) == (host, target)


def test_files_of_aws_that_only_botocore_reads_are_not_ignored_without_it(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setitem(sys.modules, "botocore.configloader", None)
    assert S3Service(OPTIONS).origin("s3://data/x").host == "data.s3.us-east-1.amazonaws.com"
    (home / ".aws").mkdir()
    (home / ".aws/config").write_text("[default]\nendpoint_url = https://minio\n")
    with pytest.raises(MissingExtraError, match=r"\.aws/config .* pip install 'torch_dpflow\[s3\]'"):
        S3Service(OPTIONS)


@pytest.mark.parametrize("style", ["path", "virtual"])
def test_an_endpoint_may_have_a_path(style: str) -> None:
    with WebServer(SignedS3(DATA, KEYS)) as server:
        endpoint = f"{server.url}/some%20base/"
        with ObjectReader(OPTIONS | {"endpoint": endpoint, "addressing_style": style}) as reader:
            assert reader.read("s3://My_Bucket/x", 5, 9) == DATA[5:9]
    assert server.requests[0]["path"] == "/some%20base/My_Bucket/x"


@pytest.mark.parametrize(
    "endpoint", ["https://h:x", "https://h?x", "https://h#x", "https://h\t/x", "https://a b", "//h"]
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    for service in (S3Service, OSSService):
        with pytest.raises(OptionError, match=r"endpoint .*; give http"):
            service(OPTIONS | {"endpoint": endpoint})


def test_a_domain_of_a_bucket_of_oss_is_used_as_it_is() -> None:
    options = OPTIONS | {"endpoint": "https://img.example.com", "cname": True}
    service = OSSService(options)
    bucket = oss2.Bucket(oss2.Auth("key", "secret"), "https://img.example.com", "data", is_cname=True)
    expected = urlsplit(bucket.sign_url("GET", "a b/c", 60, slash_safe=True))
    request = service.request("oss://data/a b/c")
    assert (request.origin.host, request.target) == (expected.hostname, expected.path)
    with pytest.raises(OptionError, match="cname=True only reads objects by their names"):
        fsspec_options("oss", options)
    with pytest.raises(OptionError, match="OSS has no endpoints with a path"):
        OSSService(OPTIONS | {"endpoint": "https://oss.example/path"})


def test_s3_express_is_read_in_sessions_by_the_vendors_client() -> None:
    bucket = "fast--usw2-az1--x-s3"
    session = (
        b"<CreateSessionResult><Credentials><SessionToken>tok</SessionToken><SecretAccessKey>s</SecretAccessKey>"
        b"<AccessKeyId>a</AccessKeyId><Expiration>2999-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"
    )

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if "session" in handler.path:
            reply(handler, 200, session)
        elif handler.headers.get("x-amz-s3session-token") == "tok":
            serve_ranges(DATA)(handler)
        else:
            reply(handler, 403)

    with WebServer(answer) as server:
        options = OPTIONS | {"endpoint": server.url, "region": "us-west-2"}
        with ObjectReader(options) as reader:
            assert reader.read(f"s3://{bucket}/x", 5, 9) == DATA[5:9]
        files = fsspec.filesystem("s3", **fsspec_options("s3", options))
        files.close_session(files.loop, files._s3)
        type(files).clear_instance_cache()


def test_tls_can_be_done_without() -> None:
    assert S3Service({"use_ssl": False}).origin("s3://data/x") == (
        False,
        "data.s3.us-east-1.amazonaws.com",
        80,
    )
    with WebServer(SignedS3(DATA, KEYS)) as server:
        assert _read(server, use_ssl=False, endpoint=server.url.partition("://")[2]) == DATA
        assert _read(server, use_ssl=False) == DATA


@pytest.mark.parametrize(("service", "option"), [(S3Service, "anon"), (S3Service, "use_ssl"), (OSSService, "anon")])
def test_a_word_is_no_switch(service: type[S3Service] | type[OSSService], option: str) -> None:
    with pytest.raises(OptionTypeError, match=f"{option}='no' is of type str; give True or False"):
        service({"endpoint": "http://127.0.0.1:1", option: "no"})
