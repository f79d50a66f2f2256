"""Objects to frames and back, without copies: one parcel is one encoded sample or batch.

A parcel is a pickle head (protocol 5) and out-of-band buffers. Buffers from `ARENA_BYTES` on lie in shared
memory where there is an arena; small ones are coalesced behind the head into the first frame, each 64-byte
aligned; the others are frames of their own. The table says where each lies. Services pass (table, frames) on
unopened.

Only workers and jobs open parcels, and only those of peers that have proved who they are: a pickle can run
code.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec
import numpy as np

from torch_dpflow.errors import MessageError, TransportError
from torch_dpflow.remote.arena import Arena, ArenaReader, BlockRef
from torch_dpflow.remote.memory import ALIGNMENT, Memory, address_of, aligned_copy
from torch_dpflow.remote.reduction import ParcelPickler, Source
from torch_dpflow.remote.unpicklable import explain

Frame: TypeAlias = "bytes | bytearray | memoryview"

#: From this size on a buffer is worth a block of shared memory, bytes.
ARENA_BYTES = 1 << 15
#: Below this size a buffer is coalesced with others instead of travelling as a frame of its own, bytes.
FRAME_BYTES = 1 << 15


class Place(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where one piece of a parcel lies: `size` bytes at `offset` of a frame, or a block of shared memory.

    A frame other than the first is one piece, whole.
    """

    frame: int
    offset: int
    size: int
    block: BlockRef | None = None


