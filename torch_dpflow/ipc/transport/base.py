"""The contract of a transport: many connections talk to one listener in multipart messages.

A listener is a ROUTER: it knows every peer by an identity of bytes and can answer any of them. A connection is a
DEALER: it talks to one listener and reconnects by itself. A message is a list of binary frames that arrives whole or
not at all. Messages of one connection keep their order. A message may be lost when its connection breaks; repeating
calls is up to the caller.

Listener and connection belong to one thread; any thread may call `wake`. After a fork they belong to the parent: in the
child every call but `close` raises StateError, and `close` does not affect the parent.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch_dpflow._core.checks import check_fields, check_int, check_seconds
from torch_dpflow.errors import MessageError, OptionError
from torch_dpflow.ipc.messages.payload_table import Frame

if TYPE_CHECKING:
    from torch_dpflow.ipc.transport.keys import ClientKeys, ServerKeys, WorkerKeys

#: ZeroMQ's longest peer identity, bytes.
MAX_IDENTITY_BYTES = 255


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """Limits and timeouts of one listener or connection."""

    #: Longest frame that is accepted from a peer, bytes. A peer that sends a longer one is disconnected.
    max_frame_bytes: int = 1 << 31
    #: Most frames in one message, in either direction. A received message with more is dropped and counted.
    max_frames: int = 4096
    #: Most messages waiting in either direction, per peer.
    queue_messages: int = 1000
    #: How long `Connection.send` waits for room in a full queue before it raises PeerLostError, seconds.
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
            raise OptionError(
                f"reconnect_s={self.reconnect_s!r}: must be (first, longest) with 0 < first <= longest"
            )


class Listener(Protocol):
    """The bound side."""

    #: Where connections reach this listener: the address given, with tcp port 0 replaced by the real port.
    address: str
    #: Messages that were dropped because they exceeded `max_frames`.
    dropped: int

    @property
    def losses(self) -> int:
        """Connections that have ended, where keys are `WorkerKeys`; each makes a waiting `receive` return. Else 0."""

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[memoryview]] | None:
        """The next message as (identity of the peer, frames), or None.

        None on a timeout, after `wake`, and when a watched descriptor is readable. The frames are writable and own
        their memory. `timeout_s=None` waits without end, 0 does not wait.
        """

    def watch(self, descriptor: int) -> None:
        """Make a waiting `receive` return when `descriptor` is readable. The caller must find out why it is."""

    def unwatch(self, descriptor: int) -> None:
        """Undo `watch`, before the descriptor is closed."""

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        """Queue a message for `peer`; False where the peer is unknown, gone, or its queue full. Never waits.

        Large frames are not copied: their memory must not change until the peer has them.
        """

    def wake(self) -> None:
        """Make the `receive` that waits now, or the next one that would wait, return None. Any thread may call."""

    def close(self) -> None:
        """Close at once; unsent messages are lost. May be called twice."""


class Connection(Protocol):
    """The connecting side; it reconnects by itself for as long as it is open."""

    #: Names this connection to the listener, across reconnects.
    identity: bytes
    #: Messages that were dropped because they exceeded `max_frames`.
    dropped: int

    def receive(self, timeout_s: float | None) -> list[memoryview] | None:
        """The next message's frames; None on a timeout or after `wake`. As `Listener.receive` otherwise."""

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue a message, whether or not the listener exists yet.

        Raises PeerLostError when the queue stays full for `send_timeout_s` or the connection is closed. Large frames
        are not copied: their memory must not change until the peer has them.
        """

    def wake(self) -> None:
        """Make the `receive` that waits now, or the next one that would wait, return None. Any thread may call."""

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close, after at most `linger_s` in which messages leave; those left then are lost. May be called twice."""


def is_loopback(address: str) -> bool:
    """Whether a tcp address cannot be reached from, and does not reach, another host."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_frames(frames: Sequence[Frame], options: TransportOptions) -> None:
    """Raise MessageError unless `frames` is a message within the limits."""
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
            raise MessageError(
                f"a frame of {size} bytes: max_frame_bytes allows {options.max_frame_bytes}; split it"
            )


def check_identity(identity: bytes) -> None:
    """Raise OptionError unless this is a valid identity: 1 to 255 bytes, the first not zero."""
    if not 1 <= len(identity) <= MAX_IDENTITY_BYTES or identity[0] == 0:
        raise OptionError(
            f"identity={identity!r}: must be 1 to {MAX_IDENTITY_BYTES} bytes, the first of them not zero"
        )
