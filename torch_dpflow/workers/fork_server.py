"""Processes of a fork server, which has imported what they need: they start at once and share its memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from torch_dpflow.log import SERVICE
from torch_dpflow.workers.local_platform import LocalHandle, LocalPlatform

#: Has a fork server survive bytes that are no request.
GUARD = "torch_dpflow.workers.fork_server_guard"


class ForkServerPlatform(LocalPlatform):
    """Starts processes through this process's fork server.

    Args:
        context: a multiprocessing context of this kind; None: Python's own.
        preload: modules that the fork server imports; only its first start reads them. With them it drops a connection
            that does not speak its protocol, which ends another one.
        patience_s: how long the fork server may take to fork a process, and to start, seconds; one that takes
            longer is killed, and another is started. None: no limit, as others may use it.
        outlived: whether processes survive the death of the fork server. Otherwise the kernel kills them with it,
            including those that never release the interpreter's lock.
    """

    def __init__(
        self,
        context: Any = None,
        *,
        preload: Sequence[str] = (),
        patience_s: tuple[float, float] | None = None,
        outlived: bool = False,
    ) -> None:
        super().__init__(context or multiprocessing.get_context("forkserver"))
        self._has_guard = bool(preload)
        if preload:
            self._context.set_forkserver_preload([GUARD, *preload])
        self._patience_s = patience_s
        self._may_be_killed_by_kernel = not outlived
        #: The pid of the fork server that forked the latest process.
        self._known: int | None = None

    def begin(self) -> None:
        """Wait until the fork server has imported what it is to import; the first launch would wait for it."""
        process = self._context.Process(target=_nothing, daemon=True)
        self._start(process)
        process.join()

    def take_ended(self) -> list[LocalHandle]:
        pid = _fork_server()
        if pid is not None and pid == self._known:
            # If it has died, another starts now, since importing takes seconds, which the next launch would wait for.
            # Once only: one that dies before it has forked anything is not replaced until that launch.
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
            # Without a guard anything that its user sends to its socket ends it; that takes seconds with much imported.
            _kill_fork_server(f"has closed its socket ({error})")
        self._fork(process)

    def _fork(self, process: BaseProcess) -> None:
        self._ensure_running()
        # SIGINT stays unblocked here: the fork server would inherit the mask and pass it on to all its processes.
        if self._patience_s is None:
            process.start()
            return
        (fork_s, begin_s), known, made = self._patience_s, self._known, threading.Event()

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
    """What a process does that is forked to see that it can be."""


def local_platform(context: Any) -> LocalPlatform:
    """The platform of a multiprocessing context, or of a module that is used as one."""
    if context.get_start_method() == "forkserver":
        return ForkServerPlatform(context)
    return LocalPlatform(context)


def end_fork_server() -> None:
    """End this process's fork server and wait for its end; by itself it takes seconds."""
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
    """Kill a fork server and wait until it is a zombie, from which multiprocessing will learn its end."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
