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
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 4.0


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
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
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
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)

    def _try(self, now: float) -> None:
        own = self.size
        tried = self._clamped(max(own * self._step, own + self._unit) if self._step > 1 else own * self._step)
        if abs(tried - own) < self._unit / 2:
            self._turn(now)  # there is no such size
        else:
            self._tried = tried


#: A reader may ask for so many bytes at least, and at most.
LEAST, MOST = 32 << 10, 8 << 20
#: How long a rate and a round trip count, seconds.
MEMORY_S = 10.0
#: What may be asked for beyond what the line needs by Little's law.
SURPLUS = 1.5
#: What may be asked of each lane: while one record comes, the next one is under way.
RECORDS_PER_CONNECTION = 2
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
    def grant(self, lengths: Sequence[int], now: float, connections: int = 1) -> int:
        """How many of the next records, of these lengths, are to be asked for now.

        At least one if nothing is out. Call `asked` for each of them. Call it after each arrival, also with no lengths:
        nothing is left then.

        lanes: over which those that are left come.
        """

    def requested(self, length: int, now: float) -> object:
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

    def grant(self, lengths: Sequence[int], now: float, connections: int = 1) -> int:
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

    def grant(self, lengths: Sequence[int], now: float, connections: int = 1) -> int:
        if not lengths:
            self._is_limited = False
            self._trials.pause()
            return 0
        if not self.records_out:
            self._lanes, self._longest = connections, 0
        self._longest = max(self._longest, *lengths)
        self._bound(now)
        granted = self._fitting(lengths, self.size(), STAGE)
        self._is_limited = granted < len(lengths) and connections >= min(
            self._lanes, self.records_out + granted
        )
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
        if self._is_limited and (rate := self._trials.came(token.length, now)) is not None:
            self._rate.see(rate, now)

    def given_up(self, token: object) -> None:
        assert isinstance(token, _OutRecord)
        self._leave(token.length)

    def _bound(self, now: float) -> None:
        rate, round_trip = self._rate.value(now), self._round_trip.value(now)
        held = 0.0 if rate is None or round_trip is None else SURPLUS * rate * round_trip
        least = max(LEAST, self._longest)
        of_use = max(RECORDS_PER_CONNECTION * self._lanes * self._longest, held)
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


class ConnectionQueues:
    """Places of a batch's records, by lane. The lane that has the fewest bytes under way is asked next.

    Lanes that have the same are asked in the order of what they have left, so that all of them end together.

    Args:
        lanes: of each record, any names.
        sizes: of each record, bytes.
        together: what one lane is asked for before the next at least, bytes, where so much may be asked for.
    """

    def __init__(self, connections: Sequence[str], sizes: Sequence[int], together: int = 0) -> None:
        self._lanes, self._sizes, self._together = connections, sizes, together
        self._waiting: dict[str, deque[int]] = {}
        for place, connection in enumerate(connections):
            self._waiting.setdefault(connection, deque()).append(place)
        #: Bytes under way, by lane.
        self._out = dict.fromkeys(self._waiting, 0)
        #: The lane that is asked, and for how many bytes in a row it was.
        self._asked, self._run = "", 0
        #: Sizes of records, as many of which are still to be asked for as follow this one.
        self._order, self._at = [*sizes], 0

    @property
    def connections(self) -> list[str]:
        """Those that have something left."""
        return [*self._waiting]

    def sizes(self, count: int) -> list[int]:
        """What those that are left are like, bytes: of so many records, in any order."""
        return self._order[self._at : self._at + count]

    def take(self, room: int) -> list[int]:
        """The next places, at least one where something is left, and more while they fit in so many bytes."""
        share = (sum(self._out.values()) + room) / max(1, len(self._waiting))
        taken = list[int]()
        while self._waiting:
            connection = self._next()
            queue = self._waiting[connection]
            while queue and (
                not self._run or self._run < self._together or self._has_room(connection, share)
            ):
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
        """The lane that has not been asked for enough yet, or that has the fewest bytes under way."""
        if self._asked not in self._waiting or self._run >= self._together:
            self._asked = min(self._waiting, key=lambda one: (self._out[one], -len(self._waiting[one])))
            self._run = 0
        return self._asked

    def _has_room(self, connection: str, share: float) -> bool:
        return self._out[connection] + self._sizes[self._waiting[connection][0]] <= share

    def came(self, place: int) -> None:
        """It is not under way any more."""
        self._out[self._lanes[place]] -= self._sizes[place]

    def again(self, place: int) -> None:
        """It is to be asked for once more."""
        self._waiting.setdefault(self._lanes[place], deque()).append(place)
        self._order.append(self._sizes[place])

    def drop(self, connection: str) -> None:
        """Nothing is asked for over it any more, and nothing comes."""
        self._at += len(self._waiting.pop(connection, ()))
        self._out[connection] = 0
