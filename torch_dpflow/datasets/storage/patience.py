"""One deadline for the reads of a batch, extended while bytes arrive."""

from __future__ import annotations

import time
from collections.abc import Callable


class Patience:
    """Ends so long after the last read of a batch that brought its bytes. Thread-safe.

    Each read has a deadline of its own, but a batch has more of them than run at once: on a storage that hangs
    those that wait would each take as long again. Where bytes come, a large batch takes its time.

    Args:
        seconds: how long without bytes is too long.
        clock: tells the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        #: When it ends, on the clock, unless bytes come before.
        self.deadline = clock() + seconds

    def renew(self) -> None:
        """A read has brought its bytes."""
        self.deadline = self._clock() + self._seconds

    @property
    def is_over(self) -> bool:
        return self._clock() >= self.deadline
