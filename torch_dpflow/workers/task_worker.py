"""A worker process's loop: it holds the tasks that its shard assigns, loads the oldest, and sends the results.

One message delivers results and requests more tasks. Subclasses define the task: a batch of a private loader
(`workers/batch_worker`), or a sample of a flow (`cluster/shard/sample_worker`).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch_dpflow._core.stage_clock import StageClock
from torch_dpflow.ipc.memory.arena import Arena, RunningTask
from torch_dpflow.ipc.messages.headers import (
    Exchange,
    Finished,
    Frame,
    PayloadTable,
    Stop,
    Window,
    WorkerHandshake,
    WorkerReady,
    WorkerRefused,
    WorkerWelcome,
    decode,
    encode,
)
from torch_dpflow.ipc.messages.payload_groups import frames_of_tasks, group_payloads
from torch_dpflow.ipc.transport import Connection
from torch_dpflow.workers.exit_report import has_started

#: Function that compresses frames; returns the frames and their original sizes (0: unchanged; empty: all unchanged).
Compress = Callable[[Sequence[Frame]], tuple[list[Frame], list[int]]]


class TaskWorker:
    """Worker that holds some of its shard's tasks and loads the oldest.

    Args:
        connection: connection to the shard; its identity begins with the worker's number.
        shared_memory: maximum bytes of results in shared memory; 0: none.
        compress: compresses results for a shard on another host; None: they are sent unchanged.
    """

    #: How often a worker that has tasks polls its socket, seconds; 0: after each task.
    look_s = 0.0
    #: Minimum number of waiting results that are sent when half of the assigned tasks are left.
    min_group = 1
    #: After how long without a task or message `_on_idle` is called, seconds; None: never.
    idle_s: float | None = None

    def __init__(
        self, connection: Connection, number: int, incarnation: int, shared_memory: int, compress: Compress | None
    ) -> None:
        self._connection = connection
        self._number = number
        self._incarnation = incarnation
        self._arena = Arena(budget_bytes=shared_memory) if shared_memory else None
        self._running = RunningTask(None)
        self._clock = StageClock()
        self._outbox = ResultOutbox(connection, compress=compress, clock=self._clock)
        self._tasks: deque[tuple[int, memoryview]] = deque()
        #: How many tasks are left in the middle of the window.
        self._low = 0
        self._looked_at = 0.0
        self._stopped = False

    def work(self) -> None:
        """Load until the shard sends `Stop`."""
        self.begin()
        while not self._stopped:
            self.step()
        self._outbox.close()

    def begin(self) -> None:
        self._send_handshake()

    def step(self) -> None:
        """Handle the messages that have arrived, then load tasks for about `look_s`; wait if there is no task."""
        for frames in self._received():
            self._handle(decode(frames[0]), frames[1:])
        look_at = self._looked_at + self.look_s
        while self._tasks and not self._stopped:
            self._load(*self._tasks.popleft())
            if time.monotonic() >= look_at:
                return

    def _received(self) -> list[list[memoryview]]:
        """Return the shard's messages that have arrived; wait for a message if there are no tasks."""
        received: list[list[memoryview]] = []
        if not self._tasks:
            frames = self._connection.receive(self.idle_s)
            if frames is not None:
                received.append(frames)
            elif self.idle_s is not None:
                self._on_idle()
        now = time.monotonic()
        if received or now - self._looked_at >= self.look_s:
            self._looked_at = now
            with self._outbox.lock:
                while (frames := self._connection.receive(0)) is not None:
                    received.append(frames)
        return received

    def _send_handshake(self, *, is_ready: bool = False) -> None:
        if is_ready:
            has_started()
        probe = self._arena.probe_ref() if self._arena is not None else None
        self._running = RunningTask(self._arena)  # a new one: a reference to shared memory can be opened once
        handshake = WorkerHandshake(
            self._number, self._incarnation, os.getpid(), probe, self._running.ref, is_ready=is_ready
        )
        self._connection.send([encode(handshake)])

    def _send_ready(self) -> None:
        has_started()
        self._connection.send([encode(WorkerReady())])

    def _handle(self, header: Any, frames: list[memoryview]) -> None:
        match header:
            case Window(tasks=tasks, revoked=revoked):
                held, payloads = len(self._tasks), frames_of_tasks(header, frames)
                if revoked:
                    gone = set(revoked)
                    self._tasks = deque(task for task in self._tasks if task[0] not in gone)
                self._tasks.extend(zip(tasks, payloads, strict=True))
                self._low = len(self._tasks) // 2
                self._on_tasks(payloads)
                self._report_if_emptied(held)
            case WorkerWelcome(shared_memory=shared_memory):
                self._on_welcome(frames[0], shares_memory=shared_memory)
            case WorkerRefused(reason=reason):
                self._on_refused(reason)
            case Stop():
                self._stopped = True

    def _report_if_emptied(self, held: int) -> None:
        # The scheduler cannot tell whether a task had begun when it was revoked.
        if held and not self._tasks:
            self._outbox.flush()

    def _may_hold(self) -> bool:
        """Return whether the latest result may wait to be sent together with later results.

        In the middle of the window the results are sent at once, so that the shard refills the window before idle
        workers steal from it. Fewer than `min_group` wait: a message is answered by a window of as many tasks, so ever
        smaller groups would follow. No result waits if the shard cannot read from shared memory which task runs: it
        could suspect a finished task.
        """
        if self._running.ref is None or not self._tasks:
            return False
        return len(self._tasks) != self._low or self._outbox.waiting + 1 < self.min_group

    # -- of a kind of worker -----------------------------------------------------------------------------

    def _on_welcome(self, frame: memoryview, *, shares_memory: bool) -> None:
        """Handle the shard's answer to the handshake."""
        raise NotImplementedError

    def _on_refused(self, reason: str) -> None:
        """End the worker, because the shard refuses it."""
        raise NotImplementedError

    def _load(self, task: int, payload: memoryview) -> None:
        """Load this task, and pass its result to the outbox."""
        raise NotImplementedError

    def _on_tasks(self, payloads: Sequence[memoryview]) -> None:
        """Handle newly arrived tasks, before they are loaded."""

    def _on_idle(self) -> None:
        """Handle a wait of `idle_s` in which no task or message arrived."""


