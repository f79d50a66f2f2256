"""A reader's side of one stream lane."""

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
from torch_dpflow.pool.transport.address import PoolAddress
from torch_dpflow.pool.transport.authentication import StreamAuthenticator, TLSStream, connect_stream
from torch_dpflow.pool.transport.data_frames import (
    ANSWER_BYTES,
    ENTRY_BYTES,
    LANE,
    READY,
    WHOLE,
    RecordPart,
    RecordRequest,
    read_header,
    read_table,
)

#: Most bytes that are used again: of four batches of 256 records of 110 kB.
_MAX_REUSED_BYTES = 128 << 20
#: Sizes of blocks are rounded up to an eighth of the power of two below, so that similar records share them.
_SIZES_BITS = 3
_NONE: deque[bytearray] = deque()
#: How many blocks of a size are looked at for one that nobody uses.
_CHECKED = 4


class ReceiveMemory:
    """Lends memory for records. One thread at a time; any may drop what was lent.

    most_bytes: memory that is used again, lent or not. What is lent beyond is not; once that is as much, all blocks are
        given up, as records may have come to have other sizes.
    """

    def __init__(self, most_bytes: int = _MAX_REUSED_BYTES) -> None:
        self._most_bytes = check_int("most_bytes", most_bytes, minimum=0)
        #: By size, the one that was lent longest ago first.
        self._blocks: dict[int, deque[bytearray]] = {}
        self._bytes = self._beyond = 0

    def lend(self, size: int) -> memoryview:
        """Memory of so many bytes, at least one, that is not cleared; lent again once all views of it are gone."""
        capacity = _capacity(size)
        blocks = self._blocks.get(capacity, _NONE)
        for _ in range(min(_CHECKED, len(blocks))):
            block = blocks[0]
            blocks.rotate(-1)
            # Each view has a reference to the block, through what it shares with the views that were made of it.
            if sys.getrefcount(block) == _ALONE:
                return memoryview(block)[:size]
        return memoryview(self._new(capacity))[:size]

    def _new(self, capacity: int) -> bytearray:
        block = bytearray(capacity)
        if self._bytes + capacity <= self._most_bytes:
            self._blocks.setdefault(capacity, deque()).append(block)
            self._bytes += capacity
        else:
            self._beyond += capacity
            if self._beyond > self._most_bytes:
                self._blocks, self._bytes, self._beyond = {}, 0, 0
        return block


