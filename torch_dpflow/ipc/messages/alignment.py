"""The alignment of memory that crosses a process boundary."""

from __future__ import annotations

#: A cache line, and the widest vector: memory that we allocate begins at a multiple of it.
ALIGNMENT = 64


def aligned(size: int) -> int:
    """The least multiple of ALIGNMENT that is not below `size`."""
    return size + -size % ALIGNMENT


#: The alignment that a received frame has at best, by libzmq's header. It is enough for every dtype but numpy's long
#: double, whose frames are copied; to copy the others would cost more than unaligned vectors do.
WORD = 8
