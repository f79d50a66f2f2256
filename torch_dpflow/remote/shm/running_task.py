"""Which task a worker is at: a word in shared memory, which outlives the worker that wrote it.

What a worker last said may be old when it dies: a message that was on its way is lost with it. What is blamed for a
death is what the worker was at, and nothing else.
"""

from __future__ import annotations

import struct

from torch_dpflow.errors import DescriptorLimitError, TransportError
from torch_dpflow.remote.shm.arena import Arena, ArenaReader
from torch_dpflow.remote.wire.shared_blocks import BlockRef

#: The task's number and one; 0: none.
_WORD = struct.Struct("<Q")


class RunningTask:
    """The worker's side.

    Args:
        arena: where the word lies, which stays lent; None: nobody can read what is noted.
    """

    def __init__(self, arena: Arena | None) -> None:
        block = None if arena is None else arena.allocate(_WORD.size)
        self._memory = None if block is None else block.memory.data
        self.note(None)
        #: For the reader; None where the arena has nothing to lend.
        self.ref: BlockRef | None = None if arena is None or block is None else arena.publish(block)

    def note(self, task: int | None) -> None:
        """From now on it is at this task, or at none."""
        if self._memory is not None:
            _WORD.pack_into(self._memory, 0, 0 if task is None else task + 1)


class RunningTaskReader:
    """The shard's side.

    Args:
        memory: the word.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    @classmethod
    def open(cls, reader: ArenaReader, ref: BlockRef | None) -> RunningTaskReader | None:
        """Open what a worker has told of; None where it does not write, or where that cannot be read.

        reader: of the worker's arena.
        """
        if ref is None or ref.nbytes != _WORD.size:
            return None
        try:
            return cls(reader.view(ref).data)
        except (TransportError, DescriptorLimitError):
            return None

    def tasks(self) -> tuple[int, ...]:
        """The task that the worker is at, or was at when it died; none, or one."""
        (word,) = _WORD.unpack_from(self._memory)
        return (word - 1,) if word else ()
