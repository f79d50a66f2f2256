"""Where the pieces of an encoded object lie, in frames and in shared memory."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from torch_dpflow.ipc.messages.alignment import WORD
from torch_dpflow.ipc.messages.shared_blocks import BlockRef

#: One part of a message.
Frame: TypeAlias = "bytes | bytearray | memoryview"


class BufferSpan(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where one piece of a parcel lies: `size` bytes at `offset` of a frame or a block."""

    #: Number of the frame; or -1 for the first block, -2 for the second, and so on.
    part: int
    offset: int
    size: int


class ParcelTable(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where the head and the buffers of a parcel lie in its frames and blocks."""

    #: How many frames of a message the parcel takes.
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
