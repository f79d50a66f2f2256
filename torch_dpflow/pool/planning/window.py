"""How many bytes a reader may have asked for and not got: pure; times are arguments, in seconds.

Where many servers answer at once, their answers meet in the buffer of one switch port; what does not fit is lost, and
a connection whose last packets are lost waits for its retransmission timer: incast. So the reader bounds what is
under way.

Algorithm 1 of the DataServer paper counts records, and is told bandwidth and latency (`benchmarks/staged_window`).
`MeasuredWindow` knows neither, nor whether servers share one line or have a link each: it tries what is of use.
Between processes of one host nothing is lost on the way: `FixedWindow`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch_dpflow._core.checks import check_int
from torch_dpflow.pool.planning.size_trials import SizeTrials

#: A reader may ask for so many bytes at least, and at most.
LEAST, MOST = 32 << 10, 8 << 20
#: How long a rate and a round trip count, seconds.
MEMORY_S = 10.0
#: What may be asked for beyond what the line needs by Little's law.
SURPLUS = 1.5
#: What may be asked of each lane: while one record comes, the next one is under way.
RECORDS_A_LANE = 2
#: Bytes of a stage at most: while one of several lanes waits for it, its link is idle.
STAGE = 64 << 10
#: So much longer than usual, seconds, a record comes for which a retransmission timer ran out: Linux' least one.
TIMEOUT_S = 0.2


class BatchWindow(ABC):
    """Says how many of the next records may be asked for now."""

    def __init__(self, stages: int) -> None:
        self._stages = check_int("stages", stages, minimum=1)
        #: Bytes, and records, that were asked for and have not come.
        self.bytes_out = self.records_out = 0

    @abstractmethod
    def grant(self, lengths: Sequence[int], now: float, lanes: int = 1) -> int:
        """How many of the next records, of these lengths, are to be asked for now.

        At least one if nothing is out. Call `asked` for each of them. Call it after each arrival, also with no lengths:
        nothing is left then.

        lanes: over which those that are left come.
        """

    def asked(self, length: int, now: float) -> object:
        """A record was asked for; hand in what this returns when it has come."""
        self.bytes_out += length
        self.records_out += 1
        return length

    def arrived(self, token: object, now: float) -> None:
        """A record has come."""
        assert isinstance(token, int)
        self._leave(token)

    def given_up(self, token: object) -> None:
        """A record does not come, or not now."""
        assert isinstance(token, int)
        self._leave(token)

    def _leave(self, length: int) -> None:
        self.bytes_out -= length
        self.records_out -= 1

    def _fitting(self, lengths: Sequence[int], size: int, most: int = MOST) -> int:
        """How many of the next records a window of so many bytes has room for, once a stage of it is free.

        most: bytes of a stage.
        """
        if self.bytes_out > size - min(most, size // self._stages):
            return 0
        granted = out = 0
        for length in lengths:
            if self.bytes_out + out + length > size and (granted or self.records_out):
                break
            granted, out = granted + 1, out + length
        return granted


class FixedWindow(BatchWindow):
    """So many bytes, and never less than one record."""

    def __init__(self, size: int, *, stages: int = 4) -> None:
        super().__init__(stages)
        self._size = check_int("size", size, minimum=1)

    def grant(self, lengths: Sequence[int], now: float, lanes: int = 1) -> int:
        return self._fitting(lengths, self._size)


class _OutRecord(NamedTuple):
    length: int
    at: float
    #: Whether the window alone kept more from being asked for.
    is_limited: bool


class MeasuredWindow(BatchWindow):
    """The least with which records come about as fast as with more, and never less than one record.

    Where each server has a link of its own, records come the faster the more of them are under way, until each link has
    its own; where servers share the reader's line, they do not. A round trip does not tell the two apart: one record
    fills a slow link, and a link that was idle lets a burst through. So other sizes are tried (`SizeTrials`). None is
    larger than what can be of use: two records for each lane, or Little's law on the best rate and the least round
    trip. After a round trip in which a retransmission timer has run out it is halved.
    """

    def __init__(self, *, stages: int = 4) -> None:
        super().__init__(stages)
        self._trials = SizeTrials()
        self._rate, self._round_trip = _Extreme(best=max), _Extreme(best=min)
        #: A usual round trip, seconds; None: not known yet.
        self._usual_s: float | None = None
        self._shrunk_at = -math.inf
        #: Lanes of the batch, and the longest of its records.
        self._lanes, self._longest = 1, 0
        #: Whether the window alone keeps more from being asked for.
        self._is_limited = False

    def size(self) -> int:
        """Bytes that may be out."""
        return int(self._trials.size)

    def grant(self, lengths: Sequence[int], now: float, lanes: int = 1) -> int:
        if not lengths:
            self._is_limited = False
            self._trials.pause()
            return 0
        if not self.records_out:
            self._lanes, self._longest = lanes, 0
        self._longest = max(self._longest, *lengths)
        self._bound(now)
        granted = self._fitting(lengths, self.size(), STAGE)
        self._is_limited = granted < len(lengths) and lanes >= min(self._lanes, self.records_out + granted)
        if not self._is_limited:
            self._trials.pause()
        return granted

    def asked(self, length: int, now: float) -> _OutRecord:
        super().asked(length, now)
        return _OutRecord(length, now, self._is_limited)

    def arrived(self, token: object, now: float) -> None:
        assert isinstance(token, _OutRecord)
        self._leave(token.length)
        took = now - token.at
        self._round_trip.see(took, now)
        usual = took if self._usual_s is None else self._usual_s
        if token.is_limited and took > 2 * usual + TIMEOUT_S:
            if token.at >= self._shrunk_at:
                self._trials.shrink(now)
                self._shrunk_at = now
            return
        self._usual_s = usual + (took - usual) / 16
        if self._is_limited and (rate := self._trials.came(token.length, now)) is not None:
            self._rate.see(rate, now)

    def given_up(self, token: object) -> None:
        assert isinstance(token, _OutRecord)
        self._leave(token.length)

    def _bound(self, now: float) -> None:
        rate, round_trip = self._rate.value(now), self._round_trip.value(now)
        held = 0.0 if rate is None or round_trip is None else SURPLUS * rate * round_trip
        least = max(LEAST, self._longest)
        of_use = max(RECORDS_A_LANE * self._lanes * self._longest, held)
        self._trials.bound(least, max(least, min(MOST, of_use)), max(1, self._longest))


class _Extreme:
    """The best value seen in the last `MEMORY_S`; the latest one where there is none."""

    def __init__(self, best: object) -> None:
        self._is_max = best is max
        #: (when, value), each better than all that follow.
        self._seen: deque[tuple[float, float]] = deque()

    def see(self, value: float, now: float) -> None:
        seen = self._seen
        while seen and (seen[-1][1] <= value if self._is_max else seen[-1][1] >= value):
            seen.pop()
        seen.append((now, value))

    def value(self, now: float) -> float | None:
        seen = self._seen
        while len(seen) > 1 and seen[0][0] < now - MEMORY_S:
            seen.popleft()
        return seen[0][1] if seen else None
