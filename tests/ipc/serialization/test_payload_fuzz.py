"""Hostile tables and frames: decoding answers with MessageError or with an object, and never otherwise.

Heads are only ever cut short. A pickle head that a peer made up can run code, and no check of ours would
change that; payloads are taken from authenticated peers only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.ipc.serialization.payload_corpus import Seed, load
from torch_dpflow.errors import MessageError, TransportError
from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.headers import BlockRef, BufferSpan, Frame, PayloadTable
from torch_dpflow.ipc.serialization.codec import decode, discard

SEEDS = load()
WELL_FORMED = {name: seed for name, seed in SEEDS.items() if not name.startswith("bad-")}
MALFORMED = {name: seed for name, seed in SEEDS.items() if name.startswith("bad-")}

_table = msgspec.msgpack.Decoder(PayloadTable)
_fuzz = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

numbers = st.one_of(
    st.integers(-2, 8),
    st.sampled_from([63, 64, 65, 127, 128, 192, 256, 1 << 15, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63]),
    st.integers(-(1 << 63), (1 << 64) - 1),
)
refs = st.builds(BlockRef, numbers, numbers, numbers, numbers, numbers, numbers)
places = st.builds(BufferSpan, numbers, numbers, numbers)
names = st.sampled_from(sorted(WELL_FORMED))


@pytest.fixture(scope="module")
def reader() -> ArenaReader:
    """Of this very process, so that made-up references meet real descriptors."""
    return ArenaReader(os.getpid())


def survive(table: PayloadTable, frames: Sequence[Frame], reader: ArenaReader | None) -> None:
    with suppress(TransportError):
        decode(table, frames, reader=reader)
    discard(table, reader=reader)


def read_table(data: bytes) -> PayloadTable | None:
    """As the layer above does: headers that are not valid get no further."""
    try:
        return _table.decode(data)
    except msgspec.DecodeError:
        return None


@pytest.mark.parametrize("seed", WELL_FORMED.values(), ids=WELL_FORMED)
def test_well_formed_seeds_open(seed: Seed) -> None:
    decode(_table.decode(seed.table), seed.frames)


@pytest.mark.parametrize("seed", MALFORMED.values(), ids=MALFORMED)
def test_malformed_seeds_are_refused(seed: Seed) -> None:
    with pytest.raises(MessageError):
        decode(_table.decode(seed.table), seed.frames)


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_tables_with_one_byte_changed(seed: Seed, reader: ArenaReader) -> None:
    for position in range(len(seed.table)):
        for value in (0x00, 0x01, 0x7F, 0x80, 0xC0, 0xCF, 0xD3, 0xFF, seed.table[position] ^ 1):
            changed = bytearray(seed.table)
            changed[position] = value
            table = read_table(bytes(changed))
            if table is not None:
                survive(table, seed.frames, reader)


@pytest.mark.parametrize("seed", WELL_FORMED.values(), ids=WELL_FORMED)
def test_heads_cut_short(seed: Seed) -> None:
    table = _table.decode(seed.table)
    for size in range(table.head.size):
        with pytest.raises(MessageError):
            decode(msgspec.structs.replace(table, head=BufferSpan(0, 0, size)), seed.frames)


@_fuzz
@given(name=names, frames=st.lists(st.integers(0, 200), max_size=3), data=st.data())
def test_frames_cut_short_or_changed_in_number(name: str, frames: list[int], data: Any) -> None:
    seed = SEEDS[name]
    cut = [frame[: data.draw(st.integers(0, len(frame)))] for frame in seed.frames]
    table = _table.decode(seed.table)
    survive(table, cut, None)
    survive(msgspec.structs.replace(table, frames=len(frames)), [bytes(size) for size in frames], None)


@_fuzz
@given(
    name=names,
    blocks=st.lists(refs, max_size=2),
    head=st.none() | places,
    buffers=st.none() | st.lists(places, max_size=4),
    count=numbers,
    alignment=numbers,
)
@example(
    name="pair",
    blocks=[],
    head=None,
    buffers=[BufferSpan(0, 128, -64), BufferSpan(0, 1 << 63, 64)],
    count=1,
    alignment=0,
)
def test_made_up_tables(
    name: str,
    blocks: list[BlockRef],
    head: BufferSpan | None,
    buffers: list[BufferSpan] | None,
    count: int,
    alignment: int,
) -> None:
    seed = SEEDS[name]
    table = _table.decode(seed.table)
    made_up = PayloadTable(
        table.frames if buffers else count,
        tuple(blocks),
        table.head if head is None else head,
        table.buffers if buffers is None else tuple(buffers),
        alignment,
    )
    survive(made_up, seed.frames, None)
    survive(made_up, [bytearray(frame) for frame in seed.frames], None)
    survive(made_up, seed.frames, ArenaReader(os.getpid()))


@_fuzz
@given(name=names, data=st.data())
def test_tables_with_one_place_changed(name: str, data: Any) -> None:
    seed = SEEDS[name]
    table = _table.decode(seed.table)
    if not table.buffers:
        return
    position = data.draw(st.integers(0, len(table.buffers) - 1))
    field = data.draw(st.sampled_from(BufferSpan.__struct_fields__))
    buffers = list(table.buffers)
    buffers[position] = msgspec.structs.replace(buffers[position], **{field: data.draw(numbers)})
    survive(msgspec.structs.replace(table, buffers=tuple(buffers)), seed.frames, None)


@_fuzz
@given(changes=st.dictionaries(st.sampled_from(BlockRef.__struct_fields__), numbers, min_size=1))
def test_made_up_references(changes: dict[str, int]) -> None:
    arena, reader = Arena(budget_bytes=1 << 20), ArenaReader(os.getpid())
    block = arena.allocate(1000)
    assert block is not None
    block.memory[:] = 0  # no pickle at all
    ref = msgspec.structs.replace(arena.publish(block), **changes)
    survive(PayloadTable(0, (ref,), BufferSpan(-1, 0, 100), (BufferSpan(-1, 64, 64),)), [], reader)
