"""What a head knows of one worker of its fleet, and what workers ask of the shard."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch_dpflow._version import __version__
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.headers import PIECE_BYTES, PROTOCOL_VERSION, WorkerGoodbye
from torch_dpflow.log import LOADER, SERVICE
from torch_dpflow.remote.shipping.compatibility import missing_text, unfit, versions_here, warnings_of

#: A worker's two connections, by the ends of their identities: see `ipc.messages.headers`.
LINE, WORK = b"line", b"work"
#: Such a part of the usual time of a task may pass in a round trip before a window grows for it.
NEGLIGIBLE = 0.05
#: After how long without any message one is lost that a connection's end may have cost, seconds.
LOST_S = 10.0
#: Weight of the latest task in its usual time.
_WEIGHT = 0.2


@dataclass(frozen=True)
class WorkerKind:
    """What the workers of a fleet are to their shard."""

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
    """A worker that was asked for and is not lost. Times are seconds on the clock of `RemoteWorkers`."""

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
        raise MessageError("no connection of a worker has such an identity")
    return b"/".join(parts[:2]).decode(errors="replace"), parts[2], parts[3]


class RemoteContent:
    """What each worker is sent.

    Args:
        data: what it loads, pickled.
        code: the archive of the user's modules that this needs, see `code_bundle`; empty: none.
    """

    def __init__(self, data: bytes | memoryview, code: bytes | memoryview = b"") -> None:
        self.digest, self.nbytes = hashlib.sha256(data).hexdigest(), len(data)
        self.code_digest, self.code_nbytes = hashlib.sha256(code).hexdigest() if len(code) else "", len(code)
        self._contents = {self.digest: memoryview(data), self.code_digest: memoryview(code)}
        self._versions = versions_here()
        self._warned: set[str] = set()

    def piece(self, digest: str, offset: int) -> memoryview:
        """A piece that begins here. Raises MessageError if there is none."""
        data = self._contents.get(digest)
        if data is None or not 0 <= offset < data.nbytes or offset % PIECE_BYTES:
            raise MessageError("it asks for a piece of a content which is not there")
        return data[offset : offset + PIECE_BYTES]

    def unfit(self, versions: Mapping[str, str]) -> str:
        """Why a worker with these versions cannot load it, and what to do; empty if it can."""
        reason = unfit(versions, self._versions)
        for text in () if reason else warnings_of(versions, self._versions):
            if text not in self._warned:
                self._warned.add(text)
                LOADER.warning("%s", text)
        return reason

    def missing(self, modules: Sequence[str]) -> str:
        """Why a worker without these modules cannot load it, and what to do."""
        return missing_text(name for name in modules if name.replace(".", "").isidentifier())


def other_release(version: int) -> str:
    """Why a worker is refused that speaks another version of the protocol; empty if it does not."""
    if version == PROTOCOL_VERSION:
        return ""
    return (
        f"it speaks version {version} of the protocol and this process {PROTOCOL_VERSION}: install torch_dpflow "
        f"{__version__} where workers run"
    )


#: After how long to say how many workers have come, if not all have, seconds.
COMPLAIN_S = 20.0


class Shortage:
    """What people are told of workers that are missing; nobody is to wait in silence. Times are seconds.

    Args:
        platform: its name.
        workers: how many there are to be.
        least: fewer are an error after `start_s`, the time of a start.
        address: where they call.
        log: where that is told.
    """

    def __init__(
        self,
        platform: str,
        workers: int,
        least: int,
        start_s: float,
        address: str,
        log: logging.Logger,
    ) -> None:
        self._log = log
        self._platform = platform
        self.workers = workers
        self._least = least
        self._start_s = start_s
        self._address = address
        #: What limits them and the details, for people; empty: nothing that is known.
        self.reason = ""
        #: When to say that not all have come, and when too few are an error.
        self._complains_at = self._fails_at = math.inf

    def begin(self, now: float) -> None:
        """They have been asked for."""
        self._complains_at, self._fails_at = now + COMPLAIN_S, now + self._start_s

    def end(self) -> None:
        """None is to come."""
        self._complains_at = self._fails_at = math.inf

    def limit(self, by: str, text: str, working: int) -> None:
        """The platform has said what limits them; by: empty if nothing does any more."""
        self.reason = f"limited by {by}: {text}" if by else ""
        if by:
            self._log.warning(
                "%d of %d workers run on platform %r, %s", working, self.workers, self._platform, self.reason
            )

    def check(self, working: int, called: int, now: float) -> str:
        """Say once how many are missing; returns an error if too few of them have called in time, else nothing.

        called: all that have, also those that work.
        """
        if working == self.workers:
            self._complains_at = self._fails_at = math.inf
        if now >= self._complains_at:
            self._complains_at = math.inf
            self._complain(working, called)
        if now < self._fails_at:
            return ""
        self._fails_at = math.inf
        if called >= self._least:
            return ""
        return (
            f"{called} of min_workers={self._least} workers of platform {self._platform!r} have called within "
            f"{self._start_s:g} s: {self.reason or self._hint()}"
        )

    def _complain(self, working: int, called: int) -> None:
        listener = "" if called or self.reason else f"; {self._hint()}"
        self._log.warning(
            "%d of %d workers of platform %r run %.0f s after they were asked for, %d more have called%s; those that "
            "run go on, and the others are awaited",
            working,
            self.workers,
            self._platform,
            COMPLAIN_S,
            called - working,
            listener,
        )

    def _hint(self) -> str:
        return f"is {self._address} open to where they run?"
