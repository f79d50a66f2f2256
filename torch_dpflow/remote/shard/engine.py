"""A shard: the queue of tasks and the workers that pull from it. A thin shell around the scheduler.

It moves parcels and opens none: what a result holds is the affair of its `Requester`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from torch_dpflow.errors import DescriptorLimitError, MessageError, SegmentLostError
from torch_dpflow.log import TRANSPORT
from torch_dpflow.remote.scheduler import (
    AddWorker,
    Assign,
    CancelTasks,
    Deliver,
    Discard,
    Exchanged,
    IdleWorkers,
    KillWorker,
    Lose,
    Poison,
    Revoke,
    Scheduler,
    SchedulerInstruction,
    Submit,
    Tick,
)
from torch_dpflow.remote.transport import Frame, Listener
from torch_dpflow.remote.wire.fields import MAX_TEXT
from torch_dpflow.remote.wire.headers import (
    PROTOCOL_VERSION,
    EpochBegin,
    Exchange,
    Finished,
    Stop,
    Window,
    WorkerBegun,
    WorkerHello,
    WorkerReady,
    WorkerRefused,
    WorkerWelcome,
    decode,
    encode,
)

#: Malformed messages that are logged; a peer can send any number, and all are counted.
MALFORMED_LOGGED = 10

_NO_RESULTS: Mapping[int, tuple[Finished, Any]] = MappingProxyType({})


class Requester(Protocol):
    """On whose behalf a shard loads. Called in the shard's thread."""

    def refusal(self, hello: WorkerHello) -> str:
        """Why this is no worker of this shard, or none any more; empty where it is one."""

    def shares_memory(self, hello: WorkerHello) -> bool:
        """Whether this worker's shared memory can be read here. Raises DescriptorLimitError: it is not welcome yet."""

    def epoch_for(self, worker: int) -> bytes:
        """What this worker must know of the running epoch; opaque to the shard."""

    def begun(self, worker: int, frame: memoryview) -> None:
        """Where this worker begins. Raises MessageError where no worker has to say."""

    def open(self, worker: int, finished: Finished, frames: list[memoryview]) -> Any:
        """Take in a result's frames. Raises SegmentLostError when they died with the worker."""

    def delivered(self, task: int, worker: int, finished: Finished, opened: Any) -> None:
        """This is the task's first result."""

    def poisoned(self, task: int, workers: tuple[int, ...], late: int) -> None:
        """The task has taken down these workers, `late` of them by taking too long, and is given up."""

    def starved(self) -> None:
        """A worker has nothing to do."""

    def failed(self, worker: int) -> None:
        """This worker breaks the protocol, or its memory cannot be read: it must be replaced."""

    def overdue(self, worker: int) -> None:
        """This worker has been at one task, or at its own start, for longer than it may: it must be replaced."""


