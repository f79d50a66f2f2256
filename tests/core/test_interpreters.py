"""Interpreters of tests that are forked from one process are as if each was started."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.new_process import Interpreter, run_interpreter

BLOCKED = "import signal; print([int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())])"


def test_an_interpreter_blocks_the_signals_that_its_starter_blocks() -> None:
    """The process from which interpreters are forked blocks at most one of these sets."""
    for blocked in ([signal.SIGINT], []):
        former = signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            done = run_interpreter(BLOCKED)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        assert (done.stderr, done.stdout) == ("", f"{[int(one) for one in blocked]}\n")


@pytest.mark.parametrize("as_script", [False, True])
def test_a_program_is_compiled_without_the_futures_of_the_tests(tmp_path: Path, as_script: bool) -> None:
    program = "def f(x: int): pass\nprint(f.__annotations__)"
    script = tmp_path / "script.py"
    script.write_text(program)
    with Interpreter([sys.executable, str(script)] if as_script else [sys.executable, "-c", program]) as process:
        assert process.communicate() == ("{'x': <class 'int'>}\n", "")


def test_an_interpreter_imports_what_its_path_has_for_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.time = lambda: 7\n")
    done = run_interpreter("import time; print(time.time())", env={"PYTHONPATH": str(tmp_path)})
    assert (done.stderr, done.stdout) == ("", "7\n")
