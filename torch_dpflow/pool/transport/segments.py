"""PoolSegment: shared memory of a server with stripes of one dataset, which readers map read-only.

    header | stripes: number, first record in the index | index: offset and length of each record | records

A segment is a memfd. Its pages are reserved when it is made, so no later access can fail. It is sealed: it cannot
shrink, and only the server writes to it. It is shared only by versions of a dataset that have the same stripes, and
never used again for other samples: once the last version is dropped, the server closes the segment, and its pages exist
until the last reader has unmapped it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from torch_dpflow.errors import MessageError, PoolFullError, UsageError
from torch_dpflow.ipc.memory.headroom import Headroom
from torch_dpflow.pool.planning.layout import ALIGNMENT, SampleLayout

_MAGIC = b"dpregion"
#: Values of a segment's first byte once its dataset was dropped: by a command, or for any other reason.
UNLOADED, IDLE = 0, 1
#: Magic, identity of the dataset, stripes, records.
_HEADER = struct.Struct("<8s16sQQ")
#: In place of a length in the index: the record's length is not known, so the record stays in storage.
UNKNOWN = -1
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE
_SEAL_WRITE = 8
#: Seals required of memory that a client pushes: it can no longer be written or resized.
PUSH_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_WRITE
#: Share of the available memory that is left to the machine when a segment is made.
_RESERVE_SHARE = 0.05


class PoolSegment:
    """Mapped segment: memory with stripes of one dataset. `fd` is its descriptor in the server, and -1 in readers."""

    def __init__(self, fd: int, memory: mmap.mmap, owners: list[int] | None = None) -> None:
        self.fd = fd
        self.memory = memory
        #: Number of datasets that share it, in a list of one that their objects share.
        self._owners = owners if owners is not None else [1]
        _, self.identity, stripes, records = _HEADER.unpack_from(memory)
        self._view = view = memoryview(memory)
        table, index = _HEADER.size, _HEADER.size + 16 * stripes
        #: Position of each stripe's first record in the index, by stripe.
        self.stripes = dict(zip(*[iter(view[table:index].cast("q").tolist())] * 2))
        self._index = view[index : index + 16 * records].cast("q")

    def place(self, stripe: int, number: int) -> tuple[int, int]:
        """Return offset and length, bytes, of record `number` (from 0) of a stripe; the length can be `UNKNOWN`."""
        at = 2 * (self.stripes[stripe] + number)
        return self._index[at], self._index[at + 1]

    def offsets(self, stripe: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the offsets of records of a stripe; -1 for records of unknown length."""
        places = np.asarray(self._index)[2 * (self.stripes[stripe] + numbers)[:, None] + [0, 1]]
        return np.where(places[:, 1] == UNKNOWN, -1, places[:, 0])

    def read(self, stripe: int, number: int, *, copy: bool) -> bytes | memoryview | None:
        """Return a record, which must be in memory, as a copy or a view; None if its length is unknown."""
        index, at = self._index, 2 * (self.stripes[stripe] + number)
        offset, length = index[at], index[at + 1]
        if length == UNKNOWN:
            return None
        return (self.memory if copy else self._view)[offset : offset + length]

    def write(self, stripe: int, number: int, content: bytes) -> None:
        """Write a record to its place. Server only."""
        offset, length = self.place(stripe, number)
        self.memory[offset : offset + length] = content

    def copy_from(self, fd: int, start: int, stripe: int, number: int) -> int:
        """Copy a record from pushed memory, where it begins at `start`, to its place; return its length. Server only.

        fd: descriptor that `check_pushed` has accepted.
        """
        offset, length = self.place(stripe, number)
        copied = os.preadv(fd, [memoryview(self.memory)[offset : offset + length]], start)
        assert copied == length
        return length

    @property
    def retired(self) -> int | None:
        """Why the server has dropped the segment's dataset: `UNLOADED` or `IDLE`; None if it has reported no drop."""
        state = self.memory[0]
        return None if state == _MAGIC[0] else state

    def share(self) -> PoolSegment:
        """Return a segment of this memory for another dataset. Raises OSError if no descriptor is free. Server only."""
        other = PoolSegment(os.dup(self.fd), self.memory, self._owners)
        self._owners[0] += 1
        return other

    def retire(self, why: int) -> None:
        """Report to readers why the dataset is dropped. No effect if another dataset shares the memory. Server only."""
        if self._owners[0] == 1:
            self.memory[0] = why

    def close(self) -> None:
        """Close the descriptor; the memory is freed once no process maps it any more."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._owners[0] -= 1
            os.close(fd)


def create_segment(records: SampleLayout, stripes: Sequence[int], known: np.ndarray) -> PoolSegment:
    """Return a new segment with memory for stripes, and with the index of their records.

    records: layout in which records without a place take 0 bytes.
    known: whether each record has a place and a known length.

    Raises PoolFullError if the machine or control group does not have the memory.
    """
    count = sum(len(records.records_of(stripe)) for stripe in stripes)
    size = _start(len(stripes), count) + sum(records.stripe_bytes(stripe) for stripe in stripes)
    fd, memory = sealed_memory(size, f"{records.records:,} samples")
    _write_index(memory, records, stripes, known)
    return PoolSegment(fd, memory)


def sealed_memory(size: int, purpose: str) -> tuple[int, mmap.mmap]:
    """Return the descriptor and the mapping of new memory that only this process can write to.

    Raises PoolFullError if the memory is not available.
    """
    available = Headroom().available()
    if size > available * (1 - _RESERVE_SHARE):
        raise PoolFullError(
            f"{size:,} bytes for {purpose}: {available:,} are available to this server; have it "
            "hold less (--memory), or give it more"
        )
    fd = os.memfd_create("torch_dpflow_pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        memory = mmap.mmap(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise PoolFullError(f"{size:,} bytes cannot be reserved: {error.strerror}") from error
        raise
    return fd, memory


def map_sealed(fd: int) -> mmap.mmap:
    """Map memory from a server read-only; the caller closes `fd`. Raises MessageError, OSError or ValueError."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise MessageError("memory of the pool is not sealed, so it cannot be mapped safely")
    return mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)


