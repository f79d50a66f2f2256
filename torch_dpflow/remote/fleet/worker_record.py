"""A shard's records of its remote workers: each worker, the content they are sent, how many are missing."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch_dpflow._version import __version__
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.headers import PROTOCOL_VERSION
from torch_dpflow.ipc.messages.remote_worker import PIECE_BYTES, WorkerGoodbye, WorkerHeartbeat
from torch_dpflow.log import LOADER, SERVICE
from torch_dpflow.remote.shipping.compatibility import missing_text, unfit, versions_here, warnings_of

#: A worker's two connections, by the ends of their identities: see `ipc.messages.headers`.
LINE, WORK = b"line", b"work"
#: A window grows for a round trip above this fraction of a task's usual time.
NEGLIGIBLE = 0.05
#: A message that a broken connection may have cost counts as lost after this time without any, seconds.
LOST_S = 10.0
#: Weight of the latest task in the usual time of one.
_WEIGHT = 0.2


@dataclass(frozen=True)
class WorkerKind:
    """Kind of a fleet's workers, by what they load."""

    #: As of `LaunchSpec`.
    role: Literal["worker", "sample-worker"]
    #: How many tasks one holds: at least, and at most if round trips are long.
    min_window: int
    max_window: int
    log: logging.Logger


#: One batch is loaded and one waits.
BATCH_WORKERS = WorkerKind("worker", 2, 8, LOADER)
#: As many samples as workers of the shard's host hold; the shard requests at most twice as many.
SAMPLE_WORKERS = WorkerKind("sample-worker", 16, 32, SERVICE)


@dataclass(eq=False)
class RemoteWorker:
    """A worker that was requested and is not lost. Times are seconds on the clock of `RemoteWorkers`."""

    name: str
    number: int
    incarnation: int
    last_seen: float
    kind: WorkerKind = BATCH_WORKERS
    #: As of `RemoteHandshake`.
    where: str = ""
    #: Drawn by its process, so that two with one launch spec are distinguished.
    nonce: bytes = b""
    #: Its `WorkerHandshake`, until it is admitted.
    handshake: list[memoryview] | None = None
    is_working: bool = False
    #: Whether it was told to leave: then its end is no failure.
    is_sent_away: bool = False
    #: Its last message.
    goodbye: WorkerGoodbye | None = None
    #: Messages received and sent on its work connection.
    received: int = 0
    sent: int = 0
    #: When a message to it was first refused; None: none was.
    refused_at: float | None = None
    #: Why it is to be ended, empty: it is not; and whether its task may be the reason.
    condemned: str = ""
    may_blame: bool = True
    #: How long it has been idle while its results were under way, as it reports, seconds.
    away_s: float = 0.0
    #: Since when a side has received less than the other has sent, and how many connections had ended when none had.
    short_since: float | None = None
    losses: int = 0
    #: Time between two of its results, a moving average, and when the latest arrived.
    usual_s: float = 0.0
    worked: float = 0.0
    #: How many tasks it holds.
    window: int = field(init=False)
    has_called: bool = False
    #: When the platform was last asked about it.
    suspected_at: float = -1.0

    def __post_init__(self) -> None:
        self.window = self.kind.min_window

    def condemn(self, why: str, *, may_blame: bool = True) -> None:
        """Record why the worker is to be ended; the first reason counts."""
        if not self.condemned:
            self.condemned, self.may_blame = why, may_blame

    def note_work(self, now: float) -> None:
        """Record a result of this worker."""
        self.received += 1
        if self.worked:
            passed_s = now - self.worked
            self.usual_s = self.usual_s + _WEIGHT * (passed_s - self.usual_s) if self.usual_s else passed_s
        self.last_seen = self.worked = now

    def note_away(self, away_s: float) -> float:
        """Record how long it has waited for its link; return how much of that is new and working time, seconds."""
        more_s, self.away_s = away_s - self.away_s, away_s
        return max(0.0, more_s) if self.is_working else 0.0

    def has_lost_message(self, heartbeat: WorkerHeartbeat, losses: int, now: float) -> bool:
        """Return whether a message to or from the worker is lost.

        losses: how many connections have ended here. If none has, a late message may still be in transit over a slow
            link.
        """
        received = heartbeat.received
        if heartbeat.sent <= self.received and (received is None or received >= self.sent):
            self.short_since = None
            if received is not None:
                self.losses = losses
            return False
        self.short_since = now if self.short_since is None else self.short_since
        return losses != self.losses and now - max(self.short_since, self.worked) >= LOST_S

    def fitting_window(self, round_trip_s: float) -> int:
        """Return how many tasks the worker should hold for this round-trip time."""
        least, most = self.kind.min_window, self.kind.max_window
        if not self.usual_s:
            return self.window
        more = math.ceil(min(round_trip_s / self.usual_s, most) - NEGLIGIBLE)
        window = min(least + more, most)
        # A window that is a little smaller now will be a little larger soon.
        return window if not self.window - 2 < window < self.window else self.window

    @property
    def user(self) -> str:
        """The user of its key."""
        return f"{self.number}/{self.incarnation}"

    def peer(self, kind: bytes) -> bytes:
        """Return the identity of one of its connections."""
        return b"/".join((self.user.encode(), self.nonce, kind))


