"""Contract of a transport, in which many connections exchange messages with one listener; types of its keys.

A listener is a ROUTER: it distinguishes peers by an identity of bytes and can answer any of them. A connection is a
DEALER: it has one listener and reconnects automatically. A message is a list of binary frames that arrives whole or not
at all. Messages of one connection keep their order. A message may be lost when its connection breaks; repeating calls
is up to the caller.

Listener and connection belong to one thread; any thread may call `wake`. After a fork they belong to the parent: in the
child `send` and `receive` raise StateError, and `close` does not affect the parent.

A cluster has a server key pair, by which clients recognise its services, and a single client key pair, which its
services accept. Connection files contain these keys; only their owners may read them, because the keys allow running
code on the cluster's workers. A remote worker has a separate key pair instead, which a listener with `WorkerKeys`
accepts while the worker is expected or connected.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from torch_dpflow._core.checks import check_fields, check_int, check_seconds
from torch_dpflow.errors import MessageError, OptionError
from torch_dpflow.ipc.messages.headers import Frame

#: Timeout of `is_refused`, seconds.
PROBE_S = 1.0
#: Length of a key in Z85 text, bytes.
KEY_BYTES = 40


@dataclass(frozen=True, kw_only=True)
class ServerKeys:
    """A listener's own key pair and the one client key that it accepts. Keys are Z85 text, 40 bytes."""

    public: bytes
    secret: bytes = field(repr=False)
    client_public: bytes

    def __post_init__(self) -> None:
        _check_keys(public=self.public, secret=self.secret, client_public=self.client_public)

    def user_of(self, key: bytes) -> str | None:
        """Return the user of a client key: "" for the accepted key, None for any other."""
        return "" if hmac.compare_digest(key, self.client_public) else None


class WorkerKeys:
    """A listener's own key pair, and the keys that it accepts: one for each worker, called *user*. Thread-safe.

    The identity of a connection must begin with the name of its key's user and "/"; messages of other connections are
    dropped. After `drop`, all messages of the user are dropped.

    Args:
        public, secret: Z85 text, 40 bytes.
        clock: returns the time, seconds.
    """

    def __init__(self, *, public: bytes, secret: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        _check_keys(public=public, secret=secret)
        self.public, self.secret = public, secret
        self._clock = clock
        self._lock = threading.Lock()
        #: By key: the user, and until when they may connect, seconds, or None once they have.
        self._admitted: dict[bytes, tuple[str, float | None]] = {}
        self._keys: dict[str, bytes] = {}

    def expect(self, user: str, key: bytes, for_s: float) -> None:
        """Accept a new user's key for `for_s` seconds, or longer if `keep` is called."""
        _check_keys(key=key)
        with self._lock:
            self._keys[user] = key
            self._admitted[key] = user, self._clock() + for_s

    def keep(self, user: str) -> None:
        """Accept a connected user's key without a time limit, until `drop`, because it may have to reconnect."""
        with self._lock:
            if user in self._keys:
                self._admitted[self._keys[user]] = user, None

    def drop(self, user: str) -> None:
        """Reject this user's key from now on, and messages on the user's open connections."""
        with self._lock:
            self._admitted.pop(self._keys.pop(user, b""), None)

    def user_of(self, key: bytes) -> str | None:
        """Return the user of this key; None if the key is not accepted."""
        with self._lock:
            user, until = self._admitted.get(key, (None, None))
            return None if until is not None and self._clock() >= until else user

    def admits(self, user: str, identity: bytes) -> bool:
        """Return whether to accept a message with this identity on a connection that `user` has opened."""
        return user in self._keys and identity.startswith(f"{user}/".encode())


@dataclass(frozen=True, kw_only=True)
class ClientKeys:
    """A connection's own key pair and the listener's public key. Keys are Z85 text, 40 bytes."""

    public: bytes
    secret: bytes = field(repr=False)
    server_public: bytes

    def __post_init__(self) -> None:
        _check_keys(public=self.public, secret=self.secret, server_public=self.server_public)


def _check_keys(**keys: bytes) -> None:
    for name, key in keys.items():
        if len(key) != KEY_BYTES:
            raise OptionError(f"{name} has {len(key)} bytes: a CURVE key is {KEY_BYTES} bytes of Z85 text")


#: ZeroMQ's longest peer identity, bytes.
MAX_IDENTITY_BYTES = 255


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """Limits and timeouts of one listener or connection. Raises OptionError or OptionTypeError for invalid values."""

    #: Maximum bytes of a frame, in either direction. A peer that sends a longer one is disconnected.
    max_frame_bytes: int = 1 << 31
    #: Maximum frames in one message, in either direction. A received message with more is dropped and counted.
    max_frames: int = 4096
    #: Maximum messages waiting in either direction, per peer.
    queue_messages: int = 1000
    #: How long `Connection.send` waits for space in a full queue before it raises PeerLostError, seconds.
    send_timeout_s: float = 10.0
    #: First and longest pause between attempts to reconnect, seconds.
    reconnect_s: tuple[float, float] = (0.02, 1.0)
    #: tcp only: a peer that sends nothing for this long is disconnected, seconds.
    silence_s: float = 30.0
    #: With keys, CURVE is mandatory over tcp; without them tcp is allowed for loopback addresses only.
    keys: ServerKeys | WorkerKeys | ClientKeys | None = None

    def __post_init__(self) -> None:
        check_fields(self, check_int, "max_frame_bytes", "max_frames", "queue_messages", minimum=1)
        check_fields(self, check_seconds, "send_timeout_s", zero=True)
        check_fields(self, check_seconds, "silence_s")
        first, longest = self.reconnect_s
        if not 0 < first <= longest:
            raise OptionError(f"reconnect_s={self.reconnect_s!r}: must be (first, longest) with 0 < first <= longest")


class Listener(Protocol):
    """Bound side of a transport: receives from many connections, and answers them."""

    #: Address at which connections reach this listener: the given address, with the real port in place of tcp port 0.
    address: str
    #: Number of received messages that were dropped, such as those with more than `max_frames`.
    dropped: int

    @property
    def losses(self) -> int:
        """Number of ended connections; each makes a waiting `receive` return. Always 0 without `WorkerKeys`."""

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[memoryview]] | None:
        """Return the next message as (identity of the peer, frames); None if there is none.

        Returns None on a timeout, after `wake`, and when a watched descriptor is readable. The frames are writable and
        own their memory. `timeout_s=None` waits without end, 0 does not wait.
        """

    def watch(self, source: Any) -> None:
        """Make a waiting `receive` return while `source` is readable. The caller must check `source` itself.

        source: an open descriptor, or one of another listener's `sources`.
        """

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        """Queue a message for `peer`; return False if the peer is unknown or gone, or its queue is full. Never waits.

        Large frames are not copied: their memory must not change until the peer has them.
        """

    def wake(self) -> None:
        """Make the `receive` that waits now, or the next one that would wait, return None. Any thread may call."""

    def close(self) -> None:
        """Close at once; unsent messages are lost. Idempotent."""


