"""How long tasks usually take, and so after how long a worker counts as stuck."""

from __future__ import annotations

#: Weight of the latest task in the moving average.
_WEIGHT = 0.1
#: A worker is stuck at a task that takes so many times the average.
_TIMES = 4.0


class Pace:
    """A moving average of the time that tasks take.

    Args:
        least_s: a worker that has run a task for less is never stuck, seconds.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._usual_s = 0.0

    @property
    def patience_s(self) -> float:
        """After how long at one task a worker counts as stuck, seconds."""
        return max(self._least_s, _TIMES * self._usual_s)

    def took(self, seconds: float) -> None:
        """A task has taken so long; at most `patience_s` of it counts, or one stuck task would raise that."""
        self._usual_s += _WEIGHT * (min(seconds, self.patience_s) - self._usual_s)
