"""Memory that a reader receives records into, and uses again once nobody has a view of it.

Memory that is taken afresh costs a page fault for each 4 KiB, which takes longer than what is received there.
"""

from __future__ import annotations

import sys
from collections import deque

from torch_dpflow._core.checks import check_int

#: Most bytes that are used again: of four batches of 256 records of 110 kB.
_MOST_BYTES = 128 << 20
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

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
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
