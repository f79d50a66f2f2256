"""A private directory for the sockets of one loader, which the next loader removes if its owner was killed."""

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

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
