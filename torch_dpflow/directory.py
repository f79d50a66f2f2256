"""A private directory for the sockets of one loader, which the next loader removes if its owner was killed."""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
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
        made = tempfile.mkdtemp(prefix=_UNLOCKED + PREFIX, dir=_base())
        lock = os.path.join(made, _LOCK)
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        #: Whoever takes the descriptor from it closes it.
        self._locks = [descriptor]
        # Renamed once it is locked: sweeps of other processes remove directories without a lock.
        #: Its path, without a slash at the end.
        self.path = os.path.join(_base(), os.path.basename(made).removeprefix(_UNLOCKED))
        os.rename(made, self.path)

    def remove(self) -> None:
        """Remove it and what is in it. May be called twice, and by several threads."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(IndexError):
            os.close(self._locks.pop())


def sweep() -> None:
    """Remove directories of this user that no process uses any more."""
    for directory in Path(_base()).glob(PREFIX + "*"):
        if _is_abandoned(directory / _LOCK):
            shutil.rmtree(directory, ignore_errors=True)
    for made in Path(_base()).glob(_UNLOCKED + PREFIX + "*"):
        with suppress(OSError):  # already removed
            if time.time() - made.stat().st_mtime > _MAKING_S:
                shutil.rmtree(made, ignore_errors=True)


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
