"""Platform that wraps a launcher: blocking calls run in threads, and their results are events."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch_dpflow._core import descriptors
from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.threads import AwaitedThread
from torch_dpflow.errors import AnswerLostError, OptionError, PlatformError
from torch_dpflow.ipc.messages.remote_worker import checked_launch_spec
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.launchers.contract import (
    Accepted,
    Answerless,
    Ended,
    Fate,
    Launcher,
    Outcome,
    RateLimit,
    Ref,
    Refused,
    Warned,
)
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, End

#: How long a start may take, in seconds.
DEADLINE_S = 60.0
#: First and longest pause between checks of workers that are suspected or being stopped, and pause between checks of
#: all workers, in seconds.
FIRST_LOOK_S, LOOK_S, SWEEP_S = 0.1, 1.0, 60.0
#: How long a suspected worker is checked; how long a platform may take to confirm a stop, in seconds.
SUSPECT_S, CONFIRM_S = 10.0, 10.0
#: How long closing waits until all workers have ended, in seconds; twice the deadline of a start if that is longer.
CLOSE_S = 60.0
#: The longest pause after a failed stop or look, in seconds.
MAX_PAUSE_S = 10.0


@dataclass(eq=False)
class _Requested:
    """State of a worker that was requested and has not ended."""

    name: str
    #: Emptied once it was sent: it has a key.
    launch_spec: bytes = field(repr=False)
    ref: Ref | None = None
    #: Whether the platform may have it and no start of it is awaited: it can be looked at and stopped.
    there: bool = False
    #: When its start counts as lost, in seconds, and whether it does.
    overdue_at: float = 0.0
    overdue: bool = False
    #: Why it must be stopped; None while it may run.
    why: str | None = None
    #: Whether the platform has accepted to stop it.
    stopped: bool = False
    warned: bool = False
    #: Whether its last event was reported.
    reported: bool = False
    backoff: Backoff = field(default_factory=lambda: Backoff(0.5, MAX_PAUSE_S))


class ThreadedPlatform:
    """`RemotePlatform` that calls a launcher in threads, so that only `close` waits for the launcher.

    A start that is not answered within `deadline_s` counts as `Answerless`. Starts are never repeated. The launcher's
    `stop` takes precedence over other calls, and is repeated while it raises an error. `close` closes the launcher.

    Args:
        deadline_s: time limit of a start, in seconds.
        sweep_s: interval between checks of all workers, in seconds.

    Raises DescriptorLimitError: this process has too many files open.
    """

    def __init__(self, launcher: Launcher, *, deadline_s: float = DEADLINE_S, sweep_s: float = SWEEP_S) -> None:
        self.limits = launcher.limits
        try:
            self.wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            if descriptors.is_exhausted(error):
                raise descriptors.exhausted("no worker can be started") from error
            raise
        self._launcher = launcher
        self._deadline_s = deadline_s
        self._sweep_s = sweep_s
        self._rate = RateLimit(launcher.limits.starts_per_s)
        #: Guards the attributes below; notified when one of them changes.
        self._changed = threading.Condition()
        self._workers: dict[str, _Requested] = {}
        #: Names to be started, in order; to be stopped, and when; suspected, and until when.
        self._queue: dict[str, None] = {}
        self._to_stop: dict[str, float] = {}
        self._suspects: dict[str, float] = {}
        self._look_at, self._sweep_at = 0.0, time.monotonic() + sweep_s
        self._looking = False
        self._look_pause_s = FIRST_LOOK_S
        #: Starts under way that are not overdue, and all calls.
        self._starting: dict[str, _Requested] = {}
        self._threads: set[AwaitedThread] = set()
        self._hung = 0
        self._events: list[Outcome] = []
        #: Whether `close` has begun, and whether it has released the descriptor.
        self._closed = self._released = False
        self._owner = os.getpid()
        self._thread = AwaitedThread(self._run, name="dpflow-calls")
        self._thread.start()

    # -- for the owner -----------------------------------------------------------------------------------

    def start(self, name: str, launch_spec: bytes) -> None:
        checked_launch_spec(name, launch_spec)
        with self._changed:
            if self._closed:
                raise OptionError(f"{name} cannot be started: its platform is closed")
            if name in self._workers:
                raise OptionError(f"{name} cannot be started again: give each worker a different name")
            self._workers[name] = _Requested(name, launch_spec)
            self._queue[name] = None
            self._changed.notify_all()

    def stop(self, name: str, why: str = "") -> None:
        with self._changed:
            worker = self._workers.setdefault(name, _Requested(name, b"", there=True, reported=True))
            self._want_stop(worker, why)

    def adopt(self, name: str, ref: Ref | None) -> None:
        with self._changed:
            self._workers.setdefault(name, _Requested(name, b"", ref=ref, there=True))
            self._changed.notify_all()

    def suspect(self, name: str) -> None:
        with self._changed:
            if name in self._workers:
                self._suspect(name, SUSPECT_S)

    def take(self) -> list[Outcome]:
        with self._changed:
            events, self._events = self._events, []
            if events and not self._released:
                os.eventfd_read(self.wakeup_fd)
            return events

    def close(self, *, grace_s: float = 0.0) -> None:
        if os.getpid() != self._owner:
            return  # a fork has no threads, and the workers are its parent's
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for name in [*self._queue]:
                self._want_stop(self._workers[name], "its platform is closed")
            if grace_s > 0:
                for name in [*self._workers]:
                    self._suspect(name, grace_s)
                self._changed.wait_for(lambda: not self._workers, grace_s)
            for worker in [*self._workers.values()]:
                self._want_stop(worker, "its platform is closed")
            self._changed.wait_for(lambda: not self._workers, max(2 * self._deadline_s, CLOSE_S))
            left = sorted(self._workers)
            self._workers.clear()
            self._changed.notify_all()
        if left:
            SERVICE.error("not known to be stopped: %s; they end once no process answers them", ", ".join(left))
        self._thread.wait(self._deadline_s)
        with self._changed:
            threads, hung = [*self._threads], self._hung
        for thread in threads:
            thread.wait(0.0 if hung else self._deadline_s)
        self._launcher.close()
        with self._changed:
            self._released = True
            os.close(self.wakeup_fd)

    # -- the deciding thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        with self._changed:
            while not self._closed or self._workers:
                now = time.monotonic()
                self._give_up(now)
                call = self._next(now)
                if call is None:
                    self._changed.wait(self._idle_s(now))
                    continue
                thread = AwaitedThread(partial(self._do, call), name="dpflow-call")
                self._threads.add(thread)
                try:
                    thread.start()
                except (
                    RuntimeError
                ):  # no thread can be had, as at the interpreter's end, when workers are to be stopped
                    self._threads.discard(thread)
                    self._changed.release()
                    try:
                        call()
                    finally:
                        self._changed.acquire()

    def _do(self, call: Callable[[], None]) -> None:
        try:
            call()
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()

    def _next(self, now: float) -> Callable[[], None] | None:
        """Return the next call to make; None if no call is due or allowed now."""
        # Each hung call is replaced by another one, up to the same number of calls.
        most = self.limits.calls_at_once
        free = most - len(self._threads) + min(self._hung, most)
        if free <= 0:
            return None
        for name, due in self._to_stop.items():
            if due <= now and self._workers[name].there:
                del self._to_stop[name]
                return partial(self._stop, self._workers[name])
        if self._is_look_due(now):
            return self._look_call(now)
        # One call is reserved for stops and looks: if starts take long, they would be late.
        if self._queue and (most == 1 or free > 1) and self._rate.wait_s(now) <= 0:
            name = next(iter(self._queue))
            del self._queue[name]
            self._rate.note(now)
            worker = self._starting[name] = self._workers[name]
            worker.overdue_at = now + self._deadline_s
            return partial(self._start, worker)
        return None

    def _idle_s(self, now: float) -> float | None:
        """Return the longest time to wait before the next call, in seconds; None: no limit."""
        waits = [due - now for due in self._to_stop.values()]
        waits += [worker.overdue_at - now for worker in self._starting.values()]
        waits += [until - now for until in self._suspects.values()]
        if self._queue:
            waits.append(self._rate.wait_s(now))
        if self._workers and not self._looking:
            waits.append((self._look_at if self._suspects else self._sweep_at) - now)
        # What is due now waits for a call to end, which notifies.
        return min((wait for wait in waits if wait > 0), default=None)

    def _give_up(self, now: float) -> None:
        """Count overdue starts as lost, and drop old suspicions."""
        for name, worker in [*self._starting.items()]:
            if now >= worker.overdue_at:
                del self._starting[name]
                worker.overdue = True
                self._hung += 1
                self._lost(worker, f"no answer in {self._deadline_s:g} s")
        for name in [name for name, until in self._suspects.items() if now >= until]:
            del self._suspects[name]
            worker = self._workers[name]
            if worker.stopped:
                self._ended(worker, End())

    # -- the calls, each in a separate thread; what they find is entered under the lock ------------------

    def _start(self, worker: _Requested) -> None:
        launch_spec, worker.launch_spec = worker.launch_spec, b""
        ref: Ref | None = None
        refused: PlatformError | None = None
        text = ""
        try:
            ref = self._launcher.start(worker.name, launch_spec, deadline_s=self._deadline_s)
        except AnswerLostError as error:
            text = str(error)
        except PlatformError as error:
            refused = error
        except Exception as error:  # a fault of the launcher: the worker may have been started
            text = f"{type(error).__name__}: {error}"[:MAX_REPORT_CHARS]
        with self._changed:
            self._starting.pop(worker.name, None)
            self._hung -= worker.overdue
            if refused is not None:
                self._forget(worker)
                self._report_last(worker, Refused(worker.name, refused))
            elif ref is not None:
                self._accepted(worker, ref)
            elif not worker.overdue:
                self._lost(worker, text)
            is_stray = self._closed and worker.name not in self._workers
        if ref is not None and is_stray:
            failure = self._failure_of(lambda: self._launcher.stop(worker.name, ref))
            SERVICE.error("%s was started after its platform was closed: %s", worker.name, failure or "stopped")

    def _accepted(self, worker: _Requested, ref: Ref) -> None:
        if worker.reported and worker.why is None:
            return  # it has ended before its start was answered
        worker.ref, worker.there, worker.stopped = ref, True, False
        if not self._closed:
            self._workers.setdefault(worker.name, worker)  # stopped and forgotten before it had begun
        if worker.why is None:
            self._report(Accepted(worker.name, ref))
        elif worker.name in self._workers:
            self._want_stop(worker, worker.why)

    def _lost(self, worker: _Requested, text: str) -> None:
        worker.there = True
        if worker.why is None:
            self._report(Answerless(worker.name, text))

    def _stop(self, worker: _Requested) -> None:
        failure = self._failure_of(lambda: self._launcher.stop(worker.name, worker.ref))
        with self._changed:
            if self._workers.get(worker.name) is not worker:
                return  # it has ended meanwhile
            if failure:
                if worker.backoff.failures == 0:
                    SERVICE.warning("%s cannot be stopped, tried again: %s", worker.name, failure)
                self._to_stop[worker.name] = time.monotonic() + worker.backoff.pause_s()
                return
            worker.stopped = True
            self._suspect(worker.name, CONFIRM_S)

    def _is_look_due(self, now: float) -> bool:
        if self._looking:
            return False
        return (bool(self._suspects) and now >= self._look_at) or (bool(self._workers) and now >= self._sweep_at)

    def _look_call(self, now: float) -> Callable[[], None]:
        sweeps = now >= self._sweep_at
        names = self._workers if sweeps else self._suspects
        requested = {name: worker for name in names if (worker := self._workers[name]).there}
        self._looking = True
        if sweeps:
            self._sweep_at = now + self._sweep_s
        return partial(self._look, requested, {name for name, worker in requested.items() if worker.stopped})

    def _look(self, requested: Mapping[str, _Requested], stopped: Collection[str]) -> None:
        fates: Mapping[str, Fate] = {}

        def look() -> None:
            nonlocal fates
            fates = self._launcher.look({name: worker.ref for name, worker in requested.items()})

        failure = self._failure_of(look) if requested else ""
        with self._changed:
            self._looking = False
            self._look_at = time.monotonic() + self._look_pause_s
            self._look_pause_s = min(2 * self._look_pause_s, MAX_PAUSE_S if failure else LOOK_S)
            if failure:
                SERVICE.debug("workers cannot be looked at: %s", failure)
                return
            for name, worker in requested.items():
                if self._workers.get(name) is worker:
                    # A missing worker has ended only if it was stopped before, and has not been started since.
                    is_gone = name in stopped and worker.stopped
                    self._note(worker, fates.get(name, Fate(end=End() if is_gone else None)))

    def _note(self, worker: _Requested, fate: Fate) -> None:
        if fate.end is not None:
            self._ended(worker, fate.end)
        elif fate.until_s is not None and not worker.warned:
            worker.warned = True
            self._report(Warned(worker.name, fate.until_s))

    # -- under the lock ----------------------------------------------------------------------------------

    def _want_stop(self, worker: _Requested, why: str) -> None:
        worker.why = worker.why or why
        if worker.name in self._queue:
            self._ended(worker, End())
        elif not worker.stopped:
            self._to_stop.setdefault(worker.name, time.monotonic())
        self._changed.notify_all()

    def _suspect(self, name: str, for_s: float) -> None:
        now = time.monotonic()
        if name not in self._suspects:
            self._look_at, self._look_pause_s = min(self._look_at, now), FIRST_LOOK_S
        self._suspects[name] = max(self._suspects.get(name, 0.0), now + for_s)
        self._changed.notify_all()

    def _ended(self, worker: _Requested, end: End) -> None:
        self._forget(worker)
        self._report_last(worker, Ended(worker.name, replace(end, killed_for=worker.why or "")))

    def _forget(self, worker: _Requested) -> None:
        self._workers.pop(worker.name, None)
        self._queue.pop(worker.name, None)
        self._to_stop.pop(worker.name, None)
        self._suspects.pop(worker.name, None)

    def _report_last(self, worker: _Requested, outcome: Outcome) -> None:
        if not worker.reported:
            worker.reported = True
            self._report(outcome)
        self._changed.notify_all()

    def _report(self, outcome: Outcome) -> None:
        if not self._events and not self._released:
            os.eventfd_write(self.wakeup_fd, 1)
        self._events.append(outcome)

    def _failure_of(self, call: Callable[[], None]) -> str:
        """Make a call; return the text of its error, or ""."""
        try:
            call()
        except Exception as error:  # a launcher's faults too: a stop is always repeated
            return f"{type(error).__name__}: {error}"
        return ""
