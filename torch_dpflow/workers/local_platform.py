"""Processes of this machine: forked from this one, started afresh, or forked by a fork server."""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from torch_dpflow._core import descriptors
from torch_dpflow.errors import LaunchError, NotPicklableError
from torch_dpflow.workers.orphan import exit_with
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, End, Limits, ProcessSpec

#: How long to wait for the exit code of an ended process, seconds; a fork server has to send it.
REAP_S = 1.0
#: How long killed processes may take to end, seconds.
END_S = 5.0
#: Descriptors that the starting process holds for each one: two pipes and a pidfd.
DESCRIPTORS = 3


class LocalPlatform:
    """Starts processes through a multiprocessing context, or a module used as one (torch.multiprocessing).

    Under fork, the thread that launches is the one that is copied.
    """

    #: Whether the kernel may kill a process with its parent. It takes the end of the starting thread for the end of
    #: the parent, so `launch` uses it from the main thread only.
    _may_be_killed_by_kernel = True
    limits = Limits(shares_memory=True, accepts_connections=True, max_lifetime_s=None)

    def __init__(self, context: Any) -> None:
        self._context = context
        try:
            self._poller = select.epoll()
        except OSError as error:
            if descriptors.is_exhausted(error):
                raise descriptors.exhausted("no process can be started") from error
            raise
        self.wakeup_fd = self._poller.fileno()
        #: Processes not yet returned by `take_ended`, by descriptor.
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

    def take_ended(self) -> list[LocalHandle]:
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
            handle.kill()  # suspended, or ignores SIGTERM
        deadline = time.monotonic() + END_S
        for handle in running:
            handle.await_end(deadline)
            self._release(handle)
            handle.describe()
        self._poller.close()

    def _start(self, process: BaseProcess) -> None:
        """Start a process with SIGINT blocked; it unblocks it when Control-C no longer prints a traceback."""
        if self._context.get_start_method() == "spawn":
            resource_tracker.ensure_running()  # which the start would do, and unblocks SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _release(self, handle: LocalHandle) -> None:
        # Closing alone would not do: forked processes inherit the descriptor, and epoll watches it while one is open.
        if self._running.pop(handle.descriptor, None) is not None:
            self._poller.unregister(handle.descriptor)
            handle.release()


def _run(spec: ProcessSpec, owner: int, by_kernel: bool) -> None:
    """The body of a process: runs no line of the target before the process is bound to end with its owner."""
    exit_with(owner, spec.directory, by_kernel=by_kernel)
    spec.target(*spec.arguments)


class LocalHandle:
    """A child of this process, or of its fork server."""

    # Watched by its pidfd. multiprocessing's sentinel is a pipe that grandchildren inherit: it reports no end when a
    # process with a subprocess is killed. And when a fork server is killed, multiprocessing regards all of its
    # processes as dead and sends them no more signals.

    def __init__(self, process: BaseProcess, spec: ProcessSpec) -> None:
        self.name, self.incarnation = spec.name, spec.incarnation
        self.pid = process.pid or 0
        #: The process as multiprocessing knows it. Never closed: users of torch's loader take it from there and may
        #: ask for its exit code later.
        self.process = process
        self._report_file = spec.report_file
        self._killed_for = ""
        self._end: End | None = None
        #: Prevents a signal through a descriptor that another thread is closing.
        self._lock = threading.Lock()
        self._released = False
        self.descriptor, self._is_pidfd = _descriptor_of(process)

    def kill(self, why: str = "") -> None:
        self._killed_for = self._killed_for or why
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Send it SIGTERM; does not wait."""
        self._send(signal.SIGTERM)

    def describe(self) -> End | None:
        if self._end is None and (self._released or self._has_ended(0.0)):
            # Asked for its code first: a join alone waits for the pipe, and gives up what a grandchild holds open.
            _ = self.process.exitcode
            self.process.join(REAP_S)
            code = self.process.exitcode
            self._end = End(
                code=None if code is None or code < 0 else code,
                signal=-code if code is not None and code < 0 else None,
                killed_for=self._killed_for,
                report=self._exit_report(),
                place=f"pid {self.process.pid}",
            )
        return self._end

    def await_end(self, deadline: float) -> None:
        """Wait until it has ended, or until `deadline` on the monotonic clock, seconds."""
        self._has_ended(max(0.0, deadline - time.monotonic()))

    def release(self) -> None:
        """Close its descriptor: it has ended, or nobody waits for it any more."""
        with self._lock:
            self._released = True
            os.close(self.descriptor)

    def _send(self, number: int) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._released:
                return
            if self._is_pidfd:
                signal.pidfd_send_signal(self.descriptor, number)
            elif self.process.pid is not None:
                os.kill(self.process.pid, number)

    def _has_ended(self, within_s: float) -> bool:
        poller = select.poll()
        poller.register(self.descriptor, select.POLLIN)
        return bool(poller.poll(within_s * 1000))

    def _exit_report(self) -> str:
        if not self._report_file:
            return ""
        with suppress(OSError), open(self._report_file, errors="replace") as file:
            return file.read(MAX_REPORT_CHARS).strip()
        return ""


def _descriptor_of(process: BaseProcess) -> tuple[int, bool]:
    """A descriptor that becomes readable when the process ends, to be closed by the caller; whether it is a pidfd."""
    assert process.pid is not None
    try:
        return os.pidfd_open(process.pid), True
    except (OSError, AttributeError) as error:
        if not descriptors.is_exhausted(error):
            return os.dup(process.sentinel), False  # an old kernel, or a sandbox that forbids the call
        process.kill()
        process.join()
        raise
