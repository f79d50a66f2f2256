"""Has the C library keep the memory that a worker's samples have freed, for the next ones."""

from __future__ import annotations

import ctypes
import os
import sys

#: Freed memory at the top of a heap stays up to so many bytes; larger blocks than the second are mapped, and unmapped
#: when they are freed. glibc allows no more for the latter.
KEPT, MAPPED = 64 << 20, 32 << 20
#: glibc's numbers of these parameters of `mallopt`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Set both thresholds for this process. Nothing where the C library is another one, or the environment sets them.

    By default glibc gives memory back about as soon as a sample is freed, and each page of the next sample is a fault:
    a copy of a record of 110 kB takes 71 µs so, and 9 µs in memory that was kept.
    """
    own = os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
    if sys.platform != "linux" or own or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT)
        mallopt(_MMAP_THRESHOLD, MAPPED)
