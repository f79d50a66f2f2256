"""Passes on what a sampler knows, at the moments when there is something new to hear."""

from __future__ import annotations

from typing import Protocol

from torch_dpflow.caches.policy import Job, Policy
from torch_dpflow.errors import OptionTypeError
from torch_dpflow.lookahead import Lookahead


class Foreseeing(Protocol):
    """A sampler that can tell a cache what it will draw."""

    def lookahead(self) -> Lookahead | None:
        """What can be said now; None: nothing. Draws nothing."""
        ...


#: A sampler is asked at most this often in an epoch for what it has not got yet.
_QUESTIONS = 64


class Announcer:
    """Asks a sampler when its job has read what was certain, and when its `epoch`, if it has one, changes."""

    def __init__(self, sampler: Foreseeing) -> None:
        if not callable(getattr(sampler, "lookahead", None)):
            raise OptionTypeError(
                f"sampler={sampler!r} has no method lookahead(); pass a DynaGCSSampler or another with one, "
                "or leave it out"
            )
        self.sampler = sampler
        self._epoch: object = None
        #: reads until it is worth while to ask again
        self._left = 0

    def reads(self, policy: Policy, job: Job, count: int) -> None:
        """`job` is about to read `count` samples."""
        epoch = getattr(self.sampler, "epoch", None)
        if self._left <= 0 or epoch != self._epoch:
            told = self.sampler.lookahead()
            self._epoch = epoch
            if told is None:
                self._left = _QUESTIONS
            else:
                policy.foresee(job, told)
                self._left = max(1, len(told.certain), told.length // _QUESTIONS)
        self._left -= count
