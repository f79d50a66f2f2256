"""Encoding of samples and batches as payloads, and decoding, without copies of large tensors and arrays.

A payload is a pickle head (protocol 5) and out-of-band buffers: the memory of tensors, of arrays and of big bytes
objects. A large buffer is in a block of shared memory if there is an arena, else in a separate frame. Small buffers are
together in the first frame, behind the head, or in one block, each 64-byte aligned. With an arena, big bytes objects
share one block. A table locates the head and each buffer. Services forward (table, frames) without decoding them.

Only workers and jobs decode payloads, and only from authenticated peers: a pickle can run code.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from torch_dpflow.errors import DescriptorLimitError, MessageError, TransportError
from torch_dpflow.ipc.memory.arena import Arena, Block
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.memory.segment import (
    address_of,
    aligned_copy,
    is_aligned,
    storage_over,
    tensor_over,
)
from torch_dpflow.ipc.messages.headers import (
    ALIGNMENT,
    SHARED_BYTES,
    WORD,
    BlockRef,
    BufferSpan,
    Frame,
    PayloadTable,
    aligned,
)
from torch_dpflow.ipc.serialization.pickling import MemoryRange, PayloadPickler, explain

#: A buffer of at least this size has a separate block or frame, bytes. Measured: coalescing a smaller one costs no more
#: than a block, and less than a frame.
LARGE_BYTES = 1 << 16
#: `encode(contiguous=True)` changes tensors of at least this size, bytes; smaller ones are collated fast in any layout.
ORDERED_BYTES = 1 << 15
#: Maximum number of buffers of a payload that have separate frames: the frames of a message are limited.
MAX_LARGE_FRAMES = 1000


def encode_in(obj: Any, block: Block, arena: Arena) -> tuple[PayloadTable, list[Frame]] | None:
    """Encode `obj`, whose buffers lie in `block`, and publish the block so that other processes can write to it.

    Returns None if a buffer of `obj` is elsewhere. Raises the error of pickling if a part of `obj` cannot be pickled.
    """
    pickler = PayloadPickler()
    pickler.dump(obj)
    head, end = b"".join(pickler.chunks), block.address + len(block.memory)
    if not all(block.address <= source.address <= end - source.nbytes for source in pickler.sources):
        return None
    buffers = tuple(BufferSpan(-1, source.address - block.address, source.nbytes) for source in pickler.sources)
    return PayloadTable(1, (arena.publish(block, is_open=True),), BufferSpan(0, 0, len(head)), buffers), [head]


def encode(
    obj: Any, *, arena: Arena | None = None, contiguous: bool = False, name: str = "batch"
) -> tuple[PayloadTable, list[Frame]]:
    """Encode `obj`. The frames refer to the memory of `obj`, which must not change until they are sent.

    With `arena`, large buffers are copied into its blocks as long as it lends any. A large buffer that is already in an
    unpublished block is not copied.

    Args:
        contiguous: make big tensors of up to three dimensions contiguous. Tensors of PIL images have the channels last
            in memory, and each job would take three times as long to collate them.
        name: name of `obj` in the error.

    Raises NotPicklableError: a part of `obj` cannot be pickled; the message names it and its place.
    """
    pickler = PayloadPickler(laid_out=partial(_laid_out, arena) if contiguous else None)
    try:
        pickler.dump(obj)
    except Exception as error:
        raise explain(obj, error, name=name) from error
    return _Packing(arena).pack(pickler.chunks, pickler.sources)


def decode(table: PayloadTable, frames: Sequence[Frame], *, reader: ArenaReader | None = None) -> Any:
    """Decode a payload. The object's tensors and arrays are writable.

    A writable, aligned frame becomes the memory of the object; the caller must not use it afterwards. A block of shared
    memory can be opened only once, so a payload with blocks can be decoded only once.

    Args:
        reader: reader of the arena that the payload was encoded with, if any.

    Raises:
        MessageError: the table does not fit the frames, or the head cannot be unpickled.
        SegmentLostError: the encoding process's shared memory cannot be opened, such as after its death.
        DescriptorLimitError: this process has too many files open to map the shared memory.
    """
    try:
        buffers = _buffers_in_place(table, frames)
        if buffers is not None:
            return _load(memoryview(frames[0])[: table.head.size], buffers)
        return _Unpacking(table, frames, reader).unpack()
    except BaseException:
        discard(table, reader=reader)
        raise


def decode_heads(
    payloads: Sequence[tuple[PayloadTable, Sequence[Frame]]],
) -> list[tuple[bytes, memoryview]] | None:
    """Return (pickled head, buffer) of each payload; None if any payload needs `decode`, such as one with two buffers.

    The buffers are views of the frames, which the caller must not use for anything else.
    """
    found: list[tuple[bytes, memoryview]] = []
    known, beside = None, None
    for table, frames in payloads:
        if table is not known:  # one object for all payloads of a group
            known, beside = table, _buffer_beside_head(table)
        if beside is not None and len(frames) == 1:
            frame = memoryview(frames[0])
            if frame.nbytes < beside.stop or frame.format != "B":
                return None
            found.append((bytes(frame[: table.head.size]), frame[beside]))
            continue
        buffers = _buffers_in_place(table, frames)
        if buffers is None or len(buffers) != 1:
            return None
        found.append((bytes(memoryview(frames[0])[: table.head.size]), buffers[0]))
    return found


def _buffer_beside_head(table: PayloadTable) -> slice | None:
    """Return the slice of a payload's only buffer, if that is behind the head in the only frame; else None."""
    head, places = table.head, table.buffers
    if table.frames != 1 or len(places) != 1 or head.part or head.offset or places[0].part:
        return None
    place = places[0]
    if not 0 <= head.size <= place.offset or place.size <= 0 or place.offset % ALIGNMENT:
        return None
    return slice(place.offset, place.offset + place.size)