class ParcelTable(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is in the frames of a parcel."""

    #: How many frames the parcel takes in a message.
    frames: int
    head: Place
    #: One for each use of a buffer in the head, in order; the same place twice is the same memory.
    buffers: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the object, in frames and in shared memory."""
        return self.head.size + sum(place.size for place in set(self.buffers))


def encode(obj: Any, *, arena: Arena | None = None) -> tuple[ParcelTable, list[Frame]]:
    """Take `obj` apart. The frames refer to its memory: leave it unchanged until they are sent.

    With `arena`, big buffers go into its blocks while it lends any; one that lies in an unpublished block
    already is published where it is.

    Raises:
        NotPicklableError: something in `obj` cannot travel; the message names it and its place.
    """
    pickler = ParcelPickler()
    try:
        pickler.dump(obj)
    except Exception as error:
        raise explain(obj, error) from error
    return _Packing(arena).pack(pickler.chunks, pickler.sources)


def decode(table: ParcelTable, frames: Sequence[Frame], *, reader: ArenaReader | None = None) -> Any:
    """Put the object together again. Its tensors and arrays are writable.

    A writable frame becomes the memory of the object where it is aligned; the caller gives it away. A block
    of shared memory can be opened once, so a parcel that has any can be decoded once.

    Args:
        reader: of the arena that the parcel was encoded with, if any.

    Raises:
        MessageError: the table does not fit the frames, or the head cannot be unpickled.
        SegmentLostError: the worker died and its shared memory with it.
    """
    try:
        return _Unpacking(table, frames, reader).unpack()
    except BaseException:
        discard(table, reader=reader)
        raise


def discard(table: ParcelTable, *, reader: ArenaReader | None = None) -> None:
    """Give the shared memory of a parcel back that will not be decoded."""
    if reader is None:
        return
    for place in (table.head, *table.buffers):
        if place.block is not None:
            with suppress(TransportError):  # used twice in the parcel, or the worker is gone
                reader.release(place.block)


class _Packing:
    """Finds a place for every piece of one parcel."""

    def __init__(self, arena: Arena | None) -> None:
        self._arena = arena
        #: What goes into the coalesced frame.
        self._pieces: list[Frame] = []
        self._filled = 0
        #: Frames after the coalesced one.
        self._frames: list[Frame] = []
        self._places: dict[tuple[int, int], Place] = {}

    def pack(self, chunks: list[bytes], sources: list[Source]) -> tuple[ParcelTable, list[Frame]]:
        head = self._place_head(chunks)
        buffers = tuple([self._place(source) for source in sources])
        frames: list[Frame] = [b"".join(self._pieces), *self._frames]
        return ParcelTable(len(frames), head, buffers), frames

    def _place_head(self, chunks: list[bytes]) -> Place:
        size = sum(map(len, chunks))
        if self._arena is not None and size >= ARENA_BYTES:
            block = self._arena.allocate(size)
            if block is not None:
                end = 0
                for chunk in chunks:
                    block.memory.data[end : (end := end + len(chunk))] = chunk
                return Place(0, 0, size, self._arena.publish(block))
        self._pieces.extend(chunks)
        self._filled = size
        return Place(0, 0, size)

    def _place(self, source: Source) -> Place:
        address, nbytes, _ = source
        place = self._places.get((address, nbytes))
        if place is None:
            place = self._find_place(source)
            if nbytes:
                self._places[address, nbytes] = place
        return place

    def _find_place(self, source: Source) -> Place:
        address, nbytes, _ = source
        if self._arena is not None and nbytes >= ARENA_BYTES:
            block = self._arena.block_at(address, nbytes)
            if block is None and (block := self._arena.allocate(nbytes)) is not None:
                ctypes.memmove(block.segment.address, address, nbytes)
            if block is not None:
                return Place(0, 0, nbytes, self._arena.publish(block))
        if nbytes >= FRAME_BYTES:
            self._frames.append(source.view())
            return Place(len(self._frames), 0, nbytes)
        return self._coalesce(source)

    def _coalesce(self, source: Source) -> Place:
        padding = -self._filled % ALIGNMENT
        if padding:
            self._pieces.append(bytes(padding))
        offset = self._filled + padding
        self._pieces.append(ctypes.string_at(source.address, source.nbytes))
        self._filled = offset + source.nbytes
        return Place(0, offset, source.nbytes)


class _Unpacking:
    """Finds the memory of every piece of one parcel.

    Believes nothing that the table says, and allocates no more than the frames hold: one copy of each.
    """

    def __init__(self, table: ParcelTable, frames: Sequence[Frame], reader: ArenaReader | None) -> None:
        self._table = table
        self._reader = reader
        self._frames = [memoryview(frame).cast("B") for frame in frames]
        self._found: dict[Place, memoryview] = {}
        #: The coalesced buffers, copied so that they are aligned and writable; where in the frame the copy
        #: begins.
        self._coalesced: Memory | None = None
        self._start = 0

    def unpack(self) -> Any:
        table = self._table
        if table.frames != len(self._frames):
            raise MessageError(f"parcel of {table.frames} frames came with {len(self._frames)}")
        head = self._head(table.head)
        buffers = [self._memory(place) for place in table.buffers]
        try:
            return pickle.loads(head, buffers=buffers)
        except Exception as error:
            raise MessageError(f"the head of a parcel cannot be opened: {error!r}") from error

    def _head(self, place: Place) -> memoryview:
        if place.block is not None:
            return self._open(place, place.block)
        frame = self._frame(place)
        if place.frame or place.offset or not 0 <= place.size <= len(frame):
            raise MessageError(f"{place}: not at the start of a first frame of {len(frame)} bytes")
        return frame[: place.size]

    def _memory(self, place: Place) -> memoryview:
        memory = self._found.get(place)
        if memory is None:
            memory = self._found[place] = self._find(place)
        return memory

    def _find(self, place: Place) -> memoryview:
        if place.block is not None:
            return self._open(place, place.block)
        frame = self._frame(place)
        if place.frame == 0:
            return self._cut(place, frame)
        if place.offset or place.size != len(frame):
            raise MessageError(f"{place}: not the whole of a frame of {len(frame)} bytes")
        aligned = not frame.readonly and address_of(np.frombuffer(frame, np.uint8)) % ALIGNMENT == 0
        return frame if aligned else aligned_copy(frame).data

    def _open(self, place: Place, block: BlockRef) -> memoryview:
        if self._reader is None:
            raise MessageError("parcel lies in a worker's shared memory; decoding it takes its ArenaReader")
        if place.size != block.nbytes:
            raise MessageError(f"{place}: size and block disagree")
        return self._reader.view(block).data

    def _cut(self, place: Place, frame: memoryview) -> memoryview:
        if self._coalesced is None:
            head = self._table.head
            if head.block is None:
                self._start = head.size + -head.size % ALIGNMENT
            self._coalesced = aligned_copy(frame[self._start :])
        start = place.offset - self._start
        if start < 0 or start % ALIGNMENT or not 0 <= place.size <= len(self._coalesced) - start:
            raise MessageError(f"{place}: not aligned or not in the first frame of {len(frame)} bytes")
        return self._coalesced[start : start + place.size].data

    def _frame(self, place: Place) -> memoryview:
        if not 0 <= place.frame < len(self._frames):
            raise MessageError(f"{place}: there are {len(self._frames)} frames")
        return self._frames[place.frame]
