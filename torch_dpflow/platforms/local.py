"""Processes of this machine: forked from this one, started afresh, or forked by a fork server."""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

from torch_dpflow import descriptors
from torch_dpflow.errors import LaunchError, NotPicklableError
from torch_dpflow.platforms.base import LAST_WORDS, Capabilities, End, ProcessSpec
from torch_dpflow.platforms.orphan import end_with

#: How long it may take until it is known how a process has ended, seconds: a fork server is asked.
REAP_S = 1.0
#: How long processes that were killed may take to go, seconds.
END_S = 5.0
#: What one has open where it was started: two pipes to it, and a descriptor of the process.
DESCRIPTORS = 3


class LocalPlatform:
    """Starts processes through a multiprocessing context, or a module that is used as one (torch.multiprocessing).

    Under fork the thread that launches is the one that is copied.
    """

    #: Whether the kernel may end a process with its parent. Another thread than the main one it would take for it.
    _may_be_killed_by_kernel = True
    capabilities = Capabilities(shares_memory=True, accepts_connections=True, longest_life_s=None)

    def __init__(self, context: Any) -> None:
        self._context = context
        try:
            self._poller = select.epoll()
        except OSError as error:
            if descriptors.is_exhausted(error):
                raise descriptors.exhausted("no process can be started") from error
            raise
        self.news = self._poller.fileno()
        #: Those whose end has not been taken, by descriptor.
        self._running: dict[int, LocalHandle] = {}

    def launch(self, spec: ProcessSpec) -> LocalHandle:
        by_kernel = self._may_be_killed_by_kernel and threading.current_thread() is threading.main_thread()
        process = self._context.Process(
            target=_run, args=(spec, os.getpid(), by_kernel), name=f"dpflow-{spec.name}", daemon=True
        )
        try:
            self._start(process)
            handle = LocalHandle(process, spec)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise NotPicklableError(
                f"what {spec.name} is to run cannot be sent to it: {error}. Under "
                f"{self._context.get_start_method()!r} everything that a process needs is pickled"
            ) from error
        except (OSError, EOFError) as error:
            if descriptors.is_exhausted(error):
                raise descriptors.exhausted(f"{spec.name} cannot be started") from error
            raise LaunchError(f"{spec.name} cannot be started: {error or type(error).__name__}") from error
        self._running[handle.descriptor] = handle
        self._poller.register(handle.descriptor, select.EPOLLIN)
        return handle

    def take(self) -> list[LocalHandle]:
        ended = [self._running[descriptor] for descriptor, _ in self._poller.poll(0)]
        for handle in ended:
            self._release(handle)
        return ended

    def close(self, *, grace_s: float = 0.0) -> None:
        running = list(self._running.values())
        for handle in running:
            handle.terminate() if grace_s > 0 else handle.kill()
        deadline = time.monotonic() + grace_s
        for handle in running:
            handle.await_end(deadline)
        for handle in running:
            handle.kill()  # stopped, or it ignores SIGTERM
        deadline = time.monotonic() + END_S
        for handle in running:
            handle.await_end(deadline)
            self._release(handle)
            handle.describe()
        self._poller.close()

    def _start(self, process: BaseProcess) -> None:
        """Have a process begin with SIGINT blocked, until it is ready to leave in silence."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _release(self, handle: LocalHandle) -> None:
        # Not left to its closing: forked processes have the descriptor too, and what they have stays watched.
        if self._running.pop(handle.descriptor, None) is not None:
            self._poller.unregister(handle.descriptor)
            handle.release()


def _run(spec: ProcessSpec, owner: int, by_kernel: bool) -> None:
    """What a process does: no line of its target's before it is sure to end with its owner."""
    end_with(owner, spec.directory, by_kernel=by_kernel)
    spec.target(*spec.arguments)


class LocalHandle:
    """A process that is a child of this process, or of its fork server.

    Known by the kernel's descriptor of it. multiprocessing's own is a pipe that grandchildren inherit: it stays silent
    when a process with a subprocess is killed. And where a fork server is killed multiprocessing takes all of its
    processes for dead, and sends them no signal any more.
    """

    def __init__(self, process: BaseProcess, spec: ProcessSpec) -> None:
        self.name, self.incarnation = spec.name, spec.incarnation
        self.pid = process.pid or 0
        #: The process as multiprocessing knows it. It is not closed: who has taken it from torch's loader may still ask
        #: how it has ended.
        self.process = process
        self._words = spec.words
        self._killed_for = ""
        self._end: End | None = None
        #: Against a signal to a descriptor that another thread closes.
        self._lock = threading.Lock()
        self._released = False
        self.descriptor, self._is_kernels = _descriptor_of(process)

    def kill(self, why: str = "") -> None:
        self._killed_for = self._killed_for or why
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end now; does not wait."""
        self._send(signal.SIGTERM)

    def describe(self) -> End | None:
        if self._end is None and (self._released or self._has_ended(0.0)):
            self.process.join(REAP_S)
            code = self.process.exitcode
            self._end = End(
                code=None if code is None or code < 0 else code,
                signal=-code if code is not None and code < 0 else None,
                killed_for=self._killed_for,
                words=self._last_words(),
                place=f"pid {self.process.pid}",
            )
        return self._end

    def await_end(self, deadline: float) -> None:
        """Wait until it has ended, or until then on the monotonic clock, seconds."""
        self._has_ended(max(0.0, deadline - time.monotonic()))

    def release(self) -> None:
        """Close the descriptor of it: it has ended, or is given up."""
        with self._lock:
            self._released = True
            os.close(self.descriptor)

    def _send(self, number: int) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._released:
                return
            if self._is_kernels:
                signal.pidfd_send_signal(self.descriptor, number)
            elif self.process.pid is not None:
                os.kill(self.process.pid, number)

    def _has_ended(self, within_s: float) -> bool:
        poller = select.poll()
        poller.register(self.descriptor, select.POLLIN)
        return bool(poller.poll(within_s * 1000))

    def _last_words(self) -> str:
        if not self._words:
            return ""
        with suppress(OSError), open(self._words, errors="replace") as file:
            return file.read(LAST_WORDS).strip()
        return ""


def _descriptor_of(process: BaseProcess) -> tuple[int, bool]:
    """What becomes readable when the process ends, to be closed by the caller; whether it is the kernel's."""
    assert process.pid is not None
    try:
        return os.pidfd_open(process.pid), True
    except (OSError, AttributeError) as error:
        if not descriptors.is_exhausted(error):
            return os.dup(process.sentinel), False  # an old kernel, or a sandbox that forbids the call
        process.kill()
        process.join()
        raise
