"""Memory that a reader receives records into, and uses again once nobody has a view of it.

Memory that is taken afresh costs a page fault for each 4 KiB, which takes longer than what is received there.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from torch_dpflow.checks import check_int

#: Most bytes that nobody uses and that are kept: two batches of 256 records of 110 kB.
_MOST_BYTES = 64 << 20
#: Blocks have sizes of which there are so many to each power of two, so that similar records share them.
_SIZES_BITS = 3


class ReceiveMemory:
    """Lends memory for records. One thread at a time; any may drop what was lent.

    most_bytes: free memory that is kept; where it would be more, all of it is freed, as sizes may have changed.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = check_int("most_bytes", most_bytes, minimum=0)
        #: Blocks that have lost their users, as these go: at any time, in any thread.
        self._dropped: deque[npt.NDArray[np.uint8]] = deque()
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self._free_bytes = 0

    def lend(self, size: int) -> memoryview:
        """Memory of so many bytes, at least one, that is not cleared; lent again once all views of it are gone."""
        while self._dropped:
            self._keep(self._dropped.popleft())
        capacity = _capacity(size)
        if free := self._free.get(capacity):
            block = free.pop()
            self._free_bytes -= capacity
        else:
            block = np.empty(capacity, np.uint8)
        # Not a slice: numpy has slices of slices refer to the innermost array, and here all have to refer to this one.
        lent = np.frombuffer(block, np.uint8, size)
        weakref.finalize(lent, self._dropped.append, block).atexit = False
        return lent.data

    def _keep(self, block: npt.NDArray[np.uint8]) -> None:
        if self._free_bytes + len(block) > self._most_bytes:
            self._free, self._free_bytes = {}, 0
        if len(block) <= self._most_bytes:
            self._free.setdefault(len(block), []).append(block)
            self._free_bytes += len(block)


def _capacity(size: int) -> int:
    step = 1 << max(0, (size - 1).bit_length() - 1 - _SIZES_BITS)
    return -(-size // step) * step
