"""Turns of connections that have bytes to send. Pure; times are arguments, in seconds.

Connections with bytes to send queue up, and each sends one turn's bytes before the next. Only a limited number are in a
turn at a time, so that a server does not fill the network's buffers from all of its connections at once. A connection
that accepts nothing for `stall_s` continues when it can, and no longer blocks the others' turns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from torch_dpflow._core.checks import check_int, check_seconds

ConnectionT = TypeVar("ConnectionT", bound=Hashable)


class SendTurns(Generic[ConnectionT]):
    """Turns of connections, which may be any hashable values.

    Args:
        most: maximum number of connections in a turn at a time.
        stall_s: see above, seconds.
    """

    def __init__(self, *, most: int = 64, stall_s: float = 1.0) -> None:
        self._most = check_int("most", most, minimum=1)
        self._stall_s = check_seconds("stall_s", stall_s)
        self._line: OrderedDict[ConnectionT, None] = OrderedDict()
        #: Connections in a turn, and when each last sent something.
        self._sending: dict[ConnectionT, float] = {}

    def add(self, connection: ConnectionT) -> None:
        if connection not in self._sending:
            self._line.setdefault(connection)

    def next(self, now: float) -> ConnectionT | None:
        """Begin the next turn; `sent` or `done` must follow. None if no turn may begin."""
        if not self._line or not self.has_room(now):
            return None
        connection, _ = self._line.popitem(last=False)
        self._sending[connection] = now
        return connection

    def sent(self, connection: ConnectionT, now: float) -> None:
        """Record that a connection sent a part of its turn and cannot send more for now."""
        if connection in self._sending:
            self._sending[connection] = now

    def done(self, connection: ConnectionT, *, more: bool) -> None:
        """End a connection's turn. more: it has something left to send."""
        self._sending.pop(connection, None)
        if more:
            self.add(connection)

    def drop(self, connection: ConnectionT) -> None:
        self._sending.pop(connection, None)
        self._line.pop(connection, None)

    def __len__(self) -> int:
        """Return how many connections are queued."""
        return len(self._line)

    def has_room(self, now: float) -> bool:
        """Return whether another turn may begin now; otherwise one has to end or stall first."""
        if len(self._sending) < self._most:
            return True
        return sum(now - since < self._stall_s for since in self._sending.values()) < self._most
