"""Workers as processes of this host, which connect over TCP like remote workers."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from torch_dpflow._core.checks import check_type
from torch_dpflow._core.processes import stat_fields
from torch_dpflow.errors import OptionError, OptionTypeError, RejectedError, UnavailableError
from torch_dpflow.remote.launchers.contract import AdoptingPlatform, Fate, Finding, Launcher, Ref, check_tcp
from torch_dpflow.remote.launchers.threaded_platform import ThreadedPlatform
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, End, Limits

#: Environment variables of a worker: its launch spec, if that is not on standard input, and its name.
LAUNCH_SPEC_VARIABLE, NAME_VARIABLE = "DPFLOW_LAUNCH_SPEC", "DPFLOW_WORKER_NAME"

#: How long to wait for the end of a killed process, or for a new process to get its environment, in seconds.
END_S = 5.0
#: Errors of a start that will not succeed later either.
_LASTING = (FileNotFoundError, PermissionError, NotADirectoryError)


@dataclass(slots=True)
class _Child:
    pid: int
    #: Its standard error, of which the end goes into reports: a file without a name, so that nothing can be left.
    errors: IO[bytes]
    end: End | None = None


def take_launch_spec(file: str = "") -> bytes:
    """Return this process's launch spec, from `file` if given, else from the environment, else from standard input.

    The launch spec contains a key. It is therefore erased from the environment, and from standard input if that is a
    file; `file` is not changed. Raises OSError if `file` cannot be read.
    """
    if file:
        return Path(file).read_bytes()
    if LAUNCH_SPEC_VARIABLE in os.environ:
        _erase(LAUNCH_SPEC_VARIABLE)
        return os.environ.pop(LAUNCH_SPEC_VARIABLE).encode()
    launch_spec = sys.stdin.buffer.read()
    with suppress(OSError):  # a pipe, which is read once
        os.ftruncate(0, 0)
    return launch_spec


def _erase(name: str) -> None:
    """Overwrite a variable in the process's initial environment, which /proc/PID/environ and `ps` show."""
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_void_p
    address = library.getenv(name.encode())
    if address:
        ctypes.memset(address, 0, len(os.environb[name.encode()]))


class SubprocessLauncher:
    """Launcher of workers as processes of this host: `python -m module`, which calls `take_launch_spec`.

    `stop` also kills the other processes in the worker's process group. Other launchers of this user find a worker by
    its name in its environment.

    Args:
        module: the module that workers run. python: the interpreter.
        env: variables for workers, in addition to those of this process.
    """

    limits = Limits()

    def __init__(self, module: str, *, python: str = sys.executable, env: Mapping[str, str] | None = None) -> None:
        self._python = python
        self._command = (python, "-m", module)
        self._env = dict(env or {})
        self._children: dict[str, _Child] = {}
        self._lock = threading.Lock()

    def check(self) -> Sequence[Finding]:
        python = self._python
        good = os.access(python, os.X_OK)
        return [Finding(good, f"{python} {'can' if good else 'cannot'} be executed")]

    def start(self, name: str, launch_spec: bytes, *, deadline_s: float) -> Ref:
        with self._lock:
            child = self._children.get(name)
            if child is None:
                child = self._children[name] = self._spawn(name, launch_spec)
            return str(child.pid)

    def look(self, workers: Mapping[str, Ref | None]) -> Mapping[str, Fate]:
        with self._lock:
            fates = {name: self._fate(child) for name in workers if (child := self._children.get(name))}
        for name in workers.keys() - fates.keys():  # started by another launcher
            if ref := workers[name]:
                fates[name] = Fate() if _name_of(int(ref)) == name else Fate(end=End(place=f"pid {ref}"))
            elif name in self.list(name):
                fates[name] = Fate()
        return fates

    def stop(self, name: str, ref: Ref | None) -> None:
        with self._lock:
            child = self._children.get(name)
            if child is not None:
                if self._fate(child).end is None:
                    _kill(child.pid)
                    self._fate(child)
                return
        pid = self.list(name).get(name)
        if pid is not None:
            _kill(int(pid), name)
            with suppress(ChildProcessError):  # started by another launcher of this process
                os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOHANG)

    def list(self, prefix: str) -> Mapping[str, Ref]:
        found: dict[str, Ref] = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and (name := _name_of(int(entry.name))).startswith(prefix) and name:
                found[name] = entry.name
        with self._lock:  # processes that are ending no longer have an environment
            alive = {name: child for name, child in self._children.items() if self._fate(child).end is None}
        return found | {name: str(child.pid) for name, child in alive.items() if name.startswith(prefix)}

    def close(self) -> None:
        with self._lock:
            for child in self._children.values():
                self._fate(child)
                child.errors.close()

    def _command_of(self, name: str) -> tuple[str, ...]:
        """Return the command that runs this worker."""
        return self._command

    def _spawn(self, name: str, launch_spec: bytes) -> _Child:
        env = {**os.environ, **self._env, NAME_VARIABLE: name}
        command = self._command_of(name)
        try:
            with ExitStack() as stack:
                errors = stack.enter_context(tempfile.TemporaryFile())
                # Not in its environment, which can be read as long as it lives: the launch spec has a key.
                with os.fdopen(os.memfd_create("launch_spec"), "w+b") as launch_specs:
                    launch_specs.write(launch_spec)
                    launch_specs.seek(0)
                    files = [(os.POSIX_SPAWN_DUP2, launch_specs.fileno(), 0), (os.POSIX_SPAWN_DUP2, errors.fileno(), 2)]
                    # Not subprocess.Popen, which warns of children that live on: workers may outlive their starter.
                    pid = os.posix_spawn(command[0], command, env, file_actions=files, setsid=True)
                stack.pop_all()
        except OSError as error:
            kind = RejectedError if isinstance(error, _LASTING) else UnavailableError
            raise kind(f"{name} cannot be started by {command[0]}: {error.strerror}") from error
        return _Child(pid, errors)

    def _fate(self, child: _Child) -> Fate:
        """Return a child's fate; if the child has ended, reap it."""
        if child.end is None:
            try:
                done = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG)
            except ChildProcessError:  # reaped elsewhere
                child.end = End(place=f"pid {child.pid}")
            else:
                if done is not None:
                    exited = done.si_code == os.CLD_EXITED
                    child.end = End(
                        code=done.si_status if exited else None,
                        signal=None if exited else done.si_status,
                        report=_tail(child.errors),
                        place=f"pid {child.pid}",
                    )
        return Fate(end=child.end)


