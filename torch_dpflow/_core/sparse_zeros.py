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

    numpy requests huge pages for a large array: a few writes at random places fill all of it with zeros, which takes a
    second per gigabyte. Here each write fills one page of 4 KiB.
    """
    kind = np.dtype(dtype)
    if length * kind.itemsize < _MIN_BYTES:
        return np.zeros(length, kind)
    memory = mmap.mmap(-1, length * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, kind)


def clear_before(array: NDArray[Any], end: int) -> None:
    """Set the elements before `end` of an array from `sparse_zeros` to zero; whole pages no longer take memory."""
    memory = getattr(array.base, "obj", None)
    whole = end * array.itemsize // mmap.PAGESIZE * mmap.PAGESIZE if isinstance(memory, mmap.mmap) else 0
    if isinstance(memory, mmap.mmap) and whole:
        memory.madvise(mmap.MADV_DONTNEED, 0, whole)
    array[whole // array.itemsize : end] = 0