class Shard:
    """Owns tasks and their payloads until a result has come. One thread drives it.

    Args:
        listener: where workers connect.
        scheduler: decides who loads what.
        requester: gets what was loaded.
        clock: seconds, for the scheduler.
        start_timeout_s: how long a worker may take from its greeting until it is ready; None: as long as it likes.
    """

    def __init__(
        self,
        listener: Listener,
        scheduler: Scheduler,
        requester: Requester,
        *,
        clock: Callable[[], float] = time.monotonic,
        start_timeout_s: float | None = None,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        #: Since when workers that have been greeted and are not ready have been starting, or heard of, seconds.
        self._starting: dict[int, float] = {}
        self._listener = listener
        self._scheduler = scheduler
        self._requester = requester
        self._clock = clock
        self._malformed = 0
        #: What each unfinished task needs, by task.
        self._payloads: dict[int, Frame] = {}
        #: The connection of each worker number.
        self._peers: dict[int, bytes] = {}

    def submit(self, tasks: Sequence[tuple[int, Frame]], *, pinned_to: int | None = None) -> None:
        """Have these loaded, in this order, by any worker or by one."""
        self._payloads.update(tasks)
        self._follow(self._scheduler.handle(Submit([task for task, _ in tasks], pinned_to, self._clock())))

    def cancel(self, tasks: Sequence[int]) -> None:
        """Nobody wants these any more."""
        for task in tasks:
            self._payloads.pop(task, None)
        self._follow(self._scheduler.handle(CancelTasks(tasks, self._clock())))

    def begin_epoch(self) -> None:
        """Cancel what is left of the last epoch and tell every worker of the new one."""
        self.cancel(list(self._payloads))
        for worker, peer in self._peers.items():
            self._listener.send(peer, [encode(EpochBegin()), self._requester.epoch_for(worker)])

    def tick(self) -> None:
        """Look whether a worker is held up; for shards whose scheduler overtakes, or that have time limits."""
        now = self._clock()
        if self._start_timeout_s is not None:
            for worker, since in list(self._starting.items()):
                if now - since >= self._start_timeout_s:
                    self._starting[worker] = math.inf  # said once
                    self._requester.overdue(worker)
        self._follow(self._scheduler.handle(Tick(now)))

    def lose(self, worker: int, at: tuple[int, ...] | None = None) -> None:
        """This worker has died. at: the task that it was at, or none; None where that is not known."""
        self._peers.pop(worker, None)
        self._starting.pop(worker, None)
        self._follow(self._scheduler.handle(Lose(worker, self._clock(), at)))

    def abandon(self) -> list[int]:
        """Cancel all that is open; the tasks."""
        tasks = list(self._payloads)
        self.cancel(tasks)
        return tasks

    def is_starting(self, worker: int) -> bool:
        """Whether it has been greeted and is not ready."""
        return worker in self._starting

    @property
    def connected(self) -> list[int]:
        """Workers that have said hello and are not lost."""
        return list(self._peers)

    def stop_workers(self) -> None:
        """Tell every worker to go."""
        for peer in self._peers.values():
            self._listener.send(peer, [encode(Stop())])

    def hear(self, peer: bytes, frames: list[memoryview]) -> None:
        """Take in one message of a worker. Whatever is wrong with it is counted and goes no further."""
        try:
            header = decode(frames[0])
            match header:
                case Exchange():
                    self._exchange(peer, header, frames[1:])
                case WorkerHello():
                    self._welcome(peer, header)
                case WorkerReady():
                    self._employ(peer)
                case WorkerBegun():
                    self._note_beginning(peer, frames[1:])
                case _:
                    raise MessageError(f"a shard hears no {type(header).__name__} from workers")
        except MessageError as error:
            self._malformed += 1
            if self._malformed <= MALFORMED_LOGGED:
                TRANSPORT.warning("a message from connection %r was dropped: %s", peer[:8], error)
            self._distrust(peer, str(error))
        except DescriptorLimitError as error:
            TRANSPORT.error("a message from connection %r was dropped: %s", peer[:8], error)

    def _distrust(self, peer: bytes, reason: str) -> None:
        """Have a worker replaced that talks nonsense: the task that it is at would never be answered.

        Whoever else does is told why nothing comes of it: a worker of another release would wait for ever.
        """
        workers = [worker for worker, known in self._peers.items() if known == peer]
        for worker in workers:
            self._requester.failed(worker)
        if not workers:
            self._listener.send(peer, [encode(WorkerRefused(reason[:MAX_TEXT]))])

    def _welcome(self, peer: bytes, hello: WorkerHello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise MessageError(
                f"worker {hello.worker} speaks version {hello.version} of the protocol, its shard {PROTOCOL_VERSION}: "
                "install the same release of torch_dpflow for both"
            )
        reason = self._requester.refusal(hello)
        if hello.worker != _worker_of(peer) or reason:
            who = f"worker {hello.worker}, incarnation {hello.incarnation}"
            raise MessageError(
                f"{who}, is none of this shard: {reason or 'its connection has another number'}"
            )
        # It may take the place of one that has not been seen to end, which is lost first.
        shared = self._requester.shares_memory(hello)
        if self._peers.get(hello.worker) != peer:  # else it says hello again
            self._starting[hello.worker] = self._clock()
        self._peers[hello.worker] = peer
        self._listener.send(peer, [encode(WorkerWelcome(shared)), self._requester.epoch_for(hello.worker)])

    def _employ(self, peer: bytes) -> None:
        worker = _worker_of(peer)
        if self._peers.get(worker) == peer:
            self._starting.pop(worker, None)
            self._follow(self._scheduler.handle(AddWorker(worker, self._clock())))

    def _note_beginning(self, peer: bytes, frames: list[memoryview]) -> None:
        if len(frames) != 1:
            raise MessageError(f"a WorkerBegun has {len(frames)} frames after it; one belongs there")
        worker = _worker_of(peer)
        if self._peers.get(worker) == peer:
            self._requester.begun(worker, frames[0])

    def _exchange(self, peer: bytes, exchange: Exchange, frames: list[memoryview]) -> None:
        worker = _worker_of(peer)
        if self._peers.get(worker) != peer:
            # It was given up for lost, and its window with it; its replacement repeats what it has done.
            return
        if worker in self._starting:  # it fetches what it is to load
            self._starting[worker] = self._clock()
            return
        results: dict[int, tuple[Finished, Any]] = {}
        for finished, own in _split(exchange, frames):
            try:
                opened = self._requester.open(worker, finished, own)
            except SegmentLostError:
                # Its death will be noticed, and then the task is given to another. If it lives, it has to go.
                self._requester.failed(worker)
                continue
            results[finished.task] = (finished, opened)
        event = Exchanged(worker, list(results), exchange.started, self._clock())
        self._follow(self._scheduler.handle(event), results)

    def _follow(
        self,
        instructions: Sequence[SchedulerInstruction],
        results: Mapping[int, tuple[Finished, Any]] = _NO_RESULTS,
    ) -> None:
        windows: dict[int, Window] = {}
        for instruction in instructions:
            match instruction:
                case Deliver(task, worker):
                    self._payloads.pop(task, None)
                    self._requester.delivered(task, worker, *results[task])
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
        peer = self._peers.get(worker)
        if peer is not None:
            # A peer that cannot be reached is about to be lost, and its window with it.
            self._listener.send(peer, [encode(window), *(self._payloads[task] for task in window.tasks)])


def _worker_of(peer: bytes) -> int:
    try:
        return int(peer.partition(b"/")[0])
    except ValueError:
        raise MessageError(f"the peer {peer!r} is not a worker") from None


def _split(exchange: Exchange, frames: list[memoryview]) -> list[tuple[Finished, list[memoryview]]]:
    """Give each result its own frames."""
    parts = []
    begin = 0
    for finished in exchange.finished:
        end = begin + finished.parcel.frames + finished.has_stream
        parts.append((finished, frames[begin:end]))
        begin = end
    if begin != len(frames):
        raise MessageError(f"an exchange announces {begin} frames and has {len(frames)}")
    return parts
