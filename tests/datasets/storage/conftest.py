"""Servers of object storages, on sockets of this machine."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path

import fsspec.asyn
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.datasets.storage.servers import BUCKET, s3_client
from tests.later import Later
from tests.support.oss_server import OSSServer
from torch_dpflow.datasets.storage import ReadOptions

moto = Later("moto.server")


@pytest.fixture
def impatient() -> ReadOptions:
    """Options under which everything that fails has failed within seconds: only for what is to time out."""
    return ReadOptions(timeout_s=0.3, deadline_s=3.0, attempts=3, backoff_s=0.01)


@pytest.fixture
def patient() -> ReadOptions:
    """Options under which a busy machine meets no time-out."""
    return ReadOptions(timeout_s=60.0, deadline_s=60.0, attempts=3, backoff_s=0.01)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home directory, and an environment without settings of clouds."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "OSS_", "ALIBABA_CLOUD_", "REQUESTS_CA_BUNDLE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def oss() -> Iterator[OSSServer]:
    """An OSS server with one bucket."""
    with OSSServer() as server:
        server.buckets.create(BUCKET)
        yield server


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 server with one bucket, for all tests: it takes a second to start."""
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = s3_client(endpoint)
    client.create_bucket(Bucket=BUCKET)
    client.close()
    _resolve_in_loop(host)
    yield endpoint
    server.stop()


def _resolve_in_loop(host: str) -> None:
    """Have fsspec start its thread and its loop's resolver, which live as long as the process."""
    loop = fsspec.asyn.get_loop()
    asyncio.run_coroutine_threadsafe(loop.getaddrinfo(host, 0), loop).result()


@pytest.fixture(scope="session")
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
    """The context of a server with that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context
