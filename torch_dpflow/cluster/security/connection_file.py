"""Connection files: the address of a cluster, and the keys by which its clients authenticate."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from torch_dpflow._core.checks import check_json, check_path, check_type, is_loopback
from torch_dpflow._core.decoding import json_decoder
from torch_dpflow.cluster.security.certificates import ClusterCertificates, draw_certificates
from torch_dpflow.errors import OptionError
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient
from torch_dpflow.ipc.transport import TransportOptions
from torch_dpflow.ipc.transport.base import ClientKeys, ServerKeys
from torch_dpflow.ipc.transport.zeromq import draw_key_pair

_NOT_YOURS = (
    "a cluster is for the user who started it: give a file that you own and can read, or start one by `dpflow up`"
)
_NOT_REGULAR = " is a pipe, socket or device; give a regular file"


#: The version of files with certificates, the newest one.
_NEWEST = 2


class ConnectionFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a cluster's connection file."""

    address: str
    server_public: str
    client_public: str
    client_secret: str
    #: Secret key of the cluster's services; None in files for jobs only.
    server_secret: str | None = None
    #: Version of the file's format: 2 with certificates, else 1.
    version: int = 1
    #: Whether a platform runs the workers or nodes, so that jobs have to send the user's modules.
    sends_code: bool = False
    #: Certificates for connections to pool servers over a network.
    certificates: ClusterCertificates | None = None

    def for_jobs(self) -> ConnectionFile:
        """Return a copy without the secrets of services."""
        certificates = self.certificates
        if certificates is not None:
            certificates = msgspec.structs.replace(certificates, server=None)
        return msgspec.structs.replace(self, server_secret=None, certificates=certificates)

    def with_certificates(self, certificates: ClusterCertificates) -> ConnectionFile:
        return msgspec.structs.replace(self, certificates=certificates, version=_NEWEST)

    def client_keys(self) -> ClientKeys:
        """Return the keys with which a job or worker connects to services."""
        return ClientKeys(
            public=self.client_public.encode(),
            secret=self.client_secret.encode(),
            server_public=self.server_public.encode(),
        )

    def server_keys(self) -> ServerKeys:
        """Return the keys with which a service listens. Raises OptionError if the file is for jobs only."""
        if self.server_secret is None:
            raise OptionError(
                "the connection file holds no server_secret, so no service can listen with it; use the file of the "
                "user who started the cluster"
            )
        return ServerKeys(
            public=self.server_public.encode(),
            secret=self.server_secret.encode(),
            client_public=self.client_public.encode(),
        )


def generate_keys(address: str, *, certificates: bool = False) -> ConnectionFile:
    """Generate the keys of a new cluster whose coordinator listens at `address`.

    certificates: generate certificates too. Raises MissingExtraError if the library for them is not installed.
    """
    server_public, server_secret = draw_key_pair()
    client_public, client_secret = draw_key_pair()
    keys = ConnectionFile(
        address=address,
        server_public=server_public.decode(),
        server_secret=server_secret.decode(),
        client_public=client_public.decode(),
        client_secret=client_secret.decode(),
    )
    return keys.with_certificates(draw_certificates()) if certificates else keys


