"""The payload of a worker's task in a shared flow: which sample, which draw, and the input of the per-draw stage.

One frame: the numbers, then for a per-draw stage the table of its input and the input's frames, each of which begins at
a multiple of ALIGNMENT.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.payload_table import Frame, PayloadTable, aligned

#: The sample's key, the number that decides its random draws, and the bytes of its input's header, 0 without input.
_NUMBERS = struct.Struct("<QQQ")


class _TaskHeader(msgspec.Struct, array_like=True, gc=False):
    """The header of an input."""

    table: PayloadTable
    #: Bytes of each of its frames.
    sizes: list[int]


_decoder = msgspec.msgpack.Decoder(_TaskHeader)


@dataclass(frozen=True, slots=True)
class SampleTask:
    """One sample to be loaded, or the per-draw stage of one."""

    key: int
    #: Decides, with the key, the random draws.
    draw: int
    #: The output of the cacheable stage, as table and frames of a payload: run the per-draw stage on it. None: load the
    #: sample.
    input: tuple[PayloadTable, list[memoryview]] | None


def pack_task(key: int, draw: int, input: tuple[PayloadTable, Sequence[Frame]] | None) -> Frame:
    """The payload of a task. `input`: as of `SampleTask`; copied once."""
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
    """The key of a task that loads a sample; None: it has an input, or is cut short."""
    if len(payload) < _NUMBERS.size:
        return None
    key, _, length = _NUMBERS.unpack_from(payload)
    return None if length else int(key)


def unpack_task(payload: memoryview) -> SampleTask:
    """The task in a payload; its input shares the payload's memory. MessageError where the payload is cut short."""
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
    """The offset of each frame, and the end of the last one."""
    offsets = [aligned(_NUMBERS.size + header)]
    for size in sizes:
        offsets.append(aligned(offsets[-1] + size))
    return offsets
