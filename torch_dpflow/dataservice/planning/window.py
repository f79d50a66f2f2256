"""How many bytes a reader may have asked for and not got: pure; times are arguments, in seconds.

Where many servers answer at once, their answers meet in the buffer of one switch port; what does not fit is lost, and
a connection whose last packets are lost waits for its retransmission timer: incast. So the reader bounds what is
under way.

Algorithm 1 of the DataServer paper counts records, and is told bandwidth and latency (`benchmarks/staged_window`).
`MeasuredWindow` knows neither: it measures both (Little's law, on the least round trip), as others may use the same
line. Between processes of one host nothing is lost on the way: `FixedWindow`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch_dpflow.checks import check_int

#: A reader may ask for so many bytes at least, and at most.
LEAST, MOST = 32 << 10, 8 << 20
#: How long a measurement counts, seconds.
MEMORY_S = 10.0
#: What is asked for beyond what the line needs, so that a better rate would be seen.
SURPLUS = 1.5
#: A round trip of so many times the least one tells of loss, or of others on the line.
CONGESTED = 4.0
#: A rate is that of so many round trips: a reader that was kept waiting finds several records at once, which would
#: look like a line that is as much faster.
MEASURED = 8.0


class BatchWindow(ABC):
    """Says how many of the next records may be asked for now."""

    def __init__(self, stages: int) -> None:
        self._stages = check_int("stages", stages, minimum=1)
        #: Bytes, and records, that were asked for and have not come.
        self.bytes_out = self.records_out = 0

    @abstractmethod
    def grant(self, lengths: Sequence[int], now: float) -> int:
        """How many of the next records, of these lengths, are to be asked for now.

        At least one if nothing is out. Call `asked` for each of them.
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

    def _fitting(self, lengths: Sequence[int], size: int) -> int:
        """How many of the next records a window of so many bytes has room for, once a stage of it is free."""
        if self.bytes_out > size - size // self._stages:
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

    def grant(self, lengths: Sequence[int], now: float) -> int:
        return self._fitting(lengths, self._size)


class _OutRecord(NamedTuple):
    length: int
    at: float
    #: Whether nothing else was out, and nothing else is asked for before it comes.
    alone: bool


class MeasuredWindow(BatchWindow):
    """The bandwidth-delay product of what was seen, half as much more, and never less than one record.

    After a round trip of `CONGESTED` times the least one it is halved, and grows by one record for each window that
    has come. At the beginning, and when no round trip has been measured for `MEMORY_S`, one record is asked for
    alone.
    """

    def __init__(self, *, stages: int = 4) -> None:
        super().__init__(stages)
        #: Bytes that have come since the last measurement, and when that was.
        self._came, self._since = 0, 0.0
        #: When a record has come last.
        self._last = 0.0
        self._rate = _Extreme(best=max)
        self._round_trip = _Extreme(best=min)
        self._cap = float(MOST)
        self._halved_at = -math.inf
        #: Bytes that have come since the cap grew last.
        self._since_growth = 0
        self._probing = False

    def size(self, now: float) -> int:
        """Bytes that may be out."""
        rate, round_trip = self._rate.value(now), self._round_trip.value(now)
        needed = LEAST if rate is None or round_trip is None else SURPLUS * rate * round_trip
        return int(min(max(needed, LEAST), MOST, self._cap))

    def grant(self, lengths: Sequence[int], now: float) -> int:
        if self._probing or not lengths:
            return 0
        if not self.records_out and self._round_trip.is_old(now):
            self._probing = True
            return 1
        return self._fitting(lengths, self.size(now))

    def asked(self, length: int, now: float) -> _OutRecord:
        least = self._round_trip.value(now)
        if not self.records_out and (least is None or now - self._last > least):
            self._came, self._since = 0, now  # nothing was asked for meanwhile
        token = _OutRecord(length, now, self._probing)
        super().asked(length, now)
        return token

    def arrived(self, token: object, now: float) -> None:
        assert isinstance(token, _OutRecord)
        self._leave(token.length)
        self._came, self._last = self._came + token.length, now
        took = now - token.at
        if token.alone:
            self._probing = False
            self._round_trip.see(took, now)
        least = self._round_trip.value(now)
        if least and now - self._since >= MEASURED * least:
            self._rate.see(self._came / (now - self._since), now)
            self._came, self._since = 0, now
        self._adapt(token, took, now)

    def given_up(self, token: object) -> None:
        assert isinstance(token, _OutRecord)
        self._leave(token.length)
        if token.alone:
            self._probing = False

    def _adapt(self, token: _OutRecord, took: float, now: float) -> None:
        least = self._round_trip.value(now)
        if least is not None and took > CONGESTED * least and token.at >= self._halved_at:
            self._cap = max(float(LEAST), min(self._cap, self.size(now)) / 2)
            self._halved_at, self._since_growth = now, 0
            return
        self._since_growth += token.length
        if self._since_growth >= self.size(now):
            self._cap = min(float(MOST), self._cap + token.length)
            self._since_growth = 0


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

    def is_old(self, now: float) -> bool:
        """Whether nothing was seen in the last `MEMORY_S`."""
        return not self._seen or self._seen[-1][0] < now - MEMORY_S
