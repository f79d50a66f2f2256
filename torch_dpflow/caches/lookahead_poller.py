"""Gets a sampler's lookahead whenever there may be a new one."""

from __future__ import annotations

from typing import Protocol

from torch_dpflow._core.checks import working
from torch_dpflow.errors import OptionTypeError
from torch_dpflow.lookahead import Lookahead


class LookaheadSampler(Protocol):
    """A sampler with lookaheads."""

    def lookahead(self) -> Lookahead | None:
        """What is known of its future draws; None: nothing. Draws nothing."""
        ...


#: Most calls in an epoch to a sampler that has no new lookahead.
_POLLS_PER_EPOCH = 64


class LookaheadPoller:
    """Polls a sampler when the certain samples have been read, and when its `epoch`, if it has one, changes."""

    def __init__(self, sampler: LookaheadSampler) -> None:
        if not callable(working(sampler, "lookahead")):
            raise OptionTypeError(
                f"sampler={sampler!r} has no method lookahead(); pass a DynaGCSSampler or another with one, "
                "or leave it out"
            )
        self.sampler = sampler
        self._epoch: object = None
        #: reads until the next poll
        self._left = 0

    def poll(self, count: int) -> Lookahead | None:
        """The new lookahead, if any, before `count` samples are read. Runs the sampler's code: hold no lock."""
        epoch = working(self.sampler, "epoch")
        lookahead = None
        if self._left <= 0 or epoch != self._epoch:
            # Set before the call: the sampler may read samples itself.
            self._epoch, self._left = epoch, _POLLS_PER_EPOCH
            try:
                lookahead = self.sampler.lookahead()
            except BaseException:
                self._left = 0
                raise
            if lookahead is not None:
                self._left = max(1, len(lookahead.certain), lookahead.length // _POLLS_PER_EPOCH)
        self._left -= count
        return lookahead
