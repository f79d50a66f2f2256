"""One deadline for the reads of a batch, extended while bytes arrive."""

from __future__ import annotations

import time
from collections.abc import Callable


class BatchDeadline:
    """A deadline that each successful read of a batch renews. Thread-safe.

    Each read has a deadline of its own, but not all reads of a batch run at once: on a storage that hangs
    the waiting ones would each take as long again. While reads succeed, a large batch may take any time.

    Args:
        seconds: the longest time without a successful read.
        clock: seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        #: On the clock, unless a read succeeds before.
        self.deadline = clock() + seconds

    def renew(self) -> None:
        """A read has succeeded."""
        self.deadline = self._clock() + self._seconds

    @property
    def is_over(self) -> bool:
        return self._clock() >= self.deadline
