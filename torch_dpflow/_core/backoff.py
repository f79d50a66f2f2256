"""Exponential back-off with full jitter, for transient failures."""

from __future__ import annotations

import random
from collections.abc import Callable

# Not the global generator, whose seed belongs to the user, and whose state forked workers share.
_RANDOM = random.SystemRandom()


class Backoff:
    """Random pauses after consecutive failures, so that clients that failed together retry at different times.

    Args:
        first_s: upper limit of the pause after the first failure, in seconds; each further failure doubles it.
        longest_s: upper limit of all pauses, in seconds.
        draw: returns the fraction of the upper limit to wait, from 0 to below 1.
    """

    def __init__(
        self, first_s: float = 0.1, longest_s: float = 1.0, *, draw: Callable[[], float] = _RANDOM.random
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._draw = draw
        self.failures = 0

    def reset(self) -> None:
        self.failures = 0

    def pause_s(self) -> float:
        """Record a failure and return the seconds to wait."""
        longest_s: float = min(self._longest_s, self._first_s * 2.0 ** min(self.failures, 100))
        self.failures += 1
        return self._draw() * longest_s
