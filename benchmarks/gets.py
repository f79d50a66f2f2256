"""GETs of objects by several clients in a forked process, in plain and with TLS: processor time and rate.

    python -m benchmarks.gets [--json] [--rounds 5] [--quick]

The server is a stand-in for S3 and OSS: it answers every key with as many bytes as the key names, checks no signature,
and costs little, so that the clients are compared. Each client makes its connections in the forked process, as in a
worker of a loader, and opens them before the clock starts.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import re
import socketserver
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from benchmarks.loader_run import processor_s
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish

#: Bytes of an object, and how many of them are read for one figure.
SIZES: Mapping[int, int] = {4_000: 1024, 100_000: 512, 4_000_000: 48}
AT_ONCE = (1, 16)
BUCKET, KEY_ID, SECRET, REGION = "data", "test-key-id", "test-secret", "us-east-1"
PACKAGES = ("boto3", "s3fs", "obstore", "oss2")
METRICS = (
    Metric(name="cpu_us_per_get", label="CPU µs/GET", higher_is_better=False, spec=",.0f"),
    Metric(name="gets_per_s", label="GETs/s", spec=",.0f"),
)
#: Variables by which the clients find the certificate.
CERTIFICATES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
_DAY = datetime.timedelta(days=1)
_REQUEST = re.compile(rb"(GET|HEAD) \S*?/(\d+)-\d+[ ?]")
_RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d*)\r\n", re.IGNORECASE)
_CONTENT = memoryview(os.urandom(max(SIZES)))


class Answers(socketserver.StreamRequestHandler):
    """Answers the requests of one connection."""

    disable_nagle_algorithm = True

    def handle(self) -> None:
        while head := self._head():
            method, size = _REQUEST.match(head).groups()  # type: ignore[union-attr]
            first, last, status = 0, int(size) - 1, b"200 OK"
            extra = b""
            if found := _RANGE.search(head):
                first, last = int(found[1]), min(int(found[2] or last), last)
                status, extra = b"206 Partial Content", b"Content-Range: bytes %d-%d/%d\r\n" % (first, last, int(size))
            self.wfile.write(
                b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%sContent-Type: binary/octet-stream\r\nAccept-Ranges: bytes\r\n"
                b'ETag: "00000000000000000000000000000000"\r\nLast-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n'
                b"Date: Wed, 01 Jan 2025 00:00:00 GMT\r\nServer: stand-in\r\n\r\n" % (status, last + 1 - first, extra)
            )
            if method == b"GET":
                self.wfile.write(_CONTENT[first : last + 1])

    def _head(self) -> bytes:
        """The lines of a request; none at the end of the connection."""
        lines: list[bytes] = []
        while (line := self.rfile.readline()) not in (b"", b"\r\n"):
            lines.append(line)
        return b"".join(lines)


class Server(socketserver.ThreadingTCPServer):
    """Listens on a free port of this host, with TLS if it is given a context."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self.context = context
        super().__init__(("127.0.0.1", 0), Answers)

    def finish_request(self, request: Any, address: Any) -> None:
        if self.context is not None:  # in the thread of the connection
            request = self.context.wrap_socket(request, server_side=True)
        super().finish_request(request, address)

    def handle_error(self, request: Any, address: Any) -> None:
        """A client that has ended."""


@contextmanager
def served(folder: Path | None) -> Iterator[str]:
    """Serve from another process, with the certificate in `folder` if that is given; the URL of the server."""
    context = None
    if folder is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    with Server(context) as server:
        process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
        process.start()
        yield f"http{'s' if folder else ''}://localhost:{server.server_address[1]}"
        process.kill()
        process.join()


def write_certificates(folder: Path) -> None:
    """Write a certificate of this host with its key, and that of its authority, which all clients then trust."""
    authority, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("authority", "localhost")]
    now = datetime.datetime.now(datetime.timezone.utc)
    for is_authority, name, key in ((True, names[0], authority), (False, names[1], own)):
        serial = x509.random_serial_number()
        certificate = (
            x509.CertificateBuilder(names[0], name, key.public_key(), serial, now - _DAY, now + _DAY)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .sign(authority, hashes.SHA256())
        )
        path = folder / ("authority.pem" if is_authority else "certificate.pem")
        path.write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for variable in CERTIFICATES:
        os.environ[variable] = str(folder / "authority.pem")


