"""Interpreters of tests that are forked from one process are as if each was started."""

from __future__ import annotations

import signal

from tests.new_process import run_interpreter

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
