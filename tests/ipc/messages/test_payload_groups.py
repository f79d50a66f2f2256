"""Payloads with one table travel as a group, and come out as they went in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.headers import BlockRef, BufferSpan, Finished, Frame, PayloadGroup, PayloadTable, Window
from torch_dpflow.ipc.messages.payload_groups import (
    JOINED_BYTES,
    frames_of_tasks,
    group_payloads,
    join_tasks,
    split_payloads,
)


def table_of(frames: int, head: int) -> PayloadTable:
    return PayloadTable(frames, (), BufferSpan(0, 0, head), ())


#: One object for each table, as workers and shards have them.
TABLES = [table_of(1, 8), table_of(1, 16), table_of(2, 8), table_of(1, JOINED_BYTES + 1)]
#: Of samples in shared memory: the objects that they share.
HEAD, BUFFERS = BufferSpan(0, 0, 8), (BufferSpan(-1, 0, 65536),)


def in_block(number: int) -> PayloadTable:
    """The table of a sample that lies in a block of its own."""
    return PayloadTable(1, (BlockRef(number, 3, 65536, 65536, 1, 0),), HEAD, BUFFERS)


@st.composite
def payloads(draw: st.DrawFn) -> list[tuple[int, int, PayloadTable, list[Frame]]]:
    made: list[tuple[int, int, PayloadTable, list[Frame]]] = []
    for number in range(draw(st.integers(0, 12))):
        table, kind = draw(st.sampled_from([*TABLES, in_block(number)])), draw(st.integers(0, 3))
        size = draw(st.sampled_from([0, table.head.size, table.head.size + 3]))
        made.append((number, kind, table, [bytes([number]) * size] * table.frames))
    return made


def received(frames: list[Frame]) -> list[memoryview]:
    return [memoryview(bytearray(frame)) for frame in frames]


@given(payloads())
def test_every_payload_comes_out_as_it_went_in(given: list[tuple[int, int, PayloadTable, list[Frame]]]) -> None:
    groups, frames = group_payloads(given, PayloadGroup)
    assert len(frames) <= sum(len(own) for *_, own in given)
    back = {
        number: (group.kind, group.payload, [bytes(frame) for frame in own])
        for group, parts in split_payloads(groups, received(frames))
        for number, own in zip(group.numbers, parts, strict=True)
    }
    assert back == {number: (kind, table, [bytes(frame) for frame in own]) for number, kind, table, own in given}


@given(payloads())
def test_large_payloads_keep_their_order(given: list[tuple[int, int, PayloadTable, list[Frame]]]) -> None:
    groups, _ = group_payloads(given, PayloadGroup)
    large = [number for number, _, table, own in given if len(own) > 1 or len(own[0]) > JOINED_BYTES]
    alone = [number for group in groups if not group.joined for number in group.numbers]
    assert [number for number in alone if number in set(large)] == large


def test_alike_and_small_is_one_frame() -> None:
    groups, frames = group_payloads([(n, 0, TABLES[0], [bytes([n] * 8)]) for n in range(3)], PayloadGroup)
    assert [(group.numbers, group.joined) for group in groups] == [([0, 1, 2], 8)]
    assert frames == [bytes([0] * 8 + [1] * 8 + [2] * 8)]


def test_samples_in_blocks_with_one_layout_are_one_frame() -> None:
    groups, frames = group_payloads([(n, 0, in_block(n), [bytes([n] * 8)]) for n in range(3)], PayloadGroup)
    assert [(group.numbers, len(group.blocks), group.joined) for group in groups] == [([0, 1, 2], 2, 8)]
    assert frames == [bytes([0] * 8 + [1] * 8 + [2] * 8)]
    split = split_payloads(groups, received(frames))
    assert [group.payload for group, _ in split] == [in_block(n) for n in range(3)]
    assert [bytes(part) for _, ((part,),) in split] == [bytes([n] * 8) for n in range(3)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_block_too_few_or_too_many_is_refused(count: int) -> None:
    (group,), frames = group_payloads([(n, 0, in_block(n), [b"x" * 8]) for n in range(3)], PayloadGroup)
    group.blocks = [*group.blocks, *group.blocks][:count]
    with pytest.raises(MessageError, match=f"3 payloads came with 1 and {count} blocks"):
        split_payloads([group], received(frames))


def test_layouts_that_differ_in_their_heads_are_two_frames() -> None:
    """The buffers of both are one object."""
    first = in_block(0)
    other = PayloadTable(1, in_block(1).blocks, BufferSpan(0, 1, 7), first.buffers)
    groups, frames = group_payloads([(0, 0, first, [b"x" * 8]), (1, 0, other, [b"x" * 8])], PayloadGroup)
    assert [(group.numbers, group.payload) for group in groups] == [([0], first), ([1], other)]
    assert frames == [b"x" * 8] * 2


def test_large_neighbours_with_one_table_are_one_group() -> None:
    given = [(number, kind, TABLES[2], [bytes([number]) * 8] * 2) for number, kind in enumerate([0, 0, 0, 1, 0])]
    groups, frames = group_payloads(given, PayloadGroup)
    assert [(group.numbers, group.kind, group.joined) for group in groups] == [
        ([0, 1, 2], 0, 0),
        ([3], 1, 0),
        ([4], 0, 0),
    ]
    assert frames == [bytes([number]) * 8 for number in range(5) for _ in range(2)]


@pytest.mark.parametrize("frames", [[], [b"x" * 23], [b"x" * 25], [b"x" * 8] * 3])
def test_a_joined_frame_of_another_size_is_refused(frames: list[Frame]) -> None:
    group = PayloadGroup([1, 2, 3], 0, TABLES[0], 8)
    with pytest.raises(MessageError, match="3 parts of 8 bytes"):
        split_payloads([group], received(frames))


@pytest.mark.parametrize("count", [1, 3])
def test_more_or_fewer_frames_than_announced_are_refused(count: int) -> None:
    with pytest.raises(MessageError, match=f"announces 2 frames and has {count}"):
        split_payloads([PayloadGroup([1], 0, TABLES[2])], received([b"x"] * count))


def test_the_state_of_a_stream_is_a_frame_more() -> None:
    finished = Finished([1], 0, TABLES[0], has_stream=True)
    ((_, parts),) = split_payloads([finished], received([b"payload", b"state"]))
    assert [bytes(frame) for frame in parts[0]] == [b"payload", b"state"]


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_tasks_come_out_as_they_went_in(tasks: list[bytes]) -> None:
    window = Window(list(range(len(tasks))), [])
    frames = join_tasks(window, tasks)
    assert [bytes(frame) for frame in frames_of_tasks(window, received([*frames]))] == tasks


def test_a_window_without_the_frames_of_its_tasks_is_refused() -> None:
    with pytest.raises(MessageError, match="2 tasks came with 1 frames"):
        frames_of_tasks(Window([1, 2], []), received([b"x"]))
    with pytest.raises(MessageError, match="2 parts of 8 bytes"):
        frames_of_tasks(Window([1, 2], [], 8), received([b"x"]))
