"""A limit on how often something is done."""

from __future__ import annotations

from collections import deque

from torch_dpflow._core.checks import check_number

#: The time over which a rate is an average, seconds.
PERIOD_S = 10.0


class RateLimit:
    """At most so many in any `PERIOD_S`, which may come all at once: control planes count so.

    A bucket of that size which is filled at that rate would let twice as many through. Time is an argument.

    Args:
        per_s: a second, on average, above 0. Below one in a period, one in as much time as it takes.
    """

    def __init__(self, per_s: float) -> None:
        check_number("per_s", per_s, exclusive=True)
        self.period_s = max(PERIOD_S, 1.0 / per_s)
        self._latest: deque[float] = deque(maxlen=max(1, int(per_s * self.period_s)))

    def wait_s(self, now: float) -> float:
        """How long until the next is allowed, seconds; 0 if it is now."""
        if len(self._latest) < (self._latest.maxlen or 1):
            return 0.0
        return max(0.0, self.period_s - (now - self._latest[0]))

    def note(self, now: float) -> None:
        """One is done now."""
        self._latest.append(now)
