"""Reader side of a data connection, over which a server sends records to another host."""

from __future__ import annotations

import io
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from torch_dpflow._core.checks import check_int
from torch_dpflow.errors import MessageError, PeerLostError
from torch_dpflow.ipc.memory.headroom import Headroom
from torch_dpflow.pool.planning.request_window import RequestedBytes
from torch_dpflow.pool.transport.address import PoolAddress
from torch_dpflow.pool.transport.authentication import StreamAuthenticator, TLSStream, connect_stream
from torch_dpflow.pool.transport.data_frames import (
    ANSWER_BYTES,
    DATA_CONNECTION,
    ENTRY_BYTES,
    READY,
    WHOLE,
    RecordPart,
    RecordRequest,
    read_header,
    read_table,
)

#: Maximum bytes to reuse: four batches of 256 records of 110 kB.
_MAX_REUSED_BYTES = 128 << 20
#: Block sizes are rounded up to an eighth of the power of two below, so that similar records share blocks.
_SIZES_BITS = 3
_NONE: deque[bytearray] = deque()
#: How many blocks of a size to check for an unused one.
_CHECKED = 4


class ReceiveMemory:
    """Reusable receive buffers, because page faults of fresh memory take longer than receiving into it.

    Only one thread at a time may call `lend`; any thread may drop a lent buffer.

    max_bytes: maximum bytes of reused buffers. Further buffers are not reused. Once these add up to more than
    `max_bytes`, the reused ones are dropped, because record sizes may have changed.
    """

    def __init__(self, max_bytes: int = _MAX_REUSED_BYTES) -> None:
        self._max_bytes = check_int("max_bytes", max_bytes, minimum=0)
        #: Blocks by size, the least recently lent first.
        self._blocks: dict[int, deque[bytearray]] = {}
        self._bytes = self._beyond = 0

    def lend(self, size: int) -> memoryview:
        """Return uninitialised memory of `size` >= 1 bytes; it can be reused once no view of it is left."""
        capacity = _capacity(size)
        blocks = self._blocks.get(capacity, _NONE)
        for _ in range(min(_CHECKED, len(blocks))):
            block = blocks[0]
            blocks.rotate(-1)
            # Every view derived from a block holds a reference to it.
            if sys.getrefcount(block) == _UNUSED_REFCOUNT:
                return memoryview(block)[:size]
        return memoryview(self._new(capacity))[:size]

    def _new(self, capacity: int) -> bytearray:
        block = bytearray(capacity)
        if self._bytes + capacity <= self._max_bytes:
            self._blocks.setdefault(capacity, deque()).append(block)
            self._bytes += capacity
        else:
            self._beyond += capacity
            if self._beyond > self._max_bytes:
                self._blocks, self._bytes, self._beyond = {}, 0, 0
        return block


