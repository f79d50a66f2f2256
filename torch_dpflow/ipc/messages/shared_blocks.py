"""References to blocks in another process's shared memory."""

from __future__ import annotations

import msgspec

#: From this size on something goes through shared memory where it can, bytes. Measured: below it the socket is as fast.
SHARED_BYTES = 1 << 15


class BlockRef(msgspec.Struct, array_like=True, frozen=True):
    """Where a published block lies, as the process that wrote it describes it."""

    #: Number of the segment, never used twice by one arena.
    segment: int
    #: The writer's descriptor of the segment.
    fd: int
    #: Payload bytes of the segment.
    capacity: int
    #: Payload bytes in use.
    nbytes: int
    #: Counts the loans of the segment; a reference can be opened once.
    generation: int
    #: How many segments the writer has retired so far; when this grows, the reader unmaps the retired ones.
    retired: int


class ProbeRef(msgspec.Struct, array_like=True, frozen=True):
    """A published block that holds a token, by which a reader proves that it can read the arena."""

    token: bytes
    block: BlockRef
