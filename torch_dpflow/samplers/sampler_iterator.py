"""Iterators of samplers that torchdata's StatefulDataLoader saves and restores beside the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch_dpflow.errors import StateError

T = TypeVar("T")


class SamplerIterator(Iterator[T]):
    """One iteration of a sampler. Its state says whether it has begun and ended; the sampler's state has the position.

    StatefulDataLoader loads the sampler's state, makes an iterator, and loads the iterator's state. If the saved
    iteration had nothing left, the iterator yields nothing, and the next one reads a whole epoch.

    Args:
        items: what is left of the epoch, or a whole epoch.
        is_over: whether nothing was left of the epoch in the sampler's state, so that `items` are a whole epoch.
    """

    #: The loader of this package needs the sampler's state only.
    is_placed_by_sampler = True

    def __init__(self, items: Iterator[T], *, is_over: bool) -> None:
        self._items = items
        self._is_over = is_over
        self._has_begun = False
        self._has_ended = False

    def __next__(self) -> T:
        self._has_begun = True
        try:
            return next(self._items)
        except StopIteration:
            self._has_ended = True
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return whether this iteration has begun and ended."""
        return {"has_begun": self._has_begun, "has_ended": self._has_ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the iteration of this state, after the sampler has loaded its own.

        Raises:
            StateError: it is no state of an iterator.
        """
        keys = ("has_begun", "has_ended")
        if not isinstance(state, dict) or any(type(state.get(key)) is not bool for key in keys):
            raise StateError(f"{state!r:.80} is no state of a sampler's iterator; pass what its state_dict() returned")
        self._has_begun = state["has_begun"]
        self._has_ended = state["has_ended"] or (self._has_begun and self._is_over)
        if self._has_ended:
            self._items = iter(())
