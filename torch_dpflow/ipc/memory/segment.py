"""One shared-memory segment: 64 bytes of header, then a payload, mapped by a writer and a reader.

The header's first byte is the segment's state, so that no messages are needed:

- the writer sets PUBLISHED before it sends the reader a reference;
- the reader sets FREE when nothing refers to the payload, or INHERITED if the reader has forked meanwhile, because the
  child may still read: the writer frees such a segment and does not lend it again;
- the writer sets RETIRED before it frees the segment.

A segment is a memfd: it has no name that could outlive its processes, does not count against a container's small
/dev/shm, and is sealed against shrinking under a mapping. Its pages are reserved when it is created, so that no later
access can fail with SIGBUS. A system without memfds has no segments.

Several processes may fill a segment: siblings of the writer map it as well. The header then contains the generation of
the loan during which they may write. Each sibling locks the file (`locked`) while it checks the generation and writes.
To end the writing, a process takes the exclusive lock and clears the generation. The kernel drops a dead process's
lock.

The functions above `Segment` turn plain memory into arrays, storages and tensors, and back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast
from weakref import ref as weakref

import numpy as np
import numpy.typing as npt
import torch

from torch_dpflow._core import descriptors
from torch_dpflow.errors import DescriptorLimitError, MessageError, SegmentLostError

#: One-dimensional bytes.
Memory: TypeAlias = npt.NDArray[np.uint8]


def from_array(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor over an array's memory. The tensor's storage keeps the array alive.

    So arrays made from the tensor stay valid when torch's queues move the storage (`share_memory_`).
    """
    tensor = torch.from_numpy(array)
    _keep(tensor, array)
    return tensor


def storage_over(memory: Memory) -> torch.UntypedStorage:
    """Return a storage over `memory`. The storage keeps `memory` alive, even if it is moved to shared memory."""
    return _keep(torch.from_numpy(memory), memory)


def _keep(tensor: torch.Tensor, memory: npt.NDArray[Any]) -> torch.UntypedStorage:
    storage: Any = tensor.untyped_storage()
    storage.memory = memory
    return cast(torch.UntypedStorage, storage)


def keeps_memory(storage: torch.UntypedStorage) -> bool:
    """Return whether the storage was made by `from_array` or `storage_over`, so that it keeps its memory."""
    return hasattr(storage, "memory")


def memory_of(storage: Any, start: int = 0, nbytes: int | None = None) -> Memory:
    """Return the bytes of a CPU storage, or `nbytes` of them beginning at `start`, without a copy."""
    empty: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
    if nbytes is None:
        nbytes = storage.nbytes()
    memory: Memory = empty.set_(storage, start, (nbytes,), (1,)).numpy()
    return memory


