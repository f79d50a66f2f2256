"""The worker's body: connect out, load what the window holds, tell and ask in one exchange, until told to stop."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from torch_dpflow.errors import NotPicklableError, WorkerError
from torch_dpflow.remote.parcel.codec import encode as encode_parcel
from torch_dpflow.remote.shm.arena import Arena
from torch_dpflow.remote.shm.running_task import RunningTask
from torch_dpflow.remote.transport import Frame, connect
from torch_dpflow.remote.wire.headers import (
    FAILURE,
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
from torch_dpflow.remote.worker import collate
from torch_dpflow.remote.worker.batches import BatchSource, LoadedBatch, LoadSpec
from torch_dpflow.remote.worker.fetching import unpicklable_failure
from torch_dpflow.remote.worker.sealed import Sealed
from torch_dpflow.remote.worker.time_slices import take_long_slices
from torch_dpflow.torch_private import ExceptionWrapper, set_worker_signal_handlers

#: A task's number is its epoch's generation above these bits and its batch's position below them.
POSITION_BITS = 40
POSITION_MASK = (1 << POSITION_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class Post:
    """Which worker this is, whom it works for and where it finds the shard."""

    worker: int
    #: Counts the processes that have worked under this number.
    incarnation: int
    address: str
    #: Private to the training process and its workers.
    directory: str


def exit_report_path(post: Post) -> str:
    """Where this worker writes its exit report: faulthandler's stacks, or a traceback."""
    return os.path.join(post.directory, f"exit-report-{post.worker}-{post.incarnation}")


def main(sealed: Sealed, post: Post) -> None:
    """Work until told to stop or until the owner is gone. The target of a worker process.

    Args:
        sealed: what to load (a `LoadSpec`).
        post: where.
    """
    # In this order: torch's handlers take the place of Python's, which call what they have found. And a handler
    # that is inherited would not be installed again.
    faulthandler.disable()
    set_worker_signal_handlers()
    with open(exit_report_path(post), "w") as report:
        faulthandler.enable(file=report)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which the platform had blocked
            worker = _Worker(sealed.open(), post)
            take_long_slices()  # not before: the thread that speaks with the shard is to be quick
            worker.work()
        except KeyboardInterrupt:
            pass  # the owner gets it too, and decides
        except BaseException as error:
            report.write(_exit_report(error))
            raise
        finally:
            faulthandler.disable()


def _exit_report(error: BaseException) -> str:
    return ExceptionWrapper((type(error), error, error.__traceback__), "").exc_msg


class _Worker:
    """Mirrors, from below, what the shard's scheduler knows of this worker: a window of tasks, oldest first."""

    def __init__(self, spec: LoadSpec, post: Post) -> None:
        self._post = post
        self._load_spec = spec
        self._arena = Arena(budget_bytes=spec.shared_memory) if spec.shared_memory else None
        self._running = RunningTask(self._arena)
        self._connection = connect(post.address, identity=f"{post.worker}/{post.incarnation}".encode())
        self._source: BatchSource | None = None
        self._tasks: deque[tuple[int, bytes]] = deque()
        self._stopped = False

    def work(self) -> None:
        probe = self._arena.probe_ref() if self._arena is not None else None
        hello = WorkerHello(self._post.worker, self._post.incarnation, os.getpid(), probe, self._running.ref)
        self._connection.send([encode(hello)])
        # Seeds, worker_init_fn and the like come after the greeting, so that its answer is on its way meanwhile.
        self._source = BatchSource(self._load_spec, self._post.worker)
        while not self._stopped:
            self._hear(wait=not self._tasks)
            if self._tasks and not self._stopped:
                self._load_oldest()
        self._connection.close()

    def _hear(self, *, wait: bool) -> None:
        frames = self._connection.receive(None if wait else 0)
        while frames is not None:
            self._obey(decode(frames[0]), frames[1:])
            frames = self._connection.receive(0)

    def _obey(self, header: Any, frames: list[memoryview]) -> None:
        assert self._source is not None
        match header:
            case Window(tasks=tasks, revoked=revoked):
                held = len(self._tasks)
                gone = set(revoked)
                self._tasks = deque(task for task in self._tasks if task[0] not in gone)
                self._tasks.extend(zip(tasks, map(bytes, frames), strict=True))
                self._ask_if_emptied(held)
            case WorkerWelcome(shared_memory=shared_memory):
                self._share_memory(shared_memory)
                self._begin(frames[0])
                self._connection.send([encode(WorkerReady())])
            case WorkerRefused(reason=reason):
                raise WorkerError(f"its shard does not take it: {reason}")
            case EpochBegin():
                held = len(self._tasks)
                self._tasks.clear()
                self._begin(frames[0])
                self._ask_if_emptied(held)
            case Stop():
                self._stopped = True

    def _begin(self, order: memoryview) -> None:
        assert self._source is not None
        begun = self._source.begin(pickle.loads(order))
        if begun is None:
            return
        try:
            told = pickle.dumps(begun)
        except Exception:  # the exception's class cannot travel; its text can
            told = pickle.dumps(replace(begun, failure=_as_runtime_error(begun.failure)))
        self._connection.send([encode(WorkerBegun()), told])

    def _ask_if_emptied(self, held: int) -> None:
        # The scheduler cannot know that nothing of a window was begun when it was taken back.
        if held and not self._tasks:
            self._connection.send([encode(Exchange([], None))])

    def _share_memory(self, works: bool) -> None:
        if not works:
            self._arena = None
        elif self._arena is not None:
            collate.install(self._arena)

    def _load_oldest(self) -> None:
        assert self._source is not None
        task, index = self._tasks.popleft()
        self._running.note(task)
        loaded = self._source.load(task & POSITION_MASK, pickle.loads(index))
        table, frames = self._wrap(loaded)
        if loaded.stream is not None:
            frames = [*frames, pickle.dumps(loaded.stream)]
        finished = Finished(task, loaded.kind, table, loaded.stream is not None)
        started = self._tasks[0][0] if self._tasks else None
        self._running.note(None)
        self._connection.send([encode(Exchange([finished], started)), *frames])

    def _wrap(self, loaded: LoadedBatch) -> tuple[Any, list[Frame]]:
        try:
            return encode_parcel(loaded.value, arena=self._arena)
        except NotPicklableError as error:
            if loaded.kind == FAILURE:
                # The exception's class cannot travel; its text can.
                return encode_parcel(_as_runtime_error(loaded.value))
            return encode_parcel(unpicklable_failure(self._post.worker, error))


def _as_runtime_error(failure: ExceptionWrapper) -> ExceptionWrapper:
    plain = ExceptionWrapper((RuntimeError, RuntimeError(), None), failure.where)
    plain.exc_msg = failure.exc_msg
    return plain
