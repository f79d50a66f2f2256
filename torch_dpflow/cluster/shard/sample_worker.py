"""Worker of a shared flow: loads the samples that its shard assigns, until its node or its shard ends it."""

from __future__ import annotations

import io
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any

import msgspec

from torch_dpflow._core.torch_private import set_worker_signal_handlers
from torch_dpflow.cluster.control.supervision import UP
from torch_dpflow.cluster.messages.shard import FAILED, GREETING, WorkerArguments
from torch_dpflow.cluster.services.contents import open_content
from torch_dpflow.cluster.services.service import COORDINATOR, ClusterPlace, HeartbeatSender, ServiceSpec, locate
from torch_dpflow.cluster.shard.sample_source import SampleSource
from torch_dpflow.errors import MessageError, NotPicklableError
from torch_dpflow.ipc.memory.arena import Arena, RunningTask
from torch_dpflow.ipc.messages.headers import (
    Exchange,
    Finished,
    NoSession,
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
from torch_dpflow.ipc.rpc.carrier import compress
from torch_dpflow.ipc.serialization.fast_path import encode_sample
from torch_dpflow.ipc.transport import Connection, Frame, connect
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.shipping.code_bundle import install_bundle
from torch_dpflow.remote.shipping.content_pack import code_in
from torch_dpflow.workers.batches import unpicklable_failure
from torch_dpflow.workers.process_control import exit_with, use_sched_batch

#: Most shared memory that a worker uses for its results, bytes.
SHARED_MEMORY_BYTES = 64 << 20
#: How long a worker waits for its shard's answer before it repeats its handshake, seconds.
HANDSHAKE_S = 1.0
#: How often a worker that has tasks polls its socket, seconds. Polling after every sample took 3% of its time, and new
#: or revoked tasks can wait half as long as a result may.
LOOK_S = 0.03
#: How long a worker that cannot watch its shard's process is idle before it repeats its handshake, as its shard may
#: have been replaced, seconds.
IDLE_S = 10.0
#: A worker whose handshakes have not been answered for so long ends, seconds: its shard may listen elsewhere by now,
#: and the worker that is started in its place locates it.
SILENCE_S = 120.0


class SampleWorker:
    """Worker that holds some of its shard's tasks and loads the oldest.

    Args:
        content: opens the content with a digest; calls its second argument repeatedly while it fetches it.
        up: called once the content is open.
        outbox: sends its results; None: unchanged.
        directory: removed if the worker ends with its shard.
    """

    #: Times after which an unanswered handshake, and one of an idle worker, is repeated, seconds; None: never, as the
    #: shard's end is detected otherwise.
    handshake_s: float | None = HANDSHAKE_S
    idle_s: float | None = IDLE_S

    def __init__(
        self,
        connection: Connection,
        number: int,
        incarnation: int,
        content: Callable[[str, Callable[[], None]], IO[bytes]],
        up: Callable[[], None] = lambda: None,
        *,
        outbox: ResultOutbox | None = None,
        directory: str = "",
    ) -> None:
        self._directory = directory
        self._content = content
        self._up = up
        self._connection = connection
        self._number = number
        self._incarnation = incarnation
        self._arena: Arena | None = Arena(budget_bytes=SHARED_MEMORY_BYTES)
        self._running = RunningTask(None)
        self._outbox = outbox or ResultOutbox(connection)
        self._source: SampleSource | None = None
        self._tasks: deque[tuple[int, memoryview]] = deque()
        #: How many tasks are left in the middle of the window.
        self._low = 0
        self._looked_at = 0.0
        self._stopped = False
        #: For how long handshakes have not been answered, seconds.
        self._unanswered_s = 0.0
        self._shard = b""

    def work(self) -> None:
        """Load samples until the shard sends `Stop`."""
        self._await_welcome()
        while not self._stopped:
            for frames in self._received():
                self._handle(decode(frames[0]), frames[1:])
            if not self._stopped:
                self._load_until(self._looked_at + LOOK_S)
        self._outbox.close()

    def _received(self) -> list[list[memoryview]]:
        """Return the messages of the shard; wait for one if there are no tasks."""
        received: list[list[memoryview]] = []
        if not self._tasks:
            frames = self._connection.receive(self.idle_s)
            if frames is None:
                self._send_handshake(IDLE_S)
            else:
                received.append(frames)
        now = time.monotonic()
        if received or now - self._looked_at >= LOOK_S:
            self._looked_at = now
            with self._outbox.lock:
                while (frames := self._connection.receive(0)) is not None:
                    received.append(frames)
        return received

    def _await_welcome(self) -> None:
        """Repeat the handshake until it is answered: another shard may have replaced one that died."""
        is_due = True
        while self._source is None and not self._stopped:
            if is_due:
                self._send_handshake(HANDSHAKE_S)
            frames = self._connection.receive(self.handshake_s)
            is_due = self.handshake_s is not None
            if frames is not None:
                self._handle(decode(frames[0]), frames[1:])

    def _send_handshake(self, every_s: float) -> None:
        """Send the handshake, at most every `every_s` seconds."""
        if self._unanswered_s >= SILENCE_S:
            self._end(f"its shard has not answered for {SILENCE_S:g} s")
            return
        self._unanswered_s += every_s
        probe = self._arena.probe_ref() if self._arena is not None else None
        self._running = RunningTask(self._arena)  # a new one: a reference to shared memory can be opened once
        hello = WorkerHandshake(self._number, self._incarnation, os.getpid(), probe, self._running.ref)
        self._connection.send([encode(hello)])

    def _end(self, reason: str) -> None:
        SERVICE.error("worker ends: %s", reason)
        self._stopped = True

    def _handle(self, header: Any, frames: list[memoryview]) -> None:
        match header:
            case Window(tasks=tasks, revoked=revoked):
                held = len(self._tasks)
                if revoked:
                    gone = set(revoked)
                    self._tasks = deque(task for task in self._tasks if task[0] not in gone)
                payloads = frames_of_tasks(header, frames)
                self._tasks.extend(zip(tasks, payloads, strict=True))
                self._low = len(self._tasks) // 2
                if self._source is not None:
                    self._source.announce(payloads)
                if held and not self._tasks:
                    # The shard cannot know whether a task had begun when it was revoked.
                    self._outbox.flush()
            case WorkerWelcome(shared_memory=shared_memory):
                self._unanswered_s = 0.0
                if self._source is None:
                    self._begin(shared_memory, frames[0])
                elif self._shard != GREETING.unpack_from(frames[0])[0]:
                    # Another shard, whose tasks have the numbers of the old one's: no result may reach it.
                    self._stopped = True
            case WorkerRefused(reason=reason):
                self._end(f"its shard refuses it: {reason}")
            case NoSession():
                self._end("a service of another node listens where its shard did")
            case Stop():
                self._stopped = True

    def _begin(self, shared_memory: bool, greeting: memoryview) -> None:
        """Open the content, once the shard has accepted this worker."""
        if not shared_memory:
            self._arena, self._running = None, RunningTask(None)
        self._shard, pid, workers = GREETING.unpack_from(greeting)
        # A process id is valid on one host only. The shard has read this worker's memory, so both are on one host.
        if shared_memory:
            self.idle_s = None
            # The next shard would not know this worker; the node starts another one.
            exit_with(pid, self._directory)
        #: Open until this process ends: the host keeps the file for as long.
        self._packed = self._content(bytes(greeting[GREETING.size :]).decode(), self._report_progress)
        self._source = SampleSource(self._packed, self._number, workers)
        self._connection.send([encode(WorkerReady())])
        self._up()

    def _report_progress(self) -> None:
        """Restart the shard's time limit, which is meant for the user's code and not for fetching the content."""
        self._connection.send([encode(Exchange([], None))])

    def _load_until(self, look_at: float) -> None:
        """Load the oldest tasks until it is time to look for messages, or none is left."""
        tasks = self._tasks
        while tasks:
            self._load(*tasks.popleft())
            if time.monotonic() >= look_at:
                return

    def _load(self, task: int, payload: memoryview) -> None:
        if self._source is None:
            raise MessageError("a task came before the welcome")
        self._running.note(task)
        kind, value = self._source.load(payload)
        try:
            table, frames = encode_sample(value, arena=self._arena, keep_layout=self._source.keeps_layout)
        except NotPicklableError as error:
            kind = FAILED
            table, frames = encode_sample(unpicklable_failure(self._number, error))
        self._running.note(None)
        started = self._tasks[0][0] if self._tasks else None
        # Send at once in the middle of the window: the shard refills it, instead of letting others steal from it.
        hold = self._running.ref is not None and len(self._tasks) not in (self._low, 0)
        self._outbox.add(task, kind, table, frames, started, hold=hold)


def run(service: ServiceSpec) -> None:
    """Run a worker until it ends: the role of a node's process."""
    arguments = msgspec.msgpack.decode(service.arguments, type=WorkerArguments)
    heartbeats = HeartbeatSender(service, "", stuck_s=float("inf"))
    address = locate(service.place, arguments.shard)
    connection = connect(
        address,
        identity=f"{arguments.number}/{service.incarnation}/{service.place.token}".encode(),
        options=service.place.client_transport(),
    )
    worker = SampleWorker(
        connection,
        arguments.number,
        service.incarnation,
        partial(_open_content, service.place),
        lambda: heartbeats.report({UP: True}),
    )
    use_sched_batch()  # not before: the socket's and the outbox's threads have to answer quickly
    worker.work()


def _open_content(place: ClusterPlace, digest: str, on_progress: Callable[[], None]) -> IO[bytes]:
    """Open a content, and import from the modules of the job first, if it has sent them."""
    content = open_content(place, digest, on_progress, coordinator=COORDINATOR)
    if code := code_in(content):
        install_bundle(code, f"{place.directory}/code")
    return content


class RemoteSampleWorker(SampleWorker):
    """Sample worker of a platform: sends one handshake, as its control connection detects a silent shard."""

    handshake_s = None
    idle_s = None


def load_samples(
    packed: bytes, number: int, incarnation: int, connection: Connection, *, is_near: bool, directory: str
) -> None:
    """Load single samples in a remote worker until the shard ends it.

    packed: a `SampleAssignment`. is_near: as of `work`. directory: removed if the worker ends with its shard.
    """
    set_worker_signal_handlers()
    outbox = ResultOutbox(connection, compress=None if is_near else compress)
    worker = RemoteSampleWorker(
        connection,
        number,
        incarnation,
        lambda digest, on_progress: io.BytesIO(packed),
        outbox=outbox,
        directory=directory,
    )
    use_sched_batch()  # not before: the threads of sockets have to answer quickly
    worker.work()


#: Most results of a message; most frames and bytes, shared memory included, of a message of several results.
MAX_RESULTS, MAX_FRAMES, MAX_BYTES = 64, 128, 8 << 20
#: The longest wait of a result for others, seconds: the time of ten small samples. With 8 results and 20 ms a shard
#: took a fifth more processor time.
HOLD_S = 0.06
#: The time after which results are sent although the worker still loads the next sample, seconds.
LATE_S = 0.1


class ResultOutbox:
    """Sends a worker's results to its shard: slow ones at once, fast ones in groups.

    A single result costs a shard three times the processor time of one in a group: on a busy machine it begins with
    cold caches, and so does the decoder afterwards. The code of shard, job and worker around a sample takes some 100 µs
    alone; beside decoders, on two cores, it took 700 µs. One thread at a time uses the connection.

    `add` and `flush` are for the worker's thread; a thread of the outbox sends results that have waited too long. That
    thread is no `PeriodicCall`, as it must not wake up during decoding while no result waits.

    Args:
        connection: to the shard. Other users of it must hold `lock` while results wait.
        hold_s: as HOLD_S.
        late_s: as LATE_S.
        compress: compresses frames; None: they are sent unchanged.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        hold_s: float = HOLD_S,
        late_s: float = LATE_S,
        compress: Callable[[Sequence[Frame]], tuple[list[Frame], list[int]]] | None = None,
    ) -> None:
        self._compress = compress
        self._connection = connection
        self._hold_s, self._late_s = hold_s, late_s
        self.lock = threading.Lock()
        #: The waiting results, as of `group_payloads`; their frames and bytes.
        self._finished: list[tuple[int, int, PayloadTable, Sequence[Frame]]] = []
        self._frames = self._nbytes = 0
        #: The task that the worker has run since the latest result.
        self._started: int | None = None
        self._sent_at = -math.inf
        self._waiting = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_late, name="dpflow-results", daemon=True)
        self._thread.start()

    def add(
        self, task: int, kind: int, table: PayloadTable, frames: Sequence[Frame], started: int | None, *, hold: bool
    ) -> None:
        """Send a result, now or with later ones. The frames must not change until they are sent.

        started: the task that the worker runs next. hold: whether the result may wait for others.
        """
        with self.lock:
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
                    self._waiting.set()
            else:
                self._send()

    def flush(self) -> None:
        """Send the waiting results; if there are none, report that the worker is idle."""
        with self.lock:
            self._started = None
            self._send()

    def close(self) -> None:
        """Drop the waiting results and end the thread."""
        with self.lock:
            self._finished = []
        self._closed.set()
        self._waiting.set()
        self._thread.join()

    def _send(self) -> None:
        finished, frames = group_payloads(self._finished, Finished)
        self._finished, self._frames, self._nbytes = [], 0, 0
        self._sent_at = time.monotonic()
        sizes: list[int] = []
        if self._compress is not None:
            frames, sizes = self._compress(frames)
        self._connection.send([encode(Exchange(finished, self._started, sizes or None)), *frames])

    def _send_late(self) -> None:
        while not self._closed.is_set():
            self._waiting.wait()
            self._closed.wait(self._late_s)
            with self.lock:
                if not self._finished:
                    self._waiting.clear()
                elif time.monotonic() - self._sent_at >= self._late_s:
                    self._send()
