"""A parcel copied out of its worker's shared memory, which the worker may then use again."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from torch_dpflow.cluster.messages.shard import SAMPLE, ServedSample
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.memory.arena import ArenaReader
from torch_dpflow.ipc.messages.parcel_table import BufferSpan, ParcelTable
from torch_dpflow.ipc.transport import Frame


@dataclass(frozen=True, slots=True)
class DetachedParcel:
    """One encoded parcel in this process's memory. Its frames may be sent any number of times."""

    #: SAMPLE, FAILED, POISONED or WORKERLESS.
    kind: int
    table: ParcelTable
    frames: list[Frame]
    #: Its size, bytes.
    nbytes: int

    @property
    def parcel(self) -> tuple[ParcelTable, list[Frame]]:
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
    kind: int, table: ParcelTable, frames: list[memoryview], reader: ArenaReader | None
) -> DetachedParcel:
    """Copy the parcel's shared memory into this process.

    Raises:
        MessageError: the table does not fit the frames, or there is no shared memory to read.
        SegmentLostError: the shared memory is gone because its writer has ended.
    """
    if table.frames != len(frames):
        raise MessageError(f"a parcel of {table.frames} frames came with {len(frames)}")
    if not table.blocks:
        return DetachedParcel(kind, table, [*frames], sum(frame.nbytes for frame in frames))
    if reader is None:
        raise MessageError("a parcel refers to shared memory that cannot be read here")
    copies = [reader.view(block).tobytes() for block in table.blocks]
    nbytes = sum(frame.nbytes for frame in frames) + sum(map(len, copies))
    moved = ParcelTable(
        len(frames) + len(copies),
        (),
        _moved(table.head, len(frames)),
        tuple(_moved(place, len(frames)) for place in table.buffers),
    )
    return DetachedParcel(kind, moved, [*frames, *copies], nbytes)


def text_parcel(kind: int, text: str) -> DetachedParcel:
    """A text of the service itself as a parcel."""
    data = text.encode()
    return DetachedParcel(kind, ParcelTable(1, (), BufferSpan(0, 0, len(data)), ()), [data], len(data))


def _moved(place: BufferSpan, frames: int) -> BufferSpan:
    return place if place.part >= 0 else msgspec.structs.replace(place, part=frames - 1 - place.part)
