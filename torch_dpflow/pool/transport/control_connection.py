"""Control connections between pool processes: a packet of a Unix socket per message, or a length prefix over TCP.

A message is MessagePack. Over the Unix socket, shared memory comes along as descriptors; the socket lies in a directory
of mode 0700, and only its owner is answered.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from torch_dpflow._core.checks import check_msgpack
from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.errors import MessageError, OptionError, PeerLostError, UsageError
from torch_dpflow.log import DATASETS
from torch_dpflow.pool.messages import (
    MAX_MESSAGE_BYTES,
    MAX_SEGMENTS,
    AheadAnswer,
    AheadRequest,
    AnnounceAccessPlan,
    AnySource,
    CachedDataset,
    CachedDatasetList,
    CountReads,
    DatasetOpened,
    GetRecordStates,
    ListDatasets,
    OpenDataset,
    PoolRefusal,
    PreloadDataset,
    PushStripe,
    RecordStates,
    StartReading,
    UnloadDataset,
)
from torch_dpflow.pool.server_messages import ListServers, ServerAnswer, ServerInfo, ServerList, ServerRequest
from torch_dpflow.pool.transport.address import AddressLike, check_private, find_address, socket_path
from torch_dpflow.pool.transport.authentication import (
    Stream,
    TLSStream,
    authenticator_for,
    connect_stream,
    receive_exactly,
)
from torch_dpflow.pool.transport.data_frames import CONTROL

PoolRequest: TypeAlias = (
    PreloadDataset
    | StartReading
    | OpenDataset
    | GetRecordStates
    | PushStripe
    | ListDatasets
    | UnloadDataset
    | AheadRequest
    | ServerRequest
)
PoolAnswer: TypeAlias = (
    CachedDataset | DatasetOpened | RecordStates | CachedDatasetList | PoolRefusal | AheadAnswer | ServerAnswer
)
PoolMessage: TypeAlias = PoolRequest | PoolAnswer | CountReads
REQUESTS: msgspec.msgpack.Decoder[PoolRequest | CountReads] = msgpack_decoder(PoolRequest | CountReads)
ANSWERS: msgspec.msgpack.Decoder[PoolAnswer] = msgpack_decoder(PoolAnswer)


def encode(message: PoolMessage) -> bytes:
    """Encode a message. Raises OptionError if it is too long."""
    packet = msgspec.msgpack.encode(message)
    if len(packet) > MAX_MESSAGE_BYTES:
        raise OptionError(f"a message of {len(packet)} bytes; at most {MAX_MESSAGE_BYTES} are allowed: shorten options")
    return packet


T = TypeVar("T")
_LENGTH = struct.Struct("<I")


class Channel(ABC):
    """Connection that carries control messages."""

    #: Whether descriptors can be passed, as both sides are on one host.
    passes_memory: bool
    _socket: Stream

    @abstractmethod
    def send(self, message: PoolMessage, fds: list[int] | None = None) -> None:
        """Send one message. Raises OSError if the peer is gone, OptionError if the message is too long."""

    @abstractmethod
    def receive(self, decoder: msgspec.msgpack.Decoder[T], max_fds: int = 0) -> tuple[T, list[int]]:
        """Receive one message and at most `max_fds` descriptors.

        Raises PeerLostError at the end of the connection, MessageError for an invalid or too long message.
        """

    def send_nowait(self, message: PoolMessage) -> bool:
        """Send without blocking; return whether the message was sent."""
        # On a socket with a timeout, Python waits for buffer space in spite of MSG_DONTWAIT.
        if not self._is_ready(select.POLLOUT):
            return False
        try:
            self.send(message)
        except OSError:  # the peer is gone; the next request reports it
            return False
        return True

    @property
    def is_readable(self) -> bool:
        """Whether `receive` would return at once, with a message or the end of the connection."""
        has_bytes = isinstance(self._socket, TLSStream) and self._socket.has_bytes
        return has_bytes or self._is_ready(select.POLLIN)

    def close(self) -> None:
        self._socket.close()

    def _is_ready(self, event: int) -> bool:
        if self._socket.fileno() < 0:  # closed; the next request reports it
            return False
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(self._socket, event)
        return bool(poll.poll(0))


class PacketChannel(Channel):
    """Channel over a Unix socket: one packet per message."""

    passes_memory = True

    _socket: socket.socket

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: PoolMessage, fds: list[int] | None = None) -> None:
        socket.send_fds(self._socket, [encode(message)], fds or [])

    def receive(self, decoder: msgspec.msgpack.Decoder[T], max_fds: int = 0) -> tuple[T, list[int]]:
        packet, fds, flags, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES + 1, max_fds)
        try:
            if not packet:
                raise PeerLostError("the pool's other side has closed the connection")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(packet) > MAX_MESSAGE_BYTES:
                raise MessageError(f"a message to or from the pool has more than {MAX_MESSAGE_BYTES} bytes")
            return _decoded(decoder, packet), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise


class StreamChannel(Channel):
    """Channel over TCP: each message follows its length."""

    passes_memory = False

    def __init__(self, connection: Stream) -> None:
        self._socket = connection

    def send(self, message: PoolMessage, fds: list[int] | None = None) -> None:
        if fds:
            raise UsageError("memory is pushed to servers of this host alone; give the directory of one as address")
        packet = encode(message)
        self._socket.sendall(_LENGTH.pack(len(packet)) + packet)

    def receive(self, decoder: msgspec.msgpack.Decoder[T], max_fds: int = 0) -> tuple[T, list[int]]:
        (length,) = _LENGTH.unpack(receive_exactly(self._socket, _LENGTH.size))
        if not 1 <= length <= MAX_MESSAGE_BYTES:
            raise MessageError(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
        return _decoded(decoder, receive_exactly(self._socket, length)), []


def _decoded(decoder: msgspec.msgpack.Decoder[T], content: bytes) -> T:
    try:
        check_msgpack(content)
        return decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MessageError(f"a message to or from the pool cannot be read: {error}") from error


#: Commands consider a server lost after this much silence, seconds.
_SILENCE_S = 60.0
_POLL_S = 0.1
AnswerT = TypeVar("AnswerT", bound=PoolAnswer)


class PoolConnection:
    """Control connection to a pool server. Thread-safe: one call at a time.

    silence_s: how long an answer may take, seconds.

    Raises:
        PeerLostError: there is no server, it does not answer, or it belongs to another cluster.
        OptionError: the directory of its socket is open to other users, or there are no keys.
    """

    def __init__(self, address: AddressLike = "auto", *, silence_s: float = _SILENCE_S) -> None:
        found = find_address(address)
        self._lock = threading.Lock()
        #: Whether an answer is outstanding.
        self._is_pending = False
        #: Outstanding answers to posted requests, which arrive before that one.
        self._posted = 0
        self._channel: Channel
        if found.directory is None:
            authenticator = authenticator_for(found, serves=False)
            self._channel = StreamChannel(connect_stream(found, authenticator, CONTROL, silence_s))
        else:
            self._channel = PacketChannel(_connect_here(found.directory, silence_s))

    @property
    def passes_memory(self) -> bool:
        """Whether the server is on this host and passes its memory along with answers."""
        return self._channel.passes_memory

    def request(self, request: PoolRequest, fds: list[int] | None = None) -> tuple[PoolAnswer, list[int]]:
        """Return the server's answer and the descriptors that came with it; the caller closes them.

        fds: descriptors to send with the request.

        Raises:
            PeerLostError: the server is lost or does not answer; the connection is then closed.
            DPFlowError: the server refuses, by the error class that it names.
        """
        with self._lock:
            self.send(request, fds)
            return self.receive()

    def get(self, request: PoolRequest, kind: type[AnswerT]) -> AnswerT:
        """Return the server's answer of this type, without descriptors. Raises as `request`."""
        answer, _ = self.request(request)
        assert isinstance(answer, kind)
        return answer

    def send(self, request: PoolRequest, fds: list[int] | None = None) -> None:
        """Send a request; `receive` must follow before any other request. Raises PeerLostError."""
        if self._is_pending:  # after Control-C, the old answer would be taken for the answer to this request
            self._channel.close()
        self._is_pending = True
        try:
            self._channel.send(request, fds)
        except OSError as error:
            self._channel.close()
            raise PeerLostError(f"the server of the pool does not answer: {error.strerror or error}") from error

    def receive(self) -> tuple[PoolAnswer, list[int]]:
        """Receive the answer to `send`. Raises as `request`."""
        while self._posted:
            self._take_posted()
        answer, fds = self._receive(MAX_SEGMENTS)
        self._is_pending = False
        if isinstance(answer, PoolRefusal):
            raise answer.error()
        return answer, fds

    def post(self, request: AnnounceAccessPlan) -> None:
        """Send a request without blocking, or drop it if the server accepts none now; ignore the answer.

        Raises PeerLostError if the server is lost.
        """
        with self._lock:
            if self._is_pending:
                self._channel.close()
                raise PeerLostError("an earlier request to the pool server was interrupted")
            while self._channel.is_readable:
                self._take_posted()
            self._posted += self._channel.send_nowait(request)

    def send_nowait(self, message: CountReads) -> bool:
        """Send a message that has no answer, without blocking; return whether it was sent."""
        with self._lock:
            return self._channel.send_nowait(message)

    def contents(self) -> CachedDatasetList:
        """Return all cached datasets, and the free memory."""
        found: dict[bytes, CachedDataset] = {}
        first = 0
        while True:
            answer = self.get(ListDatasets(first), CachedDatasetList)
            first += len(answer.datasets)
            found |= {one.identity: one for one in answer.datasets}
            if not answer.datasets or first >= answer.total:
                return msgspec.structs.replace(answer, datasets=[*found.values()])

    def servers(self) -> list[ServerInfo]:
        """Return the pool's servers, its leader first."""
        return self.get(ListServers(), ServerList).servers

    def preload(
        self,
        source: AnySource,
        identity: bytes,
        *,
        whole: bool,
        progress: Callable[[CachedDataset], None] = lambda info: None,
    ) -> CachedDataset:
        """Cache a dataset until it is unloaded; return once every sample was read or has failed.

        Raises PoolFullError if the whole dataset does not fit; and as `request`.
        """
        request = PreloadDataset(source=source, identity=identity, is_explicit=True, whole=whole)
        while True:
            info = self.get(request, CachedDataset)
            progress(info)
            if info.is_placed and info.loaded + info.failed >= info.placed:
                return info
            time.sleep(_POLL_S)

    def unload(self, identity: bytes) -> CachedDatasetList:
        """Unload a dataset. Raises UsageError if it is not cached."""
        return self.get(UnloadDataset(identity), CachedDatasetList)

    def close(self) -> None:
        """Close the connection, which ends this reader at the server."""
        self._channel.close()

    def _take_posted(self) -> None:
        answer, _ = self._receive(0)
        if not self._posted:
            self._channel.close()
            raise PeerLostError("the pool server sent an answer without a request")
        self._posted -= 1
        if isinstance(answer, PoolRefusal):
            DATASETS.info("the pool server refused a message: %s", answer.error())

    def _receive(self, segments: int) -> tuple[PoolAnswer, list[int]]:
        try:
            return self._channel.receive(ANSWERS, segments)
        except (OSError, MessageError, PeerLostError) as error:
            # A late answer would be taken for the answer to the next request.
            self._channel.close()
            raise PeerLostError(f"the server of the pool does not answer: {error}") from error

    def __enter__(self) -> PoolConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _connect_here(directory: Path, silence_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(silence_s)
    try:
        check_private(directory)
        connection.connect(socket_path(directory))
    except OSError as error:
        connection.close()
        raise PeerLostError(
            f"no server of the pool answers at {directory} ({error.strerror or error}); start one: "
            f"dpflow pool serve --memory 8GiB --address {directory}"
        ) from None
    except BaseException:
        connection.close()
        raise
    return connection
