"""Pages of 2 MiB for what a test process holds: forking a worker of it takes half as long."""

from __future__ import annotations

import ctypes
from pathlib import Path

#: As <asm-generic/mman-common.h> numbers it; in Linux since 6.1.
MADV_COLLAPSE = 25
SIZE = 2 << 20


def collapse() -> None:
    """Move this process's private memory to huge pages, as far as the kernel does that.

    Each fork copies the page table. Of the half a gigabyte that all tests' modules take, it has 120,000 entries for
    small pages, and thousands of workers are forked.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, access, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in area.split("-"))
        begin, end = -(-begin // SIZE) * SIZE, end // SIZE * SIZE
        if access == "rw-p" and inode == "0":
            # One by one: the kernel ends at the first that it cannot move, and a third of the memory stayed as it was.
            for page in range(begin, end, SIZE):
                libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(SIZE), MADV_COLLAPSE)
