"""Authentication of pool connections over TCP, before any other byte is exchanged.

By default both sides present certificates of the cluster over TLS 1.3. If the operator declares the network trusted,
bytes are not encrypted, and both sides prove by HMAC that they hold the cluster's key. The client proves it first, on a
nonce drawn by the server, so an unauthenticated peer learns nothing:

    client: hello, nonce -> server: nonce -> client: proof -> server: proof
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import ssl
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeAlias, TypeVar, cast

from torch_dpflow.cluster.security.certificates import (
    CLIENT_NAME,
    SERVER_NAME,
    check_certificates,
    client_context,
    is_client,
    server_context,
)
from torch_dpflow.cluster.security.connection_file import ConnectionFile
from torch_dpflow.errors import MessageError, OptionError, PeerLostError
from torch_dpflow.pool.transport.address import PoolAddress
from torch_dpflow.pool.transport.data_frames import HELLO_BYTES, hello, purpose_of

_PIECE_BYTES = 256 << 10
T = TypeVar("T")


class TLSStream:
    """Client side of a TLS connection, with the methods of a socket that clients call. `close` closes the socket.

    Reads large pieces, because `ssl.SSLSocket` makes two system calls and waits for the GIL per 16 KiB. The constructor
    does the handshake, and raises OSError (including ssl.SSLError) if it fails.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, server_name: str) -> None:
        self.plain = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._piece = memoryview(bytearray(_PIECE_BYTES))
        self._fed(self._tls.do_handshake)
        self._flush()

    @property
    def has_bytes(self) -> bool:
        """Whether received bytes are buffered here, so that polling the socket does not report them."""
        return bool(self._tls.pending() or self._incoming.pending)

    def fileno(self) -> int:
        return self.plain.fileno()

    def sendall(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[self._tls.write(view) :]
        self._flush()

    def recv(self, count: int) -> bytes:
        return self._fed(lambda: self._tls.read(count))

    def recv_into(self, view: memoryview) -> int:
        """Fill `view`, or the part of it that is received before the connection ends; return the number of bytes."""
        read, size, at = self._tls.read, len(view), 0
        while at < size:
            if not self.has_bytes:  # `ssl` takes longer to report this than the check takes
                self._feed()
            try:
                came = cast(int, read(size - at, view[at:]))
            except ssl.SSLWantReadError:
                self._feed()
                continue
            if not came:
                break
            at += came
        return at

    def close(self) -> None:
        self.plain.close()

    def _fed(self, act: Callable[[], T]) -> T:
        """Call `act` until it succeeds, receiving more bytes between calls; return its result."""
        while True:
            try:
                return act()
            except ssl.SSLWantReadError:
                self._feed()

    def _feed(self) -> None:
        """Receive more bytes, blocking if there are none."""
        self._flush()
        came = self.plain.recv_into(self._piece)
        if came:
            self._incoming.write(self._piece[:came])
        else:
            self._incoming.write_eof()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self.plain.sendall(self._outgoing.read())


#: Connection that carries control messages or records.
Stream: TypeAlias = socket.socket | TLSStream
#: Handshake over a non-blocking socket: a generator to resume whenever the socket is readable; it returns the result.
Handshake: TypeAlias = Generator[None, None, T]
_NONCE_BYTES = 32
#: TCP keepalive: an unreachable client is dropped after 30 s, and with it its access plans and lent memory.
_ALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
#: First byte of every TLS client, and the alert that TLS sends to a client it does not understand.
_HANDSHAKE = b"\x16"
_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"


class _RefusedError(PeerLostError, OptionError):
    """A server answers, and can be reached only after a setting on this side is changed."""


class TLSAuthenticator:
    """Authenticator by TLS 1.3, of a server if `serves`, else of a client. Methods raise OSError and DPFlowError."""

    def __init__(self, keys: ConnectionFile, *, serves: bool) -> None:
        if keys.certificates is None:
            raise OptionError(
                "the connection file has no certificates, and without them nothing is sent off this host: write "
                "another by `dpflow keygen` where cryptography is installed (pip install 'torch_dpflow[pool]') or "
                "with certificates of your own (--authority, --server, --client), or say that the network is trusted "
                "(--trust-network, trust_network=True)"
            )
        if serves:
            self._context = server_context(keys.certificates)
            check_certificates(keys.certificates)
        else:
            self._context = client_context(keys.certificates)

    def accept(self, connection: socket.socket) -> Handshake[socket.socket]:
        """Authenticate a client at this server; return the connection to use from then on."""
        if (yield from _when_ready(partial(connection.recv, 1, socket.MSG_PEEK))) != _HANDSHAKE:
            _refuse(connection)
            raise MessageError("a client that does not speak TLS")
        admitted = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        try:
            yield from _when_ready(admitted.do_handshake)
            if not is_client(admitted.getpeercert()):
                raise MessageError(f"a client whose certificate is not for {CLIENT_NAME}")
        except BaseException:
            admitted.close()
            raise
        return admitted

    def connect(self, connection: socket.socket) -> Stream:
        """Authenticate the server and this client to each other; return the connection to use from then on."""
        try:
            return TLSStream(connection, self._context, SERVER_NAME)
        except ssl.SSLCertVerificationError as error:
            raise _RefusedError(
                f"its certificate is not one of this cluster's servers ({error.verify_message}); give the connection "
                "file that it was started with"
            ) from None
        except ssl.SSLEOFError:
            raise
        except ssl.SSLError as error:
            raise _RefusedError(
                f"it does not speak TLS ({error.reason or error}); it may have been started with --trust-network: "
                "give that here too, or start it without"
            ) from None


class HMACAuthenticator:
    """Authenticator by HMAC: both sides prove that they hold the cluster's key, then send plain bytes.

    Methods raise OSError and DPFlowError.
    """

    def __init__(self, keys: ConnectionFile) -> None:
        self._key = hashlib.blake2b(keys.client_secret.encode(), person=b"dpflow-pool").digest()

    def accept(self, connection: socket.socket) -> Handshake[socket.socket]:
        if (yield from _when_ready(partial(connection.recv, 1, socket.MSG_PEEK))) == _HANDSHAKE:
            _refuse(connection)
            raise MessageError("a client that speaks TLS")
        begun = yield from _exactly(connection, HELLO_BYTES + _NONCE_BYTES)
        purpose_of(begun[:HELLO_BYTES])
        drawn = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(drawn)
        proof = yield from _exactly(connection, _NONCE_BYTES)
        if not hmac.compare_digest(proof, self._proof(b"client", begun, drawn)):
            raise MessageError("a client that has another key")
        connection.sendall(self._proof(b"server", begun, drawn))
        return connection

    def connect(self, connection: socket.socket) -> Stream:
        begun = hello(1) + secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(begun)
        drawn = b""
        try:
            drawn = receive_exactly(connection, _NONCE_BYTES)
            connection.sendall(self._proof(b"client", begun, drawn))
            proof = receive_exactly(connection, _NONCE_BYTES)
        except (PeerLostError, ConnectionError):
            raise _RefusedError(
                "it has another key; give the connection file that it was started with"
                if drawn
                else "it speaks TLS, or is no server of a pool; leave out --trust-network and trust_network=True"
            ) from None
        if not hmac.compare_digest(proof, self._proof(b"server", begun, drawn)):
            raise _RefusedError("it has another key; give the connection file that it was started with")
        return connection

    def _proof(self, who: bytes, begun: bytes, drawn: bytes) -> bytes:
        return hmac.digest(self._key, who + begun + drawn, "sha256")


#: Authenticator of peers: admits those that hold the keys of one cluster.
StreamAuthenticator: TypeAlias = TLSAuthenticator | HMACAuthenticator


def authenticator_for(address: PoolAddress, *, serves: bool) -> StreamAuthenticator:
    """Return the authenticator of a server at this address, or of a client. Raises OptionError without keys."""
    keys = address.keys()
    return HMACAuthenticator(keys) if address.trust_network else TLSAuthenticator(keys, serves=serves)


def check_keys(address: PoolAddress) -> None:
    """Raise OptionError if the address is reached over a network and there are no keys for it."""
    if address.directory is None:
        authenticator_for(address, serves=False)


def connect_stream(address: PoolAddress, authenticator: StreamAuthenticator, purpose: int, silence_s: float) -> Stream:
    """Connect to a server, authenticate both sides, and return the connection.

    purpose: `CONTROL` or `DATA_CONNECTION`.
    silence_s: timeout of each wait for the server, in the handshake and later, seconds.

    Raises PeerLostError if it fails. The error is also an OptionError if the keys differ, or only one side uses TLS.
    """
    try:
        plain = socket.create_connection((address.host, address.port), silence_s)
    except OSError as error:
        raise PeerLostError(
            f"no server of the pool answers at {address} ({error.strerror or error}); start one: "
            f"dpflow pool serve --memory 8GiB --listen {address} --connection FILE"
        ) from None
    connection: Stream = plain
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = authenticator.connect(plain)
        with contextlib.suppress(ConnectionError):  # the server's alert arrived first, and is read below
            connection.sendall(hello(purpose))
        purpose_of(receive_exactly(connection, HELLO_BYTES))
    except (OSError, MessageError, PeerLostError) as error:
        connection.close()
        kind = _RefusedError if isinstance(error, _RefusedError) or _is_refusal(error) else PeerLostError
        raise kind(f"cannot connect to the pool server at {address}: {_reason(error)}") from None
    return connection


def accept_stream(
    connection: socket.socket, authenticator: StreamAuthenticator
) -> Handshake[tuple[socket.socket, int]]:
    """Authenticate a client; return its connection, and `CONTROL` or `DATA_CONNECTION`. Raises OSError, DPFlowError."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    admitted = yield from authenticator.accept(connection)
    try:
        purpose = purpose_of((yield from _exactly(admitted, HELLO_BYTES)))
        admitted.sendall(hello(purpose))
        admitted.settimeout(None)
    except BaseException:
        admitted.close()
        raise
    return admitted, purpose


def receive_exactly(connection: Stream, count: int) -> bytes:
    """Receive `count` bytes. Raises OSError (including TimeoutError), or PeerLostError at the end of the connection."""
    content = bytearray()
    while len(content) < count:
        more = connection.recv(min(count - len(content), _PIECE_BYTES))
        if not more:
            raise PeerLostError("it has closed the connection")
        content += more
    return bytes(content)


def _when_ready(act: Callable[[], T]) -> Handshake[T]:
    """Call `act` until it does not block, yielding the events to wait for; return its result."""
    while True:
        try:
            return act()
        except (BlockingIOError, ssl.SSLWantReadError):
            yield


def _exactly(connection: socket.socket, count: int) -> Handshake[bytes]:
    """Do the same as `receive_exactly` over a non-blocking socket."""
    content = bytearray()
    while len(content) < count:
        more = yield from _when_ready(partial(connection.recv, count - len(content)))
        if not more:
            raise PeerLostError("it has closed the connection")
        content += more
    return bytes(content)


def _refuse(connection: socket.socket) -> None:
    """Send a TLS alert, which clients that use TLS and clients that use HMAC recognise."""
    connection.recv(1 << 16)  # unread bytes would make the kernel discard the alert
    connection.sendall(_ALERT)


def _reason(error: Exception) -> str:
    if _is_refusal(error):
        return (
            f"it refuses this side's certificate ({getattr(error, 'reason', None) or error}); give its connection file"
        )
    return str(error)


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
