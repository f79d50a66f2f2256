"""Which processes are known to have ended, by their identity."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from torch_dpflow._core.processes import has_ended, own_process


def test_a_process_that_lives_has_not_ended_and_one_that_was_killed_has() -> None:
    assert own_process()
    assert not has_ended(own_process())
    program = "from torch_dpflow._core.processes import own_process; print(own_process(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        identity = child.stdout.readline().strip()
        assert not has_ended(identity)
        os.kill(child.pid, signal.SIGSTOP)
        assert not has_ended(identity), "one that is stopped may go on"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(identity), "a zombie"
    assert has_ended(identity)


def test_another_process_with_its_pid_is_not_that_process() -> None:
    *rest, started = own_process().split()
    assert has_ended(" ".join([*rest, str(int(started) + 1)]))


@pytest.mark.parametrize("part", [0, 1], ids=["host", "container"])
def test_of_a_process_elsewhere_nothing_is_known(part: int) -> None:
    parts = own_process().split()
    parts[part] = "another"
    parts[2] = str(2**22)
    assert not has_ended(" ".join(parts))


@pytest.mark.parametrize("text", ["", "x", "a b c d", "0 0 0 0", "a b -1 0"])
def test_a_text_that_is_no_identity_says_nothing(text: str) -> None:
    assert not has_ended(text)