class Shell(Protocol):
    """The shard that has these workers."""

    def admit(self, peer: bytes, handshake: list[memoryview]) -> None:
        """Handle the handshake of a connection that is accepted as a worker."""

    def deliver(self, peer: bytes, frames: list[memoryview]) -> None:
        """Handle a message of a worker."""

    def drain(self) -> None:
        """Handle all messages that have arrived."""

    def lose(self, worker: int, how: str, *, had_tasks: bool, may_blame: bool) -> None:
        """Handle a worker that has ended or does not answer.

        how: empty if its end was requested. had_tasks: it was admitted; else another worker may have its number.
            may_blame: its task may be the reason.
        """

    def set_window(self, worker: int, window: int) -> None:
        """Set how many tasks a worker holds."""

    def fail(self, error: Exception) -> None:
        """Handle that no worker will be started any more."""


def parts_of(peer: bytes) -> tuple[str, bytes, bytes]:
    """Split an identity into user, nonce of the process, and which of its two connections it is."""
    parts = peer.split(b"/")
    if len(parts) != 4 or parts[3] not in (LINE, WORK) or not parts[2]:
        raise MessageError("no connection of a worker has such an identity")
    return b"/".join(parts[:2]).decode(errors="replace"), parts[2], parts[3]


class RemoteContent:
    """Content that each worker is sent.

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
        """Return the piece at this offset. Raises MessageError if there is none."""
        data = self._contents.get(digest)
        if data is None or not 0 <= offset < data.nbytes or offset % PIECE_BYTES:
            raise MessageError("it requests a piece of an unknown content")
        return data[offset : offset + PIECE_BYTES]

    def unfit(self, versions: Mapping[str, str]) -> str:
        """Return why a worker with these versions cannot load it, and what to do; empty if it can."""
        reason = unfit(versions, self._versions)
        for text in () if reason else warnings_of(versions, self._versions):
            if text not in self._warned:
                self._warned.add(text)
                LOADER.warning("%s", text)
        return reason

    def missing(self, modules: Sequence[str]) -> str:
        """Return why a worker without these modules cannot load it, and what to do."""
        return missing_text(name for name in modules if name.replace(".", "").isidentifier())


def other_release(version: int) -> str:
    """Return why a worker with another protocol version is rejected; empty if it has this one."""
    if version == PROTOCOL_VERSION:
        return ""
    return (
        f"it has version {version} of the protocol and this process {PROTOCOL_VERSION}: install torch_dpflow "
        f"{__version__} where workers run"
    )


#: After how long to log how many workers have connected, if not all have, seconds.
COMPLAIN_S = 20.0


class Shortage:
    """Logs missing workers and the platform's reason. Times are seconds.

    Args:
        platform: its name.
        workers: how many there should be.
        least: fewer are an error after `start_s`, the time of a start.
        address: where they connect.
        log: where to log.
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
        #: What limits them and the details, for display; empty: nothing known.
        self.reason = ""
        #: When to log that not all have connected, and when too few are an error.
        self._complains_at = self._fails_at = math.inf

    def begin(self, now: float) -> None:
        """Record that the workers were requested."""
        self._complains_at, self._fails_at = now + COMPLAIN_S, now + self._start_s

    def end(self) -> None:
        """Expect no workers."""
        self._complains_at = self._fails_at = math.inf

    def limit(self, by: str, text: str, working: int) -> None:
        """Record and log what limits the workers. by: the limit; empty once there is none."""
        self.reason = f"limited by {by}: {text}" if by else ""
        if by:
            self._log.warning(
                "%d of %d workers run on platform %r, %s", working, self.workers, self._platform, self.reason
            )

    def check(self, working: int, called: int, now: float) -> str:
        """Log once how many are missing; return an error if too few have connected in time, else nothing.

        called: number of workers that have connected, including those that work.
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
            f"{called} of min_workers={self._least} workers of platform {self._platform!r} have connected within "
            f"{self._start_s:g} s: {self.reason or self._hint()}"
        )

    def _complain(self, working: int, called: int) -> None:
        listener = "" if called or self.reason else f"; {self._hint()}"
        self._log.warning(
            "%d of %d workers of platform %r run %.0f s after they were requested, %d more are connected%s; those that "
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
