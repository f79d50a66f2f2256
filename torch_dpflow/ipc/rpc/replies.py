"""Replies that a server keeps so that a repeated call is executed once. No socket, no clock."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class Verdict(enum.Enum):
    """What to do with a call."""

    #: New: execute it.
    EXECUTE = enum.auto()
    #: Being executed; its reply will follow.
    RUNNING = enum.auto()
    #: Executed, and its reply is kept: send that again.
    REPEAT = enum.auto()
    #: Executed, and its reply was evicted.
    FORGOTTEN = enum.auto()
    #: Reported as completed by its client.
    COMPLETED = enum.auto()
    #: Rejected: its client has too many calls open.
    OVERLOADED = enum.auto()


@dataclass(slots=True)
class _Remembered(Generic[T]):
    reply: T
    nbytes: int


@dataclass(slots=True)
class _Client(Generic[T]):
    #: Every lower call is completed.
    completed_below: int = 0
    #: RUNNING, FORGOTTEN, or the reply, by call.
    calls: dict[int, Verdict | _Remembered[T]] = field(default_factory=dict)


class ReplyMemory(Generic[T]):
    """Each client's calls, until the client reports them as completed. Not thread-safe.

    A call is executed at most once while its client is remembered. The bytes of replies are bounded: the oldest are
    evicted first, and a call whose reply was evicted is FORGOTTEN, never executed again.

    Args:
        capacity_bytes: maximum bytes of replies, of all clients together; one reply alone may be larger.
        max_open: maximum calls of one client that are not completed.
    """

    def __init__(self, *, capacity_bytes: int, max_open: int) -> None:
        self._capacity = capacity_bytes
        self._max_open = max_open
        self._clients: dict[bytes, _Client[T]] = {}
        #: Remembered replies, oldest first.
        self._by_age: OrderedDict[tuple[bytes, int], None] = OrderedDict()
        #: Bytes of all remembered replies.
        self.nbytes = 0

    def admit(
        self, client: bytes, call: int, *, completed_below: int = 0, answered: Iterable[int] = ()
    ) -> tuple[Verdict, T | None]:
        """Return what to do with an incoming call: EXECUTE records it as running, REPEAT returns the reply."""
        record = self._clients.get(client)
        if record is None:
            record = self._clients[client] = _Client()
        self._drop_completed(client, record, completed_below, answered)
        if call < record.completed_below:
            return Verdict.COMPLETED, None
        if call in record.calls:
            return self._recall(record, call)
        if len(record.calls) >= self._max_open:
            return Verdict.OVERLOADED, None
        record.calls[call] = Verdict.RUNNING
        return Verdict.EXECUTE, None

    def look_up(self, client: bytes, call: int) -> tuple[Verdict, T | None]:
        """Return what to do with a call that its client inquires about. EXECUTE: the call has never arrived."""
        record = self._clients.get(client)
        if record is None or (call >= record.completed_below and call not in record.calls):
            return Verdict.EXECUTE, None
        return (Verdict.COMPLETED, None) if call < record.completed_below else self._recall(record, call)

    def finish(self, client: bytes, call: int, reply: T, *, nbytes: int, keep: bool = True) -> bool:
        """Record the reply of a running call; return False if its client has abandoned it.

        keep: remember the reply. If False, a repeated call is executed again.
        """
        record = self._clients.get(client)
        if record is None or record.calls.get(call) is not Verdict.RUNNING:
            return False
        if not keep:
            del record.calls[call]
            return True
        record.calls[call] = _Remembered(reply, nbytes)
        self._by_age[client, call] = None
        self.nbytes += nbytes
        self._evict()
        return True

    def drop(self, client: bytes) -> None:
        """Drop a client and all its calls."""
        record = self._clients.pop(client, None)
        for call in () if record is None else record.calls:
            self._by_age.pop((client, call), None)
        for entry in () if record is None else record.calls.values():
            self.nbytes -= entry.nbytes if isinstance(entry, _Remembered) else 0

    def _drop_completed(self, client: bytes, record: _Client[T], completed_below: int, answered: Iterable[int]) -> None:
        completed = list(answered)
        if completed_below > record.completed_below:
            record.completed_below = completed_below
            completed += [call for call in record.calls if call < completed_below]
        for call in completed:
            entry = record.calls.pop(call, None)
            if isinstance(entry, _Remembered):
                self.nbytes -= entry.nbytes
                del self._by_age[client, call]

    def _recall(self, record: _Client[T], call: int) -> tuple[Verdict, T | None]:
        entry = record.calls[call]
        return (Verdict.REPEAT, entry.reply) if isinstance(entry, _Remembered) else (entry, None)

    def _evict(self) -> None:
        while self.nbytes > self._capacity and len(self._by_age) > 1:
            (client, call), _ = self._by_age.popitem(last=False)
            calls = self._clients[client].calls
            entry = calls[call]
            assert isinstance(entry, _Remembered)
            calls[call] = Verdict.FORGOTTEN
            self.nbytes -= entry.nbytes
