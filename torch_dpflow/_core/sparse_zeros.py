"""Arrays of zeros whose pages take memory, and time, only once they are written."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

#: Smaller arrays come from numpy.
_MIN_BYTES = 1 << 22


def sparse_zeros(length: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return zeros of shape (length,), whose pages take memory only once they are written.

    For arrays of 4 MiB or more, numpy requests huge pages: a few writes at random places fill a whole array with zeros,
    which takes a second per gigabyte. Here each such write fills one page of 4 KiB.
    """
    kind = np.dtype(dtype)
    if length * kind.itemsize < _MIN_BYTES:
        return np.zeros(length, kind)
    memory = mmap.mmap(-1, length * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, kind)


def clear_before(array: NDArray[Any], end: int) -> None:
    """Set the elements before `end` of a result of `sparse_zeros` to zero; releases memory of a large array."""
    memory = getattr(array.base, "obj", None)
    whole = end * array.itemsize // mmap.PAGESIZE * mmap.PAGESIZE if isinstance(memory, mmap.mmap) else 0
    if isinstance(memory, mmap.mmap) and whole:
        memory.madvise(mmap.MADV_DONTNEED, 0, whole)
    array[whole // array.itemsize : end] = 0
