"""Which size of a window is best, by trial: pure; times are arguments, in seconds."""

from __future__ import annotations

import math

#: How many times as large a size is tried.
STEP = 1.5
#: A size is worth it if the rate grows by at least this power of how much larger it is.
WORTH = 0.15
#: A rate is that of so many windows' bytes, as records of several lanes come in bursts, and of so many records.
MEASURED, MEASURED_RECORDS = 8, 64
#: A size is clearly worth it, or not, by this power; that is known after so many windows' bytes alone.
CLEARLY = 0.5
#: Between trials that were of no use, seconds: ever longer. A reader that is suspended for a while looks like a timer
#: that ran out; with pauses of up to 30 s, one such in 500 records kept the size at a third of what four links need.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 4.0


class SizeTrials:
    """The size of a window with which bytes come about as fast as with a larger one.

    From time to time another size is tried: a larger one is kept if the rate grows with it, a smaller one if the rate
    does not fall by as much.
    """

    def __init__(self) -> None:
        self._least, self._most, self._unit = 1.0, 1.0, 1
        self._kept = 1.0
        #: What is tried now; None: nothing.
        self._tried: float | None = None
        #: The next trial: so many times as large; when; and how many there were of no use since one was.
        self._step, self._at, self._in_vain = STEP, 0.0, 0
        self._pause_s = FIRST_PAUSE_S
        #: What was the most when a trial was of no use last.
        self._most_in_vain = math.inf
        self._usual_rate = 0.0
        #: Bytes until measuring begins; bytes and records that were measured since, in how many seconds.
        self._settling, self._came, self._records, self._seconds = 0.0, 0, 0, 0.0
        #: The last arrival.
        self._last = 0.0

    @property
    def size(self) -> float:
        """How many bytes may be out now."""
        return self._clamped(self._kept if self._tried is None else self._tried)

    def bound(self, least: float, most: float, unit: int) -> None:
        """The size is between these from now on; unit: what a larger one has more, at least."""
        self._least, self._most, self._unit = least, most, unit
        if most > 2 * self._most_in_vain:
            self._most_in_vain, self._step = math.inf, STEP
            self._at, self._pause_s = 0.0, FIRST_PAUSE_S

    def came(self, length: int, now: float) -> float | None:
        """Bytes came while the size alone kept more from being under way; their rate, where it is known by now."""
        if self._settling > 0:
            self._settling, self._last = self._settling - length, now
            return None
        self._came, self._records = self._came + length, self._records + 1
        self._seconds, self._last = self._seconds + now - self._last, now
        if self._came < MEASURED * self.size or not self._seconds:
            return None
        rate = self._came / self._seconds
        if self._records < MEASURED_RECORDS and not self._is_clear(rate):
            return None
        self._judge(rate, now)
        if self._tried is None and now >= self._at:
            self._try(now)
        self._begin()
        return rate

    def pause(self) -> None:
        """Something else than the size keeps more from being under way."""
        self._settling = self.size

    def shrink(self, now: float) -> None:
        """The size was too large: what is tried is given up, or what is kept halved."""
        if self._tried is None:
            self._kept = self.size / 2
        self._tried = None
        self._step, self._at = STEP, now + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._begin()

    # -- inside ----------------------------------------------------------------------------------------------

    def _clamped(self, size: float) -> float:
        return min(max(size, self._least), self._most)

    def _begin(self) -> None:
        self._settling, self._came, self._records, self._seconds = self.size, 0, 0, 0.0

    def _is_worth(self, rate: float, power: float) -> bool:
        """Whether the rate follows the size that is tried."""
        return rate >= self._usual_rate * math.pow(self.size / self._clamped(self._kept), power)

    def _is_clear(self, rate: float) -> bool:
        """Whether a larger size is worth it for certain, or a smaller one is not."""
        return self._tried is not None and self._is_worth(rate, CLEARLY) == (self._step > 1)

    def _judge(self, rate: float, now: float) -> None:
        if self._tried is None:
            self._usual_rate = rate
        elif self._is_worth(rate, WORTH):
            self._kept, self._tried, self._usual_rate = self.size, None, rate
            self._in_vain, self._pause_s = 0, FIRST_PAUSE_S
        else:
            self._tried = None
            self._turn(now)

    def _turn(self, now: float) -> None:
        """The other direction is next, after a pause where neither was of use."""
        self._step = 1 / self._step
        self._in_vain += 1
        self._most_in_vain = self._most
        self._at = now
        if self._in_vain >= 2:
            self._at += self._pause_s
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)

    def _try(self, now: float) -> None:
        own = self.size
        tried = self._clamped(max(own * self._step, own + self._unit) if self._step > 1 else own * self._step)
        if abs(tried - own) < self._unit / 2:
            self._turn(now)  # there is no such size
        else:
            self._tried = tried
