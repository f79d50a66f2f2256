"""DiskCache: remote samples and blocks of tables on a local disk, for all processes of a user, kept between runs.

An entry is a file, named by the SHA-256 of its key. It appears whole or not at all; a killed writer leaves only a
temporary file. A footer contains the length and CRC-32 of the data, and the SHA-256 of the key. A failure of the cache
never fails a read: the sample is read from the storage.

**What stays.** A full cache replaces no entry that is in use. Each epoch reads each sample once, so a cache with
capacity for half of the samples serves half of the reads. It would serve 16% if it replaced the entry used least
recently, and 28% with random replacement (CoorDL's MinIO cache is built on the same fact). Entries that no process has
read for `IDLE_S` are removed to make space.

**Why not a library.** diskcache 5.6 returns wrong bytes after a flipped bit, and raises an error on a full disk or a
damaged index. It takes 3.5 times the processor time for a write of 100 kB. fsspec's caches keep whole objects, without
checksum or limit.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import random
import shutil
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Literal, overload

from torch_dpflow.log import DATASETS

#: Seconds after which an entry that was not read may be removed. Longer than an epoch of a large dataset.
IDLE_S = 3 * 86400.0
#: An entry's time of last use is updated if it is older, seconds, so that most hits write nothing.
_TOUCH_S = 3600.0
#: Share of the file system that stays free if the cache has no limit.
_MIN_FREE = 0.1
#: Seconds for which nothing is added after a failed write, and after the cache was found full.
_PAUSE_AFTER_FAILURE_S = 60.0
_PAUSE_WHEN_FULL_S = 1.0
#: Seconds for which a directory without idle entries is not searched again.
_SEARCH_AGAIN_S = 3600.0
#: Seconds to wait for the lock of the count, which its holder needs for microseconds; then nothing is added for longer.
_LOCK_S = 0.25
_PAUSE_WHEN_LOCKED_S = 10.0
#: Seconds after which a temporary file is one of a killed writer.
_ABANDONED_S = 3600.0
#: Length and CRC-32 of the data, and SHA-256 of the key.
_FOOTER = struct.Struct("<QI32s")
#: Bytes of the entries of each directory.
_COUNTS = struct.Struct("<256q")
#: Disks allocate blocks of this size.
_BLOCK = 4096
#: Below the user's directory, so that clearing removes nothing else. Its name changes with the layout.
_LAYOUT = "dpflow-samples-1"


@dataclass(frozen=True)
class CacheUsage:
    """Usage of a disk cache: entries, bytes and idle time."""

    #: The directory that the user gave.
    directory: str
    entries: int
    #: Bytes on the disk, in whole blocks.
    bytes: int
    #: Seconds since the last read or write of any entry, exact to an hour; None: there are no entries.
    idle_s: float | None
    #: Free bytes of the file system.
    free: int


class DiskCache:
    """Cache of samples in one directory. Thread-safe. All processes of one user can use it at the same time.

    An instance belongs to the process that made it.

    Args:
        directory: created with the first entry. Not used if another user owns it or may write to it.
        limit: maximum bytes on the disk; None: entries are added while more than a tenth of the file system is free.
    """

    def __init__(self, directory: str, limit: int | None = None) -> None:
        self.directory = directory
        self._limit = limit
        self._root = os.path.join(directory, _LAYOUT)
        self._counts = os.path.join(self._root, "counts")
        self._paused_until = 0.0
        #: By directory: when it was last searched for idle entries.
        self._searched: dict[int, float] = {}
        #: The threads of this process wait for each other without polling.
        self._counting = threading.Lock()
        self._warned = False
        self._is_usable = self._open()
        if self._is_usable and os.path.isdir(self._root) and not os.path.exists(self._counts):
            with suppress(OSError):
                self.usage()  # filled by a version that counted otherwise

    @overload
    def get(self, key: str) -> bytes | None: ...

    @overload
    def get(self, key: str, *, is_mapped: Literal[True]) -> memoryview | None: ...

    def get(self, key: str, *, is_mapped: bool = False) -> bytes | memoryview | None:
        """Return the bytes of an entry; None if it is missing, damaged or unreadable. A damaged entry is removed.

        is_mapped: whether to map the bytes instead of reading them, so that processes share their memory. Mapped bytes
            are compared with the checksum once, here.
        """
        if not self._is_usable:
            return None
        digest = hashlib.sha256(key.encode()).digest()
        path = self._path(digest)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            found = os.fstat(descriptor)
            length = max(found.st_size - _FOOTER.size, 0)
            data = _mapped(descriptor, length) if is_mapped else os.pread(descriptor, length, 0)
            while len(data) < length and (more := os.pread(descriptor, length - len(data), len(data))):
                data = b"".join([data, more])  # a call reads 2 GiB at most
            footer = os.pread(descriptor, _FOOTER.size, length)
        except OSError as error:
            self._warn(error)
            return None
        finally:
            os.close(descriptor)
        if footer != _footer(digest, data):
            self._warn(f"{path} is damaged and was removed")
            self._remove(digest, found.st_size)
            return None
        if time.time() - found.st_mtime > _TOUCH_S:
            with suppress(OSError):  # a disk that cannot be written may still be readable
                os.utime(path)
        return data

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Add an entry. Does nothing if it exists, or if the cache is full or failed recently. Never raises OSError."""
        if not self._is_usable or time.monotonic() < self._paused_until:
            return
        digest = hashlib.sha256(key.encode()).digest()
        path = self._path(digest)
        size = _on_disk(len(data) + _FOOTER.size)
        try:
            if os.path.exists(path):
                return
            if not (self._count(digest[0], size) or (self._free_idle(size) and self._count(digest[0], size))):
                self._pause(_PAUSE_WHEN_FULL_S)
                return
            is_new = False
            try:
                is_new = _write(path, data, _footer(digest, data))
            finally:
                if not is_new:
                    self._count(digest[0], -size)
        except FileNotFoundError:
            return  # the cache was cleared meanwhile
        except OSError as error:
            self._pause(_PAUSE_AFTER_FAILURE_S)
            self._warn(error)

    def usage(self) -> CacheUsage:
        """Count the entries, and return the usage. Corrects recorded counts, and removes files of killed writers.

        Raises OSError: the directory does not exist, or cannot be read.
        """
        entries, total, last_use = 0, 0, None
        with self._counted() if os.path.isdir(self._root) else nullcontext() as counts:
            for number in range(256):
                before = total
                for _, found in self._entries(number):
                    entries, total = entries + 1, total + _on_disk(found.st_size)
                    last_use = max(found.st_mtime, last_use or 0.0)
                if counts is not None:
                    _set_count(counts, number, total - before)
        free = os.statvfs(self.directory)
        idle = None if last_use is None else max(0.0, time.time() - last_use)
        return CacheUsage(self.directory, entries, total, idle, free.f_bavail * free.f_frsize)

    def clear(self) -> None:
        """Remove all entries. Processes that use the cache continue, and fill it again.

        Raises OSError: the directory cannot be written.
        """
        if os.path.isdir(self._root):
            cleared = f"{self._root}-cleared-{os.getpid()}-{time.monotonic_ns()}"
            os.rename(self._root, cleared)  # at once, so that no entry written meanwhile goes uncounted
            shutil.rmtree(cleared)

    def _open(self) -> bool:
        """Return whether the directory may be used: no other user may write to it, or it does not exist yet."""
        try:
            found = os.stat(self.directory)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._warn(error)
            return False
        if found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return True
        self._warn("other users may write to the directory; give one that only you can write to (chmod 700)")
        return False

    def _make(self) -> None:
        """Make the directories. Raises OSError."""
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self._is_usable = self._open()  # another user may have made it meanwhile
        if not self._is_usable:
            raise PermissionError(errno.EACCES, "other users may write to it")
        os.makedirs(self._root, mode=0o700, exist_ok=True)

    def _path(self, digest: bytes) -> str:
        name = digest.hex()
        return f"{self._root}/{name[:2]}/{name[2:]}"

    def _count(self, number: int, change: int) -> bool:
        """Change the count of a directory. Return False if the limit forbids it, or the lock of the counts is held."""
        with self._counted() as counts:
            if counts is None:
                return False
            before = _counts_in(counts)
            if change > 0 and self._limit is not None and sum(before) + change > self._limit:
                return False
            if change > 0 and self._limit is None:
                found = os.statvfs(self.directory)
                if found.f_bavail * found.f_frsize - change < _MIN_FREE * found.f_blocks * found.f_frsize:
                    return False
            _set_count(counts, number, max(0, before[number] + change))
            return True

    @contextmanager
    def _counted(self) -> Iterator[int | None]:
        """Hold the lock of the counts, and yield their file; None if the lock cannot be taken in time.

        The holder of the lock may be frozen. Makes the directories if they are missing.
        """
        if not os.path.isdir(self._root):
            self._make()
        with self._counting:
            descriptor = os.open(self._counts, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _lock(descriptor):
                    yield descriptor
                else:
                    self._pause(_PAUSE_WHEN_LOCKED_S)
                    yield None
            finally:
                os.close(descriptor)

    def _pause(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, time.monotonic() + seconds)

    def _free_idle(self, size: int) -> bool:
        """Remove idle entries of one directory, and correct its count, which may contain entries of killed writers.

        Return whether at least `size` bytes were freed.
        """
        now = time.time()
        waiting = [number for number in range(256) if now - self._searched.get(number, 0.0) > _SEARCH_AGAIN_S]
        if not waiting:
            return False
        number = random.choice(waiting)
        freed = 0
        with self._counted() as counts:
            if counts is None:
                return False
            kept = 0
            for path, found in self._entries(number):
                if now - found.st_mtime > IDLE_S:
                    os.unlink(path)
                else:
                    kept += _on_disk(found.st_size)
            freed = _counts_in(counts)[number] - kept
            _set_count(counts, number, kept)
        if freed <= 0:
            self._searched[number] = now
        return freed >= size

    def _entries(self, number: int) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the entries of one directory. Temporary files of killed writers are removed."""
        try:
            found = list(os.scandir(f"{self._root}/{number:02x}"))
        except FileNotFoundError:
            return
        for entry in found:
            with suppress(FileNotFoundError):  # another process removed it
                status = entry.stat(follow_symlinks=False)
                if not entry.name.startswith("."):
                    yield entry.path, status
                elif time.time() - status.st_mtime > _ABANDONED_S:
                    os.unlink(entry.path)

    def _remove(self, digest: bytes, size: int) -> None:
        with suppress(OSError):
            os.unlink(self._path(digest))
            self._count(digest[0], -_on_disk(size))

    def _warn(self, why: object) -> None:
        """Log a warning, once in each process. A full disk is usual, and needs no warning."""
        if not self._warned and not (isinstance(why, OSError) and why.errno in (errno.ENOSPC, errno.EDQUOT)):
            self._warned = True
            DATASETS.warning("the disk cache %s: %s. Samples are read from storage instead.", self.directory, str(why))


def _counts_in(descriptor: int) -> Sequence[int]:
    """Return the bytes of the entries of each directory, from the file of counts."""
    return _COUNTS.unpack(os.pread(descriptor, _COUNTS.size, 0).ljust(_COUNTS.size, b"\0"))


def _set_count(descriptor: int, number: int, total: int) -> None:
    os.pwrite(descriptor, total.to_bytes(8, "little"), 8 * number)


def _lock(descriptor: int) -> bool:
    """Lock a file, and return whether this was possible in `_LOCK_S`. Closing it ends the lock."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        else:
            return True


def _mapped(descriptor: int, length: int) -> memoryview:
    if not length:
        return memoryview(b"")
    return memoryview(mmap.mmap(descriptor, length, prot=mmap.PROT_READ))


def _footer(digest: bytes, data: bytes | memoryview) -> bytes:
    return _FOOTER.pack(len(data), zlib.crc32(data), digest)


def _on_disk(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _write(path: str, data: bytes | memoryview, footer: bytes) -> bool:
    """Write an entry. Return False if another process has just written it."""
    directory = os.path.dirname(path)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    temporary = f"{directory}/.{os.getpid()}-{time.monotonic_ns()}-{random.getrandbits(32):08x}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            written = os.writev(descriptor, [data, footer])
            for part in (memoryview(data)[written:], memoryview(footer)[max(0, written - len(data)) :]):
                while part:  # a call takes 2 GiB at most
                    part = part[os.write(descriptor, part) :]
        finally:
            os.close(descriptor)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            os.rename(temporary, path)
        return True
    finally:
        with suppress(OSError):
            os.unlink(temporary)