def write_connection_file(path: str | os.PathLike[str], connection: ConnectionFile) -> None:
    """Write a connection file atomically, as JSON that only the owner can read."""
    draft = draft_connection_file(path, connection)
    try:
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def draft_connection_file(path: str | os.PathLike[str], connection: ConnectionFile) -> Path:
    """Write a connection file next to `path`, and return the path of this draft. The caller moves it to `path`."""
    draft = Path(path).with_name(f".{Path(path).name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(connection), indent=2) + b"\n")
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft


def read_connection_file(
    path: str | os.PathLike[str], *, advice: str = "give the one that `dpflow up` has written"
) -> ConnectionFile:
    """Read and check the connection file of a cluster.

    advice: what to do if the file is not a connection file, for the error's text.

    Raises OptionError if the file cannot be opened, is not private, or is not a connection file of a known version.
    """
    return _read(
        path,
        "connection file",
        missing="is the cluster up? Start one by `dpflow up`, or give its file by --address, --join or address=",
        other=advice,
    )


def read_key_file(path: str | os.PathLike[str]) -> ConnectionFile:
    """Read and check a file with keys for a new cluster. Raises the errors of `read_connection_file`."""
    return _read(
        path,
        "key file",
        missing="give one that `dpflow keygen` has written",
        other="write another by `dpflow keygen`",
    )


def _is_closed(status: os.stat_result) -> bool:
    """Return whether a file is private: only its owner, or the group of a Kubernetes pod, can read it."""
    mode = stat.S_IMODE(status.st_mode)
    if not mode & 0o077:
        return True  # the caller has checked who owns it
    # Kubernetes mounts a secret for a container that is not root as root's file, readable by the group of the pod and
    # not writable. Mode 0440 of a user's own file may be an accident, such as by a umask; this file only root can have
    # created or changed, and root chose the members of the group. A file that a group can write to is refused: its
    # writers could make this process trust their own cluster, whose answers are unpickled.
    groups = {os.getegid(), *os.getgroups()}
    return status.st_uid == 0 and status.st_gid in groups and not mode & ~0o440


def _read(path: str | os.PathLike[str], what: str, *, missing: str, other: str) -> ConnectionFile:
    """Read and check a file with keys.

    what: description of the file, for messages.
    missing, other: advice if the file is missing, or is not of this kind.
    """
    name = f"{what} {os.fspath(path)!r}"
    try:
        # Without O_NONBLOCK, opening a FIFO would block.
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            content = file.read(1 << 16) if stat.S_ISREG(status.st_mode) else b""
    except IsADirectoryError as error:
        raise OptionError(f"{name} is a directory; give a file in it") from error
    except PermissionError as error:
        raise OptionError(f"{name}: {error.strerror}; {_NOT_YOURS}") from error
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OptionError(f"{name}{_NOT_REGULAR}") from error
        raise OptionError(f"{name}: {error.strerror}; {missing}") from error
    if not stat.S_ISREG(status.st_mode):
        raise OptionError(f"{name}{_NOT_REGULAR}")
    if status.st_uid not in (os.getuid(), 0):
        raise OptionError(f"{name} belongs to user {status.st_uid}; {_NOT_YOURS}")
    mode = stat.S_IMODE(status.st_mode)
    if not _is_closed(status):
        raise OptionError(
            f"{name}: mode {mode:o}, owner {status.st_uid}, group {status.st_gid}; "
            "it holds keys, so you must own it and others must not read it (chmod 600; the volume of a Kubernetes "
            "secret: defaultMode: 0400, and fsGroup where the container is not root)"
        )
    try:
        check_json(content)
        connection: ConnectionFile = json_decoder(ConnectionFile).decode(content)
        connection.client_keys()
    except (msgspec.MsgspecError, OptionError, RecursionError) as error:
        raise OptionError(f"{name} is not a valid one, or damaged: {error}; {other}") from error
    if not 1 <= connection.version <= _NEWEST:
        raise OptionError(
            f"{name} has version {connection.version}, and this release of torch_dpflow reads 1 to {_NEWEST}; {other}, "
            "or update the older side"
        )
    return connection


#: Environment variable with the default `address` of `find_cluster`.
ADDRESS_VARIABLE = "DPFLOW_ADDRESS"
#: The name of a node's socket in the node's private directory.
NODE_SOCKET = "node"
#: The kernel's limit for the path of a socket (bytes).
LONGEST_SOCKET_PATH = 107


def default_connection_file() -> Path:
    """Return the default path of this user's connection file, to which `dpflow up` writes it."""
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(folder) / f"dpflow-connection-{os.getuid()}.json"


def _places(user: int | str) -> list[Path]:
    """Return the possible default paths of a user's connection file. Logins of one user differ in XDG_RUNTIME_DIR."""
    folders = [os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.getuid()}", tempfile.gettempdir(), "/tmp"]
    return [Path(folder) / f"dpflow-connection-{user}.json" for folder in dict.fromkeys(filter(None, folders))]


def _found_file() -> Path:
    """Return the existing default connection file; if there are several, the file of this login.

    Raises OptionError, caused by a FileNotFoundError, if there is none. The message has the paths, and any cluster of
    another user.
    """
    places = _places(os.getuid())
    for place in places:
        if place.exists():
            return place
    others = [file for pattern in _places("*") for file in sorted(pattern.parent.glob(pattern.name))]
    hint = f"; {str(others[0])!r} belongs to the cluster of another user" if others else ""
    raise OptionError(
        f"connection file {' or '.join(repr(str(place)) for place in places)}: {os.strerror(errno.ENOENT)}; is the "
        f"cluster up? Start one by `dpflow up`, or give its file by --address, --join or address={hint}"
    ) from FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(places[0]))


