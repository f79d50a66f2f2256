"""The reader's side of an arena: opens published blocks, releases unused blocks, watches the writers' processes."""

from __future__ import annotations

import gc
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet
from weakref import ref as weakref

from torch_dpflow._core.descriptors import exhausted, is_exhausted
from torch_dpflow.errors import DescriptorLimitError, MessageError, TransportError
from torch_dpflow.ipc.memory import segment as segments
from torch_dpflow.ipc.memory.segment import FORKS, FREE, PUBLISHED, RETIRED, TOKEN_BYTES, Forks, Memory, Segment
from torch_dpflow.ipc.messages.headers import BlockRef, ProbeRef

#: Maximum number of segments that are mapped for one writer, which may ignore its own limit.
_MAX_MAPPED = 1024


class ArenaReader:
    """Reader's side of one writer's arena: maps its segments, and marks unused segments as free.

    Not thread-safe. Views may be dropped in any thread, at any time, even after the writer has died or while the
    interpreter exits. A forked child's views keep their contents even if the parent drops the same views; dropping a
    view in the child releases nothing.

    Args:
        pid: process id of the writer.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._token: bytes | None = None
        self._segments: dict[int, Segment] = {}
        #: How many segments the writer had retired when they were last unmapped here.
        self._retired = 0
        _READERS.add(self)

    def view(self, ref: BlockRef) -> Memory:
        """Return the block as a writable uint8 array of `ref.nbytes`. A reference can be opened only once.

        The writer may reuse the memory when nothing refers to the array.

        Raises:
            SegmentLostError: the segment is not mapped and cannot be opened, for example because the writer has ended.
            MessageError: the reference does not match the writer's segment, or was opened before.
            DescriptorLimitError: this process has too many files open to map the segment.
        """
        segment = self._take(ref)
        memory = segment.payload(ref.nbytes)
        _hold(memory, segment.memory)
        return memory

    def read(self, ref: BlockRef) -> bytes:
        """Return a copy of a block, and release the block. Raises the errors of `view`."""
        segment = self._take(ref)
        copy = segment.payload(ref.nbytes).tobytes()
        segment.memory[0] = FREE
        return copy

    def release(self, ref: BlockRef) -> None:
        """Release a block without opening it. Raises the errors of `view`."""
        self._take(ref).memory[0] = FREE

    def end_writing(self, ref: BlockRef) -> bool:
        """Stop other processes from writing into an open block. The caller must have a view of the block.

        Returns False, and changes nothing, if this is not possible, such as while another process is writing.
        """
        segment = self._segments.get(ref.segment)
        if segment is None:
            return False
        with segments.locked(self._pid, ref.fd, segment, alone=True) as is_locked:
            if is_locked:
                segment.close_to_others()
        return is_locked

    def probe(self, ref: ProbeRef) -> bool:
        """Return whether this process can read the writer's memory, and is in the same pid namespace."""
        if ref.block.nbytes != TOKEN_BYTES:  # before it is copied, as the writer chooses its size
            return False
        # In a pid namespace without a separate /proc, the numbers there are not those of the system's calls.
        if os.path.realpath("/proc/self") != f"/proc/{os.getpid()}":
            return False
        try:
            return bytes(self.view(ref.block)) == ref.token
        except (TransportError, DescriptorLimitError):
            return False

    def close(self) -> None:
        """Unmap all segments; existing views keep their memory."""
        self._segments.clear()

    def _take(self, ref: BlockRef) -> Segment:
        if ref.retired != self._retired:
            self._retired = ref.retired
            self._unmap_retired()
        segment = self._segments.get(ref.segment) or self._map(ref)
        if ref.capacity != segment.capacity or not 0 <= ref.nbytes <= segment.capacity:
            raise MessageError(
                f"{ref}: segment {segment.number} has {segment.capacity} bytes; a reference must fit into it"
            )
        if segment.memory[0] != PUBLISHED or ref.generation <= segment.generation:
            raise MessageError(f"{ref}: is not published, or was opened before; a reference can be opened once")
        segment.generation = ref.generation
        return segment

    def _map(self, ref: BlockRef) -> Segment:
        if len(self._segments) >= _MAX_MAPPED:
            raise MessageError(f"{ref}: more than {_MAX_MAPPED} segments of process {self._pid} are mapped")
        if not (0 <= ref.segment < 1 << 64 and 0 <= ref.capacity < 1 << 48):
            raise MessageError(f"{ref}: no segment has such a number or size")
        opened = None
        with suppress(DescriptorLimitError):
            opened = self._open(ref)
        if opened is None:
            gc.collect()  # garbage may hold descriptors
            opened = self._open(ref)
        segment, self._token = opened
        self._segments[ref.segment] = segment
        return segment

    def _open(self, ref: BlockRef) -> tuple[Segment, bytes]:
        return segments.open_memfd(self._pid, ref.fd, ref.segment, ref.capacity, self._token)

    def _unmap_retired(self) -> None:
        retired = [number for number, segment in self._segments.items() if segment.memory[0] == RETIRED]
        for number in retired:
            del self._segments[number]


