"""A clock that stops while its process is suspended."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Of the time between two readings no more than this counts, seconds.
MAX_STEP_S = 1.0


class SuspendAwareClock:
    """Seconds that this process has been running, for leases. Read it at least every `MAX_STEP_S` seconds.

    A process that was suspended itself, with its container or by a debugger, has not read what its peers sent
    meanwhile, and must not let their leases expire for that. One thread reads it at a time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._suspended = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._suspended += max(0.0, now - self._last - MAX_STEP_S)
        self._last = now
        return now - self._suspended
