"""Shared memory on one host: big buffers cross from a worker to the training process without a copy.

torch's loader makes a shared-memory file for every tensor of every batch, so that every batch pays for fresh
pages, zeroed by the kernel and faulted in one by one in both processes. An `Arena` keeps its segments and
lends them again; their pages are there already, in both mappings.

A segment is lent again only when both sides are done with it. The reader's side is a byte in the segment,
which a weakref callback of the `ArenaReader` clears when the last object over the memory is gone. The
writer's side is a weakref on the array that all tensors and views over the memory keep alive.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import ref as weakref

import msgspec

from torch_dpflow.errors import MessageError, OptionError, TransportError
from torch_dpflow.remote import segment as segments
from torch_dpflow.remote.headroom import Headroom
from torch_dpflow.remote.memory import Memory
from torch_dpflow.remote.segment import FREE, HAS_MEMFD, HEADER_BYTES, PUBLISHED, Segment

#: Sizes of segments are rounded up to 1/16 of their power of two: at most 6% lie idle, and like sizes meet.
_CLASS_BITS = 5
_SMALLEST_SEGMENT = 1 << 16
#: A free segment serves requests for as little as half of it. Less would waste memory, more would make new
#: segments all the time where batches differ in size.
_LARGEST_EXCESS = 2
#: How many segments of a class are asked whether they are free before a new one is made.
_ASKED = 8
#: When a new segment is needed, no more free ones are kept than are in use, or than this, bytes.
_RETAINED_BYTES = 32 << 20
#: A free segment that was not lent during this many allocations is given back to the system.
_IDLE_ALLOCATIONS = 256
#: Of the memory that is left, a new segment takes at most this share.
_SHARE_OF_AVAILABLE = 0.5
#: Most segments of one arena: each costs the writer a descriptor, and a process often has 1,024.
MAX_SEGMENTS = 256
#: Most segments that a reader maps for one writer, who is not trusted to keep to MAX_SEGMENTS.
_MAX_MAPPED = 4 * MAX_SEGMENTS


class BlockRef(msgspec.Struct, array_like=True, frozen=True):
    """Where a published block lies, in the words of the process that wrote it."""

    #: Number of the segment, never used twice by one arena.
    segment: int
    #: The writer's descriptor of the segment; -1 where it is a named file.
    fd: int
    #: Payload bytes of the segment.
    capacity: int
    #: Payload bytes in use.
    nbytes: int
    #: Which lending of the segment this is; a reference is good for one opening.
    generation: int


class ProbeRef(msgspec.Struct, array_like=True, frozen=True):
    """A published block that holds a token, by which a reader finds out whether it can read the arena."""

    token: bytes
    block: BlockRef


class Block:
    """Memory of an arena, lent to the caller. It is lent again once nothing refers to `memory`."""

    __slots__ = ("memory", "segment")

    def __init__(self, memory: Memory, segment: Segment) -> None:
        #: uint8, writable, 64-byte aligned. Tensors and arrays made over it keep it alive.
        self.memory = memory
        self.segment = segment

    @property
    def address(self) -> int:
        """Where `memory` begins."""
        return self.segment.address


class Arena:
    """The writer's side: lends blocks, publishes them, and lends them again.

    Any thread may call `allocate`; the rest belongs to one. After a fork the arena belongs to the parent: in
    the child nothing is lent.

    Args:
        budget_bytes: most memory that the arena takes, in use and free together.
        directory: a private directory for named files, for one arena of a process; None takes memfds. Without
            either (a platform without memfds, no directory) nothing is ever lent.
    """

    def __init__(self, *, budget_bytes: int, directory: str | None = None) -> None:
        if budget_bytes < 0:
            raise OptionError(f"budget_bytes={budget_bytes!r}: must be at least 0 (0 lends nothing)")
        self._budget = budget_bytes
        self._directory = directory
        self._usable = directory is not None or HAS_MEMFD
        self._pid = os.getpid()
        self._token = secrets.token_bytes(segments.TOKEN_BYTES)
        self._lock = threading.Lock()
        self._headroom = Headroom()
        self._classes: dict[int, deque[Segment]] = {}
        self._by_address: dict[int, Segment] = {}
        self._trimmed: list[int] = []
        self._numbers = 0
        self._allocations = 0
        #: Bytes of all segments, in use and free.
        self.allocated_bytes = 0

    @property
    def segments(self) -> int:
        """How many segments there are, in use and free."""
        return len(self._by_address)

    def allocate(self, nbytes: int) -> Block | None:
        """Lend memory of `nbytes`; None where the budget or the system's memory is exhausted.

        Any thread may call. The memory's contents are arbitrary.
        """
        if nbytes <= 0 or not self._usable or os.getpid() != self._pid:
            return None
        with self._lock:
            self._allocations += 1
            if self._allocations % _IDLE_ALLOCATIONS == 0:
                self._trim_idle()
            size = _size_class(nbytes)
            segment = self._find_free(size, _ASKED)
            if segment is None and not self._has_room(size):
                segment = self._find_free(size, None)
            segment = segment or self._create(size)
            return None if segment is None else self._lend(segment, nbytes)

    def publish(self, block: Block) -> BlockRef:
        """Hand `block` to the reader. Once for each lending: the reader's release could not be told apart."""
        segment = block.segment
        if segment.published:
            raise OptionError(f"block of segment {segment.number} was published before; publish a copy")
        segment.published = True
        segment.memory[0] = PUBLISHED
        return BlockRef(segment.number, segment.fd, segment.capacity, segment.nbytes, segment.generation)

    def block_at(self, address: int, nbytes: int) -> Block | None:
        """The lent, not yet published block whose memory begins at `address` and holds `nbytes`, if any."""
        segment = self._by_address.get(address)
        if segment is None or segment.published or segment.nbytes < nbytes or os.getpid() != self._pid:
            return None
        memory = None if segment.owner is None else segment.owner()
        return None if memory is None else Block(memory, segment)

    def probe_ref(self) -> ProbeRef | None:
        """Publish a token for `ArenaReader.probe`; None where nothing can be lent."""
        block = self.allocate(segments.TOKEN_BYTES)
        if block is None:
            return None
        token = secrets.token_bytes(segments.TOKEN_BYTES)
        block.memory.data[:] = token
        return ProbeRef(token, self.publish(block))

    def trimmed(self) -> list[int]:
        """Segments given back since the last call, for `ArenaReader.forget`."""
        trimmed, self._trimmed = self._trimmed, []
        return trimmed

    def close(self) -> None:
        """Give everything back. What is mapped or in use stays valid until its last user is gone."""
        with self._lock:
            self._usable = False
            for segment in list(self._by_address.values()):
                self._give_back(segment)

    def _lend(self, segment: Segment, nbytes: int) -> Block:
        memory = segment.payload(nbytes)
        segment.owner = weakref(memory)
        segment.published = False
        segment.nbytes = nbytes
        segment.used = self._allocations
        segment.generation += 1
        return Block(memory, segment)

    def _find_free(self, size: int, asked: int | None) -> Segment | None:
        limit = size * _LARGEST_EXCESS
        while size <= limit:
            found = _first_free(self._classes.get(size), asked)
            if found is not None:
                return found
            size = _size_class(size - HEADER_BYTES + 1)
        return None

    def _create(self, size: int) -> Segment | None:
        if size > self._budget or not self._make_room(size):
            return None
        self._numbers += 1
        try:
            if size > self._headroom.available() * _SHARE_OF_AVAILABLE:
                return None
            segment = self._create_segment(size - HEADER_BYTES)
        except (OSError, RuntimeError):  # torch's mapping reports a refused mmap as RuntimeError
            return None
        self._classes.setdefault(size, deque()).append(segment)
        self._by_address[segment.address] = segment
        self.allocated_bytes += size
        return segment

    def _create_segment(self, capacity: int) -> Segment:
        if self._directory is not None:
            path = segments.file_path(self._directory, self._pid, self._numbers)
            return segments.create_file(path, self._numbers, capacity, self._token)
        return segments.create_memfd(self._numbers, capacity, self._token)

    def _make_room(self, size: int) -> bool:
        """Trim for a new segment of `size`, whose like is not free: the least recently lent go first."""
        free = sorted(self._free_segments(), key=lambda segment: segment.used)
        spare = sum(segment.size for segment in free)
        retained = max(self.allocated_bytes - spare, _RETAINED_BYTES)
        for segment in free:
            if spare <= retained and self._has_room(size):
                break
            spare -= segment.size
            self._give_back(segment)
        return self._has_room(size)

    def _has_room(self, size: int) -> bool:
        return self.allocated_bytes + size <= self._budget and len(self._by_address) < MAX_SEGMENTS

    def _trim_idle(self) -> None:
        for segment in list(self._free_segments()):
            if self._allocations - segment.used >= _IDLE_ALLOCATIONS:
                self._give_back(segment)

    def _free_segments(self) -> Iterator[Segment]:
        return (segment for segment in self._by_address.values() if segment.free)

    def _give_back(self, segment: Segment) -> None:
        self._classes[segment.size].remove(segment)
        del self._by_address[segment.address]
        self.allocated_bytes -= segment.size
        self._trimmed.append(segment.number)
        segment.close()
        if self._directory is not None:
            segments.remove_file(segments.file_path(self._directory, self._pid, segment.number))


