"""Limit of the bytes that a reader has requested and not received. Pure; times are arguments, in seconds.

If many servers answer at once, their answers meet in the buffer of one switch port. What does not fit is lost, and a
connection that loses its last packets waits for its retransmission timer: incast. So the reader bounds what is
outstanding.

Algorithm 1 of the DataServer paper counts records, and is given bandwidth and latency.
`MeasuredWindow` knows neither, nor whether servers share one line or have a link each: it tries sizes. Between
processes of one host nothing is lost: `FixedWindow`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch_dpflow._core.checks import check_int

#: Factor between a size and the next one tried.
STEP = 1.5
#: A larger size is kept if the rate grows by at least this power of the factor.
WORTH = 0.15
#: A rate is measured over this many windows' bytes, as records arrive in bursts, and this many records.
MEASURED, MEASURED_RECORDS = 8, 64
#: A size is clearly better, or not, by this power; then the number of records does not matter.
CLEARLY = 0.5
#: Growing pauses between useless trials, seconds. A suspended reader looks like a retransmission timer
#: that expired; with pauses of up to 30 s, one in 500 records kept the size at a third of what four links need.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 4.0


class SizeTrials:
    """Smallest window size with which bytes arrive about as fast as with a larger one, found by trials.

    From time to time another size is tried: a larger one is kept if the rate grows with it, a smaller one if the rate
    does not fall by as much.
    """

    def __init__(self) -> None:
        self._least, self._most, self._unit = 1.0, 1.0, 1
        self._kept = 1.0
        #: Size on trial; None if there is none.
        self._tried: float | None = None
        #: Next trial: factor, time, and the number of useless trials in a row.
        self._step, self._at, self._in_vain = STEP, 0.0, 0
        self._pause_s = FIRST_PAUSE_S
        #: Upper bound at the last useless trial.
        self._max_in_vain = math.inf
        self._usual_rate = 0.0
        #: Bytes until measuring begins; bytes, records and seconds measured since.
        self._settling, self._came, self._records, self._seconds = 0.0, 0, 0, 0.0
        #: Time of the last arrival.
        self._last = 0.0

    @property
    def size(self) -> float:
        """Bytes that may be outstanding now."""
        return self._clamped(self._kept if self._tried is None else self._tried)

    def bound(self, least: float, most: float, unit: int) -> None:
        """Set the bounds of the size. unit: minimum step to a larger size."""
        self._least, self._most, self._unit = least, most, unit
        if most > 2 * self._max_in_vain:
            self._max_in_vain, self._step = math.inf, STEP
            self._at, self._pause_s = 0.0, FIRST_PAUSE_S

    def received(self, length: int, now: float) -> float | None:
        """Record bytes that arrived while only the size limited requests; return their rate once it is known."""
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
        """Record that something other than the size limits requests."""
        self._settling = self.size

    def shrink(self, now: float) -> None:
        """Record that the size was too large: end a trial, or halve the kept size."""
        if self._tried is None:
            self._kept = self.size / 2
        self._tried = None
        self._step, self._at = STEP, now + self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        self._begin()

    # -- inside ----------------------------------------------------------------------------------------------

    def _clamped(self, size: float) -> float:
        return min(max(size, self._least), self._most)

    def _begin(self) -> None:
        self._settling, self._came, self._records, self._seconds = self.size, 0, 0, 0.0

    def _is_worth(self, rate: float, power: float) -> bool:
        """Return whether the rate has grown with the tried size."""
        return rate >= self._usual_rate * math.pow(self.size / self._clamped(self._kept), power)

    def _is_clear(self, rate: float) -> bool:
        """Return whether a larger size was clearly better, or a smaller one clearly worse."""
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
        """Try the other direction next, after a pause if neither helped."""
        self._step = 1 / self._step
        self._in_vain += 1
        self._max_in_vain = self._most
        self._at = now
        if self._in_vain >= 2:
            self._at += self._pause_s
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)

    def _try(self, now: float) -> None:
        own = self.size
        tried = self._clamped(max(own * self._step, own + self._unit) if self._step > 1 else own * self._step)
        if abs(tried - own) < self._unit / 2:
            self._turn(now)  # out of bounds
        else:
            self._tried = tried


#: Bounds of the window, bytes.
MIN_WINDOW, MAX_WINDOW = 32 << 10, 8 << 20
#: How long a measured rate or round trip counts, seconds.
MEMORY_S = 10.0
#: Factor beyond what the line needs by Little's law.
SURPLUS = 1.5
#: Outstanding records per connection: while one arrives, the next is on its way.
RECORDS_PER_CONNECTION = 2
#: Maximum bytes of a stage: while one of several connections waits for it, its link is idle.
STAGE = 64 << 10
#: Linux' minimum retransmission timeout, seconds: a record that takes this much longer than usual was lost once.
TIMEOUT_S = 0.2


class BatchWindow(ABC):
    """Decides how many of the next records may be requested now."""

    def __init__(self, stages: int) -> None:
        self._stages = check_int("stages", stages, minimum=1)
        #: Outstanding bytes and records.
        self.bytes_out = self.records_out = 0

    @abstractmethod
    def grant(self, lengths: Sequence[int], now: float, connections: int = 1) -> int:
        """Return how many of the next records, of these lengths, to request now; at least one if none is outstanding.

        Call `requested` for each of them. Call this after each arrival, also with no lengths once nothing is left.

        connections: number of connections over which the remaining records come.
        """

    def requested(self, length: int, now: float) -> object:
        """Record a request; return a token for when the record has arrived."""
        self.bytes_out += length
        self.records_out += 1
        return length

    def arrived(self, token: object, now: float) -> None:
        """Record that a record has arrived."""
        assert isinstance(token, int)
        self._leave(token)

    def cancelled(self, token: object) -> None:
        """Record that a record will not arrive, or not now."""
        assert isinstance(token, int)
        self._leave(token)

    def _leave(self, length: int) -> None:
        self.bytes_out -= length
        self.records_out -= 1

    def _fitting(self, lengths: Sequence[int], size: int, most: int = MAX_WINDOW) -> int:
        """Return how many of the next records fit into the window, once a stage of it is free.

        most: maximum bytes of a stage.
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
    """Window of constant size, but at least one record."""

    def __init__(self, size: int, *, stages: int = 4) -> None:
        super().__init__(stages)
        self._size = check_int("size", size, minimum=1)

    def grant(self, lengths: Sequence[int], now: float, connections: int = 1) -> int:
        return self._fitting(lengths, self._size)


