"""Platform whose processes are forked by a fork server, which has imported their modules, so that they start fast."""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing import process as processes
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch_dpflow._core.processes import stat_fields
from torch_dpflow._core.threads import StopSignal
from torch_dpflow.errors import LaunchError
from torch_dpflow.log import SERVICE
from torch_dpflow.workers.import_server import ImportServer, StillImportingError
from torch_dpflow.workers.local_platform import LocalHandle, LocalPlatform
from torch_dpflow.workers.platform import End, Imports, ProcessSpec
from torch_dpflow.workers.process_control import FORK_SERVER_NAME, FORK_SERVER_UP

#: Module that lets a fork server survive invalid requests, and show which module it imports.
GUARD = "torch_dpflow.workers.fork_server_guard"
#: Interval of checking an unfinished start, and time after which it is first logged, seconds.
POLL_S, NOTICE_S = 0.25, 10.0
#: Maximum number of times that the time limit of the fork server's start is doubled; each failed start doubles it.
MAX_DOUBLINGS = 4
#: How long to wait for the end of a killed fork server, seconds. One that waits for a network disk does not end.
KILLED_S = 1.0


class ModuleEndedError(LaunchError):
    """A preloaded module ends the fork server at its import: another start would end in the same way."""


class ForkServerPlatform(LocalPlatform):
    """Platform that starts processes by this process's fork server.

    Args:
        context: a multiprocessing context with start method "forkserver"; None: Python's own.
        preload: modules that the fork server imports whenever it starts; no effect on one that already runs. With any,
            it also survives connections that do not speak its protocol.
        timeouts_s: maximum seconds without progress of the fork server: while it forks a process, and while it starts.
            After that it is killed and another is started. Each failed start in a row doubles the limit of the next,
            up to 16 times the given one. None: no limit, because other code may use the fork server.
        outlived: whether processes survive the death of the fork server; one thread may then launch while another uses
            the handles. If False, the death of the fork server kills processes that the main thread launched.
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
        self._preload = [*dict.fromkeys(preload)]
        if preload:
            modules = [*self._preload]
            if timeouts_s is not None:  # its name shows which of them it imports: see the guard
                marks = [f"{FORK_SERVER_NAME}{number}" for number in range(len(modules))]
                modules = [*chain(*zip(marks, modules)), FORK_SERVER_UP]
            self._context.set_forkserver_preload([*dict.fromkeys([GUARD, *modules])])
        self._timeouts_s = timeouts_s
        self._outlived, self._may_be_killed_by_kernel = outlived, not outlived
        #: The pid of the fork server that forked the latest process.
        self._known: int | None = None
        #: How many starts of the fork server in a row have failed.
        self._failures = 0
        #: The fork server that was killed last as it made no progress; the module that another one was killed at.
        self._killed, self._suspected = 0, ""
        self._waits, self._interrupted = False, StopSignal()
        #: By what they import; and until when that is not tried after it failed. For threads that hold the lock.
        self._import_servers: dict[Imports, ImportServer] = {}
        self._not_before: dict[Imports, float] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Wait until the fork server has imported its modules. Without this call the first launch waits.

        Returns early once `interrupt` is called. Raises LaunchError if the fork server cannot start, such as when a
        module exits the process.
        """
        while not self._interrupted.is_set():
            nothing = self._context.Process(target=_nothing, daemon=True)
            try:
                self._start(nothing)
            except EOFError:
                continue  # it was killed, and gets more time
            except (OSError, LaunchError) as error:
                if self._interrupted.is_set():
                    return
                raise LaunchError(f"the fork server cannot be started: {error}") from error
            else:
                nothing.join()
                return

    def interrupt(self) -> None:
        """Refuse later launches, and end a launch that waits for the fork server. Signal handlers may call this."""
        self._interrupted.set()
        pid = _fork_server()
        if self._waits and pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for server in [*self._import_servers.values()]:
            server.kill()

    def take_ended(self) -> list[LocalHandle]:
        pid = _fork_server()
        if pid is not None and pid == self._known:
            # If it has died, another starts now: importing takes seconds, for which the next launch would wait. Once
            # only: one that dies before it has forked anything is replaced at that launch.
            self._ensure_running()
            if _fork_server() != pid:
                SERVICE.warning("the fork server (pid %d) has ended; another takes its place", pid)
        ended = super().take_ended()
        if ended and self._lock.acquire(blocking=False):  # else a process is being started: at the next end
            try:
                used = {handle.imports for handle in self._running.values()}
                unused = [one for one, server in self._import_servers.items() if server.has_forked and one not in used]
                for imports in unused:
                    self._import_servers.pop(imports).close()
            finally:
                self._lock.release()
        return ended

    def launch(self, spec: ProcessSpec) -> LocalHandle:
        """Start a process; see `Platform`. StillImportingError: `spec.imports` are being imported; launch it later."""
        with self._lock:
            return super().launch(spec)

    def close(self, *, grace_s: float = 0.0) -> None:
        super().close(grace_s=grace_s)
        while self._import_servers:
            self._import_servers.popitem()[1].close(kill=True)

    def _start(self, process: BaseProcess, imports: Imports | None = None) -> None:
        may_share = imports is not None and time.monotonic() >= self._not_before.get(imports, 0.0)
        if imports is not None and may_share and self._timeouts_s is not None:
            fork_s, begin_s = self._timeouts_s
            try:
                if imports not in self._import_servers:
                    self._import_servers[imports] = ImportServer(
                        imports, self._context, self._start, begin_s=begin_s, fork_s=fork_s
                    )
                self._import_servers[imports].start(process)
                return
            except StillImportingError:
                raise
            except Exception as error:  # also those of another Python, whose multiprocessing may differ inside
                server, why, pause_s = self._import_servers.pop(imports, None), repr(error), begin_s
                if server is not None:
                    why, pause_s = server.failure()
                    server.close(kill=True)
                self._not_before[imports] = time.monotonic() + pause_s
                until = "until the flow changes" if pause_s == math.inf else f"for {pause_s:.0f} s"
                SERVICE.info("modules of %s are imported by each of its processes %s: %s", imports.group, until, why)
        try:
            self._fork(process)
            return
        except EOFError:  # it hung and was killed
            end_fork_server()
        except ConnectionError as error:
            # Without a guard any data that its user sends to its socket ends it, which takes seconds with many imports.
            _kill_fork_server(f"has closed its socket ({error})")
        self._fork(process)

    def _fork(self, started: BaseProcess) -> None:
        made = threading.Event()
        self._waits = True
        try:
            self._ensure_running()
            if self._interrupted.is_set():
                raise LaunchError("no process is started any more")
            if self._timeouts_s is not None:
                threading.Thread(target=self._watch, args=(made,), name="dpflow-fork", daemon=True).start()
            # SIGINT stays unblocked here: the fork server would inherit the mask and pass it on to all its processes.
            started.start()
        except (EOFError, ConnectionError):
            self._check_imports()
            raise
        finally:
            self._waits = False
            made.set()
        self._known, self._failures, self._suspected = _fork_server(), 0, ""
        if self._outlived:
            # Each start polls all of multiprocessing's children. If another thread looked at one then, one of both
            # would get its exit code and the other the end of the pipe, which counts as code 255.
            children: set[BaseProcess] = processes._children  # type: ignore[attr-defined]
            children.discard(started)

    def _check_imports(self) -> None:
        """Raise ModuleEndedError if a module has ended the fork server, and not this process by its time limit.

        After a first SIGKILL it is started once more, because others send that signal too.
        """
        pid = _fork_server()
        end = None if pid is None or pid == self._killed else _end_of(pid)
        if end is None or not (module := self._imported(pid)):
            return
        is_killed = end.si_code != os.CLD_EXITED and end.si_status == signal.SIGKILL
        if is_killed and self._suspected != module:
            self._suspected = module
            return
        self._suspected = ""
        exited = end.si_code == os.CLD_EXITED
        how = End(code=end.si_status) if exited else End(signal=end.si_status)
        raise ModuleEndedError(
            f"the import of {module} has ended it: it {how}. If the module raised, its traceback is on stderr: repair "
            "or reinstall the module"
        )

    def _watch(self, made: threading.Event) -> None:
        """Kill the fork server once it has made no progress for too long, and log what it waits for."""
        assert self._timeouts_s is not None
        fork_s, begin_s = self._timeouts_s
        known = self._known is not None and self._known == _fork_server()
        limit_s = fork_s if known else begin_s * (1 << min(self._failures, MAX_DOUBLINGS))
        began = since = time.monotonic()
        noticed_s, progress = NOTICE_S, None
        while not made.wait(min(POLL_S, limit_s / 4)):
            pid, now = _fork_server(), time.monotonic()
            seen = None if pid is None else progress_of(pid)
            if seen != progress:
                progress, since = seen, now
            if now - since >= limit_s:
                self._failures += not known
                self._killed = pid or 0
                _kill_fork_server(f"has made no progress for {limit_s:g} s: it {self._activity(pid)}")
                return
            if now - began >= noticed_s:
                noticed_s *= 2
                SERVICE.warning(
                    "waiting for the fork server (pid %s) for %.0f s: it %s", pid, now - began, self._activity(pid)
                )

    def _activity(self, pid: int | None) -> str:
        module = self._imported(pid)
        return f"imports {module}" if module else "has not forked a process"

    def _imported(self, pid: int | None) -> str:
        """Return the module that the fork server imports now or imported when it ended; empty if there is none."""
        with suppress(OSError, ValueError, IndexError):
            return self._preload[int(Path(f"/proc/{pid}/comm").read_text().strip().removeprefix(FORK_SERVER_NAME))]
        return ""

    def _ensure_running(self) -> None:
        """Start the fork server unless it runs.

        Its SIGINT stays blocked until `fork_server_guard` ignores the signal.
        """
        if not self._preload:
            forkserver.ensure_running()
            return
        resource_tracker.ensure_running()  # which the fork server's start would do, and unblocks SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing() -> None:
    """Do nothing: the main function of a process that only tests whether the fork server works."""


