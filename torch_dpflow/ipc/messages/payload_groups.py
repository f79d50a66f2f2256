"""Grouping of small payloads, which then share one entry of the header and one frame.

A separate frame costs several microseconds at the sender and at the receiver, and an entry of the header costs two:
more than all other work on a small sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.headers import Frame, PayloadGroup, PayloadTable, Window

#: Largest frame that is joined with others, bytes: joining copies it.
JOINED_BYTES = 1 << 14

Group = TypeVar("Group", bound=PayloadGroup)


def group_payloads(
    payloads: Iterable[tuple[int, int, PayloadTable, Sequence[Frame]]], kind: type[Group]
) -> tuple[list[Group], list[Frame]]:
    """Group payloads, given as (number, outcome, table, frames); return the groups, and the frames to send with them.

    Small payloads of the same outcome and size are joined into one frame if they have the same table object, or tables
    that differ only in their block. All other payloads keep their order; neighbours among them with the same table
    object and outcome form a group too.

    kind: class of the groups.
    """
    groups: list[Group] = []
    parts: list[list[Frame]] = []
    #: Bytes of each payload of a group whose frames are joined; 0: they are not.
    sizes: list[int] = []
    joined: dict[tuple[object, int, int], int] = {}
    for number, outcome, table, frames in payloads:
        size = memoryview(frames[0]).nbytes if len(frames) == 1 else 0
        place: int | None = None
        if 0 < size <= JOINED_BYTES and len(table.blocks) < 2:
            layout = (table.head, table.buffers, table.alignment) if table.blocks else id(table)
            place = joined.setdefault((layout, outcome, size), len(groups))
        else:
            size = 0
            if groups and not sizes[-1] and groups[-1].payload is table and groups[-1].kind == outcome:
                place = len(groups) - 1
        if place is not None and place < len(groups):
            groups[place].numbers.append(number)
            groups[place].blocks += table.blocks
            parts[place] += frames
            continue
        groups.append(kind([number], outcome, table))
        parts.append([*frames])
        sizes.append(size)
    out: list[Frame] = []
    for group, own, size in zip(groups, parts, sizes):
        if size and len(group.numbers) > 1:
            group.joined = size
            out.append(b"".join(own))
        else:
            out += own
    return groups, out


def split_payloads(groups: Sequence[Group], frames: Sequence[memoryview]) -> list[tuple[Group, list[list[memoryview]]]]:
    """Return (group, frames of each of its payloads) for each group.

    Parts of a joined frame are views of it. If the payloads have blocks, each is returned in a group of one instead,
    with a copy of its part. Raises MessageError if the frames do not fit the groups.
    """
    split: list[tuple[Group, list[list[memoryview]]]] = []
    begin = 0
    for group in groups:
        count = len(group.numbers)
        if group.joined:
            parts = [[part] for part in split_frame(frames[begin : begin + 1], group.joined, count)]
            begin += 1
        else:
            each = group.frames_each
            parts = [[*frames[begin + number * each : begin + (number + 1) * each]] for number in range(count)]
            begin += each * count
        if group.blocks or (group.payload.blocks and count > 1):
            split += _with_own_blocks(group, parts)
        else:
            split.append((group, parts))
    if begin != len(frames):
        raise MessageError(f"a message announces {begin} frames and has {len(frames)}")
    return split


def _with_own_blocks(group: Group, parts: list[list[memoryview]]) -> list[tuple[Group, list[list[memoryview]]]]:
    """Return a group for each payload, with a copy of its frame."""
    table, kind = group.payload, type(group)
    if len(group.blocks) != len(parts) - 1 or len(table.blocks) != 1 or not group.joined:
        raise MessageError(f"{len(parts)} payloads came with {len(table.blocks)} and {len(group.blocks)} blocks")
    tables = [table, *[PayloadTable(1, (block,), table.head, table.buffers, table.alignment) for block in group.blocks]]
    return [
        (kind([number], group.kind, own), [[memoryview(bytearray(part))]])
        for number, own, (part,) in zip(group.numbers, tables, parts)
    ]


def split_frame(frames: Sequence[memoryview], size: int, count: int) -> list[memoryview]:
    """Split the single frame in `frames` into `count` parts of `size` bytes. Raises MessageError if it does not fit."""
    nbytes = sum(frame.nbytes for frame in frames)
    if len(frames) != 1 or nbytes != size * count:
        raise MessageError(f"{count} parts of {size} bytes are announced, and {len(frames)} frames have {nbytes}")
    whole = frames[0]
    return [whole[start : start + size] for start in range(0, nbytes, size)]


def join_tasks(window: Window, tasks: Sequence[Frame]) -> list[Frame]:
    """Return the frames to send after `window`: one for each task, or a single one if all are small and of equal size.

    For a single frame of several tasks, `window.joined` is set to the size of each, bytes.
    """
    sizes = {len(task) for task in tasks}
    if len(tasks) > 1 and len(sizes) == 1 and 0 < (size := sizes.pop()) <= JOINED_BYTES:
        window.joined = size
        return [b"".join(tasks)]
    return [*tasks]


def frames_of_tasks(window: Window, frames: Sequence[memoryview]) -> Sequence[memoryview]:
    """Return the frame of each task of a window. Raises MessageError if the frames do not fit."""
    if window.joined:
        return split_frame(frames, window.joined, len(window.tasks))
    if len(frames) != len(window.tasks):
        raise MessageError(f"{len(window.tasks)} tasks came with {len(frames)} frames")
    return frames