class _OutRecord(NamedTuple):
    length: int
    at: float
    #: Whether only the window limited requests.
    is_limited: bool


class MeasuredWindow(BatchWindow):
    """Smallest window with which records arrive about as fast as with a larger one, and at least one record.

    If each server has a link of its own, records arrive faster the more are outstanding, until each link is busy;
    if servers share the reader's line, they do not. The round trip does not tell the two apart: one record fills a slow
    link, and an idle link lets a burst through. So other sizes are tried (`SizeTrials`), none larger than is useful:
    two records per connection, or Little's law on the best rate and the shortest round trip. After a round trip with a
    retransmission timeout the window is halved.
    """

    def __init__(self, *, stages: int = 4) -> None:
        super().__init__(stages)
        self._trials = SizeTrials()
        self._rate, self._round_trip = _Extreme(best=max), _Extreme(best=min)
        #: Usual round trip, seconds; None if unknown.
        self._usual_s: float | None = None
        self._shrunk_at = -math.inf
        #: Connections of the batch, and its longest record.
        self._connections, self._longest = 1, 0
        #: Whether only the window limits requests.
        self._is_limited = False

    def size(self) -> int:
        """Bytes that may be outstanding."""
        return int(self._trials.size)

    def grant(self, lengths: Sequence[int], now: float, connections: int = 1) -> int:
        if not lengths:
            self._is_limited = False
            self._trials.pause()
            return 0
        if not self.records_out:
            self._connections, self._longest = connections, 0
        self._longest = max(self._longest, *lengths)
        self._bound(now)
        granted = self._fitting(lengths, self.size(), STAGE)
        self._is_limited = granted < len(lengths) and connections >= min(self._connections, self.records_out + granted)
        if not self._is_limited:
            self._trials.pause()
        return granted

    def requested(self, length: int, now: float) -> _OutRecord:
        super().requested(length, now)
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
        if self._is_limited and (rate := self._trials.received(token.length, now)) is not None:
            self._rate.see(rate, now)

    def cancelled(self, token: object) -> None:
        assert isinstance(token, _OutRecord)
        self._leave(token.length)

    def _bound(self, now: float) -> None:
        rate, round_trip = self._rate.value(now), self._round_trip.value(now)
        held = 0.0 if rate is None or round_trip is None else SURPLUS * rate * round_trip
        least = max(MIN_WINDOW, self._longest)
        of_use = max(RECORDS_PER_CONNECTION * self._connections * self._longest, held)
        self._trials.bound(least, max(least, min(MAX_WINDOW, of_use)), max(1, self._longest))


