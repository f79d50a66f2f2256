"""Time that passes while this process runs."""

from __future__ import annotations

import time

#: What passes between two looks at most, seconds: a longer gap was this process's own.
_LONGEST_S = 1.5


class RunningClock:
    """Seconds since it was made, without those in which nobody looked: so a head that was frozen loses no member."""

    def __init__(self) -> None:
        self._now, self._looked_at = 0.0, time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self._now += min(now - self._looked_at, _LONGEST_S)
        self._looked_at = now
        return self._now
