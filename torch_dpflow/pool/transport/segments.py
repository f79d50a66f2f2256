"""A region: memory of a server that holds stripes of one set, and that its readers map read-only.

    header | stripes: number, first record in the index | index: offset and length of each record | records

A region is a memfd. Its pages are reserved when it is made, so that no access can fail later; it is sealed, so that
nobody shrinks it and nobody but the server writes to it. It belongs to one set for ever: when the set is given up, the
server closes it, and its pages live on until the last reader has. So nobody can ever see bytes of another set there.
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
#: In the place of the first byte once the set was given up: because somebody said so, or because it was idle.
UNLOADED, IDLE = 0, 1
#: Magic, identity of the set, stripes, records.
_HEADER = struct.Struct("<8s16sQQ")
#: The length of a record that the index does not know; it stays in storage.
UNKNOWN = -1
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE
_SEAL_WRITE = 8
#: What memory that a client pushes has to have: nobody writes to it or cuts it any more.
PUSH_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_WRITE
#: Memory is left to the machine: so much of what is available when a region is made.
_RESERVE_SHARE = 0.05


class Segment:
    """A mapped region, as its server or a reader sees it."""

    def __init__(self, fd: int, memory: mmap.mmap, owners: list[int] | None = None) -> None:
        self.fd = fd
        self.memory = memory
        #: How many sets have it, in a list of one that they share.
        self._owners = owners if owners is not None else [1]
        _, self.identity, stripes, records = _HEADER.unpack_from(memory)
        self._view = view = memoryview(memory)
        table, index = _HEADER.size, _HEADER.size + 16 * stripes
        #: The stripes, and where in the index the records of each begin.
        self.stripes = dict(zip(*[iter(view[table:index].cast("q").tolist())] * 2))
        self._index = view[index : index + 16 * records].cast("q")

    def place(self, stripe: int, number: int) -> tuple[int, int]:
        """Offset and length of a stripe's record; the length may be `UNKNOWN`."""
        at = 2 * (self.stripes[stripe] + number)
        return self._index[at], self._index[at + 1]

    def offsets(self, stripe: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where records of a stripe begin; -1 for those whose length is unknown."""
        places = np.asarray(self._index)[2 * (self.stripes[stripe] + numbers)[:, None] + [0, 1]]
        return np.where(places[:, 1] == UNKNOWN, -1, places[:, 0])

    def read(self, stripe: int, number: int, *, copy: bool) -> bytes | memoryview | None:
        """A record that is there, or its memory, readable while somebody has it; None: its length is unknown."""
        index, at = self._index, 2 * (self.stripes[stripe] + number)
        offset, length = index[at], index[at + 1]
        if length == UNKNOWN:
            return None
        return (self.memory if copy else self._view)[offset : offset + length]

    def write(self, stripe: int, number: int, content: bytes) -> None:
        """Server: put a record into its place, whose length it has."""
        offset, length = self.place(stripe, number)
        self.memory[offset : offset + length] = content

    def copy_from(self, fd: int, start: int, stripe: int, number: int) -> int:
        """Server: fill a record's place from a file that `check_pushed` has passed; returns its bytes."""
        offset, length = self.place(stripe, number)
        copied = os.preadv(fd, [memoryview(self.memory)[offset : offset + length]], start)
        assert copied == length
        return length

    @property
    def retired(self) -> int | None:
        """Why its set was given up; None: it was not."""
        state = self.memory[0]
        return None if state == _MAGIC[0] else state

    def share(self) -> Segment:
        """Server: the same memory for a further set. Raises OSError: no descriptor is free."""
        other = Segment(os.dup(self.fd), self.memory, self._owners)
        self._owners[0] += 1
        return other

    def retire(self, why: int) -> None:
        """Server: tell whoever has mapped it that its set was given up, unless another set has it too."""
        if self._owners[0] == 1:
            self.memory[0] = why

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last user of this object."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._owners[0] -= 1
            os.close(fd)


def create_segment(records: SampleLayout, stripes: Sequence[int], known: np.ndarray) -> Segment:
    """Reserve memory for these stripes.

    known: whether each record's length is known.

    Raises PoolFullError: the machine, or the control group, has not so much memory.
    """
    count = sum(len(records.records_of(stripe)) for stripe in stripes)
    size = _start(len(stripes), count) + sum(records.stripe_bytes(stripe) for stripe in stripes)
    fd, memory = sealed_memory(size, f"{records.records:,} samples")
    _write_index(memory, records, stripes, known)
    return Segment(fd, memory)


def sealed_memory(size: int, purpose: str) -> tuple[int, mmap.mmap]:
    """Memory that only this process writes to, and its descriptor. Raises PoolFullError: there is not so much."""
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
    """Map what a server has sent; the descriptor stays the caller's. Raises MessageError, OSError, ValueError."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise MessageError("memory of the pool is not sealed, so it cannot be mapped safely")
    return mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)


def check_pushed(fd: int, size: int) -> None:
    """Raises UsageError: it is no sealed memory of this size, so that it could change or end while it is read."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # a file, a pipe
        seals = 0
    if seals & PUSH_SEALS != PUSH_SEALS or os.fstat(fd).st_size != size:
        raise UsageError(
            f"what was pushed is not {size:,} bytes of sealed memory (memfd_create); push them anew"
        )


def map_segment(fd: int, identities: Collection[bytes]) -> Segment:
    """Map what a server has sent; the descriptor stays the caller's. Raises MessageError: no region of these sets."""
    try:
        memory = map_sealed(fd)
        magic, its, stripes, records = _HEADER.unpack_from(memory)
        if magic[1:] != _MAGIC[1:] or its not in identities or _start(stripes, records) > len(memory):
            raise MessageError(f"a region of the pool is not one of set {[one.hex() for one in identities]}")
    except (OSError, ValueError, struct.error) as error:
        raise MessageError(f"a region of the pool cannot be mapped: {error}") from error
    return Segment(-1, memory)


def _start(stripes: int, records: int) -> int:
    """Where the first record lies."""
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
