"""Private shard: a thread in the training process that gives the batches of one loader to its workers.

Three parties share the work:

- the training thread plans batches, waits for them and starts workers;
- the shard's thread moves messages, opens and pins batches, and notices when workers die;
- the workers load.

Only the training thread forks. A fork from a second thread while the first is inside OpenMP or CUDA leaves the child
with locks that nothing releases.
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
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch_dpflow._core import descriptors
from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow._core.threads import AwaitedThread, SuspendAwareClock
from torch_dpflow._core.torch_private import ExceptionWrapper
from torch_dpflow.epoch.state import StreamState
from torch_dpflow.errors import DescriptorLimitError, LifetimeError, MessageError
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.headers import FAILURE, OPENED, Finished, PayloadTable, WorkerHandshake
from torch_dpflow.ipc.serialization.codec import decode
from torch_dpflow.loader.open_batches import OpenBatches, Opening
from torch_dpflow.loader.shard_events import (
    Arrived,
    Died,
    Event,
    Poisoned,
    RowsArrived,
    ShardFailed,
    Started,
    WorkerIdle,
)
from torch_dpflow.workers.batch_pieces import UNDIVIDED, generation_of, part_of
from torch_dpflow.workers.batches import Begun, EpochSpec
from torch_dpflow.workers.scheduler.machine import Counters, Scheduler
from torch_dpflow.workers.shard import Shard

if TYPE_CHECKING:
    from torch_dpflow.loader.worker_processes import WorkerProcesses
    from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers

#: Tasks that a worker holds: one that it loads, and one that waits so that the worker is not idle for a round trip.
WINDOW = 2
#: The time for a worker to finish its batch when the loader closes, seconds; torch's figure.
GRACE_S = 5.0
#: The interval at which the shard's thread checks time limits, if there are any, seconds.
TICK_S = 0.5
#: The longest wait of the training thread between two checks for signals, seconds.
SIGNALS_S = 1.0
#: Memory of Python objects per byte of their pickle, as an estimate. Measured: 4 for lists of floats, 7 for boxes with
#: labels, 11 for lists of token numbers.
EXPANSION = 8


class PrivateShard:
    """Shard of one loader, in a thread of this process.

    Only the training thread calls the methods, except `close`, `elsewhere` and the callbacks of `Requester`.

    Args:
        processes: the workers, not started yet; `close` closes them.
        epoch: parameters of the first epoch, the same for all workers.
        streams: the position at which each worker's own stream begins; empty without own streams.
        poison_limit, task_timeout_s: see `LoaderOptions`.
        pin: copies a batch to pinned memory, in the shard's thread; None: batches stay as they are.
    """

    #: Whether the thread wakes up every `TICK_S` even if no option sets a time limit.
    ticks = False
    #: Maximum number of tasks that a worker may ever hold.
    max_window = WINDOW

    def __init__(
        self,
        processes: WorkerProcesses | RemoteWorkers,
        *,
        epoch: EpochSpec,
        streams: Sequence[StreamState | None],
        poison_limit: int,
        task_timeout_s: float | None,
        pin: Callable[[Any], Any] | None,
    ) -> None:
        self._pin = pin
        self._epoch = epoch
        self._streams: list[StreamState | None] = [*streams] or [None] * len(processes)
        self._latest = -1
        #: Times in a message whose results are not delivered yet.
        self._times: StageTimes | None = None
        self._events: deque[Event] = deque()
        #: Whether the training thread waits for an event, and what wakes it then: one entry for each event.
        self._is_awaited = False
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._grace_s = GRACE_S
        self._owner = os.getpid()
        self.processes = processes
        self._listener = processes.listener
        self._task_timeout_s = task_timeout_s
        #: The interval at which time limits are checked, seconds, and when next; None: there are none.
        self._tick_s = TICK_S if self.ticks else None
        if task_timeout_s is not None:
            self._tick_s = min(task_timeout_s / 4, TICK_S)
        self._tick_at = 0.0
        # Time for which this process was stopped, by a debugger or with its container, does not count for workers.
        self._clock: Callable[[], float] = time.monotonic if self._tick_s is None else SuspendAwareClock()
        self._scheduler = Scheduler(
            window=WINDOW,
            max_window=self.max_window,
            poison_limit=poison_limit,
            task_timeout_s=task_timeout_s,
        )
        self._shard = Shard(processes.sender, self._scheduler, self, clock=self._clock, start_timeout_s=task_timeout_s)
        self._open = OpenBatches(len(processes), self._shard.submit, self._shard.cancel, self._arrived)
        self._receive = self._receiver()
        self._thread = AwaitedThread(self._run, name="dpflow-shard")
        try:
            self.processes.start_all()
        except BaseException:
            self.close(grace_s=0)
            raise
        self._thread.start()

    # -- for the training thread -------------------------------------------------------------------------

    def submit(self, task: int, index: Any, *, pinned_to: int | None = None) -> None:
        """Submit the batch with these indices for loading, by any worker or only by the worker `pinned_to`.

        Task numbers must rise; a repeated number is ignored.
        """
        self._command(partial(self._submit, [(task, pickle.dumps(index, pickle.HIGHEST_PROTOCOL))], pinned_to))

    def cancel(self, tasks: Sequence[int]) -> None:
        """Cancel these tasks: their results are no longer needed."""
        self._command(lambda: self._shard.cancel(tasks))

    def ahead(self, largest: int) -> int | None:
        """Return the maximum number of batches in flight, if the largest has `largest` bytes; None: the initial one."""
        return None

    def wait(self, timeout_s: float | None) -> Event | None:
        """Wait for the oldest event that was not acknowledged, and return it; None on timeout.

        The same event is returned until `acknowledge`, because Control-C may interrupt the training thread between any
        two steps.

        Raises:
            LifetimeError: this process was forked from the one that made the shard.
            DescriptorLimitError: this process has too many files open for a worker to connect.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._is_awaited = True
        try:
            while (event := self.poll()) is None:
                # Python handles a signal that arrived in another thread only when this thread runs Python code.
                slice_s = max(0.0, min(SIGNALS_S, deadline - time.monotonic()))
                try:
                    self._wakeups.get(timeout=slice_s)
                    continue
                except queue.Empty:
                    pass
                if time.monotonic() >= deadline and not self._events:
                    return None
                if not self._events and len(self._shard.connected) < len(self.processes):
                    descriptors.require(descriptors.SPARE, "a worker's connection")
        finally:
            self._is_awaited = False
        return event

    def poll(self) -> Event | None:
        """Return the event that `wait` would return now, without waiting, or None. Raises LifetimeError like `wait`."""
        if self._owner != os.getpid():
            raise LifetimeError(
                f"this iterator was made in process {self._owner} before the fork and belongs to it; begin another "
                "iteration of the loader in this process"
            )
        return self._events[0] if self._events else None

    def acknowledge(self) -> None:
        """Remove the event that `wait` or `poll` has returned, after it was handled."""
        self._events.popleft()

    def begin_epoch(self, epoch: EpochSpec, streams: Sequence[StreamState | None]) -> None:
        """Cancel the running epoch's tasks, and begin another epoch with the same workers."""

        def begin() -> None:
            self._epoch = epoch
            self._streams = [*streams] or [None] * len(self.processes)
            self._open.clear()
            self._shard.begin_epoch()

        self._command(begin)

    @property
    def is_own(self) -> bool:
        """Whether this process made the shard; a forked child inherits the object, but not its workers."""
        return self._owner == os.getpid()

    def totals(self) -> Counters:
        """Return the scheduler's counters since the start. The returned object continues to change."""
        return self._scheduler.counters

    def elsewhere(self) -> tuple[int, str]:
        """Return (number of remote workers that work, reason why there are no more; empty if there is none)."""
        return 0, ""

    def close(self, *, grace_s: float = GRACE_S) -> None:
        """Stop the thread and the workers, which have `grace_s` seconds to finish. Idempotent and thread-safe."""
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
            # With a timeout: a finalizer that closes may have interrupted code that holds a lock of `logging` or of an
            # import, which the thread needs.
            self._thread.wait(grace_s + GRACE_S)
        elif self._thread.ident is None:  # a worker could not be started, so it never was
            self._shut_down()
        self.processes.close()
        # The shard and this object refer to each other: free now what only the garbage collector would free later.
        self._shard.close()
        self._events.clear()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._listener.wake()

    # -- the shard's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._poll_once()
        except BaseException as error:
            self._notify(ShardFailed(error))
        finally:
            self._shut_down()

    def _poll_once(self) -> None:
        message = self._listener.receive(self._tick_s)
        # A death wakes the listener without a message, and again if commands came before it.
        is_quiet = message is None and not self._commands
        while message is not None:
            self._receive(*message)
            message = self._listener.receive(0)
        self._run_commands()
        is_due = self._tick_s is not None and time.monotonic() >= self._tick_at
        if is_quiet or is_due:
            self._look_after_workers()
        if is_due and self._tick_s is not None:
            self._shard.check_timeouts()
            self._tick_at = time.monotonic() + self._tick_s
        self._run_commands()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _submit(self, tasks: Sequence[tuple[int, bytes]], pinned_to: int | None = None) -> None:
        part = 0 if self._open.opens else UNDIVIDED
        new = [(task | part, payload) for task, payload in tasks if task > self._latest]
        if new:
            self._latest = tasks[-1][0]
            self._shard.submit(new, pinned_to=pinned_to)

    def _receiver(self) -> Callable[[bytes, list[memoryview]], None]:
        return self._shard.on_message

    def _look_after_workers(self) -> None:
        for worker, handle in self.processes.ended():
            # Else it was launched by a `start` that was interrupted, and repeated since.
            if not self.processes.refusal(worker, handle.incarnation):
                self._drain()
                local = self.processes.local
                may_blame = local is None or not local.is_interrupted(worker)
                self._lose(worker, Died(worker, handle), may_blame=may_blame)

    def _notify(self, event: Event) -> None:
        self._events.append(event)
        if self._is_awaited:  # it looks for events once more after it has set this
            self._wakeups.put(None)

    def _shut_down(self) -> None:
        """Stop the workers and wait for those that are connected."""
        self._shard.stop_workers()
        leaving = set(self._shard.connected)
        deadline = time.monotonic() + self._grace_s
        while leaving and (left_s := deadline - time.monotonic()) > 0:
            self._listener.receive(left_s)
            leaving.difference_update(worker for worker, _ in self.processes.ended())
        self._listener.close()

    def _drain(self) -> None:
        """Handle the messages that have arrived: results that a worker sent before its end count."""
        while (message := self._listener.receive(0)) is not None:
            self._receive(*message)

    def _lose(self, worker: int, event: Event, *, may_blame: bool = True) -> None:
        # The death first, so that its exit report is known when a task is reported as poisoned.
        self._notify(event)
        self._shard.on_worker_lost(worker, may_blame=may_blame)

    # -- callbacks of the shard (`Requester`) ------------------------------------------------------------

    def refusal(self, handshake: WorkerHandshake) -> str:
        return self.processes.refusal(handshake.worker, handshake.incarnation)

    def admitted(self, handshake: WorkerHandshake, *, shares_memory: bool) -> None:
        pass

    def epoch_for(self, worker: int) -> bytes:
        return pickle.dumps(replace(self._epoch, stream=self._streams[worker]))

    def begun(self, worker: int, frame: memoryview) -> None:
        begun: Begun = pickle.loads(frame)
        if begun.generation == self._epoch.generation:
            self._streams[worker] = begun.stream or self._streams[worker]
            self._notify(Started(worker, begun))

    def timed(self, worker: int, times: StageTimes) -> None:
        if self._times is not None:  # of a result that was a duplicate
            times.add(self._times)
        self._times = times

    def open(
        self, worker: int, reader: ArenaReader | None, finished: Finished, payloads: list[list[memoryview]]
    ) -> list[Any]:
        return [self._opened(worker, reader, finished, frames) for frames in payloads]

    def _opened(self, worker: int, reader: ArenaReader | None, finished: Finished, frames: list[memoryview]) -> Any:
        stream = pickle.loads(frames.pop()) if finished.has_stream else None
        try:
            value = decode(finished.payload, frames, reader=reader)
            if finished.kind == OPENED:
                blocks = finished.payload.blocks
                if reader is None or len(blocks) != 1:
                    raise MessageError(f"an opened batch in {len(blocks)} blocks of shared memory: it has one")
                value = Opening(value, finished.payload, frames[0], partial(reader.end_writing, blocks[0]))
            return value, stream
        except (MessageError, DescriptorLimitError) as error:
            # The message is intact, as it is from a worker of ours: a class of the batch fails to unpickle here.
            cause = error.__cause__ or error if isinstance(error, MessageError) else error
            where = f"while opening a batch of DataLoader worker process {worker}"
            return ExceptionWrapper((type(cause), cause, cause.__traceback__), where), stream

    def delivered(self, task: int, worker: int, finished: Finished, opened: Any) -> None:
        value, stream = opened
        if stream is not None:
            self._streams[worker] = stream
        kind = FAILURE if isinstance(value, ExceptionWrapper) else finished.kind
        # The shard is about to send what the scheduler has assigned: other tasks are submitted after that.
        times, self._times = self._times, None
        part = part_of(task)
        if kind != OPENED and part in (0, UNDIVIDED):
            self._arrived(task - part, kind, value, finished.payload, worker, stream, times)
            return
        self._notify(RowsArrived(task, worker, times, time.perf_counter()))
        if kind == OPENED:
            self._command(lambda: self._divide(task, value))
        else:
            self._command(lambda: self._open.finish(task, kind, value))

    def _divide(self, task: int, opening: Opening) -> None:
        if generation_of(task) == self._epoch.generation:
            self._open.add(task, opening)

    def _arrived(
        self,
        task: int,
        kind: int,
        value: Any,
        payload: PayloadTable | None,
        worker: int = -1,
        stream: StreamState | None = None,
        times: StageTimes | None = None,
    ) -> None:
        if self._pin is not None and kind != FAILURE:
            value = self._pinned(value)
            kind = FAILURE if isinstance(value, ExceptionWrapper) else kind
        size = memory = 0
        if payload is not None:
            size = payload.nbytes
            memory = size + (EXPANSION - 1) * payload.head.size
        self._notify(Arrived(task, worker, kind, value, stream, size, memory, times, time.perf_counter()))

    def poisoned(self, task: int, workers: tuple[int, ...], late: int) -> None:
        self._command(lambda: self._poison(task, workers))

    def _poison(self, task: int, workers: tuple[int, ...]) -> None:
        if generation_of(task) == self._epoch.generation:
            self._notify(Poisoned(self._open.drop(task), workers))

    def starved(self) -> None:
        self._commands.append(self._note_idle)  # without waking this thread, which has it soon

    def _note_idle(self) -> None:
        workers, busy = self._scheduler.workers
        if busy < workers:  # else a batch was divided since
            self._notify(WorkerIdle())

    def failed(self, worker: int, why: str) -> None:
        self.processes.kill(worker, why)

    def overdue(self, worker: int) -> None:
        limit = f"task_timeout_s={self._task_timeout_s:g} s"
        self.processes.kill(worker, f"it had been at one batch, or at its start, for more than {limit}")

    def _pinned(self, value: Any) -> Any:
        assert self._pin is not None
        try:
            return self._pin(value)
        except Exception:
            return ExceptionWrapper(where="in the thread that pins memory")
