"""Where an encoded object lies, in frames and in another process's shared memory."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

#: A cache line, and the widest vector: allocated memory begins at a multiple of it, bytes.
ALIGNMENT = 64
#: The alignment that a received frame has at best, by libzmq's header. It is enough for every dtype but numpy's long
#: double, whose frames are copied; to copy the others would cost more than unaligned vectors do.
WORD = 8
#: From this size on data goes through shared memory where possible, bytes. Measured: below it the socket is as fast.
SHARED_BYTES = 1 << 15

#: One part of a message.
Frame: TypeAlias = "bytes | bytearray | memoryview"


def aligned(size: int) -> int:
    """Return `size`, rounded up to a multiple of ALIGNMENT."""
    return size + -size % ALIGNMENT


class BlockRef(msgspec.Struct, array_like=True, frozen=True):
    """Where a published block lies, as the process that wrote it describes it."""

    #: Number of the segment, never used twice by one arena.
    segment: int
    #: The writer's descriptor of the segment.
    fd: int
    #: Bytes of the segment that can hold data.
    capacity: int
    #: Bytes of the segment that hold data.
    nbytes: int
    #: Counts the loans of the segment; a reference can be opened once.
    generation: int
    #: How many segments the writer has retired so far; when this grows, the reader unmaps the retired ones.
    retired: int


class ProbeRef(msgspec.Struct, array_like=True, frozen=True):
    """A published block that holds a token, by which a reader proves that it can read the arena."""

    token: bytes
    block: BlockRef


class BufferSpan(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where one piece of a payload lies: `size` bytes at `offset` of a frame or a block."""

    #: Number of the frame; or -1 for the first block, -2 for the second, and so on.
    part: int
    offset: int
    size: int


class PayloadTable(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where the head and the buffers of a payload lie in its frames and blocks."""

    #: How many frames of a message the payload takes.
    frames: int
    blocks: tuple[BlockRef, ...]
    head: BufferSpan
    #: One for each use of a buffer in the head, in order; equal spans are the same memory.
    buffers: tuple[BufferSpan, ...]
    #: The alignment that the items in the buffers need, bytes.
    alignment: int = WORD

    @property
    def nbytes(self) -> int:
        """Bytes of the head and the buffers, in frames and in shared memory."""
        return self.head.size + sum(place.size for place in set(self.buffers))
