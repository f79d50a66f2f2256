"""Directories for sockets go when nobody uses them, also where their maker was killed over them."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

from tests.interruption import Interruption
from tests.new_process import in_fork
from torch_dpflow._core.processes import PREFIX, PrivateDirectory, sweep


def killed_while_making() -> Path:
    """A process makes a directory and is killed before it has its name."""
    before = set(Path(tempfile.gettempdir()).iterdir())
    pid = os.fork()
    if pid == 0:
        os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        PrivateDirectory()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    (made,) = set(Path(tempfile.gettempdir()).iterdir()) - before
    return made


def left_by_interruptions() -> list[set[Path]]:
    """For each place of an interruption, what it leaves."""
    PrivateDirectory().remove()  # sweeps, once a process
    base = Path(tempfile.gettempdir())
    before, left = set(base.iterdir()), list[set[Path]]()
    while True:
        try:
            with Interruption(len(left)):
                directory = PrivateDirectory()
            directory.remove()
            return left
        except KeyboardInterrupt:
            pass
        left.append(set(base.iterdir()) - before)


def test_an_interruption_before_anybody_has_it_leaves_none() -> None:
    left = in_fork(left_by_interruptions)
    assert len(left) > 10
    assert not any(left)


def test_one_that_was_never_finished_is_swept_once_it_is_old() -> None:
    used, made = PrivateDirectory(), killed_while_making()
    sweep()
    assert made.exists()  # another process may be making it right now
    os.utime(made, (0, 0))
    sweep()
    assert not made.exists()
    assert Path(used.path).name.startswith(PREFIX)
    assert Path(used.path).exists()
    used.remove()
    used.remove()
    assert not Path(used.path).exists()
