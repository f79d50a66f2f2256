"""Bodies of the calls to a shard, the tasks of its workers, and the settings of shards and workers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow.cluster.messages.coordinator import FlowSpec
from torch_dpflow.cluster.messages.router import JobId
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.fields import MAX_SAMPLES, Body, Count, SampleKeys
from torch_dpflow.ipc.messages.headers import Frame, PayloadGroup, PayloadTable, aligned

#: How many workers a sample may kill before it is reported as poisoned.
POISON_LIMIT = 3
#: Usual number of tasks that a worker holds. It sends several results in one message while other tasks wait or run.
WINDOW = 16
#: Maximum number of samples that a job requests ahead of need, from all shards together. A shard ignores requests ahead
#: beyond this number, and refuses a fetch if the job has requested more than twice this number and not received them.
MAX_WANTS = 1 << 16


class Ask(Body):
    """To a shard: samples that a job will need (call `want`) or waits for (call `fetch`).

    Each sample has a ticket, a number that the job uses only once. A fetch is answered with `Served`, which contains
    all awaited samples or some of them.
    """

    job: JobId
    #: Generation of the routing table that named this shard.
    routing: Count
    epoch: Count
    #: Seed of the random draws. None: the job reads the output of the cacheable stage.
    draw: Count | None
    tickets: SampleKeys
    keys: SampleKeys
    #: Tickets that the job releases: it has received their samples, or no longer needs them.
    taken: SampleKeys
    #: How many of the last samples will be needed later: a fetch does not wait for them.
    ahead: Count = 0
    #: Number of this request among the job's requests to all shards. If a shard has already received a later request,
    #: it ignores the samples of this request that no fetch waits for: the job may have released them.
    number: Count = 0

    @property
    def awaited(self) -> list[tuple[int, int]]:
        """Ticket and key of each sample that a fetch waits for."""
        most = len(self.tickets) - self.ahead
        return list(zip(self.tickets[:most], self.keys[:most]))


#: Outcomes of loading a sample: the sample, an exception of the loading code, the death of its workers, no worker
#: available (for any sample).
SAMPLE, FAILED, POISONED, WORKERLESS = range(4)


class Served(Body):
    """Answer of a shard to a fetch: samples, by ticket. The frames of their payloads follow, in order."""

    #: Each group has one outcome, a number from SAMPLE to WORKERLESS.
    samples: Annotated[list[PayloadGroup], msgspec.Meta(max_length=MAX_SAMPLES)]
    #: Numbers of samples that the shard has sent to jobs (these included) and has loaded, since it started.
    served: Count = 0
    decodes: Count = 0
    #: How long the shard's workers have taken to load, by stage.
    times: StageTimes = msgspec.field(default_factory=StageTimes)


class ShardSettings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The settings of a shard, which may change while it runs."""

    workers: int
    memory_bytes: int


class ShardArguments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Arguments of a shard's process."""

    #: The id of the router's process.
    router: str
    spec: FlowSpec


#: Number of the random bytes that identify the process of a shard.
SHARD_ID_BYTES = 8
#: Frame of a shard's `WorkerWelcome`: id of the shard, pid, number of workers; the digest of the content follows.
GREETING = struct.Struct(f"<{SHARD_ID_BYTES}sQQ")


class WorkerArguments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Arguments of the process of a shard's worker."""

    #: The id of its shard's process.
    shard: str
    number: int


#: Key of the sample, number that seeds its random draws, bytes of the header of its input (0 without input).
_NUMBERS = struct.Struct("<QQQ")


class _TaskHeader(msgspec.Struct, array_like=True, gc=False):
    """Header of a task that contains the input of a per-draw stage."""

    table: PayloadTable
    #: Bytes of each of its frames.
    sizes: list[int]


_decoder = msgpack_decoder(_TaskHeader)


class SampleTask(NamedTuple):
    """Task of a worker: load one sample, or run the per-draw stage on an input."""

    key: int
    #: Seeds the random draws, with the key.
    draw: int
    #: Input of the per-draw stage (the output of the cacheable stage), as table and frames of a payload; None: load
    #: the sample by the cacheable stage.
    input: tuple[PayloadTable, list[memoryview]] | None


def pack_task(key: int, draw: int, input: tuple[PayloadTable, Sequence[Frame]] | None) -> Frame:
    """Return a task as one frame, with a copy of `input`. Arguments as in `SampleTask`."""
    if input is None:
        return _NUMBERS.pack(key, draw, 0)
    table, given = input
    frames = [memoryview(frame).cast("B") for frame in given]
    header = msgspec.msgpack.encode(_TaskHeader(table, [len(frame) for frame in frames]))
    offsets = _offsets(len(header), [len(frame) for frame in frames])
    packed = bytearray(offsets[-1])
    _NUMBERS.pack_into(packed, 0, key, draw, len(header))
    packed[_NUMBERS.size : _NUMBERS.size + len(header)] = header
    for offset, frame in zip(offsets, frames):
        packed[offset : offset + len(frame)] = frame
    return packed


def key_to_load(payload: memoryview) -> int | None:
    """Return the key of a packed task that loads a sample; None if the task has an input or the frame is cut short."""
    if len(payload) < _NUMBERS.size:
        return None
    key, _, length = _NUMBERS.unpack_from(payload)
    return None if length else int(key)


def unpack_task(payload: memoryview) -> SampleTask:
    """Decode a frame of `pack_task`; the task's input shares its memory. Raises MessageError for an invalid frame."""
    try:
        key, draw, length = _NUMBERS.unpack_from(payload)
        if not length:
            return SampleTask(key, draw, None)
        header = _decoder.decode(payload[_NUMBERS.size : _NUMBERS.size + length])
    except (struct.error, msgspec.MsgspecError) as error:
        raise MessageError(f"not a valid task: {error}") from error
    offsets = _offsets(length, header.sizes)
    if offsets[-1] != len(payload):
        raise MessageError(f"a task of {len(payload)} bytes announces {offsets[-1]}")
    frames = [payload[offset : offset + size] for offset, size in zip(offsets, header.sizes)]
    return SampleTask(key, draw, (header.table, frames))


def _offsets(header: int, sizes: list[int]) -> list[int]:
    """Return the offsets of frames of these sizes behind the header, and the end of the last frame."""
    offsets = [aligned(_NUMBERS.size + header)]
    for size in sizes:
        offsets.append(aligned(offsets[-1] + size))
    return offsets
