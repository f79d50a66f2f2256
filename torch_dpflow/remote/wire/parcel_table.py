"""Where the pieces of an encoded object lie, in frames and in shared memory."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from torch_dpflow.remote.wire.alignment import WORD
from torch_dpflow.remote.wire.shared_blocks import BlockRef

#: What a message is made of.
Frame: TypeAlias = "bytes | bytearray | memoryview"


class BufferSpan(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where one piece of a parcel lies: `size` bytes at `offset` of a frame or a block."""

    #: Number of the frame; or -1 for the first block, -2 for the second, and so on.
    part: int
    offset: int
    size: int


class ParcelTable(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is in the frames and blocks of a parcel."""

    #: How many frames the parcel takes in a message.
    frames: int
    blocks: tuple[BlockRef, ...]
    head: BufferSpan
    #: One for each use of a buffer in the head, in order; the same place twice is the same memory.
    buffers: tuple[BufferSpan, ...]
    #: What the address of every buffer has to be a multiple of, for the items that lie in it.
    alignment: int = WORD

    @property
    def nbytes(self) -> int:
        """Bytes of the object, in frames and in shared memory."""
        return self.head.size + sum(place.size for place in set(self.buffers))
