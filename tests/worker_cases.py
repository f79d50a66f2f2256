"""The worker processes of this process: who they are, and how to take them down."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path


def worker_pids() -> list[int]:
    """Process ids of the workers that this process has started and that have not ended."""
    return sorted(child.pid for child in multiprocessing.active_children() if child.pid is not None)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal; SIGKILL by default."""
    os.kill(pid, number)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped by whoever adopted it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"
