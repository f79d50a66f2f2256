"""Threads: periodic calls, threads that a finalizer may wait for, single flight; and a clock for leases."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

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


class Flight(Future[Any]):
    """A running load. Threads that wait for one that is cancelled start over."""

    def __init__(self) -> None:
        super().__init__()
        #: who loads
        self.thread = threading.get_ident()


class Flights(dict[int, Flight]):
    """The running loads, by key. Guarded by its owner's lock."""

    def board(self, key: int) -> tuple[Flight, bool]:
        """The running load of a key, or a new one; and whether it was running."""
        is_new = key not in self
        if is_new:
            self[key] = Flight()
        return self[key], not is_new

    def land(self, key: int, flight: Flight) -> bool:
        """A load is over; returns whether it was still wanted."""
        was_wanted = self.get(key) is flight
        if was_wanted:
            del self[key]
        return was_wanted


def fail(flights: Iterable[Flight], error: BaseException) -> None:
    """Fail the waiters of these loads, which are over, with `error`."""
    for flight in flights:
        if isinstance(error, Exception):
            flight.set_exception(error)
        else:
            flight.cancel()  # an interrupt concerns one thread: the others start over


#: Of the time between two readings no more than this counts, seconds.
MAX_STEP_S = 1.0


class SuspendAwareClock:
    """Seconds that this process has been running, for leases. Read it at least every `MAX_STEP_S` seconds.

    A process that was suspended itself, with its container or by a debugger, has not read what its peers sent
    meanwhile, and must not let their leases expire for that. One thread reads it at a time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._suspended = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._suspended += max(0.0, now - self._last - MAX_STEP_S)
        self._last = now
        return now - self._suspended
