"""Processes: values that each makes for itself, identities across reuse of a pid, private directories."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Makes its value on first use in every process; a forked child does not touch its parent's.

    Sockets, threads and held locks do not survive a fork, so a child must not use those of its parent, not
    even to close them. Thread-safe: at first use two threads may both call `make`; one result is kept. A pickle has
    `make` alone.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        # No lock: another thread of the parent could hold it at the moment of a fork.
        self._values: dict[int, T] = {}

    def get(self) -> T:
        process = os.getpid()
        try:
            return self._values[process]
        except KeyError:
            return self._values.setdefault(process, self._make())

    def __reduce__(self) -> tuple[Any, ...]:
        return PerProcess, (self._make,)

    def drop(self) -> T | None:
        """Forget this process's value and return it, if there is one."""
        return self._values.pop(os.getpid(), None)


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


#: Marks our directories, together with the user's id, so that a sweep looks at nothing else.
PREFIX = f"dpflow-{os.getuid()}-"
_UNLOCKED = "new-"
_LOCK = "lock"
#: A socket's path may have no more than 107 bytes, and a deep TMPDIR would break that.
_LONGEST_BASE = 60
#: A directory without a lock that is older than this, seconds, belongs to a process that was killed while making it.
_MAKING_S = 3600


class PrivateDirectory:
    """Made with mode 0700 in the system's directory for temporary files; holds a lock for as long as it is used.

    The lock lives as long as any process that holds it, so it outlives a forked child's parent and frees itself
    however they end. Whoever makes the next directory removes those whose lock is free.
    """

    _swept = False

    def __init__(self) -> None:
        if not PrivateDirectory._swept:
            PrivateDirectory._swept = True
            sweep()
        name = PREFIX + secrets.token_urlsafe(6)
        made = os.path.join(_base(), _UNLOCKED + name)
        #: Its path, without a slash at the end.
        self.path = os.path.join(_base(), name)
        #: Whoever takes the descriptor from it closes it.
        self._locks: list[int] = []
        # Control-C may come before anybody has it who would remove it. -1: after processes that use it have ended.
        self._dropped = Finalize(self, _remove, (self._locks, made, self.path), exitpriority=-1)
        os.mkdir(made, 0o700)
        lock = os.path.join(made, _LOCK)
        self._locks.append(os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        fcntl.flock(self._locks[0], fcntl.LOCK_EX)
        # Renamed once it is locked: sweeps of other processes remove directories without a lock.
        os.rename(made, self.path)

    def remove(self) -> None:
        """Remove it and what is in it. May be called twice, and by several threads."""
        _remove(self._locks, self.path)
        self._dropped.cancel()


def sweep() -> None:
    """Remove directories of this user that no process uses any more."""
    for directory in Path(_base()).glob(PREFIX + "*"):
        if _is_abandoned(directory / _LOCK):
            shutil.rmtree(directory, ignore_errors=True)
    for made in Path(_base()).glob(_UNLOCKED + PREFIX + "*"):
        with suppress(OSError):  # already removed
            if time.time() - made.stat().st_mtime > _MAKING_S:
                shutil.rmtree(made, ignore_errors=True)


def _remove(locks: list[int], *paths: str) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    with suppress(IndexError):
        os.close(locks.pop())


def _base() -> str:
    base = tempfile.gettempdir()
    return base if len(base) <= _LONGEST_BASE else "/tmp"


def _is_abandoned(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # another user's, or one that is being made right now
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
