"""Processes of this machine: forked from this one, started anew, or forked by a fork server."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.process import BaseProcess
from typing import Any

from torch_dpflow._core import descriptors
from torch_dpflow.errors import LaunchError, NotPicklableError
from torch_dpflow.log import SERVICE
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, End, Limits, ProcessSpec
from torch_dpflow.workers.process_control import exit_with

#: The timeout for the exit code of an ended process, which a fork server has to send, seconds.
REAP_S = 1.0
#: The time for killed processes to end, seconds.
END_S = 5.0
#: Descriptors that the starting process holds for each one: two pipes and a pidfd.
DESCRIPTORS = 3


class LocalPlatform:
    """Starts processes by a multiprocessing context, or a module used as one (torch.multiprocessing).

    With fork, the child has a copy of the thread that launches.
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
        is_fork = self._context.get_start_method() == "fork"
        process = self._context.Process(
            target=_run,
            args=(spec, os.getpid(), by_kernel, is_fork),
            name=_ProcessName(f"dpflow-{spec.name}"),
            daemon=True,
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
        """Start a process with SIGINT blocked, which it unblocks once Control-C prints no traceback of its start."""
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


class _ProcessName(str):
    """Name of a process. Unpickling it turns the garbage collector off, until `_run` turns it on.

    A new process unpickles its name before the user's script and torch are imported. Collections meanwhile find
    nothing, and take 4% to 8% of the time of these imports.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Of builtins alone: where modules are found is not known at that point.
        return eval, (f"__import__('gc').disable() or {str(self)!r}",)


def _run(spec: ProcessSpec, owner: int, by_kernel: bool, is_fork: bool) -> None:
    """Main function of a process. It makes the process end with its owner, then runs the target."""
    if not is_fork:
        gc.freeze()  # else the first collection would look at all that was imported
        gc.enable()
    exit_with(owner, spec.directory, by_kernel=by_kernel)
    spec.target(*spec.arguments)


class LocalHandle:
    """Handle of a child of this process, or of its fork server."""

    # Watched by its pidfd. multiprocessing's sentinel is a pipe that grandchildren inherit: it reports no end when a
    # process with a subprocess is killed. And when a fork server is killed, multiprocessing regards all of its
    # processes as dead and sends them no more signals.

    def __init__(self, process: BaseProcess, spec: ProcessSpec) -> None:
        self.name, self.incarnation = spec.name, spec.incarnation
        self.pid = process.pid or 0
        #: multiprocessing's object. Never closed: users of torch's loader may read its exit code later.
        self.process = process
        self._report_file = spec.report_file
        self._killed_for = ""
        self._end: End | None = None
        #: Prevents a signal by a descriptor that another thread is closing.
        self._lock = threading.Lock()
        self._released = False
        self.descriptor, self._is_pidfd = _descriptor_of(process)

    def kill(self, why: str = "") -> None:
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
                killed_for=self._killed_for,
                report=self._exit_report(),
                place=f"pid {self.process.pid}",
            )
        return self._end

    def await_end(self, deadline: float) -> None:
        """Wait until the process has ended, or until `deadline` on the monotonic clock, seconds."""
        self._has_ended(max(0.0, deadline - time.monotonic()))

    def release(self) -> None:
        """Close its descriptor."""
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
    """Return a descriptor that becomes readable when the process ends, and whether it is a pidfd."""
    assert process.pid is not None
    try:
        return os.pidfd_open(process.pid), True
    except (OSError, AttributeError) as error:
        if not descriptors.is_exhausted(error):
            return os.dup(process.sentinel), False  # an old kernel, or a sandbox that forbids the call
        process.kill()
        process.join()
        raise


#: Lets a fork server survive invalid requests.
GUARD = "torch_dpflow.workers.fork_server_guard"


class ForkServerPlatform(LocalPlatform):
    """Starts processes by this process's fork server, which has imported what they need: they start at once.

    Args:
        context: a multiprocessing context of this kind; None: Python's own.
        preload: modules that the fork server imports, read at its first start only. With them it survives connections
            that do not speak its protocol.
        timeouts_s: seconds for the fork server to fork a process, and to start. A slower one is killed, and another is
            started. None: no limit, as other code may use the fork server.
        outlived: whether processes survive the death of the fork server. Otherwise the kernel kills them with it,
            including those that never release the interpreter's lock.
    """

    def __init__(
        self,
        context: Any = None,
        *,
        preload: Sequence[str] = (),
        timeouts_s: tuple[float, float] | None = None,
        outlived: bool = False,
    ) -> None:
        super().__init__(context or multiprocessing.get_context("forkserver"))
        self._has_guard = bool(preload)
        if preload:
            self._context.set_forkserver_preload([*dict.fromkeys([GUARD, *preload])])
        self._timeouts_s = timeouts_s
        self._may_be_killed_by_kernel = not outlived
        #: The pid of the fork server that forked the latest process.
        self._known: int | None = None

    def begin(self) -> None:
        """Wait until the fork server has imported its modules, for which the first launch would wait."""
        process = self._context.Process(target=_nothing, daemon=True)
        self._start(process)
        process.join()

    def take_ended(self) -> list[LocalHandle]:
        pid = _fork_server()
        if pid is not None and pid == self._known:
            # If it has died, another starts now: importing takes seconds, for which the next launch would wait. Once
            # only: one that dies before it has forked anything is replaced at that launch.
            self._ensure_running()
            if _fork_server() != pid:
                SERVICE.warning("the fork server (pid %d) has ended; another takes its place", pid)
        return super().take_ended()

    def _start(self, process: BaseProcess) -> None:
        try:
            self._fork(process)
            return
        except EOFError:  # it hung and was killed
            end_fork_server()
        except ConnectionError as error:
            # Without a guard any data that its user sends to its socket ends it, which takes seconds with many imports.
            _kill_fork_server(f"has closed its socket ({error})")
        self._fork(process)

    def _fork(self, process: BaseProcess) -> None:
        self._ensure_running()
        # SIGINT stays unblocked here: the fork server would inherit the mask and pass it on to all its processes.
        if self._timeouts_s is None:
            process.start()
            return
        (fork_s, begin_s), known, made = self._timeouts_s, self._known, threading.Event()

        def watch() -> None:
            if not made.wait(fork_s) and (known == _fork_server() or not made.wait(begin_s)):
                _kill_fork_server("does not fork a process")

        threading.Thread(target=watch, name="dpflow-fork", daemon=True).start()
        try:
            process.start()
        finally:
            made.set()
        self._known = _fork_server()

    def _ensure_running(self) -> None:
        """Start the fork server, unless it runs. SIGINT is blocked in it until its guard ignores and unblocks it."""
        if not self._has_guard:
            forkserver.ensure_running()
            return
        resource_tracker.ensure_running()  # which the fork server's start would do, and unblocks SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing() -> None:
    """Main function of a process that only tests whether the fork server works."""


def local_platform(context: Any, *, preload: Sequence[str] = ()) -> LocalPlatform:
    """Return the platform for a multiprocessing context, or a module used as one.

    Args:
        preload: modules that a fork server imports beside those that the user has chosen, if it does not run yet.
    """
    if context.get_start_method() != "forkserver":
        return LocalPlatform(context)
    if not preload or not _are_found_anew():
        return ForkServerPlatform(context)
    server: Any = forkserver._forkserver
    return ForkServerPlatform(context, preload=[*server._preload_modules, *preload])


@functools.cache
def _are_found_anew() -> bool:
    """Return whether a new interpreter finds torch and this package where this process has found them.

    A fork server may import modules before it has this process's `sys.path`, and would then have others.
    """
    names = ("torch", "torch_dpflow")
    program = f"from importlib.util import find_spec\nfor name in {names}: print(find_spec(name).origin)"
    try:
        command = [os.fsdecode(spawn.get_executable()), "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no process can be started, as the fork server's start will report
        return False
    return done.stdout.split("\n")[:-1] == [found.origin for found in map(find_spec, names) if found is not None]


def end_fork_server() -> None:
    """End this process's fork server, which would take seconds to end by itself."""
    pid = _fork_server()
    if pid is not None:
        _kill(pid)


def _fork_server() -> int | None:
    server: Any = forkserver._forkserver
    pid: int | None = server._forkserver_pid
    return pid


def _kill_fork_server(why: str) -> None:
    pid = _fork_server()
    if pid is not None:
        SERVICE.warning("fork server (pid %d) %s; killed, it will be restarted", pid, why)
        _kill(pid)


def _kill(pid: int) -> None:
    """Kill a fork server and wait until it is a zombie, so that multiprocessing notices its end."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
