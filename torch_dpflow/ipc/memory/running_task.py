"""The task that a worker runs or has run last, in a word of shared memory, which outlives the worker.

A worker's last message may be old when it dies: results that wait to be sent, or are in libzmq's thread, are lost with
it. With this word the task that killed the worker is suspected, and none of its neighbours.
"""

from __future__ import annotations

import struct

from torch_dpflow.errors import DescriptorLimitError, TransportError
from torch_dpflow.ipc.memory.arena import Arena, ArenaReader
from torch_dpflow.ipc.messages.payload_table import BlockRef

#: The task's number plus one; 0: none.
_WORD = struct.Struct("<Q")


class RunningTask:
    """The worker's side.

    Args:
        arena: where the word lies, in a block that is never released; None: nothing is noted.
    """

    def __init__(self, arena: Arena | None) -> None:
        block = None if arena is None else arena.allocate(_WORD.size)
        self._memory = None if block is None else block.memory.data
        self.note(None)
        #: For the reader; None where the arena has nothing to lend.
        self.ref: BlockRef | None = None if arena is None or block is None else arena.publish(block)

    def note(self, task: int | None) -> None:
        """The worker runs this task from now on, or none, and nothing that it has run can harm it any more."""
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
        """Open a worker's word; None where the worker has none, or where it cannot be read.

        reader: of the worker's arena.
        """
        if ref is None or ref.nbytes != _WORD.size:
            return None
        try:
            return cls(reader.view(ref).data)
        except (TransportError, DescriptorLimitError):
            return None

    def tasks(self) -> tuple[int, ...]:
        """The task that the worker noted last: one or none."""
        (word,) = _WORD.unpack_from(self._memory)
        return (word - 1,) if word else ()
