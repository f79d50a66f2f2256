"""Exit report of a worker: how its process ended, in a file, or on standard error if the owner cannot read files."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

#: Interval of writing the stacks of a starting worker, seconds. They show which import hung if the worker is killed.
STACKS_S = 5.0

#: The report of this process while its worker starts; None before and afterwards.
_starting: _Start | None = None


@contextmanager
def exit_report(path: str) -> Iterator[None]:
    """Write to the file `path` how the body of the `with` statement ends this process.

    The report has the traceback of an error, or the stacks of a fatal signal. Until `has_started` is called, it also
    has the module that is being imported, and the stacks of a start that takes long.
    """
    with open(path, "w", buffering=1) as report:
        faulthandler.enable(file=report)
        report_start(report)
        try:
            yield
        except BaseException as error:
            has_started()
            report.write("".join(traceback.format_exception(error)))
            raise
        finally:
            has_started()
            faulthandler.disable()


def has_started() -> None:
    """Stop what `report_start` began, because the worker has started: later imports and stacks are not reported."""
    global _starting
    if _starting is not None:
        started, _starting = _starting, None
        started.end()


def importing() -> str:
    """Return a text with the name of the module that a starting worker is importing; empty after the start."""
    starting = _starting  # the worker's thread may clear it meanwhile
    return "" if starting is None else starting.line


def report_start(report: IO[str] | None = None, announce: Callable[[], None] | None = None) -> None:
    """Write to `report` which module this process imports, and its stacks, until `has_started` is called.

    report: a file, which is cleared before each module. None: standard error, of which platforms show the last lines.
        It cannot be cleared, so it gets no modules that other modules import.
    announce: called before each module of the report is imported.
    """
    global _starting
    _starting = _Start(report, announce)


class _Start:
    """Finder of modules that finds none, and writes to the report which module is looked for, and for which others."""

    def __init__(self, report: IO[str] | None, announce: Callable[[], None] | None) -> None:
        self._announce = announce
        self._report, self._is_log, self._owner = report or sys.stderr, report is None, os.getpid()
        self.line = ""
        self._has_ended, self._writing = threading.Event(), threading.Lock()
        sys.meta_path.insert(0, self)
        # Not by faulthandler.dump_traceback_later: in a process that was forked while it ran, it waits without end for
        # a thread that does not exist there.
        threading.Thread(target=self._write_stacks, name="dpflow-start", daemon=True).start()

    def _write_stacks(self) -> None:
        pause_s = STACKS_S
        while not self._has_ended.wait(pause_s):
            pause_s *= 1 + self._is_log
            with self._writing:
                if not self._has_ended.is_set():
                    faulthandler.dump_traceback(self._report)

    def find_spec(self, name: str, *_: object) -> None:
        if os.getpid() == self._owner and not (self._is_log and any(_importers())):
            with suppress(OSError, ValueError):
                self._clear()
                self.line = f"it was importing {' for '.join([name, *_importers()])}"
                self._report.write(f"{self.line}\n")
            if self._announce is not None:
                self._announce()

    def end(self) -> None:
        with suppress(ValueError):  # code of the user has removed it
            sys.meta_path.remove(self)
        if os.getpid() == self._owner:
            with self._writing:
                self._has_ended.set()
                self._clear()
                if self._is_log and self.line:
                    self._report.write("it has started\n")

    def _clear(self) -> None:
        if not self._is_log:
            self._report.seek(0)
            self._report.truncate()


def _importers() -> Iterator[str]:
    """Return the names of the modules whose bodies run, the innermost first, without modules of the program."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and (name := str(frame.f_globals.get("__name__"))) != "__main__":
            yield name
        frame = frame.f_back
