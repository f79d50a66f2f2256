"""Wall clocks of a cluster and of its jobs, which a test sets while they run."""

from __future__ import annotations

import random
from pathlib import Path

#: Python imports a module of this name first of all. Nobody can set one process's clock; but all that looks at it here
#: is Python.
_MODULE = """
import os, time

_time, _time_ns = time.time, time.time_ns


def _offset():
    try:
        with open(os.path.join(os.path.dirname(__file__), "offset")) as file:
            return float(file.read() or 0)
    except OSError:
        return 0.0


time.time = lambda: _time() + _offset()
time.time_ns = lambda: _time_ns() + int(_offset() * 1e9)
"""


class Clock:
    """The wall clock of all processes that find `path` before all other modules.

    Args:
        path: a folder, which is made.
        whose: for people.
    """

    def __init__(self, path: Path, whose: str) -> None:
        self.path = path
        self._whose = whose
        path.mkdir()
        (path / "sitecustomize.py").write_text(_MODULE)

    def step(self, chance: random.Random) -> tuple[str, str, float]:
        """Set it to anything up to ten minutes before or after what it should be; a fault."""
        draft = self.path / "draft"
        draft.write_text(str(chance.uniform(-600.0, 600.0)))
        draft.rename(self.path / "offset")
        return "step", f"{self._whose} clock", 0.0
