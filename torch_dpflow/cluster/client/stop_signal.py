"""An event that a finalizer may set."""

from __future__ import annotations

import queue
from contextlib import suppress


class StopSignal:
    """As `threading.Event`, whose `set` takes a lock that the code may hold which a finalizer interrupts."""

    def __init__(self) -> None:
        self._set = False
        #: A `SimpleQueue`, whose `put` is documented to be reentrant.
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        """Whether it is set; it stays so."""
        return self._set

    def set(self) -> None:
        """Set it and wake the waiting threads. Any thread, finalizer or signal handler may call."""
        self._set = True
        self._woken.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, or for so many seconds; whether it is."""
        if not self._set:
            with suppress(queue.Empty):
                self._woken.get(timeout=timeout_s)
                self._woken.put(None)  # for other waiting threads
        return self._set
