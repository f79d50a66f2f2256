"""Delivery of an epoch's batches: keys go to the reader's thread, and batches come back.

A sampler whose order may still change is called where torch calls it: in the training loop's thread, and no further
ahead than torch. `PlanFeed` passes its batches of keys to the reader's thread.

`ReadyBatches` passes batches in order from the reader's thread to the training loop. A batch stays the next one until
it was taken, which is one assignment, `ready.value = TAKEN`; see `PlannedBatch` for the reason.
"""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch_dpflow._core.threads import StopSignal
from torch_dpflow._core.torch_private import ExceptionWrapper
from torch_dpflow.errors import LoaderTimeoutError

#: Returned by a `PlanFeed` while the next batch has not been drawn.
LATER: Any = object()


class PlanFeed:
    """Queue of batches of keys: one thread puts and one takes.

    Control-C may interrupt the thread that puts, at any step.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, list[Any]]] = deque()
        self._taken = 0
        self._ended = False
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, number: int, keys: list[Any]) -> None:
        """Append batch number `number`, counted from 0. A number that was put before is ignored."""
        self._waiting.append((number, keys))
        self._came.put(None)

    def end(self) -> None:
        """End the plan: no more batches follow."""
        self._ended = True
        self._came.put(None)

    def wait(self, within_s: float) -> None:
        """Wait until a batch or the end is put, at most for the given time."""
        with suppress(queue.Empty):
            self._came.get(timeout=within_s)

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """Return the next batch, or `LATER`."""
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


#: Longest wait of the training loop, and of the reader's thread, at a time, seconds.
LOOK_S, IDLE_S = 1.0, 0.1


@dataclass(slots=True, eq=False)
class ReadyBatch:
    """A batch of a flow that is ready to be delivered, or the error in its place."""

    #: Counts the batches from 0 on.
    number: int
    value: Any
    keys: list[int]
    #: Number of the epoch's samples up to its end.
    end: int
    error: BaseException | ExceptionWrapper | None = None
    nbytes: int = 0
    #: Whether it has no batch and marks the end of the epoch, an early one if there is an error.
    is_last: bool = False


class ReadyBatches:
    """Queue of ready batches: one thread puts and one takes.

    Args:
        capacity: most batches that wait, besides the one in hand.
        closed: set to end the epoch early; call `wake` after that.
    """

    def __init__(self, capacity: int, closed: StopSignal) -> None:
        self._capacity = capacity
        self._closed = closed
        self._waiting: deque[ReadyBatch] = deque()
        # These only wake the other side. Two of them take an eighth of the time of one bounded `queue.Queue`.
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._went: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: The next batch, until `done`.
        self.in_hand: ReadyBatch | None = None

    def put(self, ready: ReadyBatch, idle: Callable[[], None]) -> None:
        """Wait until the queue is not full and append a batch, unless closed. Call `idle` every IDLE_S meanwhile."""
        if self._went.qsize():
            self._went.get()
        while len(self._waiting) >= self._capacity and not self._closed.is_set():
            try:
                self._went.get(timeout=IDLE_S)
            except queue.Empty:
                idle()
        if not self._closed.is_set():
            self._waiting.append(ready)
            self._came.put(None)

    def next(self, timeout_s: float | None = None) -> ReadyBatch | None:
        """Wait for the next batch, the same one until `done`; return None once closed.

        Raises LoaderTimeoutError if none is put within `timeout_s` seconds; None: no limit.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self.in_hand is None:
            if self._closed.is_set():
                return None
            waiting = self._waiting
            if waiting:
                self.in_hand = waiting[0]
            else:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise LoaderTimeoutError(
                        f"DataLoader timed out after {timeout_s:g} seconds; the batch is still being loaded, and the "
                        "iterator's next call returns it"
                    )
                # A signal that another thread has received is handled only when this one returns to Python.
                with suppress(queue.Empty):
                    self._came.get(timeout=min(LOOK_S, left_s))
        waiting = self._waiting
        if waiting and waiting[0] is self.in_hand:
            waiting.popleft()
            self._went.put(None)
            if self._came.qsize():
                self._came.get()
        return self.in_hand

    def done(self) -> None:
        """Proceed to the next batch: the one in hand was taken, and recorded as delivered."""
        self.in_hand = None

    def wake(self) -> None:
        """Wake both sides. Any thread may call, also a finalizer."""
        self._came.put(None)
        self._went.put(None)

    def clear(self) -> None:
        """Drop the waiting batches, once closed and the thread that puts has ended."""
        self._waiting = deque()  # a new one: the thread that takes may be using the old one
