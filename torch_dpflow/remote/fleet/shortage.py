"""Says which workers a platform has not started, and why: in the log, or as an error where too few have come."""

from __future__ import annotations

import logging
import math

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
            f"{self._start_s:g} s: {self.reason or self._door()}"
        )

    def _complain(self, working: int, called: int) -> None:
        door = "" if called or self.reason else f"; {self._door()}"
        self._log.warning(
            "%d of %d workers of platform %r run %.0f s after they were asked for, %d more have called%s; those that "
            "run go on, and the others are awaited",
            working,
            self.workers,
            self._platform,
            COMPLAIN_S,
            called - working,
            door,
        )

    def _door(self) -> str:
        return f"is {self._address} open to where they run?"
