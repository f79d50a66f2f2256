"""Asks a sampler for its lookahead whenever there may be a new one."""

from __future__ import annotations

from typing import Protocol

from torch_dpflow.errors import OptionTypeError
from torch_dpflow.lookahead import Lookahead


class Foreseeing(Protocol):
    """A sampler that can tell a cache what it will draw."""

    def lookahead(self) -> Lookahead | None:
        """What can be said now; None: nothing. Draws nothing."""
        ...


#: How often in an epoch a sampler is asked at most for a lookahead that it does not have yet.
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

    def ask(self, count: int) -> Lookahead | None:
        """The new lookahead, if any, before `count` samples are read. Runs the sampler's code: hold no lock."""
        epoch = getattr(self.sampler, "epoch", None)
        told = None
        if self._left <= 0 or epoch != self._epoch:
            # Set before the call: the sampler may read samples itself.
            self._epoch, self._left = epoch, _QUESTIONS
            try:
                told = self.sampler.lookahead()
            except BaseException:
                self._left = 0
                raise
            if told is not None:
                self._left = max(1, len(told.certain), told.length // _QUESTIONS)
        self._left -= count
        return told
