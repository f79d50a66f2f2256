"""Run a function in another process, where nothing of this one's loaders is left."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from tests.started_processes import MARK
from torch_dpflow.remote.launchers.processes import NAME_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
FORK = multiprocessing.get_context("fork")
LIBC = ctypes.CDLL(None)
PR_SET_CHILD_SUBREAPER = 36
#: Variables that processes read of others, and the longest value of one, characters.
SHOWN, MAX_SHOWN = (MARK, NAME_VARIABLE), 1000
#: How variables begin that are read as a process starts. PYTHONPATH can be changed later.
READ_AT_START = ("PYTHON", "LD_", "OMP_", "TORCH_")


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns in a forked child, which may start workers; its exception is raised here."""
    here, there = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_call, args=(there, function, arguments))
    child.start()
    there.close()
    with here:
        result = here.recv()
    child.join()
    if isinstance(result, ExceptionWrapper):
        result.reraise()
    assert child.exitcode == 0
    return result


def _call(there: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # OpenMP's threads do not survive a fork, and whoever used them before it would wait for them for ever.
    torch.set_num_threads(1)
    try:
        result = function(*arguments)
    except BaseException:
        result = ExceptionWrapper(where="in the new process")
    there.send(result)


@contextlib.contextmanager
def held_by_child(method: str, look: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """A child that is forked now; yields a function that returns what `look` returns there by then.

    method: "os.fork" or "Process".
    """
    here, there = FORK.Pipe()
    if method == "Process":
        child: Any = FORK.Process(target=_look_later, args=(there, look))
        child.start()
    else:
        child = os.fork()
        if child == 0:
            try:
                _look_later(there, look)
            finally:
                os._exit(0)
    there.close()

    def looked() -> Any:
        here.send(None)
        return here.recv()

    with here:
        yield looked
    if method == "Process":
        child.join()
        child.close()
    else:
        os.waitpid(child, 0)


def _look_later(there: Connection, look: Callable[[], Any]) -> None:
    with contextlib.suppress(EOFError):
        there.recv()
        there.send(look())


class Preloaded:
    """Forks interpreters from a process that has imported torch and this package: `tests.preloaded`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def held(self) -> tuple[int, int]:
        """Return its pid and the descriptor of the connection to it, which stay for all tests."""
        if self._process is None or self._control is None:
            return -1, -1
        return self._process.pid, self._control.fileno()

    def fork(self, request: dict[str, Any], descriptors: Sequence[int], numbers: Sequence[int] = range(3)) -> int:
        """Fork an interpreter, which is a child of this process and has `descriptors` as these numbers: its pid.

        It blocks the signals that this thread blocks.
        """
        blocked = [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        message = json.dumps(request | {"numbers": [*numbers], "blocked": blocked}).encode()
        begins, begin = os.pipe()
        try:
            with self._lock:
                pid = self._forked(message, [*descriptors, begins])
            os.write(begin, b"1")
        finally:
            os.close(begins)
            os.close(begin)
        return pid

    def _forked(self, message: bytes, descriptors: Sequence[int]) -> int:
        while True:
            control = self._running()
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(control, [message], descriptors)
                if pid := control.recv(20):
                    return int(pid)
            except (BrokenPipeError, ConnectionResetError):
                pass  # a test's time-out has ended it
            finally:
                LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            self._stop()

    def _running(self) -> socket.socket:
        if self._owner != os.getpid():  # never started, or by the process that has forked this one
            self._owner, self._process, self._control = os.getpid(), None, None
        if self._control is None:
            self._control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            with there:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.preloaded", str(there.fileno()), *SHOWN],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": import_path(), **dict.fromkeys(SHOWN, " " * MAX_SHOWN)},
                    pass_fds=[there.fileno()],
                )
        return self._control

    def _stop(self) -> None:
        assert self._process is not None
        assert self._control is not None
        self._control.close()
        self._process.wait()
        self._control = None


PRELOADED = Preloaded()


def import_path() -> str:
    """Return the PYTHONPATH of interpreters: they can import the library and the tests' modules."""
    return os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])


