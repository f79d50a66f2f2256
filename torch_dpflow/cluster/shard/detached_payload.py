"""A payload copied out of its worker's shared memory, which the worker may then use again."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from torch_dpflow.cluster.messages.shard import SAMPLE, ServedSample
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.payload_table import BufferSpan, PayloadTable
from torch_dpflow.ipc.transport import Frame


@dataclass(frozen=True, slots=True)
class DetachedPayload:
    """One encoded payload in this process's memory. Its frames may be sent any number of times."""

    #: SAMPLE, FAILED, POISONED or WORKERLESS.
    kind: int
    table: PayloadTable
    frames: list[Frame]
    #: Its size, bytes.
    nbytes: int

    @property
    def payload(self) -> tuple[PayloadTable, list[Frame]]:
        """Table and frames."""
        return self.table, self.frames

    @property
    def is_sample(self) -> bool:
        """Whether it is a sample; otherwise it is a failure."""
        return self.kind == SAMPLE

    def header(self, ticket: int) -> ServedSample:
        """Its header in the answer to this ticket."""
        return ServedSample(ticket, self.kind, self.table)


def detach(
    kind: int, table: PayloadTable, frames: list[memoryview], reader: ArenaReader | None
) -> DetachedPayload:
    """Copy the payload's shared memory into this process.

    Raises:
        MessageError: the table does not fit the frames, or there is no shared memory to read.
        SegmentLostError: the shared memory is gone because its writer has ended.
    """
    if table.frames != len(frames):
        raise MessageError(f"a payload of {table.frames} frames came with {len(frames)}")
    if not table.blocks:
        return DetachedPayload(kind, table, [*frames], sum(frame.nbytes for frame in frames))
    if reader is None:
        raise MessageError("a payload refers to shared memory that cannot be read here")
    copies = [reader.view(block).tobytes() for block in table.blocks]
    nbytes = sum(frame.nbytes for frame in frames) + sum(map(len, copies))
    moved = PayloadTable(
        len(frames) + len(copies),
        (),
        _moved(table.head, len(frames)),
        tuple(_moved(place, len(frames)) for place in table.buffers),
    )
    return DetachedPayload(kind, moved, [*frames, *copies], nbytes)


def text_payload(kind: int, text: str) -> DetachedPayload:
    """A text of the service itself as a payload."""
    data = text.encode()
    return DetachedPayload(kind, PayloadTable(1, (), BufferSpan(0, 0, len(data)), ()), [data], len(data))


def _moved(place: BufferSpan, frames: int) -> BufferSpan:
    return place if place.part >= 0 else msgspec.structs.replace(place, part=frames - 1 - place.part)