def progress_of(pid: int) -> tuple[int, ...]:
    """Return counters that grow while a process runs: major page faults and processor time.

    Empty if they cannot be read.
    """
    with suppress(OSError, ValueError, IndexError):
        fields = stat_fields(pid)
        return int(fields[9]), int(fields[11]), int(fields[12])
    return ()


def local_platform(context: Any, *, preload: Sequence[str] = ()) -> LocalPlatform:
    """Return the platform that starts processes by `context`.

    Args:
        context: a multiprocessing context, or a module with its functions (torch.multiprocessing).
        preload: modules that a fork server imports in addition to the user's modules, if it does not run yet.
    """
    if context.get_start_method() != "forkserver":
        return LocalPlatform(context)
    if not preload or not _new_interpreter_agrees():
        return ForkServerPlatform(context)
    server: Any = forkserver._forkserver
    return ForkServerPlatform(context, preload=[*server._preload_modules, *preload])


@functools.cache
def _new_interpreter_agrees() -> bool:
    """Return whether a new interpreter finds torch and this package where this process has found them.

    A fork server may import modules before it gets this process's `sys.path`, and could import other versions.
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
    """Kill this process's fork server, which would take seconds to exit on its own."""
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
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        _end_of(pid)


def _end_of(pid: int) -> os.waitid_result | None:
    """Wait for a child to end, without reaping it; return its status, or None if it still runs after `KILLED_S`."""
    deadline = time.monotonic() + KILLED_S
    with suppress(ChildProcessError):
        while (end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.001)
        return end
    return None
