"""How memory is aligned that crosses a process boundary."""

from __future__ import annotations

#: Vector instructions and cache lines want it; memory of our own begins at a multiple of it.
ALIGNMENT = 64


def aligned(size: int) -> int:
    """The least multiple of ALIGNMENT that is not below `size`."""
    return size + -size % ALIGNMENT


#: Enough for every item but numpy's long double; what a socket received is aligned to this and no more, and a
#: copy of it would cost more than unaligned vectors do.
WORD = 8
