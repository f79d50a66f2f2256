"""How long tasks usually take, and so when a worker is held up."""

from __future__ import annotations

#: Weight of the latest task in the usual time.
_WEIGHT = 0.1
#: A task that takes so many times the usual time is held up.
_TIMES = 4.0


class Pace:
    """Follows the time that tasks take.

    Args:
        least_s: a task that has run for less is never held up, seconds.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._usual_s = 0.0

    @property
    def patience_s(self) -> float:
        """A task that has run for so long is held up, seconds."""
        return max(self._least_s, _TIMES * self._usual_s)

    def took(self, seconds: float) -> None:
        """A task has taken so long. One that was held up counts for no more than the patience with it."""
        self._usual_s += _WEIGHT * (min(seconds, self.patience_s) - self._usual_s)
