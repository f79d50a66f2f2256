"""Processes of this host: forked from this process, or started from scratch. For fork servers see `fork_server`."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch_dpflow._core import descriptors
from torch_dpflow._core.processes import is_exiting
from torch_dpflow.errors import LaunchError, NotPicklableError
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, End, Imports, ProcessSpec, shortened
from torch_dpflow.workers.process_control import at_parents_end, exit_with, oom_kills

#: The timeout for the exit code of an ended process, which a fork server has to send, seconds.
REAP_S = 1.0
#: The time for killed processes to end, seconds.
END_S = 5.0
#: Descriptors that the starting process holds for each process that it started: two pipes and a pidfd.
DESCRIPTORS = 3


class LocalPlatform:
    """Platform that starts processes by a multiprocessing context, or by torch.multiprocessing.

    With start method "fork", the only thread of the child is a copy of the thread that called `launch`.
    """

    #: Whether the kernel may kill a process with its parent: see `at_parents_end`.
    _may_be_killed_by_kernel = True

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
        is_fork = self._context.get_start_method() == "fork"
        process = self._context.Process(
            target=_run,
            args=(spec, os.getpid(), by_kernel, is_fork),
            name=_ProcessName(f"dpflow-{spec.name}"),
            daemon=True,
        )
        try:
            self._start(process, spec.imports)
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

    def interrupt(self) -> None:
        """Do nothing, because no launch of this class waits. Later launches start processes as before."""

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

    def _start(self, process: BaseProcess, imports: Imports | None = None) -> None:
        """Start a process with SIGINT blocked, so that Control-C prints no traceback; its target unblocks it."""
        if self._context.get_start_method() == "spawn":
            resource_tracker.ensure_running()  # which the start would do, and unblocks SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _release(self, handle: LocalHandle) -> None:
        # Closing is not enough: forked processes inherit the descriptor, and epoll watches it while any copy is open.
        if self._running.pop(handle.descriptor, None) is not None:
            self._poller.unregister(handle.descriptor)
            handle.release()


class _ProcessName(str):
    """Process name whose unpickling turns the garbage collector off; `_run` turns it on again.

    A new process unpickles its name before the user's script and torch are imported. Collections meanwhile find
    nothing, and take 4% to 8% of the time of these imports.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # With builtins only: where modules are found is not known at that point.
        return eval, (f"__import__('gc').disable() or {str(self)!r}",)


def _run(spec: ProcessSpec, owner: int, by_kernel: bool, is_fork: bool) -> None:
    """Run the target as the main function of a process, which ends when process `owner` does."""
    # Else the first full collection would visit everything imported, or copy all inherited pages.
    gc.freeze()
    if is_fork:  # the user's handlers are for their process: one may save a checkpoint, another wakes its event loop
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    else:
        gc.enable()
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    at_parents_end(signal.SIGKILL if by_kernel else signal.SIGCONT)  # the directory is then left to the next sweep
    exit_with(owner, spec.directory)
    spec.target(*spec.arguments)


class LocalHandle:
    """Handle of a child of this process, or of its fork server."""

    # Watched by its pidfd. multiprocessing's sentinel is a pipe that grandchildren inherit: it reports no end when a
    # process with a subprocess is killed. And when a fork server is killed, multiprocessing regards all of its
    # processes as dead and sends them no more signals.

    def __init__(self, process: BaseProcess, spec: ProcessSpec) -> None:
        self.name, self.incarnation, self.imports = spec.name, spec.incarnation, spec.imports
        self.pid = process.pid or 0
        #: multiprocessing's object. Never closed: users of torch's loader may read its exit code later.
        self.process = process
        self._report_file, self._oom_kills = spec.report_file, oom_kills()
        self._killed_for = ""
        self._end: End | None = None
        #: Prevents a signal by a descriptor that another thread is closing.
        self._lock = threading.Lock()
        self._released = False
        self.descriptor, self._is_pidfd = _descriptor_of(process)

    def kill(self, why: str = "") -> None:
        if not (self._released or self._has_ended(0.0) or is_exiting(self.pid)):  # else it ends for another reason
            self._killed_for = self._killed_for or why
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM to the process, without waiting."""
        self._send(signal.SIGTERM)

    def describe(self) -> End | None:
        if self._end is None and (self._released or self._has_ended(0.0)):
            # The code first: a join alone waits for the pipe, which a grandchild may hold open.
            _ = self.process.exitcode
            self.process.join(REAP_S)
            code = self.process.exitcode
            self._end = End(
                code=None if code is None or code < 0 else code,
                signal=-code if code is not None and code < 0 else None,
                is_short_of_memory=code == -signal.SIGKILL and oom_kills() > self._oom_kills,
                killed_for=self._killed_for,
                report=self._exit_report(),
                place=f"pid {self.process.pid}",
            )
        return self._end

    def await_end(self, deadline: float) -> None:
        """Wait until the process has ended, or until `deadline` on the monotonic clock, seconds."""
        self._has_ended(max(0.0, deadline - time.monotonic()))

    def release(self) -> None:
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
        with suppress(OSError):
            file = Path(self._report_file)
            text = file.read_text(errors="replace")
            file.unlink()
            return shortened(text.strip(), MAX_REPORT_CHARS)
        return ""


def _descriptor_of(process: BaseProcess) -> tuple[int, bool]:
    """Return (descriptor that becomes readable when the process ends, whether it is a pidfd)."""
    assert process.pid is not None
    try:
        return os.pidfd_open(process.pid), True
    except (OSError, AttributeError) as error:
        if not descriptors.is_exhausted(error):
            return os.dup(process.sentinel), False  # an old kernel, or a sandbox that forbids the call
        process.kill()
        process.join()
        raise
