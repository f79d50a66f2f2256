"""The file by which jobs find a cluster, from the cluster's side: one cluster at a time has it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from torch_dpflow.errors import DPFlowError, OptionError, UsageError
from torch_dpflow.remote.access.connection_file import (
    ConnectionFile,
    draft_connection_file,
    read_connection_file,
)

#: How often a cluster looks whether its file is there, seconds.
LOOK_S = 2.0


class Announcement:
    """The connection file of a cluster that runs, locked for as long as it does.

    Where the file vanishes, as the folder of a user's session does when he logs out, it is written again as soon as
    its folder is there: nothing of the cluster needs it, but jobs and people do.

    Raises:
        OptionError: the file cannot be written, or something else is there.
        UsageError: a cluster is up that has its file there.
    """

    def __init__(self, path: Path, connection: ConnectionFile) -> None:
        self._path = path
        self._connection = connection
        try:
            self._lock = _claim(path, connection)
        except OSError as error:
            raise OptionError(f"connection file {os.fspath(path)!r}: {error.strerror}") from error
        self._where: Callable[[], str] = lambda: ""
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="dpflow-announce", daemon=True)
        self._keeper.start()

    def follow(self, where: Callable[[], str]) -> None:
        """From now on the cluster is where `where` says, if it says anything; asked in another thread."""
        self._where = where

    def remove(self) -> None:
        """The cluster ends. Another's file that has come in the place of this one stays."""
        self._ended.set()
        self._keeper.join()
        with suppress(OSError):
            if self._is_ours():
                self._path.unlink()
        os.close(self._lock)

    def _keep(self) -> None:
        while not self._ended.wait(LOOK_S):
            with suppress(OSError, DPFlowError):  # no folder yet, or another cluster was quicker
                if not self._path.exists():
                    self._hold(_claim(self._path, self._connection))
                address = self._where()
                if address not in ("", self._connection.address) and self._is_ours():
                    self._move(address)

    def _move(self, address: str) -> None:
        connection = msgspec.structs.replace(self._connection, address=address)
        draft = draft_connection_file(self._path, connection)
        lock = lock_file(draft)
        assert lock is not None
        draft.replace(self._path)
        self._connection = connection
        self._hold(lock)

    def _hold(self, lock: int) -> None:
        os.close(self._lock)
        self._lock = lock

    def _is_ours(self) -> bool:
        return os.path.samestat(os.fstat(self._lock), self._path.stat())


def check_vacant(path: Path) -> None:
    """Raise where `path` is that of a cluster that is up, or anything but a connection file."""
    leftover = _lock_leftover(path)
    if leftover is not None:
        os.close(leftover)


def lock_file(path: Path) -> int | None:
    """A descriptor that locks the file until it is closed; None where another process has locked it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _claim(path: Path, connection: ConnectionFile) -> int:
    """Put the file there; a descriptor that locks it. It is whole and locked before anybody can see it."""
    draft = draft_connection_file(path, connection)
    lock = lock_file(draft)
    assert lock is not None
    try:
        while True:
            try:
                os.link(draft, path)  # fails where anything is there
                return lock
            except FileExistsError:
                leftover = _lock_leftover(path)
            if leftover is not None:  # whose lock keeps others from doing the same
                draft.replace(path)
                os.close(leftover)
                return lock
    except BaseException:
        os.close(lock)
        raise
    finally:
        draft.unlink(missing_ok=True)


def _lock_leftover(path: Path) -> int | None:
    """Lock what a cluster that was killed has left there; None where nothing is. Raises as `check_vacant`."""
    while path.exists():
        try:
            found = read_connection_file(path, advice="remove it if it was a cluster's")
        except OptionError as error:
            raise OptionError(f"{error}, or give another --connection-file") from error
        lock = lock_file(path)
        if lock is None:
            raise UsageError(
                f"a cluster is up already at {found.address}; end it by `dpflow down --address {path}`, or give "
                "another --connection-file"
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        os.close(lock)  # another has put its own there meanwhile
    return None
