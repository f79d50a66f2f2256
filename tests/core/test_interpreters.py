"""Interpreters of tests that are forked from one process are as if each was started."""

from __future__ import annotations

import signal

import pytest

from tests import new_process

BLOCKED = "import signal; print([int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())])"


def test_an_interpreter_blocks_the_signals_that_its_starter_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process from which interpreters are forked was begun by another starter, which blocks other signals."""
    preloaded = new_process.Preloaded()
    monkeypatch.setattr(new_process, "PRELOADED", preloaded)
    for blocked in ([signal.SIGINT], []):
        former = signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            done = new_process.run_interpreter(BLOCKED)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        assert (done.stderr, done.stdout) == ("", f"{[int(one) for one in blocked]}\n")
    preloaded._stop()
