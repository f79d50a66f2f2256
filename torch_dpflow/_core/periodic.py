"""Threads that repeat a call: heartbeats, renewals of leases, checks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.errors import DPFlowError
from torch_dpflow.log import SERVICE


class CallTiming:
    """When a repeated call is due: after an interval, sooner on request, but after a failure not before a back-off.

    All times are in seconds, by one clock.
    """

    def __init__(self, interval_s: float, now: float, backoff: Backoff | None = None) -> None:
        self._interval_s = interval_s
        self._backoff = backoff or Backoff()
        self._earliest, self.due = now, now + interval_s

    def on_request(self) -> None:
        """The call is to be made as soon as it may be."""
        self.due = self._earliest

    def on_success(self, now: float) -> None:
        """A call has returned."""
        self._backoff.reset()
        self._earliest, self.due = now, now + self._interval_s

    def on_failure(self, now: float) -> None:
        """A call has failed."""
        self._earliest = self.due = now + self._backoff.pause_s()


class PeriodicCall(threading.Thread):
    """A daemon thread that repeats a call until it is stopped; no exception of the call ends it.

    Args:
        interval_s: the time before the first call, and from the end of one to the next, seconds; may be `math.inf`.
        what: what the call does, for the log; empty: the thread's name.
        on_error: called with what a call raises, which is then repeated after a back-off; None: a service's log.
        finish: called at the end, in the thread.
    """

    def __init__(
        self,
        call: Callable[[], None],
        interval_s: float,
        name: str,
        *,
        what: str = "",
        on_error: Callable[[Exception], None] | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._call, self._on_error, self._finish = call, on_error or self._log, finish
        self._what = what or name
        self._timing = CallTiming(interval_s, time.monotonic())
        self._stopping = False
        #: Its `put` is documented to be reentrant, unlike `threading.Event.set`: a finalizer may call it.
        self._requests: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake(self) -> None:
        """Have the call made now; after a failure, once its back-off is over. Any thread or finalizer may call."""
        self._requests.put(None)

    def stop(self) -> None:
        """Have no further call made, without waiting for the thread's end. Any thread or finalizer may call."""
        self._stopping = True
        self.wake()

    def run(self) -> None:
        """The thread's body."""
        while not self._stopping:
            wait_s = self._timing.due - time.monotonic()
            if wait_s > 0:
                with suppress(queue.Empty):
                    self._requests.get(timeout=min(wait_s, threading.TIMEOUT_MAX))
                    self._timing.on_request()
                continue
            while not self._requests.empty():
                self._requests.get()
            try:
                self._call()
            except Exception as error:
                self._timing.on_failure(time.monotonic())
                self._on_error(error)
            else:
                self._timing.on_success(time.monotonic())
        self._finish()
        del self._call, self._on_error, self._finish  # no reference cycle with their owner

    def _log(self, error: Exception) -> None:
        trace = None if isinstance(error, DPFlowError) else error
        SERVICE.warning("%s has failed and is repeated (%s)", self._what, error, exc_info=trace)
