"""A flag to wait for that a finalizer may set."""

from __future__ import annotations

import queue
from contextlib import suppress


class StopSignal:
    """As `threading.Event`, which must not be set from a finalizer: the code that it interrupts may hold its lock."""

    def __init__(self) -> None:
        self._set = False
        #: Python promises that `put` may interrupt any other call of a queue of this kind.
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        """Whether it is set; it stays so."""
        return self._set

    def set(self) -> None:
        """Set it, and wake whoever waits. Any thread may call, a finalizer and a signal's handler too."""
        self._set = True
        self._woken.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, or for so many seconds; whether it is."""
        if not self._set:
            with suppress(queue.Empty):
                self._woken.get(timeout=timeout_s)
                self._woken.put(None)  # for whoever else waits
        return self._set
