"""Processes that a test process has started: found by a mark in their environment, and ended, even if it was killed.

As a program: `started_processes.py PID NAME` ends what is marked with NAME once the process PID has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

#: Environment variable of what a test starts: the test processes above it, each with the part of its run.
MARK = "PYTEST_STARTED_BY"


def started_by(name: str) -> set[int]:
    """Return the processes with a mark that begins with `name`. Detached ones are found too."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                for variable in (entry / "environ").read_text(errors="replace").split("\0"):
                    if variable.startswith(f"{MARK}=") and f" {name}" in variable.replace("=", " "):
                        found.add(int(entry.name))
    return found


def end(pids: set[int]) -> None:
    """Kill processes, and wait until they have ended. The code that started a child still reaps it."""
    ends = select.poll()
    with contextlib.ExitStack() as descriptors:
        waited = 0
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                descriptor = os.pidfd_open(pid)
                descriptors.callback(os.close, descriptor)
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                ends.register(descriptor, select.POLLIN)
                waited += 1
        while waited:
            for descriptor, _ in ends.poll():
                ends.unregister(descriptor)
                waited -= 1


def end_marked(name: str) -> None:
    """End the processes with a mark that begins with `name`, and those that they start meanwhile."""
    while processes := started_by(name):
        end(processes)


def end_after(pid: int, name: str) -> None:
    """Have a detached process end what is marked with `name` once the process `pid` ends, however it does."""
    command = ["setsid", "--fork", sys.executable, "-S", __file__, str(pid), name]
    none = subprocess.DEVNULL
    subprocess.run(command, env={"PATH": os.environ["PATH"]}, stdin=none, stdout=none, stderr=none, check=True)


if __name__ == "__main__":
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
    end_marked(sys.argv[2])