def _capacity(size: int) -> int:
    step = 1 << max(0, (size - 1).bit_length() - 1 - _SIZES_BITS)
    return -(-size // step) * step


def _references_of_one_that_nobody_uses() -> int:
    """What `sys.getrefcount` says of a block as `lend` looks at it, which versions of Python differ in."""
    blocks = deque([bytearray(1)])
    block = blocks[0]
    return sys.getrefcount(block)


_ALONE = _references_of_one_that_nobody_uses()


#: Records of less than this many bytes in the mean are received together, and cut apart.
_SMALL_BYTES = 16 << 10
#: What one call receives, at most.
_PIECE_BYTES = 1 << 20
#: Most pieces of memory that one call receives into (IOV_MAX).
_MAX_VIEWS = 1024
#: What a server may say that records have whose length only it knows, bytes; more only as far as that is free.
_MAX_UNVERIFIED_BYTES = 64 << 20


class WantedRecord(NamedTuple):
    """A record that a reader wants, or a part of it."""

    record: int
    #: Bytes of it, or of the part; None: only the server knows.
    length: int | None = None
    #: Where a part begins in the record, which has to be of that many bytes at least; None: it is the whole record.
    begin: int | None = None
    #: Where it is received, of that many bytes; None: in memory of its own.
    room: memoryview | None = None


class RequestedRecord(NamedTuple):
    """A record that was asked for."""

    wanted: WantedRecord
    #: What the asker knows it by.
    place: int
    token: object


class DataConnection:
    """A connection over which records of sets are asked for, and come in the order in which they were.

    silence_s: after how long without a byte that is due the server is given up, seconds.
    memory: where records are received that are not copied.

    Raises PeerLostError: there is no server, or it does not prove that it is of the cluster.
    """

    def __init__(
        self,
        address: PoolAddress,
        authenticator: StreamAuthenticator,
        silence_s: float,
        memory: ReceiveMemory,
    ) -> None:
        self._socket = connect_stream(address, authenticator, LANE, silence_s)
        self._memory = memory
        #: What was asked for and has not been answered.
        self.asked: deque[tuple[bytes, RequestedRecord]] = deque()
        #: When something came last, or was asked for where nothing was; of `time.monotonic`.
        self.received_at = 0.0
        #: What the server has answered LATER, by its record.
        self.later: dict[int, list[RequestedRecord]] = {}
        #: Whether no line is between the two: they have one address.
        self.is_on_host = self._socket.getsockname()[0] == self._socket.getpeername()[0]
        # One call then returns a whole record, in memory of its own.
        self._socket.settimeout(None)
        seconds, rest = divmod(silence_s, 1)
        timeout = struct.pack("ll", int(seconds), max(1, int(rest * 1e6)))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, timeout)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether something of it is waited for."""
        return bool(self.asked or self.later)

    @property
    def has_bytes(self) -> bool:
        """Whether some have come that the socket does not tell of."""
        return isinstance(self._socket, TLSStream) and self._socket.has_bytes

    def request(self, identity: bytes, records: Sequence[RequestedRecord]) -> None:
        """Ask for these. Raises OSError."""
        self.asked.extend((identity, one) for one in records)
        self._socket.sendall(RecordRequest(identity, [_part(one.wanted) for one in records]).pack())

    def take(self, *, copy: bool) -> list[tuple[RequestedRecord, bytes | memoryview | int]]:
        """The next answer: each record, or why it does not come, as in `wire`; those that were LATER, with 0 or ABSENT.

        copy: False gives large records where they were received, as views that nobody can write to, as it is with those
            that have a room.

        Raises:
            PeerLostError: the connection has ended, or nothing comes.
            MessageError: this is not what was asked for.
            OSError: the connection has failed.
        """
        kind, count, identity = read_header(self._bytes(ANSWER_BYTES))
        records, lengths = read_table(self._bytes(count * ENTRY_BYTES))
        if kind == READY:
            named = zip(records, lengths)
            return [(one, state) for record, state in named for one in self.later.pop(record, ())]
        asked = self._check(identity, records, lengths)
        rooms = [one.wanted.room for one in asked]
        contents = self._contents(rooms, lengths, copy=copy)
        for _ in asked:  # only now: if the lane fails before, they were asked for and did not come
            self.asked.popleft()
        return list(zip(asked, contents))

    def close(self) -> None:
        """Close it; what was asked for does not come."""
        self._socket.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _check(self, identity: bytes, records: list[int], lengths: list[int]) -> list[RequestedRecord]:
        """What this answers of what was asked for. Raises MessageError: it is something else."""
        if len(records) > len(self.asked):
            raise MessageError(f"{len(records)} records came where {len(self.asked)} were asked for")
        asked = [*islice(self.asked, len(records))]
        unverified = sum(
            length for (_, one), length in zip(asked, lengths) if one.wanted.length is None and length > 0
        )
        if unverified > _MAX_UNVERIFIED_BYTES and unverified > (free := Headroom().available()):
            raise MessageError(f"records of {unverified:,} bytes are to come, and {free:,} are free")
        for (of, (wanted, _, _)), record, length in zip(asked, records, lengths):
            is_other = length >= 0 and wanted.length is not None and length != wanted.length
            if of != identity or wanted.record != record or is_other:
                raise MessageError(
                    f"record {record} of set {identity.hex()} with {length} bytes came where record {wanted.record} of "
                    f"{of.hex()} with {wanted.length} bytes was asked for"
                )
        return [one for _, one in asked]

    def _contents(
        self, rooms: list[memoryview | None], lengths: list[int], *, copy: bool
    ) -> Sequence[bytes | memoryview | int]:
        if rooms.count(None) == len(rooms):
            total = sum(length for length in lengths if length > 0)
            if len(lengths) < total < len(lengths) * _SMALL_BYTES:
                return self._cut(lengths, total)
            if copy:
                contents = list[bytes | int]()
                for length in lengths:
                    contents.append(self._bytes(length) if length > 0 else b"" if length == 0 else length)
                return contents
        views = [
            self._memory.lend(length) if room is None else room
            for room, length in zip(rooms, lengths)
            if length > 0
        ]
        self._fill(views)
        filled = iter(views)
        return [
            next(filled).toreadonly() if length > 0 else memoryview(b"") if length == 0 else length
            for length in lengths
        ]

    def _cut(self, lengths: list[int], total: int) -> list[bytes | int]:
        """Small records, received together."""
        joined, at, contents = self._memory.lend(total), 0, list[bytes | int]()
        self._fill([joined])
        for length in lengths:
            contents.append(bytes(joined[at : at + length]) if length >= 0 else length)
            at += max(0, length)
        return contents

    def _bytes(self, count: int) -> bytes:
        """The next so many bytes, received where they stay."""
        if isinstance(self._socket, socket.socket) and count <= _PIECE_BYTES:
            content = self._socket.recv(count, socket.MSG_WAITALL)
            if len(content) == count:
                return content
            if not content:
                raise PeerLostError("it has closed the connection")
        else:
            content = b""
        buffer = io.BytesIO(bytes(count))  # hands out its memory as it is
        with buffer.getbuffer() as view:
            view[: len(content)] = content
            self._fill([view[len(content) :]])
        return buffer.getvalue()

    def _fill(self, views: Sequence[memoryview]) -> None:
        """Receive what comes into these, one behind the other."""
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
        """Fill the first of these, or several; returns how many bytes came."""
        wanted, room = list[memoryview](), _PIECE_BYTES
        for view in islice(views, _MAX_VIEWS):
            wanted.append(view[:room])
            room -= len(wanted[-1])
            if not room or not isinstance(self._socket, socket.socket):
                break
        if isinstance(self._socket, socket.socket):
            return self._socket.recvmsg_into(wanted, 0, socket.MSG_WAITALL)[0]
        return self._socket.recv_into(wanted[0])


def _part(wanted: WantedRecord) -> RecordPart:
    if wanted.begin is None or wanted.length is None:
        return wanted.record, 0, WHOLE
    return wanted.record, wanted.begin, wanted.length
