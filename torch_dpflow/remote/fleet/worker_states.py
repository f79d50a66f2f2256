"""States of a fleet's workers, the instructions that a fleet issues, and the limits of its starts."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.errors import (
    DeniedError,
    ExpiredError,
    MessageError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)
from torch_dpflow.ipc.messages.remote_worker import WorkerGoodbye, WorkerHeartbeat
from torch_dpflow.remote.launchers.contract import RateLimit
from torch_dpflow.workers.platform import Limits


class WorkerState(enum.Enum):
    """State of a remote worker; see `lifecycle`."""

    #: Its start is requested; the platform has not answered.
    REQUESTED = "requested"
    STARTING = "starting"
    #: Connected, getting ready or waiting for its number; without tasks.
    ON_DECK = "on deck"
    WORKING = "working"
    #: Finishing its tasks; it gets no more.
    DRAINING = "draining"
    #: Rejected, leaving by itself, or not connected in time; the platform is queried.
    LEAVING = "leaving"
    #: Being ended by force.
    STOPPING = "stopping"

    @property
    def holds_place(self) -> bool:
        """Whether the worker holds its place in the fleet, because it works there or is getting ready to."""
        return self in (WorkerState.REQUESTED, WorkerState.STARTING, WorkerState.ON_DECK, WorkerState.WORKING)

    @property
    def is_expected(self) -> bool:
        """Whether the worker was requested and its handshake is awaited."""
        return self in (WorkerState.REQUESTED, WorkerState.STARTING)


#: Last part of the identity of a worker's control connection, and of its connection for tasks; see `split_identity`.
LINE, WORK = b"line", b"work"
#: The number of tasks that a worker holds grows if its round trip takes more than this fraction of a task's time.
NEGLIGIBLE = 0.05
#: Time without a result after which a message counts as lost if a connection has broken, in seconds.
LOST_S = 10.0
#: Weight of the latest task in the usual time of one.
_WEIGHT = 0.2


@dataclass(slots=True, eq=False)
class FleetWorker:
    """Record of one worker in a fleet, and of its connections. Times are in seconds, by the `now` of calls."""

    name: str
    number: int
    incarnation: int
    begun: float
    #: When its state times out; infinite if only its lease limits it.
    due: float
    #: When the platform ends it; infinite: never.
    ends: float = math.inf
    #: When a successor is started, and when this worker is drained even without a successor.
    rotates: float = math.inf
    drains: float = math.inf
    state: WorkerState = WorkerState.REQUESTED
    #: Whether the platform has accepted its start, and whether it has connected.
    accepted: bool = False
    arrived: bool = False
    ready: bool = False
    #: When it connected, and when it left, as far as is known.
    since: float | None = None
    until: float | None = None
    #: Host and process, as in `RemoteHandshake`; random bytes of its process, which distinguish two processes with one
    #: launch spec; when its latest message arrived, and when the platform was last queried because it was silent.
    where: str = ""
    nonce: bytes = b""
    last_seen: float = 0.0
    suspected_at: float = -1.0
    #: Its `WorkerHandshake`, until it is admitted; whether it is admitted; whether its messages are refused.
    handshake: list[memoryview] | None = None
    is_working: bool = False
    is_lost: bool = False
    #: Whether it was drained, so that its end is not a failure; and its last message.
    is_sent_away: bool = False
    goodbye: WorkerGoodbye | None = None
    #: Why it must be ended, or empty; and whether its task may be the reason.
    condemned: str = ""
    may_blame: bool = False
    #: Number of messages received and sent on its connection for tasks; when sending one first failed, if ever.
    received: int = 0
    sent: int = 0
    refused_at: float | None = None
    #: Since when one side has received fewer messages than the other has sent; connections that had ended before.
    short_since: float | None = None
    losses: int = 0
    #: How long it has been idle while its results were under way, as it reports.
    away_s: float = 0.0
    #: What it imports while it starts, as its latest heartbeat reports.
    importing: str = ""
    #: Moving average of the time between two of its results, and when the latest arrived.
    usual_s: float = 0.0
    worked: float = 0.0
    #: How many tasks it holds.
    window: int = 0

    @property
    def user(self) -> str:
        """User name under which the worker's key is accepted."""
        return f"{self.number}/{self.incarnation}"

    def peer(self, kind: bytes) -> bytes:
        """Return the identity of one of the worker's two connections. kind: `LINE` or `WORK`."""
        return b"/".join((self.user.encode(), self.nonce, kind))

    def ran_s(self, now: float) -> float:
        """Return how long the worker has run, in seconds: from its handshake until its goodbye or latest message."""
        if self.since is None:
            return 0.0
        until = self.until if self.until is not None else self.last_seen if self.nonce else now
        return max(0.0, until - self.since)

    def condemn(self, why: str, *, may_blame: bool = True) -> None:
        """Record why the worker should be ended; the first reason counts."""
        if not self.condemned:
            self.condemned, self.may_blame = why, may_blame

    def note_work(self, now: float) -> None:
        """Record that a message of this worker has arrived on its connection for tasks."""
        self.received += 1
        if self.worked:
            passed_s = now - self.worked
            self.usual_s = self.usual_s + _WEIGHT * (passed_s - self.usual_s) if self.usual_s else passed_s
        self.last_seen = self.worked = now

    def note_away(self, away_s: float) -> float:
        """Record the total time for which the network kept the worker idle; return its increase, 0 if not admitted."""
        more_s, self.away_s = away_s - self.away_s, away_s
        return max(0.0, more_s) if self.is_working else 0.0

    def has_lost_message(self, heartbeat: WorkerHeartbeat, losses: int, now: float) -> bool:
        """Return whether a message to or from the worker counts as lost.

        heartbeat: the worker's, with its counts of messages. losses: number of connections that have ended at the
            listener so far. If none has ended since the counts last agreed, a message is only late.
        """
        received = heartbeat.received
        if heartbeat.sent <= self.received and (received is None or received >= self.sent):
            self.short_since = None
            if received is not None:
                self.losses = losses
            return False
        self.short_since = now if self.short_since is None else self.short_since
        return losses != self.losses and now - max(self.short_since, self.worked) >= LOST_S

    def fitting_window(self, round_trip_s: float, least: int, most: int) -> int:
        """Return how many tasks the worker should hold to stay busy for this round-trip time, `least` to `most`."""
        if not self.usual_s:
            return self.window
        more = math.ceil(min(round_trip_s / self.usual_s, most) - NEGLIGIBLE)
        window = min(least + more, most)
        # A window that is a little smaller now will be a little larger soon.
        return window if not self.window - 2 < window < self.window else self.window