class ArenaReader:
    """The reader's side: maps the segments of one writer and tells it, by a byte, when they are free.

    Not thread-safe. Views may be dropped in any thread, at any time, also after the writer has died and while
    the interpreter ends. In a forked child views stay readable, and dropping them there releases nothing.

    Args:
        pid: the writer's process.
        directory: what the writer's arena was given as `directory`.
    """

    def __init__(self, pid: int, *, directory: str | None = None) -> None:
        self._pid = pid
        self._directory = directory
        self._token: bytes | None = None
        self._segments: dict[int, Segment] = {}

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all segments in the cache of mappings."""
        return sum(segment.size for segment in self._segments.values())

    def view(self, ref: BlockRef) -> Memory:
        """The block as a writable uint8 array of `ref.nbytes`. A reference can be opened once.

        When nothing refers to the array's memory any more, the writer may use it again.

        Raises:
            SegmentLostError: the writer is dead and the segment was never mapped.
            MessageError: the reference does not fit what is there, or has been opened before.
        """
        segment = self._take(ref)
        memory = segment.payload(ref.nbytes)
        _hold(memory, segment.memory)
        return memory

    def release(self, ref: BlockRef) -> None:
        """Give a block back unopened. Raises as `view`."""
        self._take(ref).memory[0] = FREE

    def probe(self, ref: ProbeRef) -> bool:
        """Whether this process can read what the writer shares."""
        try:
            return bytes(self.view(ref.block)) == ref.token
        except TransportError:
            return False

    def forget(self, trimmed: Iterable[int]) -> None:
        """Unmap the segments that the writer has given back; views that are left keep theirs."""
        for number in trimmed:
            self._segments.pop(number, None)

    def close(self) -> None:
        """Unmap everything; views that are left keep their memory."""
        self._segments.clear()

    def _take(self, ref: BlockRef) -> Segment:
        segment = self._segments.get(ref.segment) or self._map(ref)
        if ref.capacity != segment.capacity or not 0 <= ref.nbytes <= segment.capacity:
            raise MessageError(
                f"{ref}: segment {segment.number} has {segment.capacity} bytes; a reference must fit into it"
            )
        if segment.memory[0] != PUBLISHED or ref.generation <= segment.generation:
            raise MessageError(f"{ref}: is not published, or was opened before; a reference is good for once")
        segment.generation = ref.generation
        return segment

    def _map(self, ref: BlockRef) -> Segment:
        if len(self._segments) >= _MAX_MAPPED:
            raise MessageError(f"{ref}: more than {_MAX_MAPPED} segments of process {self._pid} are mapped")
        if not (0 <= ref.segment < 1 << 64 and 0 <= ref.capacity < 1 << 48):
            raise MessageError(f"{ref}: no segment has such a number or size")
        if self._directory is not None:
            path = segments.file_path(self._directory, self._pid, ref.segment)
            segment, token = segments.open_file(path, ref.segment, ref.capacity, self._token)
        else:
            segment, token = segments.open_memfd(self._pid, ref.fd, ref.segment, ref.capacity, self._token)
        self._token = token
        self._segments[ref.segment] = segment
        return segment


class _Hold(weakref[Memory]):
    """A weak reference to a view that frees the view's segment when the view is gone."""

    __slots__ = ("pid", "segment")
    # A weak reference hashes as what it refers to, and arrays do not hash.
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    segment: memoryview
    pid: int