class SharedBlocks(ArenaReader):
    """Access to another worker's open blocks (see `Arena.publish`), for writing. Only the arena's reader frees them."""

    def view(self, ref: BlockRef) -> Memory:
        """Return the block as an array, to be written only within `writing`. Raises the errors of the base class."""
        return self._take(ref).payload(ref.nbytes)

    def release(self, ref: BlockRef) -> None:
        pass

    @contextmanager
    def writing(self, ref: BlockRef) -> Iterator[bool]:
        """Keep a block open for writing during the `with` body. Yields False if the block cannot be written any more.

        Raises the errors of `view`.
        """
        segment = self._take(ref)
        with segments.locked(self._pid, ref.fd, segment, alone=False) as is_locked:
            yield is_locked and segment.is_open_for(ref.generation)

    def _take(self, ref: BlockRef) -> Segment:
        self._unmap_retired()
        segment = self._segments.get(ref.segment) or self._map(ref)
        if ref.capacity != segment.capacity or not 0 <= ref.nbytes <= segment.capacity:
            raise MessageError(f"{ref}: segment {segment.number} has {segment.capacity} bytes")
        return segment


#: All of this process.
_READERS: WeakSet[ArenaReader] = WeakSet()


def _after_fork_in_child() -> None:
    # The child can no longer open blocks. It keeps its views, and would keep the memory of all other blocks.
    for reader in list(_READERS):
        reader.close()
    _READERS.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Hold(weakref[Memory]):
    """Weak reference to a view, which frees the view's segment when the view is garbage."""

    __slots__ = ("pid", "segment", "stamp")
    # A weak reference hashes as what it refers to, and arrays do not hash.
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    segment: memoryview
    pid: int
    stamp: int


#: Keeps the weak references alive: one that died before its view would never call back.
_HELD: set[_Hold] = set()


def _hold(memory: Memory, segment: memoryview) -> None:
    hold = _Hold(memory, _release)
    hold.segment = segment
    hold.pid = os.getpid()
    hold.stamp = FORKS.stamp()
    _HELD.add(hold)


def _release(hold: Any, getpid: Callable[[], int] = os.getpid, held: set[_Hold] = _HELD, forks: Forks = FORKS) -> None:
    # Runs where the last reference is dropped: in any thread, inside any other call, and while the interpreter exits
    # and module globals are None. So it takes no lock and reads no global.
    held.discard(hold)
    if getpid() == hold.pid:
        # INHERITED, also where other processes may still write (OPEN_LOAN); else FREE.
        hold.segment[0] = 3 if forks.since(hold.stamp) or hold.segment[48:56] != b"\0" * 8 else 0


class ArenaPeers:
    """Watcher of writers' processes, which detects their ends by pidfds. Not thread-safe."""

    def __init__(self) -> None:
        self._poller = select.poll()
        #: By the caller's number for each process.
        self._descriptors: dict[int, int] = {}

    def watch(self, number: int, pid: int) -> bool:
        """Watch a process; return False if it has ended, or the system has no pidfds.

        number: the caller's number for the process.
        pid: as the process has reported it. It is valid only on the process's own host, so call this after its arena
            was read here.

        Raises DescriptorLimitError: this process has too many files open.
        """
        try:
            descriptor = self._descriptors[number] = os.pidfd_open(pid)
        except (OSError, AttributeError) as error:
            if is_exhausted(error):
                raise exhausted(f"process {pid} cannot be watched") from error
            return False
        self._poller.register(descriptor, select.POLLIN)
        return True

    def ended(self) -> list[int]:
        """Return the numbers of the watched processes that have ended, at every call until `forget`."""
        ended = {descriptor for descriptor, _ in self._poller.poll(0)}
        return [number for number, descriptor in self._descriptors.items() if descriptor in ended] if ended else []

    def forget(self, number: int) -> None:
        """Stop watching this process, if it is watched."""
        descriptor = self._descriptors.pop(number, None)
        if descriptor is not None:
            self._poller.unregister(descriptor)
            os.close(descriptor)
