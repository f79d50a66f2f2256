"""Publication of a running cluster's connection file. A lock keeps other running clusters from using its path."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from torch_dpflow._core.threads import PeriodicCall
from torch_dpflow.cluster.security.connection_file import (
    ConnectionFile,
    draft_connection_file,
    read_connection_file,
)
from torch_dpflow.errors import DPFlowError, OptionError, UsageError

#: Interval at which a cluster checks whether its file exists (seconds).
CHECK_S = 2.0


class Announcement:
    """Connection file of a running cluster. The constructor writes it; it stays locked until `remove` is called.

    A thread writes the file again if it was removed and its folder exists, or if the coordinator's address changes.

    Args:
        current_address: returns the coordinator's address, or an empty string while it is unknown. The thread calls it.

    Raises:
        OptionError: the file cannot be written or locked, or a file is there that is not a connection file.
        UsageError: another running cluster has its file at this path.
    """

    def __init__(self, path: Path, connection: ConnectionFile, current_address: Callable[[], str] = lambda: "") -> None:
        self._path = path
        self._connection = connection
        try:
            self._lock = _publish(path, connection)
        except OSError as error:
            raise OptionError(f"connection file {os.fspath(path)!r}: {error.strerror}") from error
        self._current_address = current_address
        self._renewal = PeriodicCall(self._keep, CHECK_S, "dpflow-announce", what="keeping the connection file")
        try:
            self._renewal.start()
        except BaseException:  # no thread can be started
            self._withdraw()
            raise

    def remove(self) -> None:
        """Remove the file if it is still this cluster's. Call this when the cluster ends."""
        self._renewal.stop()
        self._renewal.join()
        self._withdraw()

    def _withdraw(self) -> None:
        with suppress(OSError):
            if self._is_ours():
                self._path.unlink()
        os.close(self._lock)

    def _keep(self) -> None:
        with suppress(OSError, DPFlowError):  # no folder yet, or another cluster has published its file there
            if not self._path.exists():
                self._replace_lock(_publish(self._path, self._connection))
            address = self._current_address()
            if address not in ("", self._connection.address) and self._is_ours():
                self._update(address)

    def _update(self, address: str) -> None:
        connection = msgspec.structs.replace(self._connection, address=address)
        with _draft(self._path, connection) as (draft, lock):
            draft.replace(self._path)
        self._connection = connection
        self._replace_lock(lock)

    def _replace_lock(self, lock: int) -> None:
        os.close(self._lock)
        self._lock = lock

    def _is_ours(self) -> bool:
        return os.path.samestat(os.fstat(self._lock), self._path.stat())


def check_vacant(path: Path) -> None:
    """Raise UsageError if a running cluster uses `path`, OptionError for another kind of file or an unusable folder."""
    leftover = _lock_leftover(path)
    if leftover is not None:
        os.close(leftover)
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OptionError(f"connection file {os.fspath(path)!r}: {error.strerror}") from error


def lock_file(path: Path) -> int | None:
    """Lock a file. Return a descriptor, which holds the lock until it is closed; None if the file cannot be locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _publish(path: Path, connection: ConnectionFile) -> int:
    """Create the file, complete and locked, and return a descriptor that locks it."""
    with _draft(path, connection) as (draft, lock):
        while True:
            try:
                os.link(draft, path)  # fails if the path exists
                return lock
            except FileExistsError:
                leftover = _lock_leftover(path)
            if leftover is not None:  # its lock prevents other clusters from replacing it too
                draft.replace(path)
                os.close(leftover)
                return lock


@contextmanager
def _draft(path: Path, connection: ConnectionFile) -> Iterator[tuple[Path, int]]:
    """Write a file next to `path`, and lock it; yield (its path, its descriptor). An error closes the descriptor."""
    draft = draft_connection_file(path, connection)
    lock = None
    try:
        lock = lock_file(draft)
        if lock is None:  # a file system without locks
            text = f"connection file {os.fspath(draft)!r} cannot be locked; give an --address on another disk"
            raise OptionError(text)
        yield draft, lock
    except BaseException:
        if lock is not None:
            os.close(lock)
        raise
    finally:
        draft.unlink(missing_ok=True)


def _lock_leftover(path: Path) -> int | None:
    """Lock the file that a killed cluster has left; return None without one. Raises the errors of `check_vacant`."""
    while path.exists():
        try:
            found = read_connection_file(path, advice="remove it if it belonged to a cluster")
        except OptionError as error:
            raise OptionError(f"{error}, or give another --address") from error
        lock = lock_file(path)
        if lock is None:
            raise UsageError(
                f"a cluster is up already at {found.address}; end it by `dpflow down --address {path}`, or give "
                "another --address"
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        os.close(lock)  # another cluster has replaced the file meanwhile
    return None
