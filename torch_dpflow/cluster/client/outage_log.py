"""Reaction of a job to each error of its flow's services, and the log of their outages."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_dpflow.errors import DeadlineError, DPFlowError, ErrorKind, MessageError, RemoteCallError, UsageError
from torch_dpflow.log import LOADER

#: After this number of internal errors of a service, a call is not repeated any more, and the error is raised.
MAX_FAULTS = 5
#: Shortest outage that is logged (seconds).
SILENCE_S = 3.0
#: Longest pause before a call is repeated, after the first attempt and after many; shortest timeout of a call, even at
#: the deadline (seconds).
FIRST_PAUSE_S, LONGEST_PAUSE_S, MIN_CALL_S = 0.1, 0.5, 0.5


#: Errors that make a job wait, each with a text for the log on how long it waits; None: up to `reconnect_timeout_s`.
_WAITS: dict[ErrorKind | None, str | None] = {
    ErrorKind.LOST: None,
    ErrorKind.OVERLOADED: None,
    ErrorKind.NAME_BUSY: None,
    ErrorKind.RANKS_AWAITED: "for as long as they take",
    ErrorKind.WORKERS_AWAITED: "",
}
#: Errors after which a job repeats its call, once it has mended what its kind names; None: there was no answer.
_MENDED = {
    *_WAITS,
    None,
    ErrorKind.INTERNAL,
    ErrorKind.STALE_JOB,
    ErrorKind.STALE_ROUTING,
    ErrorKind.OUT_OF_STEP,
    ErrorKind.MISDIRECTED,
    ErrorKind.UNKNOWN_FLOW,
}


class OutageLog:
    """Log of outages and long waits of a flow's services, as one job experiences them. Any thread may call.

    Args:
        reconnect_timeout_s: how long the job waits for the services (seconds); for messages.
        muted: log nothing.
    """

    def __init__(
        self,
        flow: str,
        job: str,
        *,
        reconnect_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        muted: bool = False,
    ) -> None:
        self.reconnect_timeout_s = reconnect_timeout_s
        #: Whether the latest call was not answered.
        self.is_out = False
        #: When the services last answered, by `clock` (seconds).
        self.answered_at = clock()
        self._flow = flow
        self._job = job
        self._clock = clock
        self._logged, self.muted = False, muted
        #: Since when a service makes the job wait, None if none does, and the length of the wait that is logged next.
        self._waiting_since: float | None = None
        self._log_wait_s = SILENCE_S

    def on_answer(self) -> None:
        if self._logged:
            self._warn("its services answer again, after %.0f s", self._clock() - self.answered_at)
        self.answered_at, self.is_out, self._logged = self._clock(), False, False

    def on_no_answer(self, error: DPFlowError, *, quietly: bool = False) -> None:
        """Record a call without an answer. The outage is logged once it has lasted `SILENCE_S`.

        quietly: the silence is expected: log nothing, and count the time without an answer from now.
        """
        self.is_out = True
        if quietly:
            self.answered_at = self._clock()
            return
        silence_s = self._clock() - self.answered_at
        if silence_s >= SILENCE_S and not self._logged:
            self._logged = True
            text = "no answer from its services for %.0f s; waiting for up to reconnect_timeout_s=%g s in all (%s)"
            # Only the text: a kept log record would keep all that the traceback refers to, also the loader's iterator.
            self._warn(text, silence_s, self.reconnect_timeout_s, str(error))

    def on_wait(self, reason: str, *, limit: str | None = None) -> None:
        """Record that a service makes the job wait. `reason` is logged after `SILENCE_S`, then at doubled intervals.

        limit: text for the log about how long the job will wait; empty: no text; None: up to `reconnect_timeout_s`.
        """
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        waited_s = self._clock() - self._waiting_since
        if waited_s >= self._log_wait_s:
            self._log_wait_s = 2 * waited_s
            limit = f"for up to reconnect_timeout_s={self.reconnect_timeout_s:g} s in all" if limit is None else limit
            goes_on = f", and continues {limit}" if limit else ""
            self._warn("has waited for %.0f s%s: %s", waited_s, goes_on, reason)

    def on_error(self, error: DPFlowError, faults: int) -> ErrorKind | None:
        """Record an error of a call; return its kind, or None if there was no answer. The caller then repeats the call.

        faults: how often this call has failed with an error of the kind INTERNAL.

        Raises UsageError if the service refuses the call, `error` itself if it is no use to repeat the call.
        """
        kind = error.kind if isinstance(error, RemoteCallError) else None
        if kind is not None:
            self.on_answer()
        if kind is ErrorKind.USAGE:
            raise UsageError(str(error)) from error
        if kind not in _MENDED or isinstance(error, MessageError) or faults >= MAX_FAULTS:
            raise error
        if kind is ErrorKind.INTERNAL and faults == 1:
            self._warn("the call is repeated: %s", str(error))
        if kind in _WAITS:
            self.on_wait(str(error), limit=_WAITS[kind])
        return kind

    def on_success(self) -> None:
        if self._waiting_since is not None and self._log_wait_s > SILENCE_S:
            self._warn("continues after %.0f s", self._clock() - self._waiting_since)
        self._waiting_since, self._log_wait_s = None, SILENCE_S
        self.on_answer()

    def _warn(self, text: str, *of: object) -> None:
        if not self.muted:
            LOADER.warning(f"flow %r, job %r: {text}", self._flow, self._job, *of)

    def deadline_error(self, error: DPFlowError) -> DeadlineError:
        """Return the error for a job that has waited for `reconnect_timeout_s`. error: the last error of its call."""
        return DeadlineError(
            f"flow {self._flow!r}, job {self._job!r}: nothing was received within "
            f"reconnect_timeout_s={self.reconnect_timeout_s:g} s; its services last answered "
            f"{self._clock() - self.answered_at:.0f} s ago. If the cluster has ended (`python -m torch_dpflow.cli "
            "status`), start it again and resume from the loader's state_dict(). If it is up, the status shows whether "
            "its workers keep dying; raise JobOptions(reconnect_timeout_s=...) if samples take longer. The last error: "
            f"{error}"
        )
