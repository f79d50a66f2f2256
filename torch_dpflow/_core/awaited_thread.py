"""A thread whose end a finalizer may wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable

#: How long to wait for a thread that has done its work to be gone, seconds: it needs microseconds.
GONE_S = 0.5


class AwaitedThread(threading.Thread):
    """A daemon thread whose end any thread may wait for, the garbage collector's finalizers too.

    The garbage collector runs between any two steps of any thread, which may hold `threading`'s own lock then. A
    thread takes that lock to end, so `join()` in a finalizer could wait for ever.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._work_is_done = threading.Event()

    def run(self) -> None:
        """Run the target (threading's name)."""
        try:
            super().run()
        finally:
            self._work_is_done.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has done its work, and shortly for it to be gone. Returns whether it has done it."""
        if not self._work_is_done.wait(timeout_s):
            return False
        self.join(GONE_S)
        return True