def split_identity(peer: bytes) -> tuple[str, bytes, bytes]:
    """Split an identity into (user, nonce, `LINE` or `WORK`). Raises MessageError if it is not that of a worker."""
    parts = peer.split(b"/")
    if len(parts) != 4 or parts[3] not in (LINE, WORK) or not parts[2]:
        raise MessageError("no connection of a worker has such an identity")
    return b"/".join(parts[:2]).decode(errors="replace"), parts[2], parts[3]


class StartWorker(msgspec.Struct, frozen=True):
    """Instruction: start this worker. lifetime_s: seconds after which it has to exit by itself; None: never."""

    name: str
    number: int
    incarnation: int
    lifetime_s: float | None


class AdmitWorker(msgspec.Struct, frozen=True):
    """Instruction: admit this worker, which is ready and whose number is free, so that it gets tasks."""

    name: str


class RejectWorker(msgspec.Struct, frozen=True):
    """Instruction: make the worker of this name leave, and send it the reason."""

    name: str
    why: str


class DrainWorker(msgspec.Struct, frozen=True):
    """Instruction: assign this worker no more tasks, and make it leave once its present tasks are finished."""

    name: str


class CheckWorker(msgspec.Struct, frozen=True):
    """Instruction: query the platform about this worker."""

    name: str