#: Maximum results of a message; maximum frames and bytes, shared memory included, of a message of several results.
MAX_RESULTS, MAX_FRAMES, MAX_BYTES = 64, 128, 8 << 20
#: A result waits for others only if the latest message was sent less than this long ago, seconds: ten small samples'
#: time. With 8 results and 20 ms a shard took a fifth more processor time.
HOLD_S = 0.06
#: The time after the latest message when waiting results are sent although the worker loads a sample, seconds.
LATE_S = 0.1


class ResultOutbox:
    """Outbox that sends a worker's results to its shard: slow results at once, fast results in groups.

    A result sent alone costs a shard three times the processor time of a result in a group. Only the worker's thread
    calls `add` and `flush`; a thread of the outbox sends results that have waited too long.

    Args:
        connection: connection to the shard. Other users of it must hold `lock` while results wait.
        hold_s, late_s: see `HOLD_S` and `LATE_S`.
        compress: compresses frames; None: they are sent unchanged.
        clock: measures loading in the worker's thread; its times are sent with the results.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        hold_s: float = HOLD_S,
        late_s: float = LATE_S,
        compress: Compress | None = None,
        clock: StageClock | None = None,
    ) -> None:
        self._compress = compress
        self._clock = clock
        self._connection = connection
        self._hold_s, self._late_s = hold_s, late_s
        self.lock = threading.Lock()
        #: The waiting results, as in `group_payloads`; their frames and bytes.
        self._finished: list[tuple[int, int, PayloadTable, Sequence[Frame]]] = []
        self._frames = self._nbytes = 0
        #: The task that the worker has run since the latest result.
        self._started: int | None = None
        self._sent_at = -math.inf
        self._waiting = threading.Event()
        self._closed = threading.Event()
        #: Runs once a result has waited.
        self._thread: threading.Thread | None = None

    def add(
        self,
        task: int,
        kind: int,
        table: PayloadTable,
        frames: Sequence[Frame],
        started: int | None,
        *,
        hold: bool = False,
        has_stream: bool = False,
    ) -> None:
        """Send a result at once, or together with later results.

        started: the task that the worker runs next; None: none.
        hold: whether the result may wait for others; not allowed with `has_stream`.
        has_stream: as in `Finished`.
        """
        # Views of the sample's memory, which the dataset may overwrite with the next sample before they are sent.
        frames = [bytes(frame) if type(frame) is memoryview else frame for frame in frames]
        with self.lock:
            if not hold and not self._finished:
                self._started = started
                self._transmit([Finished([task], kind, table, has_stream=has_stream)], frames)
                return
            if self._finished and self._frames + len(frames) > MAX_FRAMES:
                self._send()
            self._finished.append((task, kind, table, frames))
            self._frames += len(frames)
            self._nbytes += sum(map(len, frames))
            if table.blocks:
                self._nbytes += sum([block.nbytes for block in table.blocks])
            self._started = started
            full = len(self._finished) == MAX_RESULTS or self._nbytes >= MAX_BYTES
            if hold and not full and time.monotonic() - self._sent_at < self._hold_s:
                if not self._waiting.is_set():
                    self._wait()
            else:
                self._send()

    def flush(self) -> None:
        """Send the waiting results; if there are none, report that the worker is idle."""
        with self.lock:
            self._started = None
            self._send()

    @property
    def waiting(self) -> int:
        """Number of results that wait for others."""
        return len(self._finished)

    def close(self) -> None:
        """Drop the waiting results and end the thread."""
        with self.lock:
            self._finished = []
        self._closed.set()
        self._waiting.set()
        if self._thread is not None:
            self._thread.join()

    def _wait(self) -> None:
        self._waiting.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_late, name="dpflow-results", daemon=True)
            self._thread.start()

    def _send(self, *, late: bool = False) -> None:
        finished, frames = group_payloads(self._finished, Finished)
        self._finished, self._frames, self._nbytes = [], 0, 0
        self._transmit(finished, frames, late=late)

    def _transmit(self, finished: list[Finished], frames: Sequence[Frame], *, late: bool = False) -> None:
        self._sent_at = time.monotonic()
        sizes: list[int] = []
        if self._compress is not None:
            frames, sizes = self._compress(frames)
        # Late, the worker's thread may change the times meanwhile; its next result has them.
        times = None if self._clock is None or late else self._clock.take()
        self._connection.send([encode(Exchange(finished, self._started, sizes or None, times)), *frames])

    def _send_late(self) -> None:
        while not self._closed.is_set():
            self._waiting.wait()
            self._closed.wait(self._late_s)
            with self.lock:
                if not self._finished:
                    self._waiting.clear()
                elif time.monotonic() - self._sent_at >= self._late_s:
                    self._send(late=True)
