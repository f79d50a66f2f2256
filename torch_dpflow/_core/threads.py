"""Threads for repeated calls and for use in finalizers, one running load for many readers, and a clock for leases."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.errors import DPFlowError
from torch_dpflow.log import SERVICE

T = TypeVar("T")


class CallTiming:
    """Schedule of a repeated call. `due` is the time of the next call; all times are in seconds.

    After a success, the call is due after an interval, or on request; after a failure, at the end of a back-off.
    """

    def __init__(self, interval_s: float, now: float, backoff: Backoff | None = None) -> None:
        self._interval_s = interval_s
        self._backoff = backoff or Backoff()
        self._earliest, self.due = now, now + interval_s

    def on_request(self) -> None:
        """Schedule the call as early as the back-off allows."""
        self.due = self._earliest

    def on_success(self, now: float) -> None:
        self._backoff.reset()
        self._earliest, self.due = now, now + self._interval_s

    def on_failure(self, now: float) -> None:
        self._earliest = self.due = now + self._backoff.pause_s()


class PeriodicCall(threading.Thread):
    """A daemon thread that repeats a call until it is stopped; exceptions of the call do not end it.

    Args:
        interval_s: seconds before the first call, and from the end of a call to the next; `math.inf`: only on request.
        what: description of the call for the log; empty: the thread's name.
        on_error: receives the exception of a failed call; None: log it. The call is repeated after a back-off.
        finish: called in the thread, when it ends.
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
        """Request a call now; after a failure, at the end of the back-off. Any thread or finalizer may call this."""
        self._requests.put(None)

    def stop(self) -> None:
        """End the thread after the present call, without waiting for it. Any thread or finalizer may call this."""
        self._stopping = True
        self.wake()

    def run(self) -> None:
        """Run the thread's loop; `start` calls it."""
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


def repeat(
    call: Callable[[], T],
    on_error: Callable[[DPFlowError, bool], object],
    timeout_s: float,
    backoff: Backoff | None = None,
) -> T:
    """Repeat a call until it succeeds, with pauses of `backoff`; return its result.

    on_error: called with each DPFlowError, and whether `timeout_s` seconds have passed since the first attempt. It
        raises an error to end the repetition. Errors of other types end it at once.
    """
    deadline, backoff = time.monotonic() + timeout_s, backoff or Backoff()
    while True:
        try:
            return call()
        except DPFlowError as error:
            on_error(error, time.monotonic() >= deadline)
        time.sleep(backoff.pause_s())


#: Timeout of `join` after the target has returned, in seconds; usually it takes microseconds.
GONE_S = 0.5


class AwaitedThread(threading.Thread):
    """A daemon thread for which a finalizer can wait, by `wait`.

    The garbage collector may run a finalizer in a thread that holds `threading`'s own lock. The awaited thread needs
    that lock to end, so `join()` in the finalizer could wait forever.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._work_is_done = threading.Event()

    def run(self) -> None:
        """Run the target; `start` calls it."""
        try:
            super().run()
        finally:
            self._work_is_done.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the target to end, at most `timeout_s` seconds (None: no limit); return whether it has ended."""
        if not self._work_is_done.wait(timeout_s):
            return False
        self.join(GONE_S)
        return True


class RunningLoad(Future[Any]):
    """Future of a sample that one thread is loading. Threads that wait for it load again if it is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()


class RunningLoads(dict[int, RunningLoad]):
    """Running loads by key, so that concurrent readers of a key share one load. Not thread-safe: the owner locks."""

    def start_or_join(self, key: int) -> tuple[RunningLoad, bool]:
        """Return (load of a key, True) if one is running; else add a load and return (load, False)."""
        is_new = key not in self
        if is_new:
            self[key] = RunningLoad()
        return self[key], not is_new

    def finish(self, key: int, future: RunningLoad) -> bool:
        """Remove a finished load; return False if the key has a different load or none by now."""
        is_registered = self.get(key) is future
        if is_registered:
            del self[key]
        return is_registered


def fail(running: Iterable[RunningLoad], error: BaseException) -> None:
    for future in running:
        if isinstance(error, Exception):
            future.set_exception(error)
        else:
            future.cancel()  # an interrupt concerns one thread: the others start over


#: Maximum by which `SuspendAwareClock` advances between two readings, seconds; a longer time counts as suspension.
MAX_STEP_S = 1.0


class SuspendAwareClock:
    """Clock for leases, in seconds; it stands still while this process is suspended.

    A process that was suspended has not read its peers' messages, so their leases must not expire for that time.
    Read it at least every `MAX_STEP_S` seconds, in one thread at a time.
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


class StopSignal:
    """Event like `threading.Event` that finalizers can set.

    `Event.set` takes a lock. A finalizer can interrupt a thread that holds this lock, and would then wait for itself.
    """

    def __init__(self) -> None:
        self._set = False
        #: A `SimpleQueue`, whose `put` is documented to be reentrant.
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Set the signal and wake the waiting threads. Any thread, finalizer or signal handler may call this."""
        self._set = True
        self._woken.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the signal is set, at most `timeout_s` seconds; return whether it is set."""
        if not self._set:
            with suppress(queue.Empty):
                self._woken.get(timeout=timeout_s)
                self._woken.put(None)  # for other waiting threads
        return self._set
