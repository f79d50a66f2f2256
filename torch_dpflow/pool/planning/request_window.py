"""Limit of the bytes that a reader has requested and not received. Pure; times are arguments, in seconds.

If many servers answer at once, their answers meet in the buffer of one switch port. What does not fit is lost, and a
connection that loses its last packets waits for its retransmission timer (incast). So the reader limits the bytes that
are outstanding (requested and not received) by Algorithm 1 of the DataServer paper: rate times latency, requested in
stages. The algorithm counts records, and is given the network's rate and latency; `MeasuredWindow` counts bytes and
measures both. Between processes of one host nothing is lost, so `FixedWindow` is enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch_dpflow._core.checks import check_int

#: Bounds of the window, bytes.
MIN_WINDOW, MAX_WINDOW = 32 << 10, 8 << 20
#: Minimum size of a rate's measurement, because records arrive in bursts: bytes, in windows, and number of records.
MEASURED, MEASURED_RECORDS = 8, 64
#: How long a measured rate or latency counts, seconds.
MEMORY_S = 10.0
#: Factor by which the window exceeds rate times latency, because a larger window can raise the rate.
SURPLUS = 1.5
#: Number of stages in which a window is requested.
STAGES = 4
#: Maximum bytes of a stage, because the link of a connection that waits for a stage is idle.
STAGE = 64 << 10


class RequestedBytes(NamedTuple):
    """Token of a requested record: its length, and the time of the request."""

    length: int
    at: float


class FixedWindow:
    """Limit of outstanding records, requested and not received: up to `size` bytes, but at least one record."""

    def __init__(self, size: int) -> None:
        self._size = check_int("size", size, minimum=1)
        self.bytes_out = self.records_out = 0

    def grant(self, lengths: Sequence[int], now: float) -> int:
        """Return the number of records to request now; at least one if no record is outstanding.

        Call `requested` for each granted record. Call `grant` after each arrival, without lengths if none are left.

        lengths: lengths of the next records, bytes.
        """
        return self._fitting(lengths, self._size)

    def requested(self, length: int, now: float) -> RequestedBytes:
        """Record a request; return the token to pass to `arrived` or `cancelled`."""
        self.bytes_out += length
        self.records_out += 1
        return RequestedBytes(length, now)

    def arrived(self, token: RequestedBytes, now: float) -> None:
        self.cancelled(token)

    def cancelled(self, token: RequestedBytes) -> None:
        """Record that a requested record will not arrive, or must be requested again."""
        self.bytes_out -= token.length
        self.records_out -= 1

    def _fitting(self, lengths: Sequence[int], size: int, most: int = MAX_WINDOW) -> int:
        """Return the number of next records that fit into the window, once a stage of it is free.

        most: maximum bytes of a stage.
        """
        if self.bytes_out > size - min(most, size // STAGES):
            return 0
        granted = out = 0
        for length in lengths:
            if self.bytes_out + out + length > size and (granted or self.records_out):
                break
            granted, out = granted + 1, out + length
        return granted


class MeasuredWindow(FixedWindow):
    """Limit by Algorithm 1 of the DataServer paper, from measured rate and latency. At least one record is allowed.

    The rate is the highest that was measured while the window limited requests. The latency is the shortest of records
    of about the same length, because queues lengthen it. Each measurement is used for `MEMORY_S`. Each batch begins
    with nothing outstanding, so its first records show the latency without a queue.
    """

    def __init__(self) -> None:
        super().__init__(MIN_WINDOW)
        #: Highest rate, bytes a second, and when it was measured.
        self._rate = (0.0, 0.0)
        #: Shortest latency by the power of two of a record's length, seconds, and when it was measured.
        self._latencies: dict[int, tuple[float, float]] = {}
        #: Longest record of the batch.
        self._longest = 0
        #: Whether only the window limits requests.
        self._is_limited = False
        self._begin()
        self._last = 0.0

    def _begin(self) -> None:
        #: Bytes until measuring begins; bytes, records, bytes times latency, and seconds measured since.
        self._settling, self._came, self._records, self._held, self._seconds = self.size(), 0, 0, 0.0, 0.0

    def size(self) -> int:
        """Return the number of bytes that may be requested and not received."""
        return min(max(self._size, MIN_WINDOW, self._longest), max(MAX_WINDOW, self._longest))

    def grant(self, lengths: Sequence[int], now: float) -> int:
        if not self.records_out:
            self._longest = 0
        self._longest = max(self._longest, *lengths, 0)
        granted = self._fitting(lengths, self.size(), STAGE)
        self._is_limited = granted < len(lengths)
        if not self._is_limited:
            self._settling = self.size()
        return granted

    def arrived(self, token: RequestedBytes, now: float) -> None:
        self.cancelled(token)
        kind, took = token.length.bit_length(), now - token.at
        latency, at = self._latencies.get(kind, (took, now))
        if took <= latency or at < now - MEMORY_S:
            self._latencies[kind] = latency, _ = took, now
        if not self._is_limited:
            return
        if self._settling > 0:
            self._settling -= token.length
        else:
            self._came, self._records = self._came + token.length, self._records + 1
            self._held += token.length * latency
            self._seconds += now - self._last
            if self._came >= MEASURED * self.size() and self._records >= MEASURED_RECORDS and self._seconds:
                self._measured(now)
        self._last = now

    def _measured(self, now: float) -> None:
        rate, at = self._rate
        if (came := self._came / self._seconds) >= rate or at < now - MEMORY_S:
            self._rate = came, now
        needed = SURPLUS * self._rate[0] * self._held / self._came
        self._size = int(-(-needed // self._longest)) * self._longest  # rounded up, else it would never be two records
        self._begin()


class ConnectionQueues:
    """Records of a batch that are still to be requested, by connection.

    The connection with the fewest outstanding bytes is next; among equals, the connection with the most records left,
    so that all finish together.

    Args:
        connections: name of each record's connection.
        sizes: size of each record, bytes.
        together: bytes to request over one connection before changing to the next, as far as `take` allows.
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
        return [*self._waiting]

    def sizes(self, count: int) -> list[int]:
        """Return up to `count` sizes, one for each record left to request, but possibly those of other records."""
        return self._order[self._at : self._at + count]

    def take(self, room: int) -> list[int]:
        """Return the indices of the records to request next: one if any is left, and more up to `room` bytes in all."""
        taken = list[int]()
        while self._waiting:
            if self._current not in self._waiting or self._run >= self._together:
                self._current = min(self._waiting, key=lambda one: (self._out[one], -len(self._waiting[one])))
                self._run = 0
            queue = self._waiting[self._current]
            size = self._sizes[queue[0]]
            if taken and size > room:
                break
            taken.append(queue.popleft())
            room -= size
            self._run += max(1, size)
            self._out[self._current] += size
            if not queue:
                del self._waiting[self._current]
        self._at += len(taken)
        return taken

    def received(self, place: int) -> None:
        """Record that the record of this index is no longer outstanding."""
        self._out[self._connections[place]] -= self._sizes[place]

    def requeue(self, place: int) -> None:
        """Queue the record of this index once more."""
        self._waiting.setdefault(self._connections[place], deque()).append(place)
        self._order.append(self._sizes[place])

    def drop(self, connection: str) -> None:
        """Remove a connection: nothing more is requested or expected over it."""
        self._at += len(self._waiting.pop(connection, ()))
        self._out[connection] = 0
