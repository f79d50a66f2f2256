"""Certificates of an operator's own authority: a pool that has them, and what is refused."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.pool.pool_servers import inner_server
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.security.connection_file import (
    ConnectionFile,
    read_connection_file,
    write_connection_file,
)
from torch_dpflow.errors import OptionError, PeerLostError
from torch_dpflow.pool import DataClient, DataServer
from torch_dpflow.pool.transport.address import find_address

USES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)


class Authority:
    """Signs, itself signed by another one or by itself."""

    def __init__(self, name: str, above: Authority | None = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signer = above or self
        self.pem = signer.signed(
            self.name,
            self.key,
            lambda one: one.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True),
        )

    def signed(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        add: Callable[[x509.CertificateBuilder], x509.CertificateBuilder],
        until: datetime.datetime = NOW + DAY,
    ) -> bytes:
        serial = x509.random_serial_number()
        builder = x509.CertificateBuilder(self.name, name, key.public_key(), serial, NOW - 9 * DAY, until)
        return add(builder).sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def member(
        self, role: str, name: str = "", *, use: str = "", until: datetime.datetime = NOW + DAY
    ) -> tuple[bytes, bytes]:
        """A certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([USES[use or role]])
        names = x509.SubjectAlternativeName([x509.DNSName(name or f"{role}.dpflow")])
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
        pem = self.signed(
            subject,
            key,
            lambda one: one.add_extension(usage, critical=True).add_extension(names, critical=False),
            until,
        )
        return pem, pem_of(key)


def pem_of(key: ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    how: Any = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


ROOT, OTHER = Authority("root"), Authority("other")
MIDDLE = Authority("middle", ROOT)
SERVER, CLIENT = ROOT.member("server"), ROOT.member("client")


def keygen(folder: Path, **files: tuple[bytes, ...]) -> str:
    """What the command says of these, each a file; without an error, `folder / "keys"` is written."""
    given = {"authority": (ROOT.pem,), "server": SERVER, "client": CLIENT, **files}
    words = list[str]()
    for role, contents in given.items():
        for number, content in enumerate(contents):
            (folder / f"{role}{number}.pem").write_bytes(content)
            words += [f"--{role}", str(folder / f"{role}{number}.pem")]
    result = CliRunner().invoke(root, ["keygen", str(folder / "keys"), *words])
    assert (result.exit_code == 0) is (folder / "keys").exists()
    return " ".join(result.output.split())


@pytest.mark.parametrize("signer", [ROOT, MIDDLE])
def test_a_pool_with_an_operators_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signer: Authority
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)  # what draws certificates is not needed
    between = () if signer is ROOT else (signer.pem,)
    server, client = ((b"Subject: \xc3\xa4\n" + b"".join(signer.member(one)),) for one in USES)
    assert "wrote" in keygen(tmp_path, server=server + between, client=client + between)
    with inner_server(tmp_path / "p", 1 << 20, listen=find_address("tcp://127.0.0.1:0", tmp_path / "keys")) as serving:
        address = str(serving.address)
        assert DataClient(address, connection=tmp_path / "keys").cached_datasets() == []
        jobs = read_connection_file(tmp_path / "keys").for_jobs()
        write_connection_file(tmp_path / "jobs", jobs)
        assert DataClient(address, connection=tmp_path / "jobs").cached_datasets() == []
        for role, name, signed_by in [
            ("client", "mail.example", ROOT),
            ("client", "", OTHER),
            ("server", "", ROOT),
        ]:
            peer = signed_by.member(role, name)
            write_connection_file(tmp_path / "other", with_pem(jobs, client=b"".join(peer).decode()))
            with pytest.raises(PeerLostError, match="cannot connect to the pool server"):
                DataClient(address, connection=tmp_path / "other").cached_datasets()
        write_connection_file(tmp_path / "other", with_pem(jobs, authority=OTHER.pem.decode()))
        with pytest.raises(PeerLostError, match="is not one of this cluster's servers"):
            DataClient(address, connection=tmp_path / "other").cached_datasets()


def with_pem(file: ConnectionFile, **changes: str) -> ConnectionFile:
    assert file.certificates is not None
    return file.with_certificates(msgspec.structs.replace(file.certificates, **changes))


def test_an_expired_certificate_is_told_by_who_has_it_and_who_sees_it(tmp_path: Path) -> None:
    keygen(tmp_path)
    keys, old = read_connection_file(tmp_path / "keys"), {}
    for role in USES:
        old[role] = b"".join(ROOT.member(role, until=NOW - DAY)).decode()
        write_connection_file(tmp_path / f"old {role}", with_pem(keys, **{role: old[role]}))
        with pytest.raises(OptionError, match=f"certificate of the {role} is refused: certificate has expired"):
            DataServer(1 << 20, tmp_path / "p", listen=find_address("tcp://127.0.0.1:0", tmp_path / f"old {role}"))
    listen = find_address("tcp://127.0.0.1:0", tmp_path / "keys")
    with (
        inner_server(tmp_path / "p", 1 << 20, listen=listen) as serving,
        pytest.raises(PeerLostError, match=r"refuses this side's certificate \(.*CERTIFICATE_EXPIRED\)"),
    ):
        DataClient(str(serving.address), connection=tmp_path / "old client").cached_datasets()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"server": (SERVER[0], CLIENT[1])}, "key values mismatch"),
        ({"server": OTHER.member("server")}, "of the server is refused: unable to get local issuer"),
        ({"client": OTHER.member("client")}, "of the client is refused: unable to get local issuer"),
        (
            {"server": ROOT.member("server", until=NOW - DAY)},
            "of the server is refused: certificate has expired",
        ),
        (
            {"client": ROOT.member("client", until=NOW - DAY)},
            "of the client is refused: certificate has expired",
        ),
        (
            {"server": ROOT.member("server", "pool.example")},
            "for the name server.dpflow and for use by a TLS server",
        ),
        ({"client": ROOT.member("client", "pool.example")}, "of the client is not for client.dpflow"),
        ({"server": ROOT.member("server", use="client")}, "of the server is refused: uns"),
        ({"client": ROOT.member("client", use="server")}, "of the client is refused: uns"),
        ({"client": MIDDLE.member("client")}, "of the client is refused: unable to get local issuer"),
        ({"server": SERVER[:1]}, "there is no key in it; give --server a second time"),
        ({"client": CLIENT[1:]}, "there is no certificate in it"),
        ({"client": (CLIENT[0], pem_of(ROOT.key, b"secret"))}, "its key is encrypted"),
        ({"authority": (ROOT.pem, pem_of(ROOT.key))}, "there is a key in it, which signs others"),
        ({"authority": (b"nothing",)}, "there is no certificate in it"),
        ({"authority": ()}, "give --authority, --server and --client together"),
        ({"client": (CLIENT[0].replace(b"M", b"N"), CLIENT[1])}, "cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_file_is_written(
    tmp_path: Path, files: dict[str, tuple[bytes, ...]], says: str
) -> None:
    assert says in keygen(tmp_path, **files)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", tmp_path):
        options = [word for role in ("authority", "server", "client") for word in (f"--{role}", str(missing))]
        result = CliRunner().invoke(root, ["keygen", str(tmp_path / "keys"), *options])
        assert result.exit_code == 1
        assert "give PEM files" in result.output
