"""Identifies a process across reuse of its pid, for other processes of the same host."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_SEPARATOR = " "
#: States in /proc of processes that have ended: zombies, and those that are being removed.
_ENDED = ("Z", "X", "x")


def own_process() -> str:
    """An identity of this process: its boot, PID namespace, pid and start time; empty where /proc does not say."""
    with suppress(OSError, ValueError, IndexError):
        _, started = _stat(os.getpid())
        return _SEPARATOR.join([*_place(), str(os.getpid()), started])
    return ""


def has_ended(process: str) -> bool:
    """Whether the process of this identity is known to have ended. False where this process cannot find out.

    That is so for a process of another host or container.
    """
    try:
        *place, number, started = process.split(_SEPARATOR)
        if place != _place():
            return False
        pid = int(number)
        os.kill(pid, 0)
        state, present = _stat(pid)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, IndexError):  # /proc may hide other users' processes
        return False
    return state in _ENDED or present != started


def _place() -> list[str]:
    """The boot of the kernel and the PID namespace, in which pids are unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.readlink("/proc/self/ns/pid")]


def _stat(pid: int) -> tuple[str, str]:
    """State and start time of a process. Raises OSError, or IndexError where /proc has another format."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