def by_boto3(endpoint: str) -> Callable[[str], bytes]:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET,
        config=Config(max_pool_connections=max(AT_ONCE), s3={"addressing_style": "path"}),
    )
    return lambda key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read()  # type: ignore[no-any-return]


def by_s3fs(endpoint: str) -> Callable[[str], bytes]:
    import s3fs

    path = {"s3": {"addressing_style": "path"}, "max_pool_connections": max(AT_ONCE)}
    files = s3fs.S3FileSystem(endpoint_url=endpoint, key=KEY_ID, secret=SECRET, config_kwargs=path)
    return lambda key: files.cat_file(f"{BUCKET}/{key}")  # type: ignore[no-any-return]


def by_obstore(endpoint: str) -> Callable[[str], bytes]:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=endpoint,
        region=REGION,
        access_key_id=KEY_ID,
        secret_access_key=SECRET,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    return lambda key: obstore.get(store, key).bytes().to_bytes()


def by_oss2(endpoint: str) -> Callable[[str], bytes]:
    import oss2

    session = oss2.Session(pool_size=max(AT_ONCE))
    bucket = oss2.Bucket(oss2.Auth(KEY_ID, SECRET), endpoint, BUCKET, is_path_style=True, session=session)
    return lambda key: bucket.get_object(key).read()  # type: ignore[no-any-return]


def ours(scheme: str, endpoint: str) -> Callable[[str], bytes]:
    from torch_dpflow.datasets.storage import ObjectReader

    option = {"s3": "endpoint_url", "oss": "endpoint"}[scheme]
    reader = ObjectReader({option: endpoint, "key": KEY_ID, "secret": SECRET})
    return lambda key: reader.read(f"{scheme}://{BUCKET}/{key}")


#: The first is the baseline.
CLIENTS: Mapping[str, Callable[[str], Callable[[str], bytes]]] = {
    "boto3": by_boto3,
    "s3fs": by_s3fs,
    **({"obstore": by_obstore} if find_spec("obstore") is not None else {}),
    "ours, s3": partial(ours, "s3"),
    "oss2": by_oss2,
    "ours, oss": partial(ours, "oss"),
}


def measure(client: str, endpoint: str, size: int, at_once: int, count: int) -> Figures:
    """Read `count` objects of `size` bytes in a forked process, `at_once` at a time."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, client, endpoint, size, at_once, count))
    process.start()
    sender.close()
    try:
        figures: Figures = receiver.recv()
    except EOFError:
        raise RuntimeError(f"{client} failed: see above") from None
    finally:
        process.join()
    return figures


def _measure(sender: Any, client: str, endpoint: str, size: int, at_once: int, count: int) -> None:
    read = CLIENTS[client](endpoint)
    keys = [f"{size}-{number}" for number in range(count)]
    with ThreadPoolExecutor(at_once) as pool:
        call = map if at_once == 1 else pool.map
        for _ in call(read, keys[: 2 * at_once]):  # connects
            pass
        before_s, began = processor_s(), time.perf_counter()
        lengths = set(map(len, call(read, keys)))
        took_s = time.perf_counter() - began
        used_s = processor_s() - before_s
    if lengths != {size}:
        raise RuntimeError(f"{client} read {sorted(lengths)} bytes instead of {size}")
    sender.send({"cpu_us_per_get": used_s / count * 1e6, "gets_per_s": count / took_s})


def compare(folder: Path | None, size: int, at_once: int, rounds: int, count: int) -> Comparison:
    """Every client in turns."""
    with served(folder) as endpoint:
        sides = {client: partial(measure, client, endpoint, size, at_once, count) for client in CLIENTS}
        return alternate(
            "gets",
            f"{size // 1000} kB, {at_once} at a time, {'TLS' if folder else 'plain'}",
            sides,
            rounds=rounds,
            parameters={"gets": count, "packages": {name: version(name) for name in PACKAGES if find_spec(name)}},
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    given = parser.parse_args(arguments)
    rounds = 1 if given.quick else given.rounds
    for package in PACKAGES:  # once, not in each forked process
        if find_spec(package) is not None:
            import_module(package)
    with tempfile.TemporaryDirectory() as name:
        write_certificates(Path(name))
        publish(
            [
                compare(folder, size, at_once, rounds, max(16, count // 32) if given.quick else count)
                for folder in (Path(name), None)
                for size, count in SIZES.items()
                for at_once in AT_ONCE
            ],
            METRICS,
            given,
        )


if __name__ == "__main__":
    main()
