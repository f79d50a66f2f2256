"""Fork servers for groups of processes: each imports its group's modules once, in memory that the group shares."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from multiprocessing import connection, forkserver, popen_forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from socket import AF_UNIX, socket
from types import FunctionType, SimpleNamespace
from typing import Any

from torch_dpflow.errors import DPFlowError
from torch_dpflow.workers.local_platform import LocalHandle
from torch_dpflow.workers.platform import Imports, ProcessSpec
from torch_dpflow.workers.process_control import at_parents_end, exit_without_thread

#: Exit codes of an import server whose imports cannot be shared, with the reasons.
NEEDS_OWN, HAS_THREADS, HAS_CUDA = 81, 82, 83
LASTING = {
    NEEDS_OWN: "an import looks for the user's own modules",
    HAS_THREADS: "an import starts a thread, of which a fork has no copy",
    HAS_CUDA: "an import initializes CUDA, which a fork cannot use",
}
#: Pause before the next attempt after imports that failed for another reason, as a multiple of their duration.
PAUSE_FACTOR = 10.0


class StillImportingError(DPFlowError):
    """The modules of the process's group are still being imported: start the process later."""


class ImportServer:
    """Second-level fork server for one group of processes, itself forked by this process's fork server.

    It imports the group's modules, then forks the group's processes. It ends with this process, and after `close` with
    the last process of the group. It ends before any fork if an import does one of the following:

    - it raises
    - it starts a thread, which a fork does not copy
    - it looks for the user's own modules
    - it initializes CUDA

    Args:
        imports: the modules to import, and the settings to apply before.
        context: a multiprocessing context whose fork server forks it.
        fork: starts a process of `context`.
        begin_s: timeout of all imports, seconds.
        fork_s: timeout of a fork, seconds.
    """

    def __init__(
        self, imports: Imports, context: Any, fork: Callable[[BaseProcess], None], *, begin_s: float, fork_s: float
    ) -> None:
        self._fork_s, self._begin_s, self._began = fork_s, begin_s, time.monotonic()
        #: Whether it has forked a process.
        self.has_forked = False
        self._address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        alive_r, self._alive = os.pipe()
        try:
            with socket(AF_UNIX) as listener:
                listener.bind(self._address)
                os.chmod(self._address, 0o600)
                arguments = imports, _Inherited(listener.fileno()), _Inherited(alive_r), os.getpid()
                process = context.Process(target=_serve, args=arguments, name="dpflow-imports", daemon=True)
                fork(process)
            self._handle = LocalHandle(process, ProcessSpec(name=imports.group, incarnation=0, target=_serve))
        except BaseException:
            os.close(self._alive)
            self._remove_socket()
            raise
        finally:
            os.close(alive_r)
        # Python's functions find the one fork server of a process by a global name. So this one is another object of
        # Python's class, and its processes start by a copy of Python's function in which the name leads to it.
        server: Any = forkserver.ForkServer()
        server._forkserver_address, server._forkserver_alive_fd = self._address, self._alive
        server.ensure_running = lambda: None
        start: Any = popen_forkserver.Popen._launch  # type: ignore[attr-defined]
        connected = SimpleNamespace(**{**vars(forkserver), "connect_to_new_process": server.connect_to_new_process})
        launch = FunctionType(start.__code__, {**vars(popen_forkserver), "forkserver": connected})
        self._popen: Any = type("Popen", (popen_forkserver.Popen,), {"_launch": launch})

    def start(self, process: BaseProcess) -> None:
        """Fork a process.

        Raises:
            StillImportingError: the imports are not finished.
            OSError, EOFError: the server has ended, or exceeded the timeout of its imports or of the fork.
        """
        unstarted: Any = process
        unstarted._Popen = self._start
        watch = threading.Timer(self._fork_s, self.kill, [f"it forked no process within {self._fork_s:g} s"])
        watch.daemon = True
        watch.start()
        try:
            process.start()
            self.has_forked = True
        except ConnectionRefusedError as error:
            if self._handle.describe() is None and time.monotonic() < self._began + self._begin_s:
                raise StillImportingError("its group's modules are being imported") from error
            raise
        finally:
            watch.cancel()

    def kill(self, why: str = "") -> None:
        """Kill the server. The processes that it forked continue."""
        self._handle.kill(why)

    def failure(self) -> tuple[str, float]:
        """Return (why `start` has failed, seconds for which the group's processes must import modules themselves)."""
        end = self._handle.describe()
        if end is not None and end.code in LASTING:
            return LASTING[end.code], math.inf
        took_s = 0.0 if self.has_forked else time.monotonic() - self._began
        why = f"their imports are not over after {took_s:.0f} s" if end is None else f"what imports them, {end}"
        return why, max(self._begin_s, PAUSE_FACTOR * took_s)

    def close(self, *, kill: bool = False) -> None:
        """Let the server end: at once with `kill`, else after the processes that it forked. Does not wait."""
        if kill:
            self.kill()
        os.close(self._alive)
        self._handle.release()
        self._remove_socket()

    def _start(self, process: Any) -> Any:
        del process._Popen  # else it would be pickled with the process
        return self._popen(process)

    def _remove_socket(self) -> None:
        Path(self._address).unlink(missing_ok=True)


class _Inherited:
    """Descriptor that a started process inherits; unpickles to its number there."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        return _detached, (DupFd(self._descriptor),)


def _detached(inherited: Any) -> Any:
    return inherited.detach()


def _serve(imports: Imports, listener: int, alive: int, owner: int) -> None:
    """Import the modules, then serve as Python's fork server does. No process can connect before that.

    Exits with a key of `LASTING` instead if its processes cannot share the imports.
    """
    # An import that hangs would not notice that `alive` is closed. The fork server above ends with its starter unless
    # another process, such as this one, has its descriptor.
    main: Any = forkserver
    os.close(main._forkserver._forkserver_alive_fd)
    at_parents_end(signal.SIGKILL)
    gc.freeze()  # else collections copy the pages of all that was inherited
    threads = _count_threads()
    # Imported here: the process that starts this one may not need torch.
    import torch

    from torch_dpflow.workers.script_settings import ScriptSettings

    ScriptSettings(directory=imports.directory, script=imports.script).apply()
    own = _Own(imports.own)
    sys.meta_path.insert(0, own)
    for module in imports.modules:
        try:
            import_module(module)
        except Exception:  # the processes that need it raise the same error where users see it
            sys.exit(1)
    sys.meta_path.remove(own)
    for is_so, code in (
        (own.were_needed, NEEDS_OWN),
        (_count_threads() > threads, HAS_THREADS),
        (torch.cuda.is_initialized(), HAS_CUDA),
    ):
        if is_so:
            sys.exit(code)
    gc.collect()
    gc.freeze()
    exit_without_thread(owner)
    with socket(AF_UNIX, fileno=listener) as served:
        served.listen()
        served.detach()
    main.main(listener, alive, [])


class _Own(MetaPathFinder):
    """Finder that records whether an import looks for the user's own modules, which only workers have."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self.were_needed = False

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        self.were_needed = self.were_needed or name.partition(".")[0] in self._names


def _count_threads() -> int:
    with suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()