def preload_spawned() -> None:
    """Have what multiprocessing starts in this process be forked from `PRELOADED`: it would import torch each time."""
    start, given = util.spawnv_passfds, _read_at_start(os.environ)

    def started(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        tracks = "multiprocessing.resource_tracker" in arguments[-1]  # it imports next to nothing
        as_usual = os.fsdecode(path) == sys.executable and arguments[1] == "-c" and _read_at_start(os.environ) == given
        if tracks or not as_usual:
            return start(path, arguments, descriptors)
        request = {
            "fork_server": False,
            "destructors": False,
            "new_session": False,
            "filters": [],
            "program": arguments[2],
            "arguments": ["-c", *arguments[3:]],
            "folder": os.getcwd(),
            "environment": dict(os.environ),
        }
        numbers = [*range(3), *descriptors]
        return PRELOADED.fork(request, numbers, numbers)

    util.spawnv_passfds = started


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith(READ_AT_START) and name != "PYTHONPATH"}


_POSIX_SPAWN = os.posix_spawn


def spawn_preloaded(
    path: str,
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    file_actions: Sequence[tuple[int, int, int]] = (),
    setsid: bool = False,
    **options: Any,
) -> int:
    """Do what `os.posix_spawn` does with `python -m module`, as an interpreter that is forked from `PRELOADED`."""
    if options:  # from subprocess, which calls it from Python 3.13 on
        return _POSIX_SPAWN(path, command, env, file_actions=file_actions, setsid=setsid, **options)
    assert [path, "-m", os.POSIX_SPAWN_DUP2] == [sys.executable, command[1], *{kind for kind, _, _ in file_actions}]
    numbers = {number: given for _, given, number in file_actions}
    request = {
        "fork_server": False,
        "destructors": False,
        "new_session": setsid,
        "filters": [],
        "program": command[2],
        "arguments": ["-m", *command[3:]],
        "folder": os.getcwd(),
        "environment": dict(env),
    }
    pid = PRELOADED.fork(request, [numbers.get(number, number) for number in range(3)])
    while setsid and os.getsid(pid) != pid:
        threading.Event().wait(0.001)
    return pid


class Interpreter(subprocess.Popen[str]):
    """A Python process, killed where the `with` block that it is for ends by an exception, and awaited otherwise.

    command: `sys.executable`, filters of warnings (`-W`), then `-c`, `-m` or a script, and arguments.
    preloaded: whether it is forked from a process that has imported torch and this package.
    fork_server: whether a fork server that it starts later is forked likewise.
    destructors: whether it ends with those of C++ libraries, if it is preloaded. They take 0.2 s of the processor.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        preloaded: bool = True,
        fork_server: bool = False,
        destructors: bool = False,
        **options: Any,
    ) -> None:
        self._preloaded = preloaded
        new_session = options.get("start_new_session", False)
        self._asked = {"fork_server": fork_server, "destructors": destructors, "new_session": new_session}
        pipe = subprocess.PIPE
        super().__init__(command, **{"stdout": pipe, "stderr": pipe, "text": True} | options)

    def _execute_child(self, *given: Any) -> None:
        """Start the process (subprocess's name)."""
        if not self._preloaded:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        (_, *words), _, _, _, _, folder, environment, _, _, _, *pipes = given
        pipes = pipes[:6]  # after them come what newer Pythons add
        filters = []
        while words[0] == "-W":
            filters.append(words[1])
            words = words[2:]
        request = {
            **self._asked,
            "filters": filters,
            "program": words.pop(1) if words[0] in ("-c", "-m") else "",
            "arguments": words,
            "folder": os.fspath(folder or os.getcwd()),
            "environment": dict(os.environ if environment is None else environment),
        }
        ours = [number if pipe == -1 else pipe for number, pipe in zip((0, 1, 2), (pipes[0], pipes[3], pipes[5]))]
        self.pid = PRELOADED.fork(request, ours)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


def interpreter(
    program: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    fresh: bool = False,
    **options: Any,
) -> Interpreter:
    """Start a Python on `program`, which can import the library and the tests' modules.

    prefix: a command that runs it, such as `ip netns exec NAME`.
    fresh: whether nothing is imported yet. Otherwise it may be forked from a process that has imported torch.
    """
    return Interpreter(
        [*prefix, sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": import_path(), **(env or {})},
        preloaded=not (fresh or prefix or _read_at_start(env or {})),
        **options,
    )


def run_interpreter(
    program: str, *arguments: str, timeout_s: float = 250, fresh: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run an `interpreter` to its end."""
    with interpreter(program, *arguments, fresh=fresh, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"it hangs; so far it said:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
