"""A shard: the queue of tasks, and the I/O between the pure scheduler and the workers.

The shard forwards payloads without decoding them; its `Requester` decodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow._version import __version__
from torch_dpflow.errors import DescriptorLimitError, MessageError, SegmentLostError
from torch_dpflow.ipc.memory.arena import RunningTaskReader
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.fields import MAX_TEXT
from torch_dpflow.ipc.messages.headers import (
    PROTOCOL_VERSION,
    EpochBegin,
    Exchange,
    Finished,
    Stop,
    Window,
    WorkerBegun,
    WorkerHandshake,
    WorkerReady,
    WorkerRefused,
    WorkerWelcome,
    decode,
    encode,
    version_of,
)
from torch_dpflow.ipc.messages.payload_groups import join_tasks, split_payloads
from torch_dpflow.ipc.transport import Frame
from torch_dpflow.log import TRANSPORT
from torch_dpflow.workers.scheduler.machine import (
    Assign,
    Deliver,
    Discard,
    IdleWorkers,
    KillWorker,
    Poison,
    Revoke,
    Scheduler,
    SchedulerInstruction,
)

#: Maximum number of malformed messages that are logged, because a peer can send any number.
MAX_MALFORMED_LOGGED = 10

#: The reason for replacing a worker to which a message could not be sent. It may have ended, which is noticed later.
UNREACHABLE = "it cannot be reached, or does not read its messages"

#: Maximum bytes of a message's frames after decompression.
MAX_UNPACKED_BYTES = 1 << 32

_NO_RESULTS: Mapping[int, tuple[Finished, Any]] = MappingProxyType({})


class Requester(Protocol):
    """Owner of a shard: receives results and events, in the shard's thread."""

    def refusal(self, handshake: WorkerHandshake) -> str:
        """Return why the sender of this handshake is not, or no longer, a worker of the shard; empty if it is."""

    def admitted(self, handshake: WorkerHandshake, *, shares_memory: bool) -> None:
        """Handle the admission of a worker. The new worker may replace a worker whose end was not noticed.

        shares_memory: whether its shared memory can be read here.

        Raises DescriptorLimitError: the worker is then not admitted, and repeats its handshake.
        """

    def epoch_for(self, worker: int) -> bytes:
        """Return the current epoch's parameters for this worker, encoded; the shard does not read them."""

    def begun(self, worker: int, frame: memoryview) -> None:
        """Handle a worker's pickled `Begun`. Raises MessageError if workers have no separate streams."""

    def timed(self, worker: int, times: StageTimes) -> None:
        """Record how long a worker's latest loads took, by stage. Called before their results are delivered."""

    def open(
        self, worker: int, reader: ArenaReader | None, finished: Finished, payloads: list[list[memoryview]]
    ) -> list[Any]:
        """Return each result, decoded or copied, for `delivered`. Raises SegmentLostError if shared memory is lost."""

    def delivered(self, task: int, worker: int, finished: Finished, opened: Any) -> None:
        """Handle the first result of this task."""

    def poisoned(self, task: int, workers: tuple[int, ...], late: int) -> None:
        """Fail a task during which these workers died, `late` of them killed by the time limit."""

    def starved(self) -> None:
        """Handle that workers have become idle, because no task is left for them."""

    def failed(self, worker: int, why: str) -> None:
        """Replace a worker that broke the protocol, cannot be reached, or whose shared memory cannot be read."""

    def overdue(self, worker: int) -> None:
        """Replace a worker that has exceeded the time limit for a task or for its start."""


class Sender(Protocol):
    """Sending side of a shard: a `Listener`, or a wrapper that counts messages."""

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        """Send a message to a worker's connection; return False if it cannot be sent, like `Listener.send`."""


@dataclass(eq=False)
class _Admitted:
    """State of an admitted worker."""

    peer: bytes
    #: Readers of its shared memory, and of the record of the task that it runs; None if they cannot be read here.
    reader: ArenaReader | None
    running: RunningTaskReader | None
    #: When it was admitted or last sent a message, seconds, until it is ready; None: it is.
    starting_since: float | None
    #: Whether it has sent nothing since it was sent an epoch, and whether another epoch waits for that.
    is_quiet: bool = True
    is_behind: bool = False


