"""Worker of a shared flow: loads the samples that its shard assigns, until its node or its shard ends it."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow._core.processor_time import taken_by
from torch_dpflow._core.torch_private import set_worker_signal_handlers
from torch_dpflow.cluster.control.supervision import UP
from torch_dpflow.cluster.messages.shard import FAILED, GREETING, SAMPLE, WINDOW, WorkerArguments
from torch_dpflow.cluster.services.contents import open_content
from torch_dpflow.cluster.services.service import COORDINATOR, ClusterPlace, HeartbeatSender, ServiceSpec, locate
from torch_dpflow.cluster.shard.sample_source import SampleSource
from torch_dpflow.errors import MessageError, NotPicklableError
from torch_dpflow.ipc.memory.arena import RunningTask
from torch_dpflow.ipc.messages.headers import Exchange, NoSession, decode, encode
from torch_dpflow.ipc.rpc.carrier import compress
from torch_dpflow.ipc.serialization.fast_path import encode_sample
from torch_dpflow.ipc.transport import Connection, connect
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.shipping.code_bundle import install_bundle
from torch_dpflow.remote.shipping.content_pack import code_in
from torch_dpflow.workers.batches import unpicklable_failure
from torch_dpflow.workers.process_control import exit_with, use_sched_batch
from torch_dpflow.workers.task_worker import Compress, TaskWorker

#: Maximum shared memory that a worker uses for its results (bytes).
SHARED_MEMORY_BYTES = 64 << 20
#: How long a worker waits for its shard's answer before it repeats its handshake (seconds).
HANDSHAKE_S = 1.0
#: Interval at which a worker that has tasks polls its socket (seconds). Polling after every sample took 3% of its time.
LOOK_S = 0.03
#: An idle worker that cannot watch its shard's process repeats its handshake at this interval (seconds), because the
#: shard may have been replaced.
IDLE_S = 10.0
#: A worker ends if its handshakes are not answered for this long (seconds). Its shard may listen elsewhere by now; the
#: next worker with this number looks up the shard's address at its start.
SILENCE_S = 120.0


class SampleWorker(TaskWorker):
    """Worker of a flow: loads samples for its shard. `work` runs it.

    Args:
        content: opens the content with a given digest; calls its second argument repeatedly while it does so.
        up: called when the worker is ready to load.
        directory: directory that is removed if the worker ends because its shard, on the same host, has ended.
        repeats: whether the worker repeats its handshake when there is no answer, and when the worker is idle. False:
            the caller detects the end of the shard by other means.
    """

    look_s = LOOK_S
    min_group = WINDOW // 2  # quick workers that wait for their shard sent half of their results alone

    def __init__(
        self,
        connection: Connection,
        number: int,
        incarnation: int,
        content: Callable[[str, Callable[[], None]], IO[bytes]],
        up: Callable[[], None] = lambda: None,
        *,
        compress: Compress | None = None,
        directory: str = "",
        repeats: bool = True,
    ) -> None:
        super().__init__(connection, number, incarnation, SHARED_MEMORY_BYTES, compress)
        self._directory = directory
        self._content = content
        self._up = up
        self._repeats = repeats
        self.idle_s = IDLE_S if repeats else None
        self._source: SampleSource | None = None
        #: For how long handshakes have not been answered (seconds).
        self._unanswered_s = 0.0
        self._shard = b""

    def begin(self) -> None:
        """Send the handshake, repeatedly if `repeats`, until the shard has answered or the worker should end."""
        is_due = True
        while self._source is None and not self._stopped:
            if is_due:
                self._greet(HANDSHAKE_S)
            frames = self._connection.receive(HANDSHAKE_S if self._repeats else None)
            is_due = self._repeats
            if frames is not None:
                self._handle(decode(frames[0]), frames[1:])

    def _greet(self, every_s: float) -> None:
        """Send the handshake, at most every `every_s` seconds."""
        if self._unanswered_s >= SILENCE_S:
            self._end(f"its shard has not answered for {SILENCE_S:g} s")
            return
        self._unanswered_s += every_s
        self._send_handshake()

    def _on_idle(self) -> None:
        self._greet(IDLE_S)

    def _end(self, reason: str) -> None:
        SERVICE.error("worker ends: %s", reason)
        self._stopped = True

    def _on_refused(self, reason: str) -> None:
        self._end(f"its shard refuses it: {reason}")

    def _handle(self, header: Any, frames: list[memoryview]) -> None:
        if isinstance(header, NoSession):
            self._end("a service of another node listens where its shard did")
        super()._handle(header, frames)

    def _on_tasks(self, payloads: Sequence[memoryview]) -> None:
        if self._source is not None:
            self._source.announce(payloads)

    def _on_welcome(self, frame: memoryview, *, shares_memory: bool) -> None:
        """Open the content, once the shard has accepted this worker."""
        self._unanswered_s = 0.0
        shard, pid, workers = GREETING.unpack_from(frame)
        if self._source is not None:
            # Tasks of another shard have the numbers of the old one's: no result may reach it.
            self._stopped = self._stopped or shard != self._shard
            return
        self._shard = shard
        if not shares_memory:
            self._arena, self._running = None, RunningTask(None)
        # A process id is valid on one host only. The shard has read this worker's memory, so both are on one host.
        if shares_memory:
            self.idle_s = None
            # The next shard would not know this worker; the node starts another one.
            exit_with(pid, self._directory)
        #: Open until this process ends: the host keeps the file for as long.
        self._packed = self._content(bytes(frame[GREETING.size :]).decode(), self._report_progress)
        self._source = SampleSource(self._packed, self._number, workers)
        self._send_ready()
        self._up()

    def _report_progress(self) -> None:
        """Restart the shard's time limit, which is meant for the user's code and not for fetching content."""
        self._connection.send([encode(Exchange([], None))])

    def _load(self, task: int, payload: memoryview) -> None:
        if self._source is None:
            raise MessageError("a task came before the welcome")
        self._running.note(task)
        kind, value = self._clock.load_sample(self._source.load, payload)
        try:
            table, frames = encode_sample(
                value, arena=self._arena, keep_layout=self._source.keeps_layout, name="sample"
            )
        except NotPicklableError as error:
            kind = FAILED
            table, frames = encode_sample(unpicklable_failure(self._number, error))
        self._running.note(None)
        started = self._tasks[0][0] if self._tasks else None
        if kind != SAMPLE:
            self._clock.drop_sample()
        self._outbox.add(task, kind, table, frames, started, hold=self._may_hold())
        self._clock.handed_over()


def _processor_time() -> dict[str, float]:
    cpu_s, queued_s = taken_by(os.getpid())
    return {"cpu_s": cpu_s, "queued_s": queued_s}


def run(service: ServiceSpec) -> None:
    """Run a worker until it ends: the main function of its process."""
    arguments = msgpack_decoder(WorkerArguments).decode(service.arguments)
    heartbeats = HeartbeatSender(service, "", figures=_processor_time, stuck_s=float("inf"))
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
    """Open a content, and make the modules that the job has sent importable, before any others."""
    content = open_content(place, digest, on_progress, coordinator=COORDINATOR)
    if code := code_in(content):
        install_bundle(code, f"{place.directory}/code")
    return content


def load_samples(
    packed: bytes, number: int, incarnation: int, connection: Connection, *, is_near: bool, directory: str
) -> None:
    """Run a remote worker of a flow until its shard ends it.

    packed: a packed `SampleAssignment`. number, incarnation: those of the worker in its shard. is_near: whether the
        shard is on this host. directory: as in `SampleWorker`.
    """
    set_worker_signal_handlers()
    worker = SampleWorker(
        connection,
        number,
        incarnation,
        lambda digest, on_progress: io.BytesIO(packed),
        compress=None if is_near else compress,
        directory=directory,
        repeats=False,  # its control connection detects a silent shard
    )
    use_sched_batch()  # not before: the threads of sockets have to answer quickly
    worker.work()
