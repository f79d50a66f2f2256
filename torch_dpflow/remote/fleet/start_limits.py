"""Limits of a fleet's starts: rate, pauses after failures, maximum number, timeout. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.errors import (
    DeniedError,
    ExpiredError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)
from torch_dpflow.remote.launchers.contract import RateLimit
from torch_dpflow.workers.platform import Limits

#: First and longest pause after a failure, seconds, and the longest while the platform does not answer, which costs
#: little to try: its workers should return soon after it does.
FIRST_PAUSE_S, MAX_PAUSE_S, AWAY_PAUSE_S = 0.5, 30.0, 5.0
#: After how long to retry with credentials that were refused, the first time and later, seconds: they are looked up
#: again, and the service that checks them may not have answered.
RENEW_S, DENIED_S = 1.0, 30.0
#: How often credentials that have not expired are refused in a row before the fleet fails.
MAX_DENIALS = 2
#: How long a fleet without workers waits out refusals that may pass: if the platform has accepted a start before, or
#: only throttles; and if it never has. Refusals so far apart are not in a row. Seconds.
REFUSED_TIMEOUT_S, UNTRIED_S, APART_S = 300.0, 60.0, 150.0
#: How often a ceiling that the platform has shown rises by one, seconds.
RAISE_S = 60.0
#: How many starts the timeout is learned from, and how many times their 95th percentile it is.
STARTS, TIMES = 32, 3.0
#: Why there are fewer workers than there should be, by the error of a start.
LIMITED_BY: dict[type[PlatformError], str] = {
    QuotaError: "quota",
    ThrottledError: "throttling",
    DeniedError: "credentials",
    RejectedError: "rejection",
    UnavailableError: "platform",
}


class StartLimits:
    """Limits of one fleet's starts. Not thread-safe.

    After a refused start, one start is tried at a time.

    Args:
        limits: of the platform.
        draw: returns the jitter of pauses, from 0 to below 1.
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
        """How many workers in a row have ended before they connected."""
        return self._false_starts.failures

    @property
    def timeout_s(self) -> float:
        """How long a worker may take from its start to its handshake, seconds."""
        least, most = self._limits.start_timeout_s
        return max(least, min(TIMES * self.usual_s, most)) if self._delays else most

    @property
    def usual_s(self) -> float:
        """Time within which nearly all workers have sent their handshake after their start, seconds.

        0 while none has connected.
        """
        return sorted(self._delays)[math.ceil(0.95 * len(self._delays)) - 1] if self._delays else 0.0

    def ceiling(self, now: float) -> float:
        """Return the known maximum number of workers."""
        return min(self._most, self._ceiling + max(0.0, now - self._shown_at) // RAISE_S)

    def may_start(self, now: float, *, requested: bool) -> bool:
        """Return whether a worker may be started now. requested: whether another start has not been answered yet."""
        if now < self._resume_at or (requested and self._refusals.failures > 0):
            return False
        return self._rate.wait_s(now) <= 0

    def note_start(self, now: float) -> None:
        """Record a start."""
        self._rate.note(now)

    def note_accepted(self, begun: float) -> None:
        """Record that the platform accepted a start that was requested at this time."""
        self._has_accepted = True
        self._forget_refusals()
        if not self._accepts_too_many:
            self._note_capacity(begun)

    def note_refused(self, error: PlatformError, others: int, now: float) -> str:
        """Record a refused start while `others` workers run; return what limits the fleet."""
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

    def gives_up(self, now: float, *, alone: bool) -> bool:
        """Return whether a fleet without workers should fail, given the latest refusal.

        alone: whether no other workers do its work. A fleet waits for capacity without a limit, as other users release
            it.
        """
        match self._refusal:
            case None | QuotaError():
                return False
            case DeniedError() if not isinstance(self._refusal, ExpiredError):
                return self._denials >= MAX_DENIALS
            case refusal:
                tried = self._has_accepted or isinstance(refusal, ThrottledError)
                return alone and now - self._refused_since >= (REFUSED_TIMEOUT_S if tried else UNTRIED_S)

    def note_arrived(self, begun: float, now: float) -> None:
        """Record that a worker has connected whose start was requested at this time."""
        self._delays.append(now - begun)
        self._false_starts.reset()
        self._note_capacity(begun)

    def note_false_start(self, now: float) -> None:
        """Record that a worker ended before it connected, or could not be used."""
        self._pause(now, self._false_starts.pause_s())

    def retry(self) -> None:
        """Forget earlier failures."""
        self._forget_refusals()
        self._false_starts.reset()
        self._resume_at = -math.inf

    def lower(self, ceiling: int, now: float, *, accepts: bool = False) -> None:
        """Record the platform's capacity; the assumed capacity rises by one each `RAISE_S`.

        accepts: the platform has accepted more starts whose workers do not connect. Then only a worker that connects
            shows that there is capacity again.
        """
        self._ceiling, self._shown_at = min(max(1, ceiling), self._most), now
        self._accepts_too_many = accepts

    def _note_capacity(self, begun: float) -> None:
        """Remove the ceiling if a start that was requested at this time has exceeded it."""
        if begun > self._shown_at:
            self._ceiling, self._accepts_too_many = self._most, False

    def _forget_refusals(self) -> None:
        self._refusals.reset()
        self._refusal, self._refused_at, self._denials = None, -math.inf, 0

    def _pause(self, now: float, pause_s: float) -> None:
        self._resume_at = max(self._resume_at, now + pause_s)
