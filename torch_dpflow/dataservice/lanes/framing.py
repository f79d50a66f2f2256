"""Control messages of the pool over a connection: a packet of a Unix socket each, or with its length before it."""

from __future__ import annotations

import os
import select
import socket
import struct
from abc import ABC, abstractmethod
from typing import TypeVar

import msgspec

from torch_dpflow.dataservice.lanes.guards import Stream, receive_exactly
from torch_dpflow.dataservice.messages.protocol import MOST_BYTES, CountReads, PoolMessage, encode
from torch_dpflow.errors import MessageError, PeerLostError, UsageError

T = TypeVar("T")
_LENGTH = struct.Struct("<I")


class Channel(ABC):
    """A connection that carries control messages."""

    #: Whether descriptors come along: both sides are on one host.
    carries_regions: bool

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

    @abstractmethod
    def tell(self, message: CountReads) -> bool:
        """Send what has no answer, without waiting for a peer that takes nothing; whether it was sent."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


class PacketChannel(Channel):
    """On one host: a packet each."""

    carries_regions = True

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

    def tell(self, message: CountReads) -> bool:
        try:
            self._socket.send(encode(message), socket.MSG_DONTWAIT)
        except OSError:  # it is full or gone, which the next request will tell
            return False
        return True

    def close(self) -> None:
        self._socket.close()


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

    def tell(self, message: CountReads) -> bool:
        if not select.select([], [self._socket], [], 0)[1]:
            return False
        try:
            self.send(message)
        except OSError:  # it is gone, which the next request will tell
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def _decoded(decoder: msgspec.msgpack.Decoder[T], content: bytes) -> T:
    try:
        return decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise MessageError(f"a message to or from the pool cannot be read: {error}") from error
