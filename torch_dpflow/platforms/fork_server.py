"""Processes that a fork server makes: it has imported what they need, so they begin at once and share its memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

from torch_dpflow.log import SERVICE
from torch_dpflow.platforms.local import LocalPlatform


class ForkServerPlatform(LocalPlatform):
    """Starts processes through this process's fork server.

    Args:
        context: a multiprocessing context of this kind; None: Python's own.
        preload: modules that processes are forked with. Only the first start of the fork server heeds them.
        patience_s: how long the fork server may take to make a process, and to come up, seconds; one that takes longer
            is killed, and the next launch begins another. None: it is waited for, as others may use it.
        outlived: whether processes go on where the fork server is killed. Else the kernel ends them with it: where this
            process is killed, also those that never let go of the interpreter's lock.
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
        if preload:
            self._context.set_forkserver_preload(list(preload))
        self._patience_s = patience_s
        self._may_be_killed_by_kernel = not outlived
        #: The one that made the latest process.
        self._known: int | None = None

    def _start(self, process: BaseProcess) -> None:
        # With SIGINT as it is: the server would be started with it blocked, and keep it so for other processes too.
        if self._patience_s is None:
            process.start()
            return
        (fork_s, begin_s), known, made = self._patience_s, self._known, threading.Event()

        def watch() -> None:
            if not made.wait(fork_s) and (known == _fork_server() or not made.wait(begin_s)):
                _kill_fork_server()

        threading.Thread(target=watch, name="dpflow-fork", daemon=True).start()
        try:
            process.start()
        finally:
            made.set()
        self._known = _fork_server()


def local_platform(context: Any) -> LocalPlatform:
    """The platform of a multiprocessing context, or of a module that is used as one."""
    if context.get_start_method() == "forkserver":
        return ForkServerPlatform(context)
    return LocalPlatform(context)


def _fork_server() -> int | None:
    server: Any = forkserver._forkserver
    pid: int | None = server._forkserver_pid
    return pid


def _kill_fork_server() -> None:
    pid = _fork_server()
    if pid is not None:
        SERVICE.warning(
            "the fork server (pid %d) makes no process and is killed; another takes its place", pid
        )
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
