"""Certificates by which both sides of a TLS connection prove that they belong to the cluster.

`dpflow keygen` generates an authority, which signs one certificate for all servers and one for all clients, and
discards the authority's key. An operator can provide certificates of another authority instead. A certificate names a
role (server or client) and not a host, because servers may move; both sides check this name.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import re
import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from torch_dpflow._core.lazy import imported
from torch_dpflow.errors import OptionError

#: Names in the certificates of servers and of clients.
SERVER_NAME, CLIENT_NAME = "server.dpflow", "client.dpflow"
_DAYS = 3650
#: Certificates and keys in a PEM file, which may have other text between them.
_BLOCKS = re.compile(rb"-----BEGIN [A-Z0-9 ]+-----.+?-----END [A-Z0-9 ]+-----", re.DOTALL)


class ClusterCertificates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificates of a cluster, as PEM text. `client` and `server` each contain a certificate and its private key."""

    #: Certificates of the authority, without a key.
    authority: str
    client: str
    #: Certificate and key of servers; None in connection files for clients only.
    server: str | None = None


def can_draw_certificates() -> bool:
    """Return whether the library that generates certificates is installed."""
    return importlib.util.find_spec("cryptography") is not None


def draw_certificates() -> ClusterCertificates:
    """Generate certificates for a new cluster, valid for ten years. Raises MissingExtraError without `cryptography`."""
    imported("cryptography", "certificates need cryptography", "pool")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.timezone.utc)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority.dpflow")])

    def builder_of(name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder(authority_name, name, key.public_key(), x509.random_serial_number())
        # A day early, as clocks of hosts differ.
        return builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
            now + datetime.timedelta(days=_DAYS)
        )

    def pem(builder: x509.CertificateBuilder) -> str:
        certificate = builder.sign(authority_key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM).decode()

    def signed(name: str, usage: x509.ObjectIdentifier) -> str:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = builder_of(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False
        ).add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
        form = serialization.PrivateFormat.PKCS8
        text = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        return pem(builder) + text.decode()

    root = builder_of(authority_name, authority_key).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    return ClusterCertificates(
        authority=pem(root),
        client=signed(CLIENT_NAME, ExtendedKeyUsageOID.CLIENT_AUTH),
        server=signed(SERVER_NAME, ExtendedKeyUsageOID.SERVER_AUTH),
    )


def read_certificates(authority: Sequence[Path], client: Sequence[Path], server: Sequence[Path]) -> ClusterCertificates:
    """Read certificates that an operator provides, from PEM files.

    authority: certificates of the authority.
    client, server: a certificate with its intermediate certificates and its key, in one or more files.

    Raises OptionError if a file cannot be read or does not fit its role, or `check_certificates` refuses a certificate.
    """
    found = ClusterCertificates(
        authority=_pem("authority", authority), client=_pem("client", client), server=_pem("server", server)
    )
    check_certificates(found)
    return found


def check_certificates(certificates: ClusterCertificates) -> None:
    """Check that client and server accept each other's certificate: key, signature, time, purpose and name.

    Raises OptionError if a certificate is missing, cannot be read or is refused.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context(certificates).wrap_bio(to_client, to_server, server_hostname=SERVER_NAME)
    server = server_context(certificates).wrap_bio(to_server, to_client, server_side=True)
    for side, refused in 2 * ((client, "server"), (server, "client")):
        try:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise OptionError(
                f"the certificate of the {refused} is refused: {error.verify_message}; give one that the authority "
                f"has signed, valid now, for the name {refused}.dpflow and for use by a TLS {refused}"
            ) from error
        except ssl.SSLError as error:
            raise OptionError(f"the certificates cannot be used: {_why(error)}; give others") from error
    if not is_client(server.getpeercert()):
        raise OptionError(
            f"the certificate of the client is not for {CLIENT_NAME}; give one that has this name (DNS, subject "
            "alternative name)"
        )


def is_client(certificate: dict[str, Any] | None) -> bool:
    """Return whether a TLS peer's certificate, as returned by `getpeercert`, contains the DNS name `CLIENT_NAME`."""
    return ("DNS", CLIENT_NAME) in (certificate or {}).get("subjectAltName", ())


def server_context(certificates: ClusterCertificates) -> ssl.SSLContext:
    """Return the TLS 1.3 context of a server. Clients need a certificate of the authority; check it by `is_client`.

    Raises OptionError if there is no certificate for servers, or a certificate cannot be read.
    """
    if certificates.server is None:
        raise OptionError(
            "the connection file holds no certificate for servers, so no server can use it; use the file that "
            "`dpflow keygen` has written"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # connections stay open, none is resumed
    context.verify_mode = ssl.CERT_REQUIRED
    return _prepared(context, certificates.authority, certificates.server)


def client_context(certificates: ClusterCertificates) -> ssl.SSLContext:
    """Return the TLS 1.3 context of a client of the cluster. Raises OptionError if a certificate cannot be read."""
    return _prepared(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificates.authority, certificates.client)


def _prepared(context: ssl.SSLContext, authority: str, own: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # ssl reads a chain and its key from files only; this file has no name.
    descriptor = os.memfd_create("dpflow-certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, own.encode())
        context.load_verify_locations(cadata=authority)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except (ssl.SSLError, ValueError) as error:
        raise OptionError(
            f"a certificate or key of the cluster cannot be read: {_why(error)}; write another connection file by "
            "`dpflow keygen`"
        ) from error
    finally:
        os.close(descriptor)
    return context


def _pem(role: str, files: Sequence[Path]) -> str:
    """Return the certificates and keys in a role's files, as PEM. Raises OptionError if they do not fit the role."""
    what = f"--{role} {' and '.join(str(file) for file in files)}"
    try:
        found = [one for file in files for one in _BLOCKS.findall(file.read_bytes())]
    except OSError as error:
        raise OptionError(f"{what}: {error.strerror}; give PEM files") from error
    text = b"\n".join(found).decode("ascii", "replace") + "\n"
    has_key = "PRIVATE KEY-----" in text
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise OptionError(f"{what}: there is no certificate in it; give PEM files")
    if role == "authority" and has_key:
        raise OptionError(f"{what}: there is a key in it, which signs others; give certificates alone")
    if role != "authority" and not has_key:
        raise OptionError(f"{what}: there is no key in it; give --{role} a second time, with the key's file")
    if "ENCRYPTED" in text:
        raise OptionError(f"{what}: its key is encrypted, and servers start unattended; decrypt it (openssl pkey)")
    return text


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return reason.lower().replace("_", " ") if reason else str(error)
