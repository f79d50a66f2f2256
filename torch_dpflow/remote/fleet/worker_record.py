"""What a head knows of one member of its fleet, and what members ask of the shard."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.headers import WorkerGoodbye
from torch_dpflow.log import LOADER, SERVICE

#: A member's two connections, by the ends of their identities: see `ipc.messages.headers`.
LINE, WORK = b"line", b"work"
#: Such a part of the usual time of a task may pass in a round trip before a window grows for it.
NEGLIGIBLE = 0.05
#: After how long without any message one is lost that a connection's end may have cost, seconds.
LOST_S = 10.0
#: Weight of the latest task in its usual time.
_WEIGHT = 0.2


@dataclass(frozen=True)
class WorkerKind:
    """What the members of a fleet are to their shard."""

    #: As of `LaunchSpec`.
    role: Literal["worker", "sample-worker"]
    #: How many tasks one holds: so many in any case, and what it loads during a round trip, up to so many.
    least_window: int
    most_window: int
    log: logging.Logger


#: One batch is loaded and one waits.
BATCH_WORKERS = WorkerKind("worker", 2, 8, LOADER)
#: As many samples as workers of the shard's host hold; a pool asks for no more than twice as many.
SAMPLE_WORKERS = WorkerKind("sample-worker", 16, 32, SERVICE)


@dataclass(eq=False)
class RemoteWorker:
    """A member that was asked for and is not lost. Times are seconds on the clock of `RemoteWorkers`."""

    name: str
    number: int
    incarnation: int
    heard: float
    kind: WorkerKind = BATCH_WORKERS
    #: As of `RemoteHandshake`.
    where: str = ""
    #: Drawn by its process, so that two with one launch spec are told apart.
    nonce: bytes = b""
    #: Its greeting as a worker, until it is admitted.
    hello: list[memoryview] | None = None
    is_working: bool = False
    #: Whether it was told to leave: that it does so is no death.
    is_sent_away: bool = False
    #: Its last message.
    bye: WorkerGoodbye | None = None
    received: int = 0
    sent: int = 0
    #: For how long it has had nothing to do while its results were on their way, as it says, seconds.
    away_s: float = 0.0
    #: Since when it has sent more than was received, as it says, and how many connections had ended when it had not.
    short_since: float | None = None
    losses: int = 0
    #: The time between two of its messages as a worker, a moving average, and when the latest has come.
    usual_s: float = 0.0
    worked: float = 0.0
    #: How many tasks it is to hold.
    window: int = field(init=False)
    has_called: bool = False
    #: When the platform was last asked about it.
    suspected_at: float = -1.0

    def __post_init__(self) -> None:
        self.window = self.kind.least_window

    def note_work(self, now: float) -> None:
        """A message of it as a worker has come."""
        self.received += 1
        if self.worked:
            passed_s = now - self.worked
            self.usual_s = self.usual_s + _WEIGHT * (passed_s - self.usual_s) if self.usual_s else passed_s
        self.heard = self.worked = now

    def note_away(self, away_s: float) -> float:
        """It has waited for its link for so long: how much of that is new and of its time as a worker, seconds."""
        more_s, self.away_s = away_s - self.away_s, away_s
        return max(0.0, more_s) if self.is_working else 0.0

    def lacks(self, sent: int, losses: int, now: float) -> bool:
        """Whether a message of it is lost: it has sent so many.

        losses: how many connections have ended here. Where none has, a message that is late is on its way, for as long
        as a slow link takes.
        """
        if sent <= self.received:
            self.short_since, self.losses = None, losses
            return False
        self.short_since = now if self.short_since is None else self.short_since
        return losses != self.losses and now - max(self.short_since, self.worked) >= LOST_S

    def fitting_window(self, round_trip_s: float) -> int:
        """How many tasks it should hold, where a message to it and its answer take so long."""
        least, most = self.kind.least_window, self.kind.most_window
        if not self.usual_s:
            return self.window
        more = math.ceil(min(round_trip_s / self.usual_s, most) - NEGLIGIBLE)
        window = min(least + more, most)
        # What is a little smaller now will be a little larger soon.
        return window if not self.window - 2 < window < self.window else self.window

    @property
    def user(self) -> str:
        """Whom its key is for."""
        return f"{self.number}/{self.incarnation}"

    def peer(self, kind: bytes) -> bytes:
        """The identity of one of its connections."""
        return b"/".join((self.user.encode(), self.nonce, kind))


class Shell(Protocol):
    """The shard that has these workers."""

    def admit(self, peer: bytes, hello: list[memoryview]) -> None:
        """This connection is a worker from now on; its hello."""

    def deliver(self, peer: bytes, frames: list[memoryview]) -> None:
        """A message of a worker."""

    def drain(self) -> None:
        """Handle all messages that have come."""

    def lose(self, worker: int, how: str, *, had_tasks: bool, may_blame: bool) -> None:
        """A worker has ended or does not answer.

        how: empty if it was told to. had_tasks: it was admitted; else another may have its number. may_blame: its task
        may be the reason.
        """

    def set_window(self, worker: int, window: int) -> None:
        """A worker is to hold so many tasks."""

    def fail(self, error: Exception) -> None:
        """There will be no worker any more."""


def parts_of(peer: bytes) -> tuple[str, bytes, bytes]:
    """A connection's user, the nonce of its process, and which of its two connections it is."""
    parts = peer.split(b"/")
    if len(parts) != 4 or parts[3] not in (LINE, WORK) or not parts[2]:
        raise MessageError("no connection of a member has such an identity")
    return b"/".join(parts[:2]).decode(errors="replace"), parts[2], parts[3]
