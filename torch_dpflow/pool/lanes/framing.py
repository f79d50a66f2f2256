"""Control messages of the pool over a connection: a packet of a Unix socket each, or with its length before it."""

from __future__ import annotations

import os
import select
import socket
import struct
from abc import ABC, abstractmethod
from typing import TypeVar

import msgspec

from torch_dpflow._core.depth import check_msgpack
from torch_dpflow.errors import MessageError, PeerLostError, UsageError
from torch_dpflow.pool.lanes.guards import Stream, receive_exactly
from torch_dpflow.pool.lanes.tls_stream import TLSStream
from torch_dpflow.pool.messages.protocol import MOST_BYTES, PoolMessage, encode

T = TypeVar("T")
_LENGTH = struct.Struct("<I")


class Channel(ABC):
    """A connection that carries control messages."""

    #: Whether descriptors come along: both sides are on one host.
    carries_regions: bool
    _socket: Stream

    @abstractmethod
    def send(self, message: PoolMessage, fds: list[int] | None = None) -> None:
        """Send one message. Raises OSError where the peer is gone, OptionError where it is too long."""

    @abstractmethod
    def receive(self, decoder: msgspec.msgpack.Decoder[T], regions: int = 0) -> tuple[T, list[int]]:
        """The next message, and descriptors that came with it, at most so many.

        Raises:
            PeerLostError: the peer has closed the connection.
            MessageError: the message is none, or too long.
        """

    def tell(self, message: PoolMessage) -> bool:
        """Send without waiting for a peer that takes nothing; whether it was sent."""
        # Where a socket has a time-out, Python waits for room in spite of MSG_DONTWAIT.
        if not self._is_ready(select.POLLOUT):
            return False
        try:
            self.send(message)
        except OSError:  # it is gone, which the next request will tell
            return False
        return True

    @property
    def has_come(self) -> bool:
        """Whether `receive` would find something, or the end of the connection."""
        has_bytes = isinstance(self._socket, TLSStream) and self._socket.has_bytes
        return has_bytes or self._is_ready(select.POLLIN)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _is_ready(self, event: int) -> bool:
        if self._socket.fileno() < 0:  # it was closed, which the next request will tell
            return False
        poll = select.poll()  # as `select` takes no descriptor above 1023
        poll.register(self._socket, event)
        return bool(poll.poll(0))


class PacketChannel(Channel):
    """On one host: a packet each."""

    carries_regions = True

    _socket: socket.socket

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: PoolMessage, fds: list[int] | None = None) -> None:
        socket.send_fds(self._socket, [encode(message)], fds or [])

    def receive(self, decoder: msgspec.msgpack.Decoder[T], regions: int = 0) -> tuple[T, list[int]]:
        packet, fds, flags, _ = socket.recv_fds(self._socket, MOST_BYTES + 1, regions)
        try:
            if not packet:
                raise PeerLostError("the pool's other side has closed the connection")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(packet) > MOST_BYTES:
                raise MessageError(f"a message to or from the pool has more than {MOST_BYTES} bytes")
            return _decoded(decoder, packet), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise


class StreamChannel(Channel):
    """Over a network: each message behind its length."""

    carries_regions = False

    def __init__(self, connection: Stream) -> None:
        self._socket = connection

    def send(self, message: PoolMessage, fds: list[int] | None = None) -> None:
        if fds:
            raise UsageError(
                "memory is pushed to servers of this host alone; give the directory of one as address"
            )
        packet = encode(message)
        self._socket.sendall(_LENGTH.pack(len(packet)) + packet)

    def receive(self, decoder: msgspec.msgpack.Decoder[T], regions: int = 0) -> tuple[T, list[int]]:
        (length,) = _LENGTH.unpack(receive_exactly(self._socket, _LENGTH.size))
        if not 1 <= length <= MOST_BYTES:
            raise MessageError(f"a message of {length} bytes; at most {MOST_BYTES} are allowed")
        return _decoded(decoder, receive_exactly(self._socket, length)), []


def _decoded(decoder: msgspec.msgpack.Decoder[T], content: bytes) -> T:
    try:
        check_msgpack(content)
        return decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MessageError(f"a message to or from the pool cannot be read: {error}") from error
