"""Workers' messages at a shard: separated from jobs' messages, with payloads copied out of the workers' memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec

from torch_dpflow.cluster.messages.shard import SAMPLE
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.headers import BufferSpan, PayloadTable
from torch_dpflow.ipc.transport import Frame, Listener

#: Maximum number of messages of workers that are handled before the server handles another one.
_BURST = 64


class WorkerDemultiplexer:
    """Listener of a shard that handles the messages of workers itself and returns all other messages.

    A worker's identity ends with the node's token. A shard trusts the results of workers, so only a process that the
    node has started counts as a worker; every other peer is a client of the RPC server.

    Args:
        listener: the wrapped listener; `close` closes it.
        on_worker_message: called with each message of a worker, in the thread that receives.
    """

    losses = 0
    #: Handles messages at the listener of remote workers; returns whether there may be more. None: no such listener.
    serve_remote: Callable[[], bool] | None = None

    def __init__(
        self, listener: Listener, token: str, on_worker_message: Callable[[bytes, list[memoryview]], None]
    ) -> None:
        self._listener = listener
        self._suffix = f"/{token}".encode()
        self._on_worker_message = on_worker_message
        self.address = listener.address
        self.send, self.wake, self.close, self.watch = listener.send, listener.wake, listener.close, listener.watch
        self.dropped = 0

    def receive(self, timeout_s: float | None) -> tuple[bytes, list[memoryview]] | None:
        """Return (identity, frames) of a client's next message; None on a timeout, or after messages of workers."""
        if self.serve_remote is not None and self.serve_remote():
            timeout_s = 0
        for _ in range(_BURST):
            message = self._listener.receive(timeout_s)
            self.dropped = self._listener.dropped
            if message is None or not message[0].endswith(self._suffix):
                return message
            self._on_worker_message(*message)
            timeout_s = 0
        return None


class DetachedPayload(msgspec.Struct, gc=False):
    """Encoded payload in this process's memory. Its frames can be sent any number of times."""

    #: Outcome of loading the sample: SAMPLE, FAILED, POISONED or WORKERLESS.
    kind: int
    table: PayloadTable
    frames: list[Frame]
    #: Size of the frames (bytes).
    nbytes: int

    @property
    def payload(self) -> tuple[PayloadTable, list[Frame]]:
        return self.table, self.frames

    @property
    def is_sample(self) -> bool:
        return self.kind == SAMPLE


def detach_group(kind: int, table: PayloadTable, size: int, parts: list[list[memoryview]]) -> list[DetachedPayload]:
    """Return a copy of each payload of a group. parts: one frame of `size` bytes for each payload."""
    return [DetachedPayload(kind, table, [bytes(part)], size) for (part,) in parts]


def detach(kind: int, table: PayloadTable, frames: list[memoryview], reader: ArenaReader | None) -> DetachedPayload:
    """Copy a payload out of shared memory into this process's memory. Frames that came by the socket are not copied.

    reader: reader of the sender's shared memory; None: the sender does not share memory.

    Raises MessageError if the table does not fit the frames or refers to memory that is not shared, and the errors of
    `ArenaReader.view`.
    """
    if table.frames != len(frames):
        raise MessageError(f"a payload of {table.frames} frames came with {len(frames)}")
    if not table.blocks:
        return DetachedPayload(kind, table, [*frames], sum(frame.nbytes for frame in frames))
    if reader is None:
        raise MessageError("a payload refers to shared memory that cannot be read here")
    parts: list[Frame] = [*frames, *[reader.read(block) for block in table.blocks]]
    moved = _without_blocks(table.frames, len(table.blocks), table.head, table.buffers, table.alignment)
    return DetachedPayload(kind, moved, parts, sum(map(len, parts)))


@lru_cache(maxsize=256)
def _without_blocks(
    frames: int, blocks: int, head: BufferSpan, buffers: tuple[BufferSpan, ...], alignment: int
) -> PayloadTable:
    """Return the table of a payload whose blocks have become frames, behind its other frames."""
    places = tuple(_moved(place, frames) for place in buffers)
    return PayloadTable(frames + blocks, (), _moved(head, frames), places, alignment)


def text_payload(kind: int, text: str) -> DetachedPayload:
    data = text.encode()
    return DetachedPayload(kind, PayloadTable(1, (), BufferSpan(0, 0, len(data)), ()), [data], len(data))


def _moved(place: BufferSpan, frames: int) -> BufferSpan:
    return place if place.part >= 0 else msgspec.structs.replace(place, part=frames - 1 - place.part)