def _capacity(size: int) -> int:
    step = 1 << max(0, (size - 1).bit_length() - 1 - _SIZES_BITS)
    return -(-size // step) * step


def _unused_refcount() -> int:
    """Return `sys.getrefcount` of an unused block as `lend` sees it, which depends on the Python version."""
    blocks = deque([bytearray(1)])
    block = blocks[0]
    return sys.getrefcount(block)


_UNUSED_REFCOUNT = _unused_refcount()


#: Records below this mean size are received together and then split.
_SMALL_BYTES = 16 << 10
#: Maximum bytes per receive call.
_PIECE_BYTES = 1 << 20
#: Maximum buffers per receive call (IOV_MAX).
_MAX_VIEWS = 1024
#: Total length that a server may claim for records of unknown length, bytes; more only if that much is free.
_MAX_UNVERIFIED_BYTES = 64 << 20


class WantedRecord(NamedTuple):
    """Record, or part of a record, to request."""

    record: int
    #: Bytes of the record or part; None if only the server knows.
    length: int | None = None
    #: First byte of a part, which must lie within the record; None for the whole record.
    begin: int | None = None
    #: Buffer of `length` bytes to receive into; None for new memory.
    buffer: memoryview | None = None


class RequestedRecord(NamedTuple):
    """Record that was requested, and whose content has not arrived."""

    wanted: WantedRecord
    #: Index of the record in the caller's batch, and the request window's token: None after LATER.
    place: int
    token: RequestedBytes | None


class DataConnection:
    """Connection that requests records of datasets and receives them in request order.

    silence_s: seconds without an expected byte, after which `take` raises OSError.
    memory: buffers to receive into.

    Raises PeerLostError if there is no server, or it fails to prove that it belongs to the cluster.
    """

    def __init__(
        self,
        address: PoolAddress,
        authenticator: StreamAuthenticator,
        silence_s: float,
        memory: ReceiveMemory,
    ) -> None:
        self._socket = connect_stream(address, authenticator, DATA_CONNECTION, silence_s)
        self._memory = memory
        #: Dataset and record of each unanswered request, the oldest first.
        self.requested: deque[tuple[bytes, RequestedRecord]] = deque()
        #: Time of the last byte, or of the first outstanding request; `time.monotonic`.
        self.received_at = 0.0
        #: Records that the server answered LATER, by number.
        self.later: dict[int, list[RequestedRecord]] = {}
        plain = self._socket.plain if isinstance(self._socket, TLSStream) else self._socket
        #: Whether both ends have the same address, so no network lies between them.
        self.is_on_host = plain.getsockname()[0] == plain.getpeername()[0]
        # Without a Python timeout one call returns a whole record, in new memory.
        plain.settimeout(None)
        seconds, rest = divmod(silence_s, 1)
        timeout = struct.pack("ll", int(seconds), max(1, int(rest * 1e6)))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            plain.setsockopt(socket.SOL_SOCKET, option, timeout)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether answers are outstanding."""
        return bool(self.requested or self.later)

    @property
    def has_bytes(self) -> bool:
        """Whether received bytes are buffered, so that polling the socket does not report them."""
        return isinstance(self._socket, TLSStream) and self._socket.has_bytes

    def request(self, identity: bytes, records: Sequence[RequestedRecord]) -> None:
        """Request records of one dataset. Raises OSError if the connection has failed."""
        self.requested.extend((identity, one) for one in records)
        self._socket.sendall(RecordRequest(identity, [_part(one.wanted) for one in records]).pack())

    def take(self, *, copy: bool) -> list[tuple[RequestedRecord, bytes | memoryview | int]]:
        """Receive the next answer; return (record, content) for each of its records.

        A content can be a code: LATER, ABSENT or GONE; in a READY answer 0 (now in memory) or ABSENT.

        copy: if False, large records are read-only views of the receive buffers. Records with a `buffer` are always
        views.

        Raises:
            PeerLostError: the connection has ended.
            MessageError: the answer does not match the requests.
            OSError: the connection has failed, or nothing has arrived for `silence_s`.
        """
        kind, count, identity = read_header(self._bytes(ANSWER_BYTES))
        records, lengths = read_table(self._bytes(count * ENTRY_BYTES))
        if kind == READY:
            named = zip(records, lengths)
            return [(one, state) for record, state in named for one in self.later.pop(record, ())]
        requested = self._check(identity, records, lengths)
        buffers = [one.wanted.buffer for one in requested]
        contents = self._contents(buffers, lengths, copy=copy)
        for _ in requested:  # only now: if the connection fails before, they count as outstanding
            self.requested.popleft()
        return list(zip(requested, contents))

    def close(self) -> None:
        """Close the connection; outstanding answers are lost."""
        self._socket.close()

    def _check(self, identity: bytes, records: list[int], lengths: list[int]) -> list[RequestedRecord]:
        """Return the requests that an answer belongs to. Raises MessageError if it does not fit the oldest requests."""
        if len(records) > len(self.requested):
            raise MessageError(f"{len(records)} records came where {len(self.requested)} were requested")
        requested = [*islice(self.requested, len(records))]
        unverified = sum(
            length for (_, one), length in zip(requested, lengths) if one.wanted.length is None and length > 0
        )
        if unverified > _MAX_UNVERIFIED_BYTES and unverified > (free := Headroom().available()):
            raise MessageError(f"the server announces records of {unverified:,} bytes, and {free:,} are free")
        for (of, (wanted, _, _)), record, length in zip(requested, records, lengths):
            is_other = length >= 0 and wanted.length is not None and length != wanted.length
            if of != identity or wanted.record != record or is_other:
                raise MessageError(
                    f"record {record} of dataset {identity.hex()} with {length} bytes came where record "
                    f"{wanted.record} of {of.hex()} with {wanted.length} bytes was requested"
                )
        return [one for _, one in requested]

    def _contents(
        self, buffers: list[memoryview | None], lengths: list[int], *, copy: bool
    ) -> Sequence[bytes | memoryview | int]:
        if buffers.count(None) == len(buffers):
            total = sum(length for length in lengths if length > 0)
            if len(lengths) < total < len(lengths) * _SMALL_BYTES:
                return self._cut(lengths, total)
            if copy:
                return [self._bytes(length) if length > 0 else b"" if length == 0 else length for length in lengths]
        views = [
            self._memory.lend(length) if buffer is None else buffer
            for buffer, length in zip(buffers, lengths)
            if length > 0
        ]
        self._fill(views)
        filled = iter(views)
        return [
            next(filled).toreadonly() if length > 0 else memoryview(b"") if length == 0 else length
            for length in lengths
        ]

    def _cut(self, lengths: list[int], total: int) -> list[bytes | int]:
        """Receive small records together, and split them."""
        joined, at, contents = self._memory.lend(total), 0, list[bytes | int]()
        self._fill([joined])
        for length in lengths:
            contents.append(bytes(joined[at : at + length]) if length >= 0 else length)
            at += max(0, length)
        return contents

    def _bytes(self, count: int) -> bytes:
        """Receive `count` bytes without a copy."""
        if isinstance(self._socket, socket.socket) and count <= _PIECE_BYTES:
            content = self._socket.recv(count, socket.MSG_WAITALL)
            if len(content) == count:
                return content
            if not content:
                raise PeerLostError("it has closed the connection")
        else:
            content = b""
        buffer = io.BytesIO(bytes(count))  # `getvalue` does not copy
        with buffer.getbuffer() as view:
            view[: len(content)] = content
            self._fill([view[len(content) :]])
        return buffer.getvalue()

    def _fill(self, views: Sequence[memoryview]) -> None:
        """Receive into all of `views`, one after the other."""
        rest = deque(views)
        while rest:
            came = self._receive_into(rest)
            if not came:
                raise PeerLostError("it has closed the connection")
            while rest and came >= len(rest[0]):
                came -= len(rest.popleft())
            if came:
                rest[0] = rest[0][came:]

    def _receive_into(self, views: Iterable[memoryview]) -> int:
        """Receive into the first views; return the number of bytes."""
        wanted, left = list[memoryview](), _PIECE_BYTES
        for view in islice(views, _MAX_VIEWS):
            wanted.append(view[:left])
            left -= len(wanted[-1])
            if not left or not isinstance(self._socket, socket.socket):
                break
        if isinstance(self._socket, socket.socket):
            return self._socket.recvmsg_into(wanted, 0, socket.MSG_WAITALL)[0]
        return self._socket.recv_into(wanted[0])


def _part(wanted: WantedRecord) -> RecordPart:
    if wanted.begin is None or wanted.length is None:
        return wanted.record, 0, WHOLE
    return wanted.record, wanted.begin, wanted.length
