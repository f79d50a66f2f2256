"""Whose turn it is to send: pure; times are arguments, in seconds.

Lanes that have something to send stand in line, and each sends one turn's bytes before the next. Only so many are in
the midst of a turn at a time, so that a server does not fill the network's buffers from all of its connections at
once. One that takes nothing for `stall_s` goes on when it can, and no longer keeps others from their turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from torch_dpflow._core.checks import check_int, check_seconds

ConnectionT = TypeVar("ConnectionT", bound=Hashable)


class SendTurns(Generic[ConnectionT]):
    """Turns of lanes, which are any hashable values.

    Args:
        most: lanes in the midst of a turn at a time.
        stall_s: as above, seconds.
    """

    def __init__(self, *, most: int = 64, stall_s: float = 1.0) -> None:
        self._most = check_int("most", most, minimum=1)
        self._stall_s = check_seconds("stall_s", stall_s)
        self._line: OrderedDict[ConnectionT, None] = OrderedDict()
        #: When each that is in the midst of a turn has sent something last.
        self._sending: dict[ConnectionT, float] = {}

    def add(self, connection: ConnectionT) -> None:
        """It has something to send."""
        if connection not in self._sending:
            self._line.setdefault(connection)

    def next(self, now: float) -> ConnectionT | None:
        """Who begins a turn; call `sent` or `done` for it. None: nobody may."""
        if not self._line or not self.has_room(now):
            return None
        connection, _ = self._line.popitem(last=False)
        self._sending[connection] = now
        return connection

    def sent(self, connection: ConnectionT, now: float) -> None:
        """It has sent a part of its turn, and can send no more for now."""
        if connection in self._sending:
            self._sending[connection] = now

    def done(self, connection: ConnectionT, *, more: bool) -> None:
        """Its turn has ended; more: it has something left to send."""
        self._sending.pop(connection, None)
        if more:
            self.add(connection)

    def drop(self, connection: ConnectionT) -> None:
        """It has gone."""
        self._sending.pop(connection, None)
        self._line.pop(connection, None)

    def __len__(self) -> int:
        """How many stand in line."""
        return len(self._line)

    def has_room(self, now: float) -> bool:
        """Whether one more may begin a turn; else one has to end, or to stall."""
        if len(self._sending) < self._most:
            return True
        return sum(now - since < self._stall_s for since in self._sending.values()) < self._most

    def validate(self) -> None:
        """Check every invariant; for tests. Raises AssertionError."""
        assert not self._line.keys() & self._sending.keys()