class StopWorker(msgspec.Struct, frozen=True):
    """Instruction: make the platform end this worker by force."""

    name: str
    why: str


class Report(msgspec.Struct, frozen=True):
    """Instruction: report what limits the fleet, such as "quota", and details; both are empty if nothing does."""

    limited_by: str
    text: str


class Fail(msgspec.Struct, frozen=True):
    """Instruction: report why the fleet no longer starts workers."""

    text: str


FleetInstruction: TypeAlias = (
    StartWorker | AdmitWorker | RejectWorker | DrainWorker | CheckWorker | StopWorker | Report | Fail
)


#: First and longest pause after a failure, in seconds, and the longest while the platform does not answer. Trying costs
#: little then, and workers should start soon after the platform is back.
FIRST_PAUSE_S, MAX_PAUSE_S, AWAY_PAUSE_S = 0.5, 30.0, 5.0
#: Minimum pause before a retry after the platform has refused the credentials, the first time and later, in seconds. A
#: retry looks the credentials up again.
RENEW_S, DENIED_S = 1.0, 30.0
#: How often credentials that have not expired are refused in a row before the fleet fails.
MAX_DENIALS = 2
#: How long a fleet without workers retries starts that are refused for a reason that may pass, in seconds: the first
#: if the platform has accepted a start before or only throttles, else the second. A refusal `APART_S` seconds after
#: the last one begins a new series.
REFUSED_TIMEOUT_S, UNTRIED_S, APART_S = 300.0, 60.0, 150.0
#: Interval at which the assumed capacity of a full platform rises by one worker, in seconds.
RAISE_S = 60.0
#: The timeout of a start, within its limits, is `TIMES` times the 95th percentile of the latest `STARTS` starts' times.
STARTS, TIMES = 32, 3.0
#: What limits the number of workers, in one word, by the error of a refused start.
LIMITED_BY: dict[type[PlatformError], str] = {
    QuotaError: "quota",
    ThrottledError: "throttling",
    DeniedError: "credentials",
    RejectedError: "rejection",
    UnavailableError: "platform",
}