def check_pushed(fd: int, size: int) -> None:
    """Raise UsageError if the descriptor is not of `size` bytes of memory that is sealed against all changes."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # a file or a pipe
        seals = 0
    if seals & PUSH_SEALS != PUSH_SEALS or os.fstat(fd).st_size != size:
        raise UsageError(f"what was pushed is not {size:,} bytes of sealed memory (memfd_create); push them again")


def map_segment(fd: int, identities: Collection[bytes]) -> PoolSegment:
    """Map a segment that a server has sent; the caller closes the descriptor.

    Raises MessageError if it is not a segment of one of these datasets.
    """
    try:
        memory = map_sealed(fd)
        magic, its, stripes, records = _HEADER.unpack_from(memory)
        if magic[1:] != _MAGIC[1:] or its not in identities or _start(stripes, records) > len(memory):
            raise MessageError(f"a segment of the pool is not one of dataset {[one.hex() for one in identities]}")
    except (OSError, ValueError, struct.error) as error:
        raise MessageError(f"a segment of the pool cannot be mapped: {error}") from error
    return PoolSegment(-1, memory)


def _start(stripes: int, records: int) -> int:
    """Return the offset of the first record."""
    return -(-(_HEADER.size + 16 * (stripes + records)) // ALIGNMENT) * ALIGNMENT


def _write_index(memory: mmap.mmap, records: SampleLayout, stripes: Sequence[int], known: np.ndarray) -> None:
    counts = [len(records.records_of(stripe)) for stripe in stripes]
    begin, index = _start(len(stripes), sum(counts)), list[np.ndarray]()
    for stripe in stripes:
        own = records.records_of(stripe)
        lengths = np.where(known[own.start : own.stop], records.lengths[own.start : own.stop], UNKNOWN)
        index.append(np.column_stack([begin + records.offsets(stripe), lengths]))
        begin += records.stripe_bytes(stripe)
    table = np.column_stack([stripes, np.cumsum([0, *counts])[:-1]])
    _HEADER.pack_into(memory, 0, _MAGIC, records.identity, len(stripes), sum(counts))
    content = b"".join(part.astype(np.int64).tobytes() for part in (table, *index))
    memory[_HEADER.size : _HEADER.size + len(content)] = content
