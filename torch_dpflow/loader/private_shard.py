"""A private shard: the thread in the training process that feeds one loader, and its workers.

Three parties: the training thread plans, waits and starts workers; the shard's thread moves messages, opens and pins
batches and sees workers die; the workers load. The training thread alone forks, because a fork from a second thread
while the first is inside OpenMP or CUDA leaves the child with locks that nobody will release.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from torch_dpflow._core import descriptors
from torch_dpflow._core.threads import AwaitedThread, SuspendAwareClock
from torch_dpflow._core.torch_private import ExceptionWrapper
from torch_dpflow.epoch.state import StreamState
from torch_dpflow.errors import DescriptorLimitError, LifetimeError, MessageError
from torch_dpflow.ipc.memory.arena import ArenaReader
from torch_dpflow.ipc.memory.running_task import RunningTaskReader
from torch_dpflow.ipc.messages.headers import FAILURE, Finished, WorkerHandshake
from torch_dpflow.ipc.serialization.codec import decode
from torch_dpflow.ipc.transport import Listener
from torch_dpflow.loader.shard_events import Arrived, Broken, Died, Event, Poisoned, Started, Starved, Totals
from torch_dpflow.loader.worker_processes import WorkerProcesses
from torch_dpflow.workers.batches import Begun, EpochSpec
from torch_dpflow.workers.engine import Shard
from torch_dpflow.workers.platform import Handle
from torch_dpflow.workers.scheduler.machine import Scheduler

#: Tasks that a worker holds: one that it loads and one that waits, so that it never idles for an answer. More would
#: only make more to steal.
WINDOW = 2
#: How long a worker may take to finish its batch when the loader closes, seconds; torch's figure.
GRACE_S = 5.0
#: How often the shard's thread looks at time limits, seconds, where there are any.
TICK_S = 0.5
#: How long the training thread waits without a look at signals, seconds.
SIGNALS_S = 1.0


class Workers(Protocol):
    """The workers of one loader, wherever they are."""

    @property
    def listener(self) -> Listener:
        """Where they connect; the shard closes it."""

    @property
    def local(self) -> WorkerProcesses | None:
        """Those that the training thread starts and replaces, all of them or the first; None: there are none."""

    def __len__(self) -> int:
        """How many there are to be."""

    def start_all(self) -> None:
        """Start them. Belongs to the training thread."""

    def ended(self) -> Sequence[tuple[int, Handle]]:
        """Workers whose processes have ended since the last call, with these."""

    def refusal(self, worker: int, incarnation: int) -> str:
        """Why a process is not the latest one of its worker; empty if it is."""

    def kill(self, worker: int, why: str) -> None:
        """Kill a worker's process."""

    def close(self) -> None:
        """End all of them."""


