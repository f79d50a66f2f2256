"""Control connections between pool processes: MessagePack messages, each after its length, over Unix sockets or TCP.

Over a Unix socket, shared memory is passed as descriptors. The socket is in a directory of mode 0700, and the server
answers only the directory's owner.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from torch_dpflow._core.checks import check_msgpack
from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow._version import __version__
from torch_dpflow.errors import MessageError, OptionError, PeerLostError, UsageError
from torch_dpflow.pool.messages import (
    MAX_ANSWER_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_SEGMENTS,
    AnnounceAccessPlan,
    AnySource,
    CachedDataset,
    CachedDatasetList,
    CountReads,
    ListDatasets,
    ListServers,
    PoolAnswer,
    PoolRefusal,
    PoolRequest,
    PreloadDataset,
    ServerInfo,
    ServerList,
    UnloadDataset,
)
from torch_dpflow.pool.transport.address import AddressLike, check_private, find_address, socket_path
from torch_dpflow.pool.transport.authentication import (
    Stream,
    authenticator_for,
    connect_stream,
    receive_exactly,
)
from torch_dpflow.pool.transport.data_frames import CONTROL

REQUESTS: msgspec.msgpack.Decoder[PoolRequest | CountReads] = msgpack_decoder(PoolRequest | CountReads)
ANSWERS: msgspec.msgpack.Decoder[PoolAnswer] = msgpack_decoder(PoolAnswer)

T = TypeVar("T")
_LENGTH = struct.Struct("<I")


class Channel:
    """Sender and receiver of control messages over one connection."""

    def __init__(self, connection: Stream) -> None:
        self._socket = connection
        #: The Unix socket, which passes descriptors as both sides are on one host; None for TCP.
        self._here = (
            connection if isinstance(connection, socket.socket) and connection.family == socket.AF_UNIX else None
        )

    @property
    def passes_memory(self) -> bool:
        """Whether descriptors of memory can be sent and received, because this is a Unix socket."""
        return self._here is not None

    def send(
        self,
        message: PoolRequest | PoolAnswer | CountReads,
        fds: list[int] | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Send one message. Raises OSError if the peer is lost, UsageError for too long a message or `fds` over TCP."""
        packet = msgspec.msgpack.encode(message)
        if len(packet) > max_bytes:
            raise OptionError(f"a message of {len(packet)} bytes; at most {max_bytes} are allowed: shorten options")
        packet = _LENGTH.pack(len(packet)) + packet
        if fds:
            if self._here is None:
                raise UsageError("memory is pushed to servers of this host alone; give the directory of one as address")
            packet = packet[socket.send_fds(self._here, [packet], fds) :]
        self._socket.sendall(packet)

    def receive(
        self, decoder: msgspec.msgpack.Decoder[T], max_fds: int = 0, max_bytes: int = MAX_MESSAGE_BYTES
    ) -> tuple[T, list[int]]:
        """Receive one message and at most `max_fds` descriptors.

        Raises PeerLostError or OSError if the connection is lost, MessageError for an invalid or too long message.
        """
        head, fds = b"", list[int]()
        try:
            if self._here is not None:
                head, fds, flags, _ = socket.recv_fds(self._here, _LENGTH.size, max_fds)
                if not head:
                    raise PeerLostError("the pool's other side has closed the connection")
                if flags & socket.MSG_CTRUNC:
                    raise MessageError(f"a message to or from the pool has more than {max_fds} descriptors")
            (length,) = _LENGTH.unpack(head + receive_exactly(self._socket, _LENGTH.size - len(head)))
            if not 1 <= length <= max_bytes:
                raise MessageError(f"a message of {length} bytes; at most {max_bytes} are allowed")
            content = receive_exactly(self._socket, length)
            check_msgpack(content)
            return decoder.decode(content), fds
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, msgspec.MsgspecError | RecursionError):
                raise MessageError(f"a message to or from the pool cannot be read: {error}") from error
            raise

    def send_nowait(self, message: PoolRequest | CountReads) -> bool:
        """Send if the socket has buffer space; return whether the message was sent."""
        if not self.is_open:  # the next request reports it
            return False
        # On a socket with a timeout, Python waits for buffer space in spite of MSG_DONTWAIT.
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(0):
            return False
        try:
            self.send(message)
        except OSError:  # the peer is gone; the next request reports it
            return False
        return True

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called yet."""
        return self._socket.fileno() >= 0

    def close(self) -> None:
        self._socket.close()


#: Commands consider a server lost after this much silence, seconds.
_SILENCE_S = 60.0
_POLL_S = 0.1
AnswerT = TypeVar("AnswerT", bound=PoolAnswer)


class PoolConnection:
    """Control connection to a pool server. Thread-safe, except for `send` and `receive`: one request at a time.

    silence_s: how long the server may send nothing while an answer is awaited, seconds.

    Raises:
        PeerLostError: there is no server, it does not answer, or it belongs to another cluster.
        OptionError: the directory of its socket is open to other users, or there are no keys.
    """

    def __init__(self, address: AddressLike = "auto", *, silence_s: float = _SILENCE_S) -> None:
        found = find_address(address)
        #: The address, for texts of errors; and the timeout.
        self._address, self._silence_s = str(found), silence_s
        self._lock = threading.Lock()
        #: Whether an answer is outstanding.
        self._is_pending = False
        self._channel = Channel(
            _connect_here(found.directory, silence_s)
            if found.directory is not None
            else connect_stream(found, authenticator_for(found, serves=False), CONTROL, silence_s)
        )

    @property
    def is_open(self) -> bool:
        """Whether the connection is open. It is also closed if the server is lost or does not answer in time."""
        return self._channel.is_open

    @property
    def passes_memory(self) -> bool:
        """Whether the server is on this host and passes its memory along with answers."""
        return self._channel.passes_memory

    def request(self, request: PoolRequest, fds: list[int] | None = None) -> tuple[PoolAnswer, list[int]]:
        """Return the server's answer and the descriptors that came with it; the caller closes them.

        fds: descriptors to send with the request.

        Raises:
            PeerLostError: the server is lost or does not answer; the connection is then closed.
            DPFlowError: the server refuses the request (it names the error's class), or the request cannot be sent.
        """
        with self._lock:
            self.send(request, fds)
            return self.receive()

    def get(self, request: PoolRequest, kind: type[AnswerT]) -> AnswerT:
        """Return the server's answer of this type, without descriptors. Raises the errors of `request`."""
        answer, _ = self.request(request)
        assert isinstance(answer, kind)
        return answer

    def send(self, request: PoolRequest, fds: list[int] | None = None) -> None:
        """Send a request; call `receive` before any other request. Raises the errors of `request`."""
        if self._is_pending:  # after Control-C, the old answer would be taken for the answer to this request
            self._channel.close()
        self._is_pending = True
        try:
            self._channel.send(request, fds)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self) -> tuple[PoolAnswer, list[int]]:
        """Receive the answer to `send`. Raises the errors of `request`."""
        try:
            answer, fds = self._channel.receive(ANSWERS, MAX_SEGMENTS, MAX_ANSWER_BYTES)
        except (OSError, MessageError, PeerLostError) as error:
            raise self._lost(error) from error
        self._is_pending = False
        if isinstance(answer, PoolRefusal):
            raise answer.error()
        return answer, fds

    def send_nowait(self, message: CountReads | AnnounceAccessPlan) -> bool:
        """Send a message that has no answer, if the socket has buffer space; return whether it was sent."""
        with self._lock:
            return self._channel.send_nowait(message)

    def contents(self) -> CachedDatasetList:
        """Return all cached datasets, and the pool's free and total memory."""
        return self.get(ListDatasets(), CachedDatasetList)

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
        """Cache a dataset until it is unloaded; return its state once every sample that fits was read or has failed.

        Raises PoolFullError if `whole` is True and the dataset does not fit, and the errors of `request`.
        """
        request = PreloadDataset(source=source, identity=identity, is_explicit=True, whole=whole)
        while True:
            info = self.get(request, CachedDataset)
            progress(info)
            if info.is_placed and info.loaded + info.failed >= info.placed:
                return info
            time.sleep(_POLL_S)

    def unload(self, identity: bytes) -> CachedDatasetList:
        """Unload a dataset; return the datasets that are still cached. Raises UsageError if it is not cached."""
        return self.get(UnloadDataset(identity), CachedDatasetList)

    def close(self) -> None:
        """Close the connection. The server then no longer counts this process as a reader."""
        self._channel.close()

    def _lost(self, error: Exception) -> PeerLostError:
        """Close the connection: a late answer would be taken for the next one; return the error with what to do."""
        self._channel.close()
        if isinstance(error, MessageError):
            why = f"{error}; have servers and clients use one release, and this side has {__version__}"
        elif isinstance(error, TimeoutError):
            why = f"nothing came within {self._silence_s:g} s; it is busy or suspended: try again"
        else:
            why = f"{error}; it has ended, or its log says why: start it again by `dpflow pool serve`, or try again"
        return PeerLostError(f"the server of the pool does not answer at {self._address}: {why}")

    def __enter__(self) -> PoolConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _connect_here(directory: Path, silence_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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
