"""Logs once that a flow's services do not answer, and once that they answer again."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_dpflow.errors import DeadlineError, DPFlowError
from torch_dpflow.log import LOADER

#: How often in a row a service may fail over a call that is safe to repeat, before the user gets the error.
MAX_FAULTS = 5
#: The log mentions an outage once it has lasted for so long, seconds.
SILENCE_S = 3.0


class OutageLog:
    """When the services of a job's flow last answered. Any thread may call.

    Args:
        flow, job: for messages.
        reconnect_timeout_s: how long the job waits for the services, seconds.
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
        #: When the services last answered, by the clock.
        self.answered_at = clock()
        self._flow = flow
        self._job = job
        self._clock = clock
        self._logged, self._muted = False, muted
        #: Since when a service has the job wait; None if none has. And whether that was logged.
        self._waiting_since: float | None = None
        self._logged_wait = False

    def mute(self) -> None:
        """The job has ended: log nothing more."""
        self._muted = True

    def on_answer(self) -> None:
        """A service has answered."""
        if self._logged:
            self._warn("its services answer again, after %.0f s", self._clock() - self.answered_at)
        self.answered_at, self.is_out, self._logged = self._clock(), False, False

    def on_no_answer(self, error: DPFlowError, *, quietly: bool = False) -> None:
        """A service has not answered; logged once, when that has lasted.

        quietly: do not log it, and do not count it as an outage that has lasted.
        """
        self.is_out = True
        if quietly:
            self.answered_at = self._clock()
            return
        silence_s = self._clock() - self.answered_at
        if silence_s >= SILENCE_S and not self._logged:
            self._logged = True
            text = "no answer from its services for %.0f s; reading waits for up to reconnect_timeout_s=%g s in all (%s)"
            # Its text alone: who keeps log records would keep what its traceback refers to, the loader's iterator too.
            self._warn(text, silence_s, self.reconnect_timeout_s, str(error))

    def on_wait(self, reason: str, *, limit: str | None = None) -> None:
        """A service has the job wait; logged once with the reason, when that has lasted.

        limit: for how long the job waits; empty: not said; None: for up to `reconnect_timeout_s`.
        """
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        waited_s = self._clock() - self._waiting_since
        if waited_s >= SILENCE_S and not self._logged_wait:
            self._logged_wait = True
            limit = (
                f"for up to reconnect_timeout_s={self.reconnect_timeout_s:g} s in all"
                if limit is None
                else limit
            )
            goes_on = f", and goes on {limit}" if limit else ""
            self._warn("has waited for %.0f s%s: %s", waited_s, goes_on, reason)

    def on_fault(self, error: DPFlowError, times: int) -> None:
        """A service has failed over a call for the `times`-th time. Raises the error where that is too often."""
        if times >= MAX_FAULTS:
            raise error
        if times == 1:
            self._warn("the call is repeated: %s", str(error))

    def on_success(self) -> None:
        """A call has succeeded."""
        if self._waiting_since is not None and self._logged_wait:
            self._warn("goes on after %.0f s", self._clock() - self._waiting_since)
        self._waiting_since, self._logged_wait = None, False
        self.on_answer()

    def _warn(self, text: str, *of: object) -> None:
        if not self._muted:
            LOADER.warning(f"flow %r, job %r: {text}", self._flow, self._job, *of)

    def deadline_error(self, error: DPFlowError) -> DeadlineError:
        """The error for a job that has waited for `reconnect_timeout_s`; `error` came last."""
        return DeadlineError(
            f"flow {self._flow!r}, job {self._job!r}: nothing came within reconnect_timeout_s={self.reconnect_timeout_s:g} s; its "
            f"services last answered {self._clock() - self.answered_at:.0f} s ago. If the cluster has ended "
            "(`python -m torch_dpflow.cli status`), start it again and resume from the loader's state_dict(); if it "
            "is up, see there whether its workers keep dying, or raise JobOptions(reconnect_timeout_s=...) where samples take "
            f"longer. The last error: {error}"
        )
