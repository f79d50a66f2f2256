"""Arrays of zeros whose pages take memory once they are written, until they are cleared."""

from __future__ import annotations

import mmap

import numpy as np
import psutil
import pytest

from torch_dpflow._core.sparse_zeros import clear_before, sparse_zeros


@pytest.mark.parametrize("length", [3000, 3_000_000])  # of numpy, and of the kernel
def test_what_was_cleared_reads_as_zeros(length: int) -> None:
    array = sparse_zeros(length, np.int32)
    array[:] = 7
    for end in (0, 1, 1024, 2500, length):
        clear_before(array, end)
        assert not array[:end].any()
        assert (array[end:] == 7).all()


def test_what_was_cleared_takes_no_memory() -> None:
    process, pages = psutil.Process(), 16384
    array = sparse_zeros(pages * mmap.PAGESIZE, np.uint8)
    before = process.memory_info().rss
    array[:] = 1
    assert process.memory_info().rss - before > 0.9 * len(array)
    clear_before(array, len(array))
    assert process.memory_info().rss - before < 0.1 * len(array)
