"""A parcel in memory of this process: what a service keeps once its worker's shared memory is given back."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from torch_dpflow.errors import MessageError
from torch_dpflow.remote.shm.arena import ArenaReader
from torch_dpflow.remote.transport import Frame
from torch_dpflow.remote.wire.parcel_table import BufferSpan, ParcelTable
from torch_dpflow.remote.wire.shard import SAMPLE, ServedSample


@dataclass(frozen=True, slots=True)
class Settled:
    """One parcel, unopened. Its frames may be sent any number of times."""

    #: SAMPLE, FAILED or POISONED.
    kind: int
    table: ParcelTable
    frames: list[Frame]
    #: Bytes that it takes.
    nbytes: int

    @property
    def parcel(self) -> tuple[ParcelTable, list[Frame]]:
        """Table and frames."""
        return self.table, self.frames

    @property
    def is_sample(self) -> bool:
        """Whether it is a sample, and not what failed or stands in for one."""
        return self.kind == SAMPLE

    def under(self, ticket: int) -> ServedSample:
        """The header of it as the answer to a ticket."""
        return ServedSample(ticket, self.kind, self.table)


def settle(kind: int, table: ParcelTable, frames: list[memoryview], reader: ArenaReader | None) -> Settled:
    """Copy what lies in shared memory, so that its writer may use that again.

    Raises:
        MessageError: the table does not fit the frames, or there is no shared memory to read.
        SegmentLostError: the writer is dead and the shared memory with it.
    """
    if table.frames != len(frames):
        raise MessageError(f"a parcel of {table.frames} frames came with {len(frames)}")
    if not table.blocks:
        return Settled(kind, table, [*frames], sum(frame.nbytes for frame in frames))
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
    return Settled(kind, moved, [*frames, *copies], nbytes)


def plain(kind: int, text: str) -> Settled:
    """A text as a parcel, for what a service itself has to say."""
    data = text.encode()
    return Settled(kind, ParcelTable(1, (), BufferSpan(0, 0, len(data)), ()), [data], len(data))


def _moved(place: BufferSpan, frames: int) -> BufferSpan:
    return place if place.part >= 0 else msgspec.structs.replace(place, part=frames - 1 - place.part)
