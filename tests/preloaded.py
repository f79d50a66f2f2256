"""A process that has imported torch and this package, from which tests fork interpreters: seconds less for each.

`new_process.Preloaded` starts it and sends it what to run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import runpy
import signal
import socket
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any

from tests import huge_pages

#: What nearly all interpreters of tests import, a cluster's processes, and the command's servers of the pool.
MODULES = (
    "torch",
    "torch_dpflow.loader",
    "torch_dpflow.cluster.client.open_job",
    "torch_dpflow.cluster.services.coordinator_process",
    "torch_dpflow.cluster.services.router",
    "torch_dpflow.cluster.shard.run",
    "torch_dpflow.cli.pool",
)
#: Where descriptors wait until the numbers below are closed.
ABOVE = 300
MAX_REQUEST, MAX_DESCRIPTORS = 1 << 20, 16


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork an interpreter for each request: in it, return the request. At the end, return None."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST, MAX_DESCRIPTORS)
        if not message:
            return None
        here, there = os.pipe()
        between = os.fork()
        if between == 0:
            # The interpreter is forked by a process that ends: the test's process adopts it as a child.
            between = os.getpid()
            if pid := os.fork():
                os.write(there, str(pid).encode())
                os._exit(0)
            control.detach()
            request: dict[str, Any] = json.loads(message)
            *given, begins = descriptors
            os.read(begins, 1)  # it is written once no other process would be adopted
            while os.getppid() == between:
                time.sleep(0.0005)
            place(request["numbers"], given)
            signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
            return request
        os.close(there)
        for number in descriptors:
            os.close(number)
        pid_there = os.read(here, 20)
        os.close(here)
        os.waitpid(between, 0)
        control.send(pid_there)


def place(numbers: Sequence[int], descriptors: Sequence[int]) -> None:
    """Give descriptors these numbers, and close all others."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    above = max(ABOVE, *numbers) + 1
    for at, number in enumerate(descriptors):
        os.dup2(number, above + at)
    os.closerange(0, above)
    for at, number in enumerate(numbers):
        os.dup2(above + at, number)
    os.closerange(above, most)


def become(request: dict[str, Any], shown: Sequence[str]) -> ModuleType:
    """Take the place of an interpreter that was started by this request; return its main module.

    shown: variables that other processes read in /proc/PID/environ, where changes of `os.environ` do not show.
    """
    import numpy

    os.chdir(request["folder"])
    for name in shown:
        write_over(name, request["environment"].get(name, ""))
    here, there = (each.get("PYTHONPATH", "").split(os.pathsep) for each in (os.environ, request["environment"]))
    if here != there:
        sys.path[1:] = [*filter(None, there), *(path for path in sys.path[1:] if path not in here)]
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    numpy.random.seed()  # it was seeded before the fork: all interpreters would draw the same
    if request["new_session"]:
        os.setsid()
    sys.warnoptions += request["filters"]
    warnings._processoptions(request["filters"])  # type: ignore[attr-defined]
    sys.argv[:] = request["arguments"]
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.path[0] = ""
    if sys.argv[0] not in ("-c", "-m"):
        main.__file__ = os.path.abspath(sys.argv[0])
        sys.path[0] = os.path.dirname(main.__file__)
    sys.modules["__main__"] = main
    if here != there:
        sys.modules.pop("sitecustomize", None)
        with contextlib.suppress(ModuleNotFoundError):
            import_module("sitecustomize")
    return main


def write_over(name: str, text: str) -> None:
    """Change a variable in the environment that this process has had since its start. It must not become longer."""
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_void_p
    size = len(os.environ[name].encode())
    ctypes.memmove(library.getenv(name.encode()), text.encode().ljust(size, b"\0")[:size], size)


def end_without_destructors() -> None:
    """Have this process end once Python has: the destructors of torch's libraries take 0.2 s of the processor."""
    library = ctypes.CDLL(None)
    library.on_exit(ctypes.cast(library._exit, ctypes.c_void_p), None)  # it is called first, with the status
    atexit.register(_keep, {name for name in sys.modules if _is_library(name)})


def _is_library(name: str) -> bool:
    """Return whether a module is neither of Python nor of this repository."""
    top = name.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in ("__main__", "tests", "torch_dpflow")


def _keep(names: set[str]) -> None:
    """Leave these modules as they are: Python takes 0.05 s to clear them, and copies their memory.

    All others are cleared, and what they hold ends, as in every interpreter.
    """
    kept = [sys.modules.pop(name, None) for name in names]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def fork_server_early() -> None:
    """Fork now what multiprocessing starts as its fork server later: it has imported what this process has."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        here.close()
        _become_fork_server(there)
    there.close()
    start = util.spawnv_passfds

    def started(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in arguments[-1]:
            return start(path, arguments, descriptors)
        util.spawnv_passfds = start
        numbers = [0, 1, 2, *descriptors]
        message = [arguments[-1], numbers, dict(os.environ)]
        with here:
            socket.send_fds(here, [json.dumps(message).encode()], numbers)
        return pid

    util.spawnv_passfds = started


def _become_fork_server(there: socket.socket) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as it is where it would be started
    message, descriptors, _, _ = socket.recv_fds(there, MAX_REQUEST, MAX_DESCRIPTORS)
    if message:
        there.detach()
        program, numbers, environment = json.loads(message)
        os.environ.clear()
        os.environ.update(environment)
        place(numbers, descriptors)
        exec(program, {"__name__": "__main__"})
    os._exit(0)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # it may have been started by a thread that blocked some for a start
    for name in MODULES:
        import_module(name)
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]  # of operators that torch has defined
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    huge_pages.collapse()
    if (asked := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        itself = sys.modules["__main__"]
        run = become(asked, sys.argv[2:])
        if not asked["destructors"]:
            end_without_destructors()
        if asked["fork_server"]:
            fork_server_early()
        # At the level of the module: this process ends as an interpreter does. `from __future__` is not inherited.
        if sys.argv[0] == "-c":
            exec(compile(asked["program"], "<string>", "exec", dont_inherit=True), run.__dict__)
        elif sys.argv[0] == "-m":
            runpy._run_module_as_main(asked["program"])  # type: ignore[attr-defined]
        else:
            exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec", dont_inherit=True), run.__dict__)