class PrivateShard:
    """Runs a shard for one loader in this process.

    All methods belong to the training thread.

    Args:
        processes: the workers, not started yet; closed with the shard.
        order: the first epoch, alike for all workers; `streams` has where each one's own stream begins.
        streams: per worker, or empty.
        poison_limit, task_timeout_s: see `LoaderOptions`.
        pin: applied to each batch in the shard's thread (copies it to pinned memory), or None.
    """

    #: Whether there is something to look at from time to time whatever the options are.
    ticks = False
    #: Most tasks that a worker may ever hold.
    most_window = WINDOW

    def __init__(
        self,
        processes: Workers,
        *,
        order: EpochSpec,
        streams: Sequence[StreamState | None],
        poison_limit: int,
        task_timeout_s: float | None,
        pin: Callable[[Any], Any] | None,
    ) -> None:
        self._pin = pin
        self._order = order
        self._streams: list[StreamState | None] = [*streams] or [None] * len(processes)
        #: The latest task of all.
        self._latest = -1
        self._events: deque[Event] = deque()
        #: One for each event, to wait for.
        self._signs: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._commands: deque[Callable[[], None]] = deque()
        self._readers: dict[int, ArenaReader] = {}
        self._running: dict[int, RunningTaskReader | None] = {}
        self._closing = False
        self._grace_s = GRACE_S
        self._owner = os.getpid()
        #: Of the workers; the training thread starts and replaces those of this host.
        self.processes = processes
        self._listener = processes.listener
        self._task_timeout_s = task_timeout_s
        # Time for which this process was stopped, by a debugger or with its container, does not count for workers.
        self._clock = SuspendAwareClock()
        self._scheduler = Scheduler(
            window=WINDOW,
            most_window=self.most_window,
            poison_limit=poison_limit,
            task_timeout_s=task_timeout_s,
        )
        self._shard = Shard(
            self._listener, self._scheduler, self, clock=self._clock, start_timeout_s=task_timeout_s
        )
        self._receive = self._receiver()
        #: How often to look at time limits, seconds, and when next; None: there are none.
        self._tick_s = TICK_S if self.ticks else None
        if task_timeout_s is not None:
            self._tick_s = min(task_timeout_s / 4, TICK_S)
        self._tick_at = 0.0
        self._thread = AwaitedThread(self._run, name="dpflow-shard")
        try:
            self.processes.start_all()
        except BaseException:
            self.close(grace_s=0)
            raise
        self._thread.start()

    # -- for the training thread -------------------------------------------------------------------------

    def submit(self, tasks: Sequence[tuple[int, Any]], *, pinned_to: int | None = None) -> None:
        """Have the batches of these indices loaded, in this order; tasks rise. Known ones are ignored."""
        payloads = [(task, pickle.dumps(index, pickle.HIGHEST_PROTOCOL)) for task, index in tasks]

        def submit() -> None:
            fresh = [payload for payload in payloads if payload[0] > self._latest]
            if fresh:
                self._latest = fresh[-1][0]
                self._shard.submit(fresh, pinned_to=pinned_to)

        self._command(submit)

    def cancel(self, tasks: Sequence[int]) -> None:
        """Drop these tasks: their results are not needed any more."""
        self._command(lambda: self._shard.cancel(tasks))

    def wait(self, timeout_s: float | None) -> Event | None:
        """The next event, in the order in which they happened; None when none comes in time.

        It stays the next one until `acknowledge`: Control-C may come between any two steps of the training thread,
        and an event lost with it would be waited for in vain.

        Raises:
            LifetimeError: this process was forked from the one that made the shard; nothing would ever come.
            DescriptorLimitError: this process has too many files open for a worker to connect.
        """
        self._check_owner()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._events:
                return self._events[0]
            # Python handles a signal that arrived in another thread only when this thread runs Python code.
            slice_s = max(0.0, min(SIGNALS_S, deadline - time.monotonic()))
            with suppress(queue.Empty):
                self._signs.get(timeout=slice_s)
            if time.monotonic() >= deadline and not self._events:
                return None
            if not self._events and len(self._shard.connected) < len(self.processes):
                descriptors.require(descriptors.SPARE, "a worker's connection")

    def poll(self) -> Event | None:
        """The next event if it has happened already. As `wait`, and raises as it does."""
        self._check_owner()
        return self._events[0] if self._events else None

    def acknowledge(self) -> None:
        """The next event was handled."""
        self._events.popleft()
        if self._signs.qsize():
            self._signs.get()

    def begin_epoch(self, order: EpochSpec, streams: Sequence[StreamState | None]) -> None:
        """Drop what is left of the running epoch and begin another with the same workers."""

        def begin() -> None:
            self._order = order
            self._streams = [*streams] or [None] * len(self.processes)
            self._shard.begin_epoch()

        self._command(begin)

    @property
    def is_own(self) -> bool:
        """Whether this process made it; a forked child has inherited the object, not what it owns."""
        return self._owner == os.getpid()

    def totals(self) -> Totals:
        """Counts since the start."""
        counters = self._scheduler.counters
        return Totals(duplicates=counters.duplicates, steals=counters.steals)

    def elsewhere(self) -> tuple[int, str]:
        """How many workers of a platform beyond this host work, and why there are no more."""
        return 0, ""

    def close(self, *, grace_s: float = GRACE_S) -> None:
        """End the workers and the thread and leave nothing behind. Any thread may call, again too."""
        if not self.is_own:
            return
        if threading.current_thread() is self._thread:
            # The garbage collector ran in this thread and freed the iterator; a thread cannot join itself.
            threading.Thread(target=self.close, name="dpflow-close").start()
            return
        self._grace_s = grace_s
        self._closing = True
        if self._thread.is_alive():
            self._listener.wake()
            # Not for ever: a finalizer that closes may have interrupted one who holds what the thread needs, a lock of
            # `logging` or an import's.
            self._thread.wait(grace_s + GRACE_S)
        elif self._thread.ident is None:  # a worker could not be started, so it never was
            self._shut_down()
        self.processes.close()
        # The shard and this object refer to each other: free at once what only the garbage collector would free later.
        self._readers.clear()
        self._running.clear()
        self._events.clear()

    def _check_owner(self) -> None:
        if not self.is_own:
            raise LifetimeError(
                f"this iterator was made in process {self._owner} before the fork and belongs to it; iterate the "
                "loader anew in this process"
            )

    # -- for both ----------------------------------------------------------------------------------------

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._listener.wake()

    # -- the shard's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._poll_once()
        except BaseException as error:
            self._notify(Broken(error))
        finally:
            self._shut_down()

    def _poll_once(self) -> None:
        message = self._listener.receive(self._tick_s)
        is_quiet = message is None  # a death wakes the listener without a message
        while message is not None:
            self._receive(*message)
            message = self._listener.receive(0)
        while self._commands:
            self._commands.popleft()()
        is_due = self._tick_s is not None and time.monotonic() >= self._tick_at
        if is_quiet or is_due:
            self._look_after_workers()
        if is_due and self._tick_s is not None:
            self._shard.check_timeouts()
            self._tick_at = time.monotonic() + self._tick_s

    def _receiver(self) -> Callable[[bytes, list[memoryview]], None]:
        """What handles a message."""
        return self._shard.on_message

    def _look_after_workers(self) -> None:
        for worker, handle in self.processes.ended():
            self._on_end(worker, handle)

    def _notify(self, event: Event) -> None:
        self._events.append(event)
        self._signs.put(None)

    def _shut_down(self) -> None:
        """Stop the workers and wait for those that are connected; the others have nothing to finish."""
        self._shard.stop_workers()
        leaving = set(self._shard.connected)
        deadline = time.monotonic() + self._grace_s
        while leaving and (left_s := deadline - time.monotonic()) > 0:
            self._listener.receive(left_s)
            leaving.difference_update(worker for worker, _ in self.processes.ended())
        self._listener.close()

    def _on_end(self, worker: int, handle: Handle) -> None:
        if self.processes.refusal(worker, handle.incarnation):
            return  # launched by an interrupted `start`, which was repeated since
        self._drain()
        self._lose(worker, Died(worker, handle))

    def _drain(self) -> None:
        """Handle what has come: results that a worker sent before its end count; only then its tasks go to others."""
        while (message := self._listener.receive(0)) is not None:
            self._receive(*message)

    def _lose(self, worker: int, event: Event, *, may_blame: bool = True) -> None:
        # The death is notified first, so that its exit report is known when a task is reported as poisoned.
        self._notify(event)
        running = self._running.pop(worker, None)
        unknown = running is None and may_blame
        at = running.tasks() if running is not None and may_blame else ()
        self._shard.on_worker_lost(worker, None if unknown else at)
        self._readers.pop(worker, None)

    # -- callbacks of the shard (`Requester`) ------------------------------------------------------------

    def refusal(self, hello: WorkerHandshake) -> str:
        return self.processes.refusal(hello.worker, hello.incarnation)

    def shares_memory(self, hello: WorkerHandshake) -> bool:
        reader = self._readers[hello.worker] = ArenaReader(hello.pid)
        shares = hello.probe is not None and reader.probe(hello.probe)
        self._running[hello.worker] = RunningTaskReader.open(reader, hello.running) if shares else None
        return shares

    def epoch_for(self, worker: int) -> bytes:
        return pickle.dumps(replace(self._order, stream=self._streams[worker]))

    def begun(self, worker: int, frame: memoryview) -> None:
        begun: Begun = pickle.loads(frame)
        if begun.generation == self._order.generation:
            self._streams[worker] = begun.stream or self._streams[worker]
            self._notify(Started(worker, begun))

    def open(self, worker: int, finished: Finished, frames: list[memoryview]) -> Any:
        stream = pickle.loads(frames.pop()) if finished.has_stream else None
        try:
            return decode(finished.payload, frames, reader=self._readers[worker]), stream
        except MessageError as error:
            # It came from a worker of ours as it was sent: a class of the batch fails to unpickle here.
            cause = error.__cause__ or error
            where = f"while opening a batch of DataLoader worker process {worker}"
            return ExceptionWrapper((type(cause), cause, cause.__traceback__), where), stream
        except DescriptorLimitError as error:
            return ExceptionWrapper(
                (type(error), error, None), f"while opening a batch of worker {worker}"
            ), stream

    def delivered(self, task: int, worker: int, finished: Finished, opened: Any) -> None:
        value, stream = opened
        if stream is not None:
            self._streams[worker] = stream
        if self._pin is not None and not isinstance(value, ExceptionWrapper):
            value = self._pinned(value)
        kind = FAILURE if isinstance(value, ExceptionWrapper) else finished.kind
        self._notify(Arrived(task, worker, kind, value, stream, finished.payload.nbytes))

    def poisoned(self, task: int, workers: tuple[int, ...], late: int) -> None:
        self._notify(Poisoned(task, workers))

    def starved(self) -> None:
        self._notify(Starved())

    def failed(self, worker: int) -> None:
        self.processes.kill(worker, "it could not be understood, or its shared memory not be read")

    def overdue(self, worker: int) -> None:
        limit = f"task_timeout_s={self._task_timeout_s:g} s"
        self.processes.kill(worker, f"it had been at one batch, or at its start, for more than {limit}")

    def _pinned(self, value: Any) -> Any:
        assert self._pin is not None
        try:
            return self._pin(value)
        except Exception:
            return ExceptionWrapper(where="in the thread that pins memory")