def keys_hint(address: str) -> str:
    """Return a hint on wrong keys, for the error that a cluster does not answer; empty if `address` is not tcp."""
    if not address.startswith("tcp://"):
        return ""
    return (
        "A cluster does not answer clients with other keys: use the connection file that `dpflow up` wrote when it was "
        "last started."
    )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Address and keys by which clients reach a cluster."""

    address: str
    transport: TransportOptions
    #: As in `ConnectionFile`.
    sends_code: bool = False

    def connect(self, address: str | None = None, *, timeout_s: float = 60.0, shared_bytes: int = 0) -> RpcClient:
        """Return a client of the service at `address`, or of the coordinator if `address` is None.

        timeout_s: default timeout of a call (seconds). shared_bytes: maximum shared memory for large payloads (bytes).
        """
        return RpcClient(
            self.address if address is None else address,
            options=ClientOptions(timeout_s=timeout_s, shared_bytes=shared_bytes),
            transport=self.transport,
        )


def find_cluster(address: str | os.PathLike[str] | None = "auto") -> Cluster:
    """Return the address and keys of a cluster; this does not connect to it.

    address: "auto" or None for the cluster that `DPFLOW_ADDRESS` names, or else the cluster that this user has started
        on this host; the path of a connection file; or an address without keys, ipc://PATH or tcp://127.0.0.1:PORT.

    Raises OptionError if `address` is not of these forms, or for the reasons of `read_connection_file`;
    OptionTypeError if `address` has another type.
    """
    check_type("address", address, (str, os.PathLike, type(None)), '"auto" or the path of a connection file')
    if address in (None, "auto"):
        address = os.environ.get(ADDRESS_VARIABLE) or str(_found_file())
    address = check_path("address", address)
    if "://" in address:
        _check_direct(address)
        return Cluster(address=address, transport=TransportOptions())
    connection = read_connection_file(address)
    keys = connection.client_keys() if connection.address.startswith("tcp://") else None
    return Cluster(address=connection.address, transport=TransportOptions(keys=keys), sends_code=connection.sends_code)


def _check_direct(address: str) -> None:
    """Raise OptionError unless `address` can belong to a service on this host that needs no keys."""
    scheme, _, rest = address.partition("://")
    try:
        parts = urlsplit(address)
        port = parts.port if parts.netloc == rest else None
    except ValueError:
        port = None
    if scheme == "tcp" and port:
        if not is_loopback(address):
            raise OptionError(
                f"address={address!r} reaches beyond this host, which requires keys; give the connection file that "
                "`dpflow up` has written"
            )
    elif scheme != "ipc" or not 1 <= len(os.fsencode(rest)) <= LONGEST_SOCKET_PATH:
        raise OptionError(
            f"address={address!r}: give the path of a connection file, ipc://PATH of at most "
            f"{LONGEST_SOCKET_PATH} bytes, or tcp://127.0.0.1:PORT"
        )


def node_proof(keys: ConnectionFile, name: str) -> str:
    """Return a proof that the node `name` has the cluster's server key: 64 hexadecimal digits, sent when it joins.

    Raises OptionError if `keys` are from a file for jobs only, which lacks this key.
    """
    secret = keys.server_keys().secret
    return hmac.new(secret, b"dpflow node " + name.encode(), hashlib.sha256).hexdigest()


def is_proved(keys: ConnectionFile, name: str, proof: str) -> bool:
    """Return whether `proof` was made for this name by a process with the cluster's server key."""
    return hmac.compare_digest(node_proof(keys, name).encode(), proof.encode())