class _Extreme:
    """Best value of the last `MEMORY_S`; the latest one if there is none."""

    def __init__(self, best: object) -> None:
        self._is_max = best is max
        #: (time, value), each better than all that follow.
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


class ConnectionQueues:
    """Records of a batch that are still to be requested, by connection.

    The connection with the fewest outstanding bytes is next; among equal ones that with the most records left, so that
    all finish together.

    Args:
        connections: connection of each record, any names.
        sizes: of each record, bytes.
        together: minimum bytes to request over one connection before the next, if that many may be requested.
    """

    def __init__(self, connections: Sequence[str], sizes: Sequence[int], together: int = 0) -> None:
        self._connections, self._sizes, self._together = connections, sizes, together
        self._waiting: dict[str, deque[int]] = {}
        for place, connection in enumerate(connections):
            self._waiting.setdefault(connection, deque()).append(place)
        #: Outstanding bytes by connection.
        self._out = dict.fromkeys(self._waiting, 0)
        #: The current connection, and the bytes requested over it in a row.
        self._current, self._run = "", 0
        #: Sizes of records; those from `_at` on are still to be requested.
        self._order, self._at = [*sizes], 0

    @property
    def connections(self) -> list[str]:
        """Connections that have records left."""
        return [*self._waiting]

    def sizes(self, count: int) -> list[int]:
        """Return the sizes of up to `count` records that are left, in any order."""
        return self._order[self._at : self._at + count]

    def take(self, room: int) -> list[int]:
        """Return the indices of the next records: at least one if any is left, and more up to `room` bytes."""
        share = (sum(self._out.values()) + room) / max(1, len(self._waiting))
        taken = list[int]()
        while self._waiting:
            connection = self._next()
            queue = self._waiting[connection]
            while queue and (not self._run or self._run < self._together or self._has_room(connection, share)):
                size = self._sizes[queue[0]]
                if taken and size > room:
                    self._at += len(taken)
                    return taken
                room -= size
                self._run += max(1, size)
                self._out[connection] += size
                taken.append(queue.popleft())
            if not queue:
                del self._waiting[connection]
        self._at += len(taken)
        return taken

    def _next(self) -> str:
        """Return the current connection until `together` bytes were requested over it, then the least loaded one."""
        if self._current not in self._waiting or self._run >= self._together:
            self._current = min(self._waiting, key=lambda one: (self._out[one], -len(self._waiting[one])))
            self._run = 0
        return self._current

    def _has_room(self, connection: str, share: float) -> bool:
        return self._out[connection] + self._sizes[self._waiting[connection][0]] <= share

    def received(self, place: int) -> None:
        """Record that a record is no longer outstanding."""
        self._out[self._connections[place]] -= self._sizes[place]

    def requeue(self, place: int) -> None:
        """Queue a record once more."""
        self._waiting.setdefault(self._connections[place], deque()).append(place)
        self._order.append(self._sizes[place])

    def drop(self, connection: str) -> None:
        """Remove a connection: nothing more is requested or expected over it."""
        self._at += len(self._waiting.pop(connection, ()))
        self._out[connection] = 0