#: Keeps the weak references alive: one that died before its view would never call back.
_HELD: set[_Hold] = set()


def _hold(memory: Memory, segment: memoryview) -> None:
    hold = _Hold(memory, _release)
    hold.segment = segment
    hold.pid = os.getpid()
    _HELD.add(hold)


def _release(hold: Any, getpid: Callable[[], int] = os.getpid, held: set[_Hold] = _HELD) -> None:
    # Runs wherever the last reference goes: in any thread, inside any other call, and while the interpreter
    # ends and module globals are gone already. So it takes no lock and looks nothing up.
    held.discard(hold)
    if getpid() == hold.pid:
        hold.segment[0] = 0


def _size_class(nbytes: int) -> int:
    """Size of the segment for a payload of `nbytes`, header included."""
    size = max(nbytes + HEADER_BYTES, _SMALLEST_SEGMENT)
    step = 1 << max(size.bit_length() - _CLASS_BITS, 0)
    return -(-size // step) * step


def _first_free(candidates: deque[Segment] | None, asked: int | None) -> Segment | None:
    """The first free segment, which goes to the end, so that the one published longest ago is asked first."""
    if candidates is None:
        return None
    for _ in range(len(candidates) if asked is None else min(asked, len(candidates))):
        segment = candidates[0]
        candidates.rotate(-1)
        if segment.free:
            return segment
    return None
