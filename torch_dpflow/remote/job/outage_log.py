"""Whether a job hears of its flow's services, and what it says while it does not."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_dpflow.errors import DeadlineError, DPFlowError
from torch_dpflow.log import LOADER

#: How often in a row a service may fail over a call that may be made again, before its user hears of it.
MOST_FAULTS = 5
#: A job says that it waits for its services once they have been silent for so long, seconds.
SILENCE_S = 3.0


class Contact:
    """When a job last heard of its flow's services. Any thread may call.

    Args:
        flow: what it reads, for messages, as is `job`.
        patience_s: how long it waits for them.
    """

    def __init__(
        self, flow: str, job: str, *, patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.patience_s = patience_s
        #: Whether they did not answer when they were called last.
        self.is_lost = False
        self._flow = flow
        self._job = job
        self._clock = clock
        self._heard = clock()
        self._told = self._ended = False
        #: Since when a service has asked to wait; None where none has. And whether that was said.
        self._put_off: float | None = None
        self._told_of_wait = False

    @property
    def heard_at(self) -> float:
        """When they last answered, by the clock."""
        return self._heard

    def end(self) -> None:
        """Nobody waits any more: nothing is to be said."""
        self._ended = True

    def heard(self) -> None:
        """They have answered."""
        if self._told and not self._ended:
            LOADER.warning(
                "flow %r, job %r: its services answer again, after %.0f s",
                self._flow,
                self._job,
                self._clock() - self._heard,
            )
        self._heard, self.is_lost, self._told = self._clock(), False, False

    def missed(self, error: DPFlowError) -> None:
        """They have not answered; it is said once, when that has lasted."""
        self.is_lost = True
        silence_s = self._clock() - self._heard
        if silence_s >= SILENCE_S and not self._told and not self._ended:
            self._told = True
            LOADER.warning(
                "flow %r, job %r: no answer from its services for %.0f s; reading waits for them, for up to "
                "patience_s=%g s in all (%s)",
                self._flow,
                self._job,
                silence_s,
                self.patience_s,
                error,
            )

    def put_off(self, reason: str) -> None:
        """They ask the job to wait, and why; it is said once, when that has lasted."""
        if self._put_off is None:
            self._put_off = self._clock()
        waited_s = self._clock() - self._put_off
        if waited_s >= SILENCE_S and not self._told_of_wait and not self._ended:
            self._told_of_wait = True
            LOADER.warning(
                "flow %r, job %r: has waited for %.0f s, and goes on for up to patience_s=%g s in all: %s",
                self._flow,
                self._job,
                waited_s,
                self.patience_s,
                reason,
            )

    def failed(self, error: DPFlowError, times: int) -> None:
        """One has failed over a call, so many times by now; raises the error where that is too often."""
        if times >= MOST_FAULTS:
            raise error
        if times == 1 and not self._ended:
            LOADER.warning("flow %r, job %r: it is asked again: %s", self._flow, self._job, error)

    def served(self) -> None:
        """They have done what was asked of them."""
        if self._put_off is not None and self._told_of_wait and not self._ended:
            waited_s = self._clock() - self._put_off
            LOADER.warning("flow %r, job %r: goes on after %.0f s", self._flow, self._job, waited_s)
        self._put_off, self._told_of_wait = None, False
        self.heard()

    def given_up(self, error: DPFlowError) -> DeadlineError:
        """The error that says so."""
        return DeadlineError(
            f"flow {self._flow!r}, job {self._job!r}: nothing came within patience_s={self.patience_s:g} s; its "
            f"services last answered {self._clock() - self._heard:.0f} s ago. If the cluster has ended "
            "(`python -m torch_dpflow.cli status`), start it again and resume from the loader's state_dict(); if it "
            "is up, see there whether its workers keep dying, or raise JobOptions(patience_s=...) where samples take "
            f"longer. At last: {error}"
        )
