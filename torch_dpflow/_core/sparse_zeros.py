"""Arrays of zeros whose pages take memory, and time, only once they are written."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

#: Smaller arrays come from numpy.
_MIN_BYTES = 1 << 22


def sparse_zeros(length: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return zeros of shape (length,).

    numpy requests huge pages for a large array: a few writes at random places fill all of it with zeros, a second for
    each gigabyte. Here they take a page of 4 KiB each. A fork has a copy, as of any other array.
    """
    kind = np.dtype(dtype)
    if length * kind.itemsize < _MIN_BYTES:
        return np.zeros(length, kind)
    memory = mmap.mmap(-1, length * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, kind)
