"""Files on a disk or a mount: `file://` URLs and plain paths."""

from __future__ import annotations

import errno
import os
import stat

from torch_dpflow.datasets.storage.base import ByteRange
from torch_dpflow.errors import AccessDeniedError, ObjectMissingError, StorageError, TruncatedObjectError


class LocalStorage:
    """Storage of local files, read with `pread`.

    A file is opened for each read, which takes 4 µs, as it may be replaced.

    `deadline` is ignored, as a mount that hangs in the kernel cannot be interrupted.
    """

    is_remote = False

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def fetch(self, span: ByteRange, deadline: float) -> bytes:
        path = local_path(span.url)
        try:
            # Without O_NONBLOCK opening a FIFO waits for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return self._read(descriptor, span)
            finally:
                os.close(descriptor)
        except StorageError:
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissingError(f"{span}: there is no such file") from error
        except IsADirectoryError as error:
            raise ObjectMissingError(f"{span}: this is a directory, not a file") from error
        except PermissionError as error:
            raise AccessDeniedError(f"{span}: this user may not read the file: {error}") from error
        except OSError as error:
            if error.errno in (errno.ESPIPE, errno.ENXIO):
                raise _not_regular(span) from error
            raise StorageError(f"{span}: the file cannot be read: {error}") from error

    def _read(self, descriptor: int, span: ByteRange) -> bytes:
        if span.stop is None:
            found = os.fstat(descriptor)
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise _not_regular(span)
            stop = found.st_size
            if span.size is not None and stat.S_ISREG(found.st_mode):
                span.check_size(stop)
        else:
            stop = span.stop  # reading a range of a file that is not regular fails or ends
        if stop - span.start > self._longest:
            raise StorageError(f"{span}: {stop - span.start} bytes are above the limit of {self._longest}")
        if stop < span.start:
            raise TruncatedObjectError(f"{span}: the file has only {stop} bytes")
        parts: list[bytes] = []
        position = span.start
        while position < stop:
            part = os.pread(descriptor, stop - position, position)
            if not part:
                size = os.fstat(descriptor).st_size
                raise TruncatedObjectError(f"{span}: the file has only {size} bytes")
            parts.append(part)
            position += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def node(self, url: str) -> str:
        return "local"

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _not_regular(span: ByteRange) -> StorageError:
    return StorageError(f"{span}: this is a pipe, socket or device; give a regular file")


def local_path(url: str) -> str:
    """Return the path of a `file://` URL or a plain path, taken literally as in fsspec, without %-escapes."""
    scheme, colon, rest = url.partition(":")
    return rest.removeprefix("//") if colon and scheme in ("file", "local") else url