class StartLimits:
    """Rules for when, and how many, workers one fleet may start. Not thread-safe.

    Args:
        limits: the limits of the platform.
        draw: returns random numbers in [0, 1), for the jitter of pauses.
    """

    def __init__(self, limits: Limits, draw: Callable[[], float]) -> None:
        self._limits = limits
        self._rate = RateLimit(limits.starts_per_s)
        self._most = math.inf if limits.max_workers is None else limits.max_workers
        #: The ceiling that the platform has shown, when, and whether by accepting workers that never connected.
        self._ceiling, self._shown_at, self._accepts_too_many = self._most, 0.0, False
        self._resume_at = -math.inf
        #: Since when starts have been refused without pause, when and why the latest one was, and how many refusals of
        #: credentials are among them.
        self._refused_since, self._refused_at = math.inf, -math.inf
        self._refusal: PlatformError | None = None
        self._denials = 0
        self._has_accepted = False
        self._refusals = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, draw=draw)
        self._false_starts = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, draw=draw)
        self._delays: deque[float] = deque(maxlen=STARTS)

    @property
    def false_starts(self) -> int:
        """Number of workers that did not connect or were unusable since the latest usable one, or `retry`."""
        return self._false_starts.failures

    @property
    def timeout_s(self) -> float:
        """Time limit from a worker's start to its handshake, in seconds."""
        least, most = self._limits.start_timeout_s
        return max(least, min(TIMES * self.usual_s, most)) if self._delays else most

    @property
    def usual_s(self) -> float:
        """95th percentile of the latest workers' times from start to handshake, in seconds; 0 if none has connected."""
        return sorted(self._delays)[math.ceil(0.95 * len(self._delays)) - 1] if self._delays else 0.0

    def ceiling(self, now: float) -> float:
        """Return the known maximum number of workers; infinite if none is known."""
        return min(self._most, self._ceiling + max(0.0, now - self._shown_at) // RAISE_S)

    def may_start(self, now: float, *, requested: bool) -> bool:
        """Return whether a worker may be started now. requested: whether another start is unanswered."""
        if now < self._resume_at or (requested and self._refusals.failures > 0):
            return False
        return self._rate.wait_s(now) <= 0

    def note_start(self, now: float) -> None:
        """Record that a start was requested from the platform."""
        self._rate.note(now)

    def note_accepted(self, begun: float) -> None:
        """Record that the platform accepted a start. begun: the time at which it was requested."""
        self._has_accepted = True
        self._forget_refusals()
        if not self._accepts_too_many:
            self._note_capacity(begun)

    def note_refused(self, error: PlatformError, others: int, now: float) -> str:
        """Record a refused start; return the limiting factor, as in `LIMITED_BY`. others: number of other workers."""
        if now - self._refused_at >= APART_S:
            self._refused_since, self._denials = now, 0
        self._refusal, self._refused_at = error, now
        match error:
            case QuotaError():
                self.lower(others, now)
                if not others:
                    self._pause(now, self._refusals.pause_s())
            case DeniedError():
                if now >= self._resume_at:  # refusals of simultaneous starts count as one
                    self._denials += 1
                    pause_s = RENEW_S if self._denials < MAX_DENIALS else DENIED_S
                    self._pause(now, pause_s + self._refusals.pause_s())
            case ThrottledError(retry_after_s=requested_s):
                self._pause(now, max(requested_s, self._refusals.pause_s()))
            case UnavailableError():
                self._pause(now, min(AWAY_PAUSE_S, self._refusals.pause_s()))
            case _:
                self._pause(now, self._refusals.pause_s())
        return next((by for kind, by in LIMITED_BY.items() if isinstance(error, kind)), "platform")

    def gives_up(self, now: float) -> bool:
        """Return whether a fleet without connected workers should fail because of the refusals so far.

        It never fails for lack of capacity, which other users may release.
        """
        match self._refusal:
            case None | QuotaError():
                return False
            case DeniedError() if not isinstance(self._refusal, ExpiredError):
                return self._denials >= MAX_DENIALS
            case refusal:
                tried = self._has_accepted or isinstance(refusal, ThrottledError)
                return now - self._refused_since >= (REFUSED_TIMEOUT_S if tried else UNTRIED_S)

    def note_arrived(self, begun: float, now: float) -> None:
        """Record that a usable worker has connected. begun: the time at which its start was requested."""
        self._delays.append(now - begun)
        self._false_starts.reset()
        self._note_capacity(begun)

    def note_false_start(self, now: float) -> None:
        """Record a worker that did not connect or was unusable; the next start has to wait."""
        self._pause(now, self._false_starts.pause_s())

    def retry(self) -> None:
        """Forget earlier failures and their pauses."""
        self._forget_refusals()
        self._false_starts.reset()
        self._resume_at = -math.inf

    def lower(self, ceiling: int, now: float, *, accepts: bool = False) -> None:
        """Assume capacity for only `ceiling` workers, at least one, and for one more every `RAISE_S` seconds.

        accepts: whether the platform accepts further starts although their workers do not connect. Then only a later
            worker that connects, and not a later accepted start, lifts the limit.
        """
        self._ceiling, self._shown_at = min(max(1, ceiling), self._most), now
        self._accepts_too_many = accepts

    def _note_capacity(self, begun: float) -> None:
        """Remove the ceiling if a start that was requested at `begun` has exceeded it."""
        if begun > self._shown_at:
            self._ceiling, self._accepts_too_many = self._most, False

    def _forget_refusals(self) -> None:
        self._refusals.reset()
        self._refusal, self._refused_at, self._denials = None, -math.inf, 0

    def _pause(self, now: float, pause_s: float) -> None:
        self._resume_at = max(self._resume_at, now + pause_s)
