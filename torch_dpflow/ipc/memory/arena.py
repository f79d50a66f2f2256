"""Shared memory on one host: large buffers travel from a worker to the training process without a copy.

torch's loader makes a shared-memory file for every tensor of every batch. So every batch pays for new pages, which the
kernel zeroes, and which both processes fault in one by one. An `Arena` reuses its segments, whose pages are mapped
already.

A segment is reused only when neither side still uses it. The reader's use is recorded in a byte of the segment, which a
weakref callback of the `ArenaReader` clears when the last object over the memory is gone. The writer's use is a weakref
to the array that all tensors and views over the memory keep alive. References in a forked child are not known here, so
a segment that was in use during a fork is freed and not reused.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
from collections import deque
from collections.abc import Iterator
from weakref import ref as weakref

from torch_dpflow._core.checks import check_int
from torch_dpflow.errors import DescriptorLimitError, OptionError, TransportError
from torch_dpflow.ipc.memory import segment as segments
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.memory.headroom import Headroom
from torch_dpflow.ipc.memory.segment import FORKS, HAS_MEMFD, HEADER_BYTES, PUBLISHED, RETIRED, Memory, Segment
from torch_dpflow.ipc.messages.headers import BlockRef, ProbeRef

#: Sizes of segments are rounded up to 1/16 of their power of two: at most 6% is wasted.
_CLASS_BITS = 5
_SMALLEST_SEGMENT = 1 << 16
#: A free segment may be this many times as large as a request. More would waste memory; with less, batches of different
#: sizes would need new segments all the time.
_LARGEST_EXCESS = 2
#: How many segments of a class are checked for a free one before a new one is created.
_CHECKED = 8
#: Free segments of more bytes than are in use, and than this, are freed when a new segment is needed.
_RETAINED_BYTES = 32 << 20
#: A free segment that was not lent during this many allocations is freed.
_IDLE_ALLOCATIONS = 256
#: A new segment takes at most this share of the available memory, unless it is of the smallest size.
_SHARE_OF_AVAILABLE = 0.5
#: Maximum number of segments of one arena: each costs the writer a descriptor, and a process often has 1,024.
MAX_SEGMENTS = 256
_NONE: deque[Segment] = deque()


class Block:
    """Memory lent by an arena, which reuses it when neither writer nor reader has references to `memory` any more."""

    __slots__ = ("memory", "segment")

    def __init__(self, memory: Memory, segment: Segment) -> None:
        #: uint8, writable, 64-byte aligned. Tensors and arrays made over it keep it alive.
        self.memory = memory
        self.segment = segment

    @property
    def address(self) -> int:
        """Address of the first byte of `memory`."""
        return self.segment.address


class Arena:
    """Writer's side of shared memory: lends blocks, publishes them, and reuses them.

    Any thread may call `allocate`; the other methods belong to one thread. After a fork only the parent can use the
    arena: in the child it lends nothing.

    Args:
        budget_bytes: maximum memory of the arena, used and free segments together, bytes. On a system without memfds
            the arena lends nothing.
    """

    def __init__(self, *, budget_bytes: int) -> None:
        self._budget = check_int("budget_bytes", budget_bytes, minimum=0)
        self._usable = HAS_MEMFD
        self._pid = os.getpid()
        self._token = secrets.token_bytes(segments.TOKEN_BYTES)
        self._lock = threading.Lock()
        self._headroom: Headroom | None = None
        self._classes: dict[int, deque[Segment]] = {}
        self._by_address: dict[int, Segment] = {}
        #: How many segments have been retired; the reader unmaps them when this has changed.
        self._retired = 0
        self._numbers = 0
        self._allocations = 0
        #: Bytes of all segments, in use and free.
        self.allocated_bytes = 0

    @property
    def segments(self) -> int:
        """Number of segments, in use and free."""
        return len(self._by_address)

    def allocate(self, nbytes: int) -> Block | None:
        """Lend an uninitialized block of `nbytes`.

        Returns None if `nbytes` is 0, if a limit (such as the budget or the system's memory) does not allow the block,
        or if the arena is closed, was inherited by a forked child, or is on a system without memfds.
        """
        if nbytes <= 0 or not self._usable or os.getpid() != self._pid:
            return None
        with self._lock:
            self._allocations += 1
            if self._allocations % _IDLE_ALLOCATIONS == 0:
                self._trim_idle()
            size = _size_class(nbytes)
            segment = self._find_free(size, _CHECKED)
            if segment is None and not self._has_room(size):
                segment = self._find_free(size, None)
            segment = segment or self._create(size)
            return None if segment is None else self._lend(segment, nbytes)

    def publish(self, block: Block, *, is_open: bool = False) -> BlockRef:
        """Return a reference by which the reader opens `block`. Call this once for each loan.

        is_open: let other processes write into the block (by `arena_reader.SharedBlocks`) until its reader calls
            `end_writing`.

        Raises OptionError if the block was published before.
        """
        segment = block.segment
        if segment.published:
            raise OptionError(f"block of segment {segment.number} was published before; publish a copy")
        segment.published = True
        if is_open:
            segment.open_to_others()
        segment.memory[0] = PUBLISHED
        return BlockRef(segment.number, segment.fd, segment.capacity, segment.nbytes, segment.generation, self._retired)

    def block_at(self, address: int, nbytes: int) -> Block | None:
        """Return the unpublished block that begins at `address` and has at least `nbytes`; None if there is none."""
        segment = self._by_address.get(address)
        if segment is None or segment.published or segment.nbytes < nbytes or os.getpid() != self._pid:
            return None
        memory = None if segment.owner is None else segment.owner()
        return None if memory is None else Block(memory, segment)

    def probe_ref(self) -> ProbeRef | None:
        """Publish a block with a random token, for `ArenaReader.probe`; return None if no block can be lent."""
        block = self.allocate(segments.TOKEN_BYTES)
        if block is None:
            return None
        token = secrets.token_bytes(segments.TOKEN_BYTES)
        block.memory.data[:] = token
        return ProbeRef(token, self.publish(block))

    def close(self) -> None:
        """Free all segments, and lend nothing any more. Blocks in use stay valid until nothing refers to them."""
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
        segment.stamp = FORKS.stamp()
        segment.generation += 1
        return Block(memory, segment)

    def _find_free(self, size: int, checked: int | None) -> Segment | None:
        limit = size * _LARGEST_EXCESS
        while size <= limit:
            found = self._first_free(size, checked)
            if found is not None:
                return found
            size = _size_class(size - HEADER_BYTES + 1)
        return None

    def _first_free(self, size: int, checked: int | None) -> Segment | None:
        """Return a free segment of `size`, or None.

        Checked segments move to the end, so the next search begins with others.
        """
        candidates = self._classes.get(size, _NONE)
        for _ in range(len(candidates) if checked is None else min(checked, len(candidates))):
            segment = candidates[0]
            candidates.rotate(-1)
            if segment.free:
                if not segment.inherited:
                    return segment
                self._give_back(segment)
        return None

    def _create(self, size: int) -> Segment | None:
        if size > self._budget or not self._make_room(size):
            return None
        self._numbers += 1
        try:
            if size > _SMALLEST_SEGMENT and size > self._available() * _SHARE_OF_AVAILABLE:
                return None
            segment = segments.create_memfd(self._numbers, size - HEADER_BYTES, self._token)
        except (OSError, RuntimeError):  # torch's mapping reports a refused mmap as RuntimeError
            return None
        self._classes.setdefault(size, deque()).append(segment)
        self._by_address[segment.address] = segment
        self.allocated_bytes += size
        return segment

    def _available(self) -> int:
        if self._headroom is None:  # which a worker does not need for its handshake
            self._headroom = Headroom()
        return self._headroom.available()

    def _make_room(self, size: int) -> bool:
        """Retire free segments, the least recently lent first, for a new segment of `size`; return whether it fits."""
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
        self._retired += 1
        segment.memory[0] = RETIRED
        segment.close()


def _size_class(nbytes: int) -> int:
    """Return the size of the segment for a payload of `nbytes`, including the header."""
    size = max(nbytes + HEADER_BYTES, _SMALLEST_SEGMENT)
    step = 1 << max(size.bit_length() - _CLASS_BITS, 0)
    return -(-size // step) * step


#: The task's number plus one; 0: none.
_WORD = struct.Struct("<Q")


class RunningTask:
    """Record of the task that a worker runs or ran last, in a word of shared memory that outlives the worker.

    The last message of a dead worker does not identify its task: results that it had not sent yet are lost with it.
    This word identifies the task that ran when the worker died, so that no other task is suspected of ending it.

    Args:
        arena: lends the word, in a block that is never released; None: nothing is recorded.
    """

    def __init__(self, arena: Arena | None) -> None:
        block = None if arena is None else arena.allocate(_WORD.size)
        self._memory = None if block is None else block.memory.data
        self.note(None)
        #: Reference for `RunningTaskReader.open`; None if nothing is recorded.
        self.ref: BlockRef | None = None if arena is None or block is None else arena.publish(block)

    def note(self, task: int | None) -> None:
        """Record the task that the worker now runs; None: it runs no task."""
        if self._memory is not None:
            _WORD.pack_into(self._memory, 0, 0 if task is None else task + 1)


class RunningTaskReader:
    """Reader of a `RunningTask`'s word, in the shard."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    @classmethod
    def open(cls, reader: ArenaReader, ref: BlockRef | None) -> RunningTaskReader | None:
        """Open the word in a worker's arena; None if the worker has no such word, or if it cannot be read."""
        if ref is None or ref.nbytes != _WORD.size:
            return None
        try:
            return cls(reader.view(ref).data)
        except (TransportError, DescriptorLimitError):
            return None

    def tasks(self) -> tuple[int, ...]:
        """Return a tuple with the recorded task, which the worker runs or ran last; empty if none is recorded."""
        (word,) = _WORD.unpack_from(self._memory)
        return (word - 1,) if word else ()
