"""Run a function in another process, where nothing of this one's loaders is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch._utils import ExceptionWrapper

ROOT = Path(__file__).resolve().parent.parent
FORK = multiprocessing.get_context("fork")


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


class Interpreter(subprocess.Popen[str]):
    """A fresh Python, killed where the `with` block that it is for ends by an exception, and awaited otherwise."""

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


def interpreter(
    program: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    **options: Any,
) -> Interpreter:
    """Start a fresh Python on `program`, which can import the library and the tests' modules.

    prefix: a command that runs it, such as `ip netns exec NAME`.
    """
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return Interpreter(
        [*prefix, sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        **options,
    )


def run_interpreter(program: str, *arguments: str, timeout_s: float = 250) -> subprocess.CompletedProcess[str]:
    """A fresh Python on `program`, run to its end."""
    with interpreter(program, *arguments) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"it hangs; so far it said:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
