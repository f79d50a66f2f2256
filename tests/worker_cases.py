"""The worker processes of this process: who they are, and how to take them down."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import psutil


def worker_pids() -> list[int]:
    """Process ids of the workers that this process has started and that have not ended."""
    return sorted(child.pid for child in multiprocessing.active_children() if child.pid is not None)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal; SIGKILL by default."""
    os.kill(pid, number)


def stop_descendants(pid: int) -> list[int]:
    """Send SIGSTOP to all processes that a process has started, but multiprocessing's resource tracker; their pids."""
    stopped = []
    for one in psutil.Process(pid).children(recursive=True):
        if "multiprocessing.resource_tracker" not in " ".join(one.cmdline()):
            one.suspend()
            stopped.append(one.pid)
    return stopped


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped by whoever adopted it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"
