"""Batches on their way from the thread that puts them together to the training loop, in order.

Control-C may come between any two steps of the training loop's thread. So a batch stays the next one until it has
been taken, which is one assignment, `ready.value = TAKEN`, behind which nothing is called before the batch is returned:
Python looks for signals at calls, and at jumps backwards, only.
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

from torch_dpflow.errors import LoaderTimeoutError
from torch_dpflow.remote.job.stop_signal import StopSignal
from torch_dpflow.torch_private import ExceptionWrapper

#: In place of a batch that the training loop has.
TAKEN: Any = object()
#: How long either side waits without a look around, seconds.
LOOK_S, IDLE_S = 1.0, 0.1


@dataclass(slots=True, eq=False)
class Ready:
    """A batch, or the error in place of it."""

    #: Counts the batches from 0 on.
    number: int
    value: Any
    keys: list[int]
    #: How many samples there are until here, its own among them.
    end: int
    error: BaseException | ExceptionWrapper | None = None
    nbytes: int = 0
    #: Nothing comes after it: the end of the epoch, or what has ended it.
    is_last: bool = False


class ReadyBatches:
    """What one thread puts and another takes; at most `room` batches wait, and the one in hand.

    Args:
        closed: set when nobody wants the rest; `wake` is to be called after that.
    """

    def __init__(self, room: int, closed: StopSignal) -> None:
        self._room = room
        self._closed = closed
        self._line: deque[Ready] = deque()
        # Only to wake who waits. Two of these take an eighth of the time of one `queue.Queue` with a bound.
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._went: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: The next one, until `done`.
        self.in_hand: Ready | None = None

    def put(self, ready: Ready, idle: Callable[[], None]) -> None:
        """Put a batch in line as soon as there is room; not any more once closed. `idle` is called now and then."""
        if self._went.qsize():
            self._went.get()
        while len(self._line) >= self._room and not self._closed.is_set():
            try:
                self._went.get(timeout=IDLE_S)
            except queue.Empty:
                idle()
        if not self._closed.is_set():
            self._line.append(ready)
            self._came.put(None)

    def next(self, timeout_s: float | None = None) -> Ready | None:
        """Wait for the next batch and have it in hand; None once closed. The same one again until `done`.

        Raises LoaderTimeoutError where none comes within `timeout_s` seconds; None: as long as it takes.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self.in_hand is None:
            if self._closed.is_set():
                return None
            line = self._line
            if line:
                self.in_hand = line[0]
            else:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise LoaderTimeoutError(
                        f"DataLoader timed out after {timeout_s:g} seconds; the batch is still under way, and comes "
                        "when the iterator is asked again"
                    )
                # Now and then Python must come by to see a signal that another thread has taken.
                with suppress(queue.Empty):
                    self._came.get(timeout=min(LOOK_S, left_s))
        line = self._line
        if line and line[0] is self.in_hand:
            line.popleft()
            self._went.put(None)
            if self._came.qsize():
                self._came.get()
        return self.in_hand

    def done(self) -> None:
        """The one in hand was taken, and is noted."""
        self.in_hand = None

    def wake(self) -> None:
        """Have both sides look around. Any thread may call, a finalizer too."""
        self._came.put(None)
        self._went.put(None)

    def clear(self) -> None:
        """Drop what waits, once closed and the thread that puts has ended."""
        self._line = deque()  # another, because who takes may be at the old one
