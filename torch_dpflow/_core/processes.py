"""Values per process, identities of processes that stay unique when pids are reused, and directories for sockets."""

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
    """Value that each process makes at its first use; a forked child does not use its parent's value.

    Sockets, threads and held locks do not survive a fork, so a child must not use those of its parent, not even to
    close them. Thread-safe: at first use two threads may both call `make`; one result is kept. Pickles `make` only.
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
        """Remove this process's value and return it; None if there is none."""
        return self._values.pop(os.getpid(), None)


_SEPARATOR = " "
#: States in /proc of processes that have ended: zombies, and those that are being removed.
_ENDED = ("Z", "X", "x")
#: The kernel's flag of a process whose main thread has begun to exit, in the seventh field of `stat_fields`.
_PF_EXITING = 4


def own_process() -> str:
    """Return an identity of this process: boot, PID namespace, pid and start time; "" if /proc does not have them."""
    with suppress(OSError, ValueError, IndexError):
        return _SEPARATOR.join([*_place(), str(os.getpid()), stat_fields(os.getpid())[19]])
    return ""


def has_ended(process: str) -> bool:
    """Return whether the process with this identity (see `own_process`) has ended; False if not known."""
    try:
        *place, number, started = process.split(_SEPARATOR)
        if place != _place():
            return False
        pid = int(number)
        os.kill(pid, 0)
        fields = stat_fields(pid)
        state, present = fields[0], fields[19]
    except ProcessLookupError:
        return True
    except (OSError, ValueError, IndexError):  # /proc may hide other users' processes
        return False
    return state in _ENDED or present != started


def is_exiting(pid: int) -> bool:
    """Return whether a process has begun to exit, which can be before its pidfd reports the end; False if unknown."""
    with suppress(OSError, ValueError, IndexError):
        return bool(int(stat_fields(pid)[6]) & _PF_EXITING)
    return False


def _place() -> list[str]:
    """Return the kernel's boot and the PID namespace, in which pids are unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.readlink("/proc/self/ns/pid")]


def stat_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat as texts, beginning with the state. Raises OSError if it cannot be read."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


#: Beginning of the names of this package's directories for this user.
PREFIX = f"dpflow-{os.getuid()}-"
_UNLOCKED = "new-"
_LOCK = "lock"
#: A socket's path may have no more than 107 bytes, and a deep TMPDIR would break that.
_MAX_BASE = 60
#: A directory without a lock that is older than these seconds belongs to a process that was killed while making it.
_MAKING_S = 3600


class PrivateDirectory:
    """A new directory of mode 0700 for the sockets of a loader, worker or node; removed with this object.

    This process and its forks hold a lock while they use it. If all were killed, a later process removes it.
    """

    _swept = False

    def __init__(self) -> None:
        if not PrivateDirectory._swept:
            PrivateDirectory._swept = True
            sweep()
        name = PREFIX + secrets.token_urlsafe(6)
        made = os.path.join(_base(), _UNLOCKED + name)
        #: Path of the directory, without a slash at the end.
        self.path = os.path.join(_base(), name)
        #: The lock's descriptor; the caller that pops it closes it.
        self._locks: list[int] = []
        # Before the directory is made, because Control-C may come at any time. -1: after its processes have ended.
        self._dropped = Finalize(self, _remove, (self._locks, made, self.path), exitpriority=-1)
        os.mkdir(made, 0o700)
        lock = os.path.join(made, _LOCK)
        self._locks.append(os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        fcntl.flock(self._locks[0], fcntl.LOCK_EX)
        # Renamed once it is locked: sweeps of other processes remove directories without a lock.
        os.rename(made, self.path)

    def remove(self) -> None:
        """Remove the directory. May be called twice, and by several threads."""
        _remove(self._locks, self.path)
        self._dropped.cancel()


def sweep() -> None:
    """Remove this user's private directories whose processes have ended."""
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
    return base if len(base) <= _MAX_BASE else "/tmp"


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