class Connection(Protocol):
    """Connecting side of a transport; it reconnects automatically while it is open."""

    #: Identity by which the listener recognises this connection, also after it has reconnected.
    identity: bytes

    def receive(self, timeout_s: float | None) -> list[memoryview] | None:
        """Return the next message's frames; None on a timeout or after `wake`. See `Listener.receive`."""

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue a message, whether or not the listener exists yet.

        Raises PeerLostError if the queue stays full for `send_timeout_s` or the connection is closed. Large frames are
        not copied: their memory must not change until the peer has them.
        """

    def wake(self) -> None:
        """Make `receive` return None, like `Listener.wake`."""

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close. Messages that are not sent within `linger_s` seconds are lost. Idempotent."""


def check_identity(identity: bytes) -> None:
    """Raise OptionError if `identity` does not have 1 to 255 bytes, or its first byte is zero."""
    if not 1 <= len(identity) <= MAX_IDENTITY_BYTES or identity[0] == 0:
        raise OptionError(f"identity={identity!r}: must be 1 to {MAX_IDENTITY_BYTES} bytes, the first of them not zero")


def check_frames(frames: Sequence[Frame], options: TransportOptions) -> None:
    """Raise MessageError if `frames` are not 1 to `max_frames` contiguous frames of at most `max_frame_bytes`."""
    if not 1 <= len(frames) <= options.max_frames:
        raise MessageError(
            f"a message of {len(frames)} frames: max_frames allows 1 to {options.max_frames}; join small ones"
        )
    for frame in frames:
        size = len(frame)
        if isinstance(frame, memoryview):
            size = frame.nbytes
            if not frame.c_contiguous:
                raise MessageError("a frame is a memoryview that is not contiguous; copy it first")
        if size > options.max_frame_bytes:
            raise MessageError(f"a frame of {size} bytes: max_frame_bytes allows {options.max_frame_bytes}; split it")


def is_refused(address: str) -> bool:
    """Return whether a connection to `address` fails because nothing listens there.

    Raises PermissionError if this user may not connect.
    """
    parts = urlsplit(address)
    try:
        if parts.scheme == "tcp":
            socket.create_connection((parts.hostname or "", parts.port or 0), PROBE_S).close()
        else:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(PROBE_S)
                probe.connect(address.removeprefix("ipc://"))
    except PermissionError:
        raise
    except OSError as error:
        return isinstance(error, (ConnectionRefusedError, FileNotFoundError))
    return False