class Shard:
    """Owner of tasks and their payloads until their results arrive. One thread drives it.

    Args:
        sender: sends to workers.
        scheduler: decides which worker loads which task.
        requester: receives the results.
        clock: returns the time for the scheduler, seconds.
        start_timeout_s: the time from a worker's handshake until it is ready, seconds; None: no limit.
    """

    def __init__(
        self,
        sender: Sender,
        scheduler: Scheduler,
        requester: Requester,
        *,
        clock: Callable[[], float] = time.monotonic,
        start_timeout_s: float | None = None,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        #: Sends to workers.
        self.sender = sender
        self._scheduler = scheduler
        self._requester = requester
        self._clock = clock
        self._malformed = 0
        #: The payload of each unfinished task.
        self._payloads: dict[int, Frame] = {}
        self._workers: dict[int, _Admitted] = {}

    def submit(self, tasks: Sequence[tuple[int, Frame]], *, pinned_to: int | None = None) -> None:
        """Queue (task, payload) pairs, in order, for any worker, or only for worker `pinned_to`."""
        self._payloads.update(tasks)
        self._apply(self._scheduler.submit([task for task, _ in tasks], pinned_to, self._clock()))

    def cancel(self, tasks: Sequence[int]) -> None:
        for task in tasks:
            self._payloads.pop(task, None)
        self._apply(self._scheduler.cancel(tasks, self._clock()))

    def begin_epoch(self) -> None:
        """Cancel all tasks of the previous epoch, and send the new epoch to every worker.

        A worker that has not answered since the previous epoch gets the new epoch with its next task, or once it
        answers. So a worker that loads one slow sample gets a single message, however many epochs begin meanwhile.
        """
        self.cancel(list(self._payloads))
        for number, worker in list(self._workers.items()):
            worker.is_behind = worker.is_behind or worker.is_quiet
            if not worker.is_behind:
                self._send_epoch(number)

    def check_timeouts(self) -> None:
        """Apply time limits, and let other workers take over tasks of slow workers."""
        now = self._clock()
        if self._start_timeout_s is not None:
            for number, worker in list(self._workers.items()):
                if worker.starting_since is not None and now - worker.starting_since >= self._start_timeout_s:
                    worker.starting_since = math.inf  # reported once
                    self._requester.overdue(number)
        self._apply(self._scheduler.tick(now))

    def on_worker_lost(self, worker: int, *, may_blame: bool = True) -> None:
        """Handle the end of a worker. may_blame: whether its running task may have caused the end."""
        lost = self._workers.pop(worker, None)
        at: tuple[int, ...] | None = ()
        if may_blame:
            at = None if lost is None or lost.running is None else lost.running.tasks()
        self._apply(self._scheduler.lose(worker, self._clock(), at))

    def close(self) -> None:
        """Release the shared memory of all workers."""
        self._workers.clear()

    def abandon(self) -> list[int]:
        """Cancel all tasks; return their numbers."""
        tasks = list(self._payloads)
        self.cancel(tasks)
        return tasks

    def set_window(self, worker: int, window: int) -> None:
        """Set the maximum number of tasks that this worker holds."""
        self._apply(self._scheduler.set_window(worker, window, self._clock()))

    def is_starting(self, worker: int) -> bool:
        known = self._workers.get(worker)
        return known is not None and known.starting_since is not None

    @property
    def connected(self) -> list[int]:
        """The workers that are admitted and not lost."""
        return list(self._workers)

    def stop_workers(self) -> None:
        for worker in list(self._workers):
            self._send(worker, [encode(Stop())])

    def on_message(self, peer: bytes, frames: list[memoryview]) -> None:
        """Handle one message of a worker. A malformed message is dropped, and its sender is replaced or refused."""
        try:
            header = decode(frames[0])
            match header:
                case Exchange():
                    results = frames[1:]
                    self._exchange(peer, header, results if header.sizes is None else _unpacked(results, header.sizes))
                case WorkerHandshake():
                    self._on_handshake(peer, header)
                case WorkerReady():
                    self._on_ready(peer)
                case WorkerBegun():
                    self._on_begun(peer, frames[1:])
                case _:
                    raise MessageError(f"a worker may not send a {type(header).__name__}")
        except MessageError as error:
            self._malformed += 1
            if self._malformed <= MAX_MALFORMED_LOGGED:
                TRANSPORT.warning("message from connection %r dropped: %s", _shown(peer), error)
            self._reject(peer, other_release(version_of(frames[0])) or str(error))
        except DescriptorLimitError as error:
            TRANSPORT.error("message from connection %r dropped: %s", _shown(peer), error)

    def _reject(self, peer: bytes, reason: str) -> None:
        """Replace the sender of a malformed message if it is an admitted worker, else refuse it with the reason."""
        workers = [number for number, known in self._workers.items() if known.peer == peer]
        for worker in workers:
            self._requester.failed(worker, f"it sent an invalid message: {reason}")  # its result would never come
        if not workers:  # a worker of another release would wait without end; one that is gone needs no answer
            self.sender.send(peer, [encode(WorkerRefused(reason[:MAX_TEXT]))])

    def _on_handshake(self, peer: bytes, handshake: WorkerHandshake) -> None:
        if handshake.version != PROTOCOL_VERSION:
            raise MessageError(f"version {handshake.version} of the protocol")
        reason = self._requester.refusal(handshake)
        if handshake.worker != _worker_of(peer) or reason:
            who = f"worker {handshake.worker}, incarnation {handshake.incarnation}"
            raise MessageError(f"{who}, is none of this shard: {reason or 'its connection has another number'}")
        # The pid counts only once the memory has proved it: on another host it belongs to another process.
        reader = ArenaReader(handshake.pid)
        shared = handshake.probe is not None and reader.probe(handshake.probe)
        # First: it may replace a worker whose end was not noticed, which the requester then reports as lost.
        self._requester.admitted(handshake, shares_memory=shared)
        before = self._workers.get(handshake.worker)
        repeats = before is not None and before.peer == peer
        since = before.starting_since if before is not None and repeats else self._clock()
        running = RunningTaskReader.open(reader, handshake.running) if shared else None
        self._workers[handshake.worker] = _Admitted(peer, reader if shared else None, running, since)
        self._send(handshake.worker, [encode(WorkerWelcome(shared)), self._requester.epoch_for(handshake.worker)])
        if handshake.is_ready and not repeats:
            self._on_ready(peer)

    def _on_ready(self, peer: bytes) -> None:
        # Not at the handshake: a worker that dies in worker_init_fn has no task yet, so no task is suspected.
        worker = _worker_of(peer)
        if (known := self._admitted(worker, peer)) is not None:
            known.starting_since = None
            self._note_answer(worker, known)
            self._apply(self._scheduler.add_worker(worker, self._clock()))

    def _on_begun(self, peer: bytes, frames: list[memoryview]) -> None:
        if len(frames) != 1:
            raise MessageError(f"a WorkerBegun has {len(frames)} frames after it; one belongs there")
        worker = _worker_of(peer)
        if (known := self._admitted(worker, peer)) is not None:
            self._requester.begun(worker, frames[0])
            self._note_answer(worker, known)

    def _exchange(self, peer: bytes, exchange: Exchange, frames: list[memoryview]) -> None:
        worker = _worker_of(peer)
        known = self._admitted(worker, peer)
        if known is None:
            # It was reported as lost and its tasks are requeued.
            return
        self._note_answer(worker, known)
        if known.starting_since is not None:  # it is fetching the dataset, and lives
            known.starting_since = self._clock()
            return
        if exchange.times is not None:
            self._requester.timed(worker, exchange.times)
        results: dict[int, tuple[Finished, Any]] = {}
        for finished, payloads in split_payloads(exchange.finished, frames):
            try:
                opened = self._requester.open(worker, known.reader, finished, payloads)
            except SegmentLostError:
                # Once it has ended, its task is requeued.
                self._requester.failed(worker, "its shared memory cannot be read")
                continue
            for task, one in zip(finished.numbers, opened, strict=True):
                results[task] = (finished, one)
        self._apply(self._scheduler.exchange(worker, list(results), exchange.started, self._clock()), results)

    def _apply(
        self, instructions: Sequence[SchedulerInstruction], results: Mapping[int, tuple[Finished, Any]] = _NO_RESULTS
    ) -> None:
        windows: dict[int, Window] = {}
        for instruction in instructions:
            if isinstance(instruction, Deliver):  # before the others: there is one for every result
                task = instruction.task
                self._payloads.pop(task, None)
                self._requester.delivered(task, instruction.worker, *results[task])
                continue
            match instruction:
                case Assign(worker, tasks):
                    windows.setdefault(worker, Window([], [])).tasks.extend(tasks)
                case Revoke(worker, tasks):
                    windows.setdefault(worker, Window([], [])).revoked.extend(tasks)
                case Poison(task, workers, late):
                    self._payloads.pop(task, None)
                    self._requester.poisoned(task, workers, late)
                case KillWorker(worker):
                    self._requester.overdue(worker)
                case IdleWorkers():
                    self._requester.starved()
                case Discard():
                    pass
        for worker, window in windows.items():
            self._send_window(worker, window)

    def _send_window(self, worker: int, window: Window) -> None:
        if (known := self._workers.get(worker)) is not None:
            if window.tasks and known.is_behind:
                self._send_epoch(worker)
            frames = join_tasks(window, [self._payloads[task] for task in window.tasks])  # completes the header
            self._send(worker, [encode(window), *frames])

    def _send_epoch(self, worker: int) -> None:
        known = self._workers[worker]
        known.is_behind, known.is_quiet = False, True
        self._send(worker, [encode(EpochBegin()), self._requester.epoch_for(worker)])

    def _note_answer(self, worker: int, known: _Admitted) -> None:
        """Record that a worker has read its messages; send it the epoch that was held back until then."""
        known.is_quiet = False
        if known.is_behind:
            self._send_epoch(worker)

    def _admitted(self, worker: int, peer: bytes) -> _Admitted | None:
        """Return the admitted worker with this number; None if it has another connection."""
        known = self._workers.get(worker)
        return known if known is not None and known.peer == peer else None

    def _send(self, worker: int, frames: list[Frame]) -> None:
        """Send a message to an admitted worker; replace the worker if that fails, because its tasks would never end."""
        if not self.sender.send(self._workers[worker].peer, frames):
            self._requester.failed(worker, UNREACHABLE)


def other_release(version: int) -> str:
    """Return why a worker with this protocol version is refused; empty if it is the shard's version."""
    if version == PROTOCOL_VERSION:
        return ""
    return (
        f"it has version {version} of the protocol, and its shard {PROTOCOL_VERSION}: install torch_dpflow "
        f"{__version__}, the shard's release, where workers run"
    )


def _shown(peer: bytes) -> bytes:
    """Return a connection's identity for logs: worker number and incarnation, without the secret token."""
    return b"/".join(peer.split(b"/")[:2])[:20]


def _worker_of(peer: bytes) -> int:
    try:
        return int(peer.partition(b"/")[0])
    except ValueError:
        raise MessageError(f"peer {peer!r} is not a worker") from None


def _unpacked(frames: list[memoryview], sizes: list[int]) -> list[memoryview]:
    # Imported here, as a loader whose workers are of this host does without it.
    from torch_dpflow.ipc.rpc.carrier import decompress

    if len(sizes) != len(frames) or sum(sizes) > MAX_UNPACKED_BYTES:
        raise MessageError(f"{len(frames)} frames, of which {len(sizes)} hold {sum(sizes)} bytes compressed")
    return [
        decompress(frame, size, limit=MAX_UNPACKED_BYTES) if size else frame
        for frame, size in zip(frames, sizes, strict=True)
    ]