def tensor_over(
    storage: Any,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """Return a tensor over `storage`, contiguous if `stride` is None. offset: its first element in `storage`."""
    # Twice as fast as `torch.empty`.
    empty: Any = _empty(dtype).new_empty(0)
    if stride is None:
        tensor: torch.Tensor = empty.set_(storage, offset, shape)
    else:
        tensor = empty.set_(storage, offset, shape, stride)
    return tensor


@functools.cache
def _empty(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of the array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def is_aligned(memory: memoryview, alignment: int) -> bool:
    """Return whether writable memory is empty, or begins at a multiple of `alignment`."""
    # Three times as fast as with numpy.
    return not memory.nbytes or ctypes.addressof(ctypes.c_char.from_buffer(memory)) % alignment == 0


def aligned_copy(memory: memoryview) -> Memory:
    """Return a writable copy that begins at a multiple of 64 bytes."""
    copy: Memory = torch.empty(len(memory), dtype=torch.uint8, device="cpu").numpy()
    copy.data[:] = memory
    return copy


class Forks:
    """Counter of this process's forks, which detects whether a loan of memory was in use during a fork.

    A forked child may read such memory for as long as it lives, unnoticed by this process. So the memory is never lent
    again; its pages are freed with the last mapping.

    The methods take no lock and read no global: they are called in any thread, and while the interpreter exits.
    """

    def __init__(self) -> None:
        self._count = 0
        #: One entry for each thread that forks now.
        self._running: list[None] = []
        os.register_at_fork(before=self._begin, after_in_parent=self._running.pop, after_in_child=self._running.clear)

    def stamp(self) -> int:
        """Return the stamp of a loan that begins now, for `since`."""
        # Another thread may be between its hook and its fork: such a loan counts as forked.
        return -1 if self._running else self._count

    def since(self, stamp: int) -> bool:
        """Return whether this process may have forked since the loan with this stamp."""
        return stamp != self._count

    def _begin(self) -> None:
        self._running.append(None)
        self._count += 1


#: The counter of this process; a child continues from its parent's count.
FORKS = Forks()


#: Bytes before the payload: one cache line, so that the payload is aligned for every vector instruction.
HEADER_BYTES = 64
#: Bytes of the header with the generation of the loan in which other processes may write; 0 if they may not. `_HEADER`
#: does not contain these bytes.
OPEN_LOAN = slice(48, 56)
#: States, in the header's first byte; see the module's docstring.
FREE, PUBLISHED, RETIRED, INHERITED = 0, 1, 2, 3

TOKEN_BYTES = 16
#: The name of segments in /proc.
_NAME = "torch_dpflow"
_MAGIC = b"dpflow1\n"
#: State, magic, number of the segment, capacity in bytes, token of the arena.
_HEADER = struct.Struct(f"<B7x8sQQ{TOKEN_BYTES}s")
#: Forbid shrinking the file under a mapping (SIGBUS), growing it, and lifting these two rules.
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")

HAS_MEMFD = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS") and os.path.isdir("/proc/self/fd")


@dataclass(slots=True)
class Segment:
    """Segment as mapped in one process. Its memory stays mapped while anything refers to it."""

    number: int
    #: Bytes of payload.
    capacity: int
    #: Header and payload.
    memory: memoryview
    #: The writer's descriptor, by which the reader finds it; -1 in the reader.
    fd: int
    address: int
    #: Device and inode of the file, if another process created the segment.
    file: tuple[int, int] = (0, 0)
    #: Writer: how often the segment was lent. Reader: the number of the last loan that was opened.
    generation: int = 0
    #: Writer: how many allocations its arena had made when the segment was last lent.
    used: int = 0
    #: Writer: the latest loan's stamp, by `Forks`.
    stamp: int = 0
    #: Writer: bytes requested in this loan.
    nbytes: int = 0
    #: Writer: whether this loan has been published.
    published: bool = False
    #: Writer: the array that every user of the payload on this side keeps alive.
    owner: weakref[Memory] | None = None

    @property
    def size(self) -> int:
        """Bytes of memory, including the header."""
        return HEADER_BYTES + self.capacity

    @property
    def free(self) -> bool:
        """Whether neither side uses the payload."""
        return self.memory[0] in (FREE, INHERITED) and (self.owner is None or self.owner() is None)

    @property
    def inherited(self) -> bool:
        """Whether a forked child may use the payload, because writer or reader forked during the last loan."""
        return self.memory[0] == INHERITED or (self.owner is not None and FORKS.since(self.stamp))

    def open_to_others(self) -> None:
        """Let other processes write into the payload until `close_to_others`."""
        self.memory[OPEN_LOAN] = self.generation.to_bytes(8, "little")

    def is_open_for(self, generation: int) -> bool:
        """Return whether other processes may write during the loan `generation`.

        The caller must hold a lock of the file.
        """
        return self.memory[OPEN_LOAN] == generation.to_bytes(8, "little")

    def close_to_others(self) -> None:
        """Stop other processes from writing. The caller must hold the exclusive lock of the file."""
        self.memory[OPEN_LOAN] = bytes(8)

    def payload(self, nbytes: int) -> Memory:
        """Return a new array over the first `nbytes` of the payload. Views of the array keep it alive."""
        # Not a view of an array: numpy makes views of views refer to the innermost array.
        return np.frombuffer(self.memory, np.uint8, nbytes, HEADER_BYTES)

    # Bound when it is defined: at the interpreter's end `os` may be gone before the last segment.
    def close(self, _close: Callable[[int], None] = os.close) -> None:
        """Close the descriptor; the memory is unmapped with its last user."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _close(fd)

    def __del__(self) -> None:
        self.close()


def _check_kind(path: str, claim: str) -> None:
    """Check that a descriptor is a memfd before opening it: a peer may claim a descriptor of another process."""
    with contextlib.suppress(OSError):  # it cannot be reached, as opening it will report
        kind = os.readlink(path)
        if not kind.startswith(f"/memfd:{_NAME}"):
            raise MessageError(f"{claim}: not a segment, but {kind!r}")


def create_memfd(number: int, capacity: int, token: bytes) -> Segment:
    """Create an anonymous segment with its number and its arena's token in the header.

    capacity: bytes of the payload. Raises OSError or RuntimeError if memory is exhausted, or if less than a quarter of
    the descriptors would be left to the user's code in this process.
    """
    size = HEADER_BYTES + capacity
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if fd >= descriptors.soft_limit() * 3 // 4:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
        memory, address = _map(f"/proc/self/fd/{fd}", size)
    except BaseException:
        os.close(fd)
        raise
    _HEADER.pack_into(memory, 0, FREE, _MAGIC, number, capacity, token)
    return Segment(number, capacity, memory, fd, address)


def open_memfd(pid: int, fd: int, number: int, capacity: int, token: bytes | None) -> tuple[Segment, bytes]:
    """Map another process's memfd; return (segment, token of its arena).

    pid, fd, number, capacity: as the other process reports them.
    token: the token that the segment must have; None: any.

    Raises:
        SegmentLostError: the process, or its descriptor, does not exist or cannot be accessed.
        MessageError: the descriptor is not the claimed segment, belongs to another arena, or cannot be mapped.
        DescriptorLimitError: this process has too many files open.
    """
    claim = f"segment {number} (descriptor {fd} of process {pid}, {capacity} bytes)"
    path = f"/proc/{pid}/fd/{fd}"
    _check_kind(path, claim)
    own = _open(path, claim)
    try:
        _check_file(own, capacity, claim)
        file = _file_of(own)
        memory, address = _map_theirs(f"/proc/self/fd/{own}", HEADER_BYTES + capacity, claim)
    finally:
        os.close(own)
    segment, token = _check_header(memory, address, number, capacity, token, claim)
    segment.file = file
    return segment, token


@contextlib.contextmanager
def locked(pid: int, fd: int, segment: Segment, *, alone: bool) -> Iterator[bool]:
    """Try to lock another process's segment file for the `with` block, without waiting; yield whether that succeeded.

    pid, fd: the process that created the segment, and its descriptor.
    alone: take an exclusive lock; otherwise a shared lock.
    """
    try:
        own = _open(f"/proc/{pid}/fd/{fd}", f"segment {segment.number} of process {pid}")
    except (SegmentLostError, DescriptorLimitError):
        yield False
        return
    try:
        try:
            # The number of the descriptor may be of another file by now.
            is_locked = _file_of(own) == segment.file
            if is_locked:
                fcntl.flock(own, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:  # another process holds it, or the system has no such locks
            is_locked = False
        try:
            yield is_locked
        finally:
            if is_locked:
                fcntl.flock(own, fcntl.LOCK_UN)  # a forked child may hold the descriptor
    finally:
        os.close(own)


def _file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _seals() -> int:
    return sum(getattr(fcntl, name) for name in _SEALS)


def _map(path: str, size: int) -> tuple[memoryview, int]:
    # Unlike mmap.mmap, torch's mapping keeps no descriptor, of which a process has few.
    storage = cast("torch.UntypedStorage", torch.UntypedStorage.from_file(path, True, size))
    return memory_of(storage).data, storage.data_ptr() + HEADER_BYTES


def _map_theirs(path: str, size: int, claim: str) -> tuple[memoryview, int]:
    try:
        return _map(path, size)
    except RuntimeError as error:  # torch raises it for every error of the system
        if descriptors.is_exhausted(error):
            raise descriptors.exhausted(f"{claim} cannot be mapped") from None
        raise MessageError(f"{claim} cannot be mapped: {error}") from error


def _open(path: str, claim: str) -> int:
    try:
        # Opening any other descriptor (a pipe, a terminal) must neither block nor set our terminal.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if descriptors.is_exhausted(error):
            raise descriptors.exhausted(f"{claim} cannot be opened") from None
        raise SegmentLostError(
            f"{claim} cannot be opened: {error}. Its process has ended, or runs in another container or "
            "under another user; its samples have to be loaded again"
        ) from error


def _check_file(fd: int, capacity: int, claim: str) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != HEADER_BYTES + capacity:
        raise MessageError(f"{claim}: not a segment of that size, but {status.st_size} bytes")
    seals = 0
    with contextlib.suppress(OSError):
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & _seals() != _seals():
        raise MessageError(f"{claim}: not sealed against shrinking, so it cannot be mapped safely")
    # A sparse file of any size costs its creator nothing, but its pages would be allocated as they are read here.
    if status.st_blocks * 512 < HEADER_BYTES + capacity:
        raise MessageError(f"{claim}: its pages are not reserved, so that reading could take any amount of memory")


def _check_header(
    memory: memoryview, address: int, number: int, capacity: int, token: bytes | None, claim: str
) -> tuple[Segment, bytes]:
    _, magic, real_number, real_capacity, real_token = _HEADER.unpack_from(memory)
    if (magic, real_number, real_capacity) != (_MAGIC, number, capacity):
        raise MessageError(f"{claim}: the header says segment {real_number} of {real_capacity} bytes")
    if token is not None and token != real_token:
        raise MessageError(f"{claim}: belongs to another arena")
    return Segment(number, capacity, memory, -1, address), bytes(real_token)
