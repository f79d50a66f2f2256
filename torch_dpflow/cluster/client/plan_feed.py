"""Batches of keys that the training loop's thread draws, for the reader's thread to request.

A sampler whose order may still change is called where torch calls it: in the training loop's thread, and no further
ahead than torch.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

#: What a `PlanFeed` gives where the next batch has not been drawn yet.
LATER: Any = object()


class PlanFeed:
    """A queue for one thread that puts and one that takes. Control-C may interrupt the former at any step."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, list[Any]]] = deque()
        self._taken = 0
        self._ended = False
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, number: int, keys: list[Any]) -> None:
        """Append the batch of this number, counted from 0; of one that is put twice, the second is ignored."""
        self._waiting.append((number, keys))
        self._came.put(None)

    def end(self) -> None:
        """No more batches come."""
        self._ended = True
        self._came.put(None)

    def wait(self, within_s: float) -> None:
        """Wait until something was put, or for so long."""
        with suppress(queue.Empty):
            self._came.get(timeout=within_s)

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """The next batch, or `LATER`."""
        is_last = self._ended  # read first: nothing is put after the end
        while self._waiting:
            number, keys = self._waiting.popleft()
            if number == self._taken:
                self._taken += 1
                return keys
        if is_last:
            raise StopIteration
        later: list[Any] = LATER
        return later
