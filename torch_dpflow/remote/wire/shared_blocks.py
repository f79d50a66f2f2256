"""References into shared memory of another process."""

from __future__ import annotations

import msgspec

#: From this size on something goes through shared memory where it can, bytes. Measured: below it the socket is as fast.
SHARED_BYTES = 1 << 15


class BlockRef(msgspec.Struct, array_like=True, frozen=True):
    """Where a published block lies, in the words of the process that wrote it."""

    #: Number of the segment, never used twice by one arena.
    segment: int
    #: The writer's descriptor of the segment.
    fd: int
    #: Payload bytes of the segment.
    capacity: int
    #: Payload bytes in use.
    nbytes: int
    #: Which lending of the segment this is; a reference is good for one opening.
    generation: int
    #: How many segments the writer has retired so far; when this grows, the reader looks for them and unmaps.
    retired: int


class ProbeRef(msgspec.Struct, array_like=True, frozen=True):
    """A published block that holds a token, by which a reader finds out whether it can read the arena."""

    token: bytes
    block: BlockRef