def discard(table: PayloadTable, *, reader: ArenaReader | None = None) -> None:
    """Release a payload's shared memory without decoding the payload."""
    if reader is None:
        return
    for block in table.blocks:
        # It was opened already, the worker has ended, or there is no descriptor left.
        with suppress(TransportError, DescriptorLimitError):
            reader.release(block)


def _laid_out(arena: Arena | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return a big tensor made contiguous, in a block of the arena if possible; other tensors unchanged."""
    nbytes = tensor.nbytes
    if tensor.dim() > 3 or nbytes < ORDERED_BYTES or tensor.is_contiguous():
        return tensor
    block = arena.allocate(nbytes) if arena is not None and nbytes >= LARGE_BYTES else None
    if block is None:
        return tensor.contiguous()
    return tensor_over(storage_over(block.memory), tensor.dtype, tensor.shape).copy_(tensor)


class _Packing:
    """Layout of one payload: chooses a place for every piece."""

    def __init__(self, arena: Arena | None) -> None:
        self._arena = arena
        #: Large frames; the first frame comes before them.
        self._frames: list[Frame] = []
        self._blocks: list[BlockRef] = []
        #: By key and size, so that memory that is used twice is sent once.
        self._places: dict[tuple[int, int], BufferSpan] = {}
        #: Small buffers and their offsets in the coalesced segment; its size so far.
        self._small: list[tuple[MemoryRange, int]] = []
        self._coalesced_bytes = 0

    def pack(self, chunks: list[bytes], sources: list[MemoryRange]) -> tuple[PayloadTable, list[Frame]]:
        if self._arena is not None:
            self._share_bytes_objects(self._arena, sources)
        places = [self._places.get(source[:2]) or self._place(source) for source in sources]
        alignment = max([source.alignment for source in sources], default=WORD)
        first: Frame = b"".join(chunks)
        head = BufferSpan(0, 0, len(first))
        if (block := self._share(len(first))) is not None:
            block.memory.data[:] = first
            head = BufferSpan(self._publish(block), 0, len(first))
            first = b""
        if self._small:
            first, start, part = self._coalesce(first)
            # Until here a small buffer's offset is relative to the coalesced segment, whose own offset is known only
            # now.
            places = [BufferSpan(part, start + p.offset, p.size) if p.part == 0 else p for p in places]
        frames: list[Frame] = [first, *self._frames]
        return PayloadTable(len(frames), tuple(self._blocks), head, tuple(places), alignment), frames

    def _share_bytes_objects(self, arena: Arena, sources: list[MemoryRange]) -> None:
        """Put all bytes objects into one block. Decoding copies them, so none of them keeps the block in use."""
        pieces = {source[:2]: source for source in sources if type(source.owner) is bytes}
        if not pieces:
            return
        block = arena.allocate(sum(aligned(source.nbytes) for source in pieces.values()))
        if block is None:
            return
        part, offset = self._publish(block), 0
        for key, source in pieces.items():
            ctypes.memmove(block.address + offset, source.address, source.nbytes)
            self._places[key] = BufferSpan(part, offset, source.nbytes)
            offset += aligned(source.nbytes)

    def _place(self, source: MemoryRange) -> BufferSpan:
        part = self._place_large(source) if source.nbytes >= LARGE_BYTES else None
        if part is not None:
            place = BufferSpan(part, 0, source.nbytes)
        else:
            place = BufferSpan(0, self._coalesced_bytes, source.nbytes)
            self._small.append((source, self._coalesced_bytes))
            self._coalesced_bytes += aligned(source.nbytes)
        self._places[source[:2]] = place
        return place

    def _place_large(self, source: MemoryRange) -> int | None:
        if self._arena is not None:
            block = self._arena.block_at(source.address, source.nbytes)
            if block is None and (block := self._arena.allocate(source.nbytes)) is not None:
                ctypes.memmove(block.address, source.address, source.nbytes)
            if block is not None:
                return self._publish(block)
        if len(self._frames) >= MAX_LARGE_FRAMES:
            return None
        self._frames.append(source.view())
        return len(self._frames)

    def _coalesce(self, first: Frame) -> tuple[Frame, int, int]:
        """Copy the small buffers together; return (first frame, offset of the copy in its part, number of the part)."""
        block = self._share(self._coalesced_bytes)
        if block is not None:
            self._copy_small(block.address)
            return first, 0, self._publish(block)
        start = aligned(len(first))
        frame = np.zeros(start + self._coalesced_bytes, np.uint8)
        frame.data[: len(first)] = first
        self._copy_small(address_of(frame) + start)
        return frame.data, start, 0

    def _copy_small(self, address: int) -> None:
        for source, offset in self._small:
            ctypes.memmove(address + offset, source.address, source.nbytes)

    def _share(self, nbytes: int) -> Block | None:
        return self._arena.allocate(nbytes) if self._arena is not None and nbytes >= SHARED_BYTES else None

    def _publish(self, block: Block) -> int:
        assert self._arena is not None
        self._blocks.append(self._arena.publish(block))
        return -len(self._blocks)


def _load(head: memoryview, buffers: list[memoryview]) -> Any:
    try:
        return pickle.loads(head, buffers=buffers)
    except Exception as error:
        raise MessageError(f"the head of a payload cannot be opened: {error!r}") from error


def _buffers_in_place(table: PayloadTable, frames: Sequence[Frame]) -> list[memoryview] | None:
    """Return the buffers if each is in a writable, aligned frame, as is common; otherwise None.

    This is three times as fast as `_Unpacking`, which reports errors.
    """
    head, count = table.head, len(frames)
    if table.frames != count or head.part or head.offset or not count or not 0 <= head.size <= len(frames[0]):
        return None
    alignment = max(table.alignment, WORD)
    buffers: list[memoryview] = []
    for place in table.buffers:
        part, begin, size = place.part, place.offset, place.size
        frame = frames[part] if 0 <= part < count else None
        if type(frame) is not memoryview or frame.readonly or frame.format != "B" or size <= 0:
            return None
        if part == 0:
            if begin < head.size or begin + size > frame.nbytes or begin % ALIGNMENT:
                return None
            frame = frame[begin : begin + size]
        elif begin or frame.nbytes != size:
            return None
        if not is_aligned(frame, alignment):
            return None
        buffers.append(frame)
    return buffers


class _Unpacking:
    """Search for the memory of every piece of one payload.

    It checks everything in the table, and allocates at most one copy of each frame.
    """

    def __init__(self, table: PayloadTable, frames: Sequence[Frame], reader: ArenaReader | None) -> None:
        self._table = table
        self._reader = reader
        self._frames = [memoryview(frame).cast("B") for frame in frames]
        #: By part: its memory, aligned and writable, and where in the part that begins.
        self._memory: dict[int, tuple[memoryview, int]] = {}

    def unpack(self) -> Any:
        table = self._table
        if table.frames != len(self._frames):
            raise MessageError(f"payload of {table.frames} frames came with {len(self._frames)}")
        head = self._piece(table.head) if table.head.part else self._head_in_frame(table.head)
        buffers = [self._piece(place) for place in table.buffers]
        return _load(head, buffers)

    def _head_in_frame(self, place: BufferSpan) -> memoryview:
        first = self._frames[0] if self._frames else memoryview(b"")
        if place.offset or not 0 <= place.size <= len(first):
            raise MessageError(f"{place}: not at the start of a first frame of {len(first)} bytes")
        return first[: place.size]

    def _piece(self, place: BufferSpan) -> memoryview:
        found = self._memory.get(place.part)
        if found is None:
            found = self._memory[place.part] = self._open(place.part)
        memory, start = found
        begin, end = place.offset - start, place.offset - start + place.size
        if not 0 <= begin <= end <= len(memory) or begin % ALIGNMENT:
            raise MessageError(f"{place}: not in a part of {start} + {len(memory)} bytes, or not aligned in it")
        return memory[begin:end]

    def _open(self, part: int) -> tuple[memoryview, int]:
        if part < 0:
            return self._open_block(-1 - part), 0
        if part >= len(self._frames):
            raise MessageError(f"part {part} of a payload that has {len(self._frames)} frames")
        frame, start = self._frames[part], 0
        if part == 0:  # do not copy the head and its padding
            head = self._table.head
            start = aligned(head.size) if head.part == 0 else 0
            frame = frame[start:]
        if frame.readonly or not is_aligned(frame, max(self._table.alignment, WORD)):
            frame = aligned_copy(frame).data
        return frame, start

    def _open_block(self, number: int) -> memoryview:
        if number >= len(self._table.blocks):
            raise MessageError(f"block {number} of a payload that has {len(self._table.blocks)}")
        if self._reader is None:
            raise MessageError("a payload is in a worker's shared memory; decoding it needs the ArenaReader")
        return self._reader.view(self._table.blocks[number]).data
