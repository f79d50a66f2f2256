"""A clock that stands still while its process does."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A service that comes round less often than this was held up, seconds.
MAX_STEP_S = 1.0


class SuspendAwareClock:
    """Seconds that this process has been running, for leases: call it at least every `MAX_STEP_S` seconds.

    Whoever was frozen itself, with its container or by a debugger, has not read what others sent meanwhile, and
    must not take them for dead: of a longer pause between two calls no more than `MAX_STEP_S` counts. One thread
    calls.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen = clock()
        self._held_up = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._held_up += max(0.0, now - self._seen - MAX_STEP_S)
        self._seen = now
        return now - self._held_up