def _kill(pid: int, name: str = "") -> None:
    """Kill a session's leader and all processes that it has started; wait briefly for their end.

    name: name of the worker; required if the worker may have ended, so that another process may have its pid.
    """
    with suppress(ProcessLookupError), ExitStack() as stack:
        poller, timeout_s = select.poll(), 0.0
        with suppress(PermissionError):  # of a sandbox that forbids the call
            descriptor = os.pidfd_open(pid)
            stack.callback(os.close, descriptor)
            poller.register(descriptor, select.POLLIN)
            timeout_s = END_S
        if not name or _name_of(pid) == name:
            os.killpg(pid, signal.SIGKILL)
            poller.poll(timeout_s * 1000)


def _name_of(pid: int) -> str:
    """Return the worker name of a process; empty if it is no worker, has ended, or belongs to another user."""
    file, until = Path(f"/proc/{pid}/environ"), time.monotonic() + END_S
    try:
        while not (environ := file.read_bytes()) and _has_variables(pid) and time.monotonic() < until:
            time.sleep(0.001)
        if os.getsid(pid) != pid:
            return ""  # its worker's child
    except OSError:
        return ""
    key = f"{NAME_VARIABLE}=".encode()
    return next((one[len(key) :].decode() for one in environ.split(b"\0") if one.startswith(key)), "")


def _has_variables(pid: int) -> bool:
    """Return whether a process of this user has an environment, or will have it once its program is loaded."""
    try:
        fields = stat_fields(pid)
        os.readlink(f"/proc/{pid}/exe")  # a process that has ended has none
    except OSError:
        return False
    start, end, code_end = fields[47], fields[48], fields[24]
    # While the kernel loads a program, it first sets `end` to 0, then to `start`; the code's end is 0 until it is done.
    return start != end or "0" in (end, code_end)


def _tail(file: IO[bytes]) -> str:
    """Return the last lines of a file, and close it."""
    if file.closed:
        return ""
    with file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_REPORT_CHARS))
        return file.read().decode(errors="replace").strip()


MODULE = "torch_dpflow.remote.worker"
#: Interval between checks of all workers, for platforms where a check is cheap, in seconds. The end of a worker that
#: is not suspected is noticed only then.
LOOK_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Processes:
    """`platform="processes"`: processes of this host as remote workers, for trials and tests. Slower than forks.

    Args:
        python: the interpreter of workers; empty: that of this process, with its module path.
        env: variables for workers, in addition to those of this process.

    Raises:
        OptionError: a variable of `env` has a name or value that no process can have.
        OptionTypeError: a value is of the wrong type.
    """

    python: str = ""
    #: Not shown: it may hold keys.
    env: Mapping[str, str] = field(default_factory=dict, repr=False)

    name = "processes"

    def __post_init__(self) -> None:
        check_type("python", self.python, str, "text")
        check_type("env", self.env, Mapping, "a dict")
        for variable, text in self.env.items():
            if not isinstance(variable, str) or not isinstance(text, str):
                raise OptionTypeError(
                    f"env has {variable!r} of type {type(text).__name__}; give variables and their values as text"
                )
            if not variable or "=" in variable or "\0" in variable + text:
                # Not the value, which may be a key.
                raise OptionError(
                    f"env has {variable!r}: a variable's name has no '=', and neither it nor its value NUL"
                )

    @property
    def sends_code(self) -> bool:
        return bool(self.python)  # this one's workers have its path

    def check_installed(self) -> None:
        """Do nothing: this platform needs no library."""

    def check_workers(self, workers: int) -> None:
        """Do nothing: processes of this host are not billed."""

    def launcher(self) -> Launcher:
        path = {} if self.python else {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return SubprocessLauncher(MODULE, python=self.python or sys.executable, env={**path, **self.env})

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        return ThreadedPlatform(self.launcher(), sweep_s=LOOK_S)

    def listen_at(self) -> str:
        return "tcp://127.0.0.1:0"

    def check_listen(self, address: str) -> None:
        check_tcp(address)
