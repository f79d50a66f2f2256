"""Workers as processes of this machine, started as torch's loader starts its own."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import pickle
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

from torch_dpflow import descriptors
from torch_dpflow.errors import NotPicklableError
from torch_dpflow.platforms.base import WorkerHandle
from torch_dpflow.remote import worker
from torch_dpflow.remote.batches import Assignment
from torch_dpflow.remote.sealed import Sealed
from torch_dpflow.remote.worker import Post

#: How long a worker that was told to terminate may take before it is killed, seconds.
TERMINATE_S = 1.0
#: The most that is read of a worker's last words, characters.
LAST_WORDS = 4000


class LocalPlatform:
    """Starts workers through a multiprocessing context, or a module that is used as one (torch.multiprocessing)."""

    def __init__(self, assignment: Assignment, context: Any) -> None:
        self._assignment = Sealed(assignment)
        self._context = context

    def start(self, post: Post) -> WorkerHandle:
        process = self._context.Process(
            target=worker.main,
            args=(self._assignment, post),
            name=f"dpflow-worker-{post.worker}",
            daemon=True,
        )
        try:
            with self._control_c_waits():
                process.start()
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise NotPicklableError(
                f"the dataset, collate_fn or worker_init_fn cannot be sent to a worker: {error}. Under "
                f"{self._context.get_start_method()!r} everything a worker needs is pickled: define it at the top of a "
                "module (no lambda, no local class), leave out open files and locks, or pass "
                "multiprocessing_context='fork'"
            ) from error
        except OSError as error:
            if descriptors.is_exhausted(error):
                raise descriptors.exhausted(f"worker {post.worker} cannot be started") from error
            raise
        return LocalWorker(process, post)

    @contextlib.contextmanager
    def _control_c_waits(self) -> Iterator[None]:
        """Have a worker begin with SIGINT blocked, until it is ready to leave in silence.

        Not under forkserver: its server would be started with it, and keep it blocked for other processes too.
        """
        if self._context.get_start_method() == "forkserver":
            yield
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalWorker:
    """A worker process that is a child of this process, or of its forkserver."""

    def __init__(self, process: multiprocessing.process.BaseProcess, post: Post) -> None:
        #: The process as multiprocessing knows it.
        self.process = process
        self._post = post
        self._closed = False
        self._killed_for = ""
        self._descriptor: int | None = _process_descriptor(process)
        self.ended: int = self._descriptor if self._descriptor is not None else process.sentinel

    def has_ended(self) -> bool:
        poller = select.poll()
        poller.register(self.ended, select.POLLIN)
        return bool(poller.poll(0))

    def obituary(self) -> str:
        self.process.join(TERMINATE_S)
        how = f"was killed: {self._killed_for}" if self._killed_for else _how(self.process.exitcode)
        return f"pid {self.process.pid} {how}{self._last_words()}"

    def kill(self, why: str) -> None:
        self._killed_for = why
        self.process.kill()

    def terminate(self) -> None:
        if not self.has_ended():
            self.process.terminate()

    def end(self, *, grace_s: float) -> None:
        if self._closed:
            return
        self.process.join(max(0.0, grace_s))
        if self.process.is_alive():
            self.process.kill()  # stopped, or it ignores SIGTERM
            self.process.join()
        # Not closed: who has taken the processes from the iterator may still ask them, as torch's, how they ended.
        self._closed = True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _last_words(self) -> str:
        try:
            with open(worker.last_words_path(self._post), errors="replace") as file:
                words = file.read(LAST_WORDS).strip()
        except OSError:
            return ""
        return f"; its last words:\n{words}" if words else ""


def end_all(handles: list[WorkerHandle]) -> None:
    """End these workers, which were told to go and have not, within one common period."""
    for handle in handles:
        handle.terminate()
    deadline = time.monotonic() + TERMINATE_S
    for handle in handles:
        handle.end(grace_s=deadline - time.monotonic())


def _process_descriptor(process: multiprocessing.process.BaseProcess) -> int | None:
    # multiprocessing's sentinel is a pipe that grandchildren inherit: it stays silent when a worker with a
    # subprocess is killed. The kernel's descriptor of the process does not; but old kernels and some sandboxes
    # have none, where the sentinel has to do.
    if not hasattr(os, "pidfd_open") or process.pid is None:
        return None
    try:
        return os.pidfd_open(process.pid)
    except OSError:
        return None


def _how(exitcode: int | None) -> str:
    if exitcode is None:
        return "has not been reaped"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (the kernel's out-of-memory killer sends it too)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
