"""Settings that boto3 honours: bundles of certificates, regions, and doing without TLS."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.datasets.storage.signed_s3 import SignedS3
from tests.datasets.storage.web_server import WebServer, serve_ranges
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.credentials import Credentials
from torch_dpflow.datasets.storage.services import OSSService, S3Service
from torch_dpflow.errors import OptionError, OptionTypeError, StorageError

DATA = bytes(range(250))
KEYS = Credentials("key", "secret")
OPTIONS = {"key": "key", "secret": "secret"}
SPANS = [ByteRange(f"s3://data/{number}") for number in range(32)]
_BUNDLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the key and the certificate of 127.0.0.1, which its own authority has signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "an authority of ours")])
    now = datetime.now(timezone.utc)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "own.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


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


def test_a_bundle_of_the_shared_configuration_is_trusted(
    server: WebServer, certificate: Path, tmp_path: Path
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/config").write_text(f"[default]\nca_bundle = {certificate}\n")
    assert _read(server) == DATA


def test_the_option_comes_first(
    server: WebServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    service = S3Service(OPTIONS | {"region": "cn-north-1"}, {})
    assert service.origin("s3://data/x").host == "data.s3.cn-north-1.amazonaws.com.cn"


def test_tls_can_be_done_without() -> None:
    assert S3Service({"use_ssl": False}, {}).origin("s3://data/x") == (
        False,
        "data.s3.us-east-1.amazonaws.com",
        80,
    )
    with WebServer(SignedS3(DATA, KEYS)) as server:
        assert _read(server, use_ssl=False, endpoint=server.url.partition("://")[2]) == DATA
        assert _read(server, use_ssl=False) == DATA


@pytest.mark.parametrize(
    ("service", "option"), [(S3Service, "anon"), (S3Service, "use_ssl"), (OSSService, "anon")]
)
def test_a_word_is_no_switch(service: type[S3Service] | type[OSSService], option: str) -> None:
    with pytest.raises(OptionTypeError, match=f"{option}='no' is of type str; give True or False"):
        service({"endpoint": "http://127.0.0.1:1", option: "no"})
