"""Passes batches in order from the reader's thread to the training loop.

A batch stays the next one until it was taken, which is one assignment, `ready.value = TAKEN`; `epoch.planned_batch`
says why.
"""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch_dpflow._core.torch_private import ExceptionWrapper
from torch_dpflow.cluster.client.stop_signal import StopSignal
from torch_dpflow.errors import LoaderTimeoutError

#: How long the training loop, and the reader's thread, wait at a time, seconds.
LOOK_S, IDLE_S = 1.0, 0.1


@dataclass(slots=True, eq=False)
class ReadyBatch:
    """A batch, or the error in its place."""

    #: Counts the batches from 0 on.
    number: int
    value: Any
    keys: list[int]
    #: How many samples there are up to its end.
    end: int
    error: BaseException | ExceptionWrapper | None = None
    nbytes: int = 0
    #: Whether it marks the end of the epoch, and has no batch; with an error, the epoch ended early.
    is_last: bool = False


class ReadyBatches:
    """A queue for one thread that puts and one that takes.

    Args:
        capacity: most batches that wait, beside the one in hand.
        closed: set to end the epoch early; call `wake` after that.
    """

    def __init__(self, capacity: int, closed: StopSignal) -> None:
        self._capacity = capacity
        self._closed = closed
        self._waiting: deque[ReadyBatch] = deque()
        # They only wake the other side. Two of these take an eighth of the time of one bounded `queue.Queue`.
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._went: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: The next batch, until `done`.
        self.in_hand: ReadyBatch | None = None

    def put(self, ready: ReadyBatch, idle: Callable[[], None]) -> None:
        """Wait for room and append a batch, unless closed. `idle` is called every IDLE_S while it waits."""
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
        """Wait for the next batch, the same one until `done`; None once closed.

        Raises LoaderTimeoutError where none comes within `timeout_s` seconds; None waits without end.
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
                        f"DataLoader timed out after {timeout_s:g} seconds; the batch is still under way, and comes "
                        "when the iterator is asked again"
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
        """The batch in hand was taken, and noted as delivered."""
        self.in_hand = None

    def wake(self) -> None:
        """Wake both sides. Any thread may call, also a finalizer."""
        self._came.put(None)
        self._went.put(None)

    def clear(self) -> None:
        """Drop the waiting batches, once closed and the thread that puts has ended."""
        self._waiting = deque()  # a new one: the thread that takes may be using the old one
