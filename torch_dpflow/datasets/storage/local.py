"""Files on a disk or a mount: `file://` URLs and plain paths."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from torch_dpflow.datasets.storage.base import ByteRange, ObjectState, is_state_of_file, state_of_file
from torch_dpflow.errors import AccessDeniedError, ObjectMissingError, StorageError, TruncatedObjectError

#: The end of the names of files that are being written.
UNFINISHED = ".unfinished"
#: Seconds for which a writer makes a directory again that other processes remove while it is empty.
_REMOVED_TIMEOUT_S = 30.0
#: How often a directory that exists may refuse a new entry as missing. One made again meanwhile does so once or twice.
_MAX_REFUSALS = 100


class LocalStorage:
    """Storage of local files, read with `pread`.

    A file is opened for each read (4 µs), because it may be replaced. If a `ByteRange` expects a state, it is compared
    with the file's state after the bytes were read, so that a write meanwhile is an error.

    `deadline` is ignored, because a mount that hangs in the kernel cannot be interrupted.
    """

    is_remote = False

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def fetch(self, span: ByteRange, deadline: float) -> bytes:
        try:
            # Without O_NONBLOCK opening a FIFO waits for a writer.
            descriptor = os.open(local_path(span.url), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return self._read(descriptor, span)
            finally:
                os.close(descriptor)
        except StorageError:
            raise
        except OSError as error:
            raise _storage_error(span, error) from error

    def look(self, span: ByteRange, deadline: float) -> ObjectState:
        try:
            found = os.stat(local_path(span.url))
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError
            _check(span, found)
        except StorageError:
            raise
        except OSError as error:
            raise _storage_error(span, error) from error
        return ObjectState(found.st_size, state_of_file(found))

    def _read(self, descriptor: int, span: ByteRange) -> bytes:
        stop = span.stop  # reading a range of a file that is not regular fails or ends
        if stop is None:
            found = os.fstat(descriptor)
            _check(span, found)
            stop = found.st_size
        if stop - span.start > self._longest:
            raise StorageError(f"{span}: {stop - span.start} bytes are above the limit of {self._longest}")
        if stop < span.start:
            raise TruncatedObjectError(f"{span}: the file has only {stop} bytes")
        parts: list[bytes] = []
        position = span.start
        while position < stop and (part := os.pread(descriptor, stop - position, position)):
            parts.append(part)
            position += len(part)
        if span.state is not None or position < stop:
            found = os.fstat(descriptor)  # after reading, as the file may be written in place until then
            if span.state is not None and (span.size is not None or not is_state_of_file(span.state, found)):
                _check(span, found)  # else the state shows that it is the same regular file
            if position < stop:
                raise TruncatedObjectError(f"{span}: the file has only {found.st_size} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def node(self, url: str) -> str:
        return "local"

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _check(span: ByteRange, found: os.stat_result) -> None:
    """Raise StorageError unless this is a regular file with the expected size and state. A directory fails later."""
    if stat.S_ISDIR(found.st_mode):
        return
    if not stat.S_ISREG(found.st_mode):
        raise _not_regular(span)
    span.check_size(found.st_size)
    if span.state is not None and not is_state_of_file(span.state, found):
        raise span.replaced(state_of_file(found))


def _not_regular(span: ByteRange) -> StorageError:
    return StorageError(f"{span}: this is a pipe, socket or device; give a regular file")


def _storage_error(span: ByteRange, error: OSError) -> StorageError:
    """Return an error of the operating system as a StorageError that names the file."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ObjectMissingError(f"{span}: there is no such file")
    if isinstance(error, IsADirectoryError):
        return ObjectMissingError(f"{span}: this is a directory, not a file")
    if isinstance(error, PermissionError):
        return AccessDeniedError(f"{span}: this user may not read the file: {error}")
    if error.errno in (errno.ESPIPE, errno.ENXIO):
        return _not_regular(span)
    return StorageError(f"{span}: the file cannot be read: {error}")


def local_path(url: str) -> str:
    """Return the path that a `file://` URL or a plain path names. As in fsspec, %-escapes are not decoded."""
    scheme, colon, rest = url.partition(":")
    return rest.removeprefix("//") if colon and scheme in ("file", "local") else url


def beside_name(path: str) -> str:
    """Return a new temporary path in the directory of `path`, a file that is to be written."""
    name = path.rpartition("/")[2]
    return f"{path[: len(path) - len(name)]}.{name}.{secrets.token_hex(4)}{UNFINISHED}"


@contextmanager
def written(path: str, *, replaces: bool = True, is_durable: bool = False) -> Iterator[IO[bytes]]:
    """Open a new file for writing. It appears as `path` after the body of `with`; if that fails, the file is removed.

    Args:
        replaces: whether to replace a file that exists; else raise FileExistsError.
        is_durable: whether to wait until the file's bytes and name are on the disk.
    """
    beside = beside_name(path)
    try:
        with opened_new(beside) as file:
            yield file
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        if replaces:
            os.replace(beside, path)
        else:
            _link_into_place(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
    if is_durable:
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)  # else a power cut may take the name away
        except OSError as error:
            if error.errno != errno.EINVAL:  # some mounts sync no directories
                raise
        finally:
            os.close(folder)


def opened_new(path: str) -> IO[bytes]:
    """Create a file and its directory, and open the file for writing.

    If another process removes the directory while it is empty (`Files.remove_empty`), the directory is made again.

    Raises:
        StorageError: the directory was removed again and again for 30 s.
        NotADirectoryError: a file is in the place of a directory.
        FileNotFoundError: a directory that exists refuses new entries, like the ones in /proc.
    """
    folder = os.path.dirname(path)
    deadline, refusals = time.monotonic() + _REMOVED_TIMEOUT_S, 0
    while True:
        try:
            os.makedirs(folder, exist_ok=True)
            return open(path, "xb")
        except FileExistsError as error:
            if os.path.lexists(error.filename) and not os.path.isdir(error.filename):
                raise NotADirectoryError(f"{error.filename} is a file, where a directory should be") from error
        except FileNotFoundError as error:
            refusals = refusals + 1 if os.path.isdir(os.path.dirname(error.filename)) else 0
            if refusals >= _MAX_REFUSALS:
                raise
        if time.monotonic() >= deadline:
            raise StorageError(
                f"{folder}: another process removed this directory for {_REMOVED_TIMEOUT_S:g} s each time it was made; "
                "stop that process, then write again"
            )


def _link_into_place(beside: str, path: str) -> None:
    """Rename without ever replacing a file: a link fails where a rename would replace the file."""
    try:
        os.link(beside, path)
    except FileExistsError:
        raise
    except OSError:  # a mount without hard links
        if os.path.exists(path):
            raise FileExistsError(f"{path} exists already") from None
        os.replace(beside, path)
    else:
        os.unlink(beside)
