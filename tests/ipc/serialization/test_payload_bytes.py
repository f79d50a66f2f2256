"""Big bytes objects in payloads: they leave the pickle without a copy, and what comes back is bytes."""

from __future__ import annotations

import os
import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.serialization.codec import LARGE_BYTES, MAX_LARGE_FRAMES, decode, encode

Carry = Callable[[Any], Any]


class Named(bytes):
    """A subclass, which pickle rebuilds from plain bytes."""


class Lying(bytes):
    """A subclass that claims another length."""

    def __len__(self) -> int:
        return 3


class Giving:
    """Pickled as bytes made for the occasion, which nobody but the payload keeps."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self) -> Any:
        return Giving, (bytes(bytearray(self.content)),)


def carry_inline(obj: Any) -> Any:
    table, frames = encode(obj)
    return decode(table, [bytes(frame) for frame in frames])


def carry_shared(obj: Any) -> Any:
    arena, reader = Arena(budget_bytes=1 << 26), ArenaReader(os.getpid())
    table, frames = encode(obj, arena=arena)
    return decode(table, [bytes(frame) for frame in frames], reader=reader)


@pytest.fixture(params=[carry_inline, carry_shared], ids=["inline", "shared"])
def carry(request: pytest.FixtureRequest) -> Carry:
    chosen: Carry = request.param
    return chosen


def content(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng([size, seed]).bytes(size)


SIZES = [LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 500_000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [bytes, bytearray, Named, Lying])
def test_bytes_and_their_like_keep_type_and_content(carry: Carry, kind: Any, size: int) -> None:
    original = kind(content(size))
    carried = carry(original)
    assert type(carried) is kind
    assert bytes(memoryview(carried)) == bytes(memoryview(original))


@pytest.mark.parametrize("size", SIZES[1:])
def test_big_bytes_are_not_copied_into_the_head(size: int) -> None:
    original = content(size)
    table, frames = encode({"a": [original], "b": 1})
    assert table.head.size < 200
    assert frames[1] is original


def test_one_object_twice_travels_once_and_stays_one(carry: Carry) -> None:
    one = content(100_000)
    equal = bytes(bytearray(one))
    table, frames = encode([one, {"again": one}, equal])
    assert len(frames) == 3
    assert len(table.buffers) == 2
    first, again, other = carry([one, {"again": one}, equal])
    assert again["again"] is first
    assert other is not first
    assert first == other == one


def test_an_array_over_a_bytes_object_does_not_share_its_fate(carry: Carry) -> None:
    original = content(LARGE_BYTES)
    carried, array = carry([original, np.frombuffer(original, np.uint8)])
    array[:] = 0
    assert carried == original


def test_bytes_that_only_the_payload_keeps(carry: Carry) -> None:
    parts = [Giving(content(200_000, number)) for number in range(5)]
    assert [part.content for part in carry(parts)] == [part.content for part in parts]


@pytest.mark.parametrize(
    "text", ["é" * 100_000, "\udcff" * 50_000, "B\x00\x00\x01" * 50_000], ids=["utf-8", "surrogates", "ascii"]
)
def test_big_text_stays_in_the_head(carry: Carry, text: str) -> None:
    table, frames = encode([text, text[1:]])
    assert (len(frames), table.buffers) == (1, ())
    assert carry([text, text[1:]]) == [text, text[1:]]


def test_what_looks_like_output_of_pickle(carry: Carry) -> None:
    frame = pickle.FRAME + struct.pack("<Q", LARGE_BYTES)
    pieces = [frame + content(LARGE_BYTES), pickle.dumps(content(LARGE_BYTES), protocol=5)]
    pieces += [piece[:-5] + b"B\x00\x00\x01\x00" for piece in pieces]
    assert carry(pieces) == pieces


def chunk_sizes(obj: Any) -> list[int]:
    """What pickle hands to the file, piece by piece."""
    sizes: list[int] = []

    class File:
        def write(self, chunk: Any) -> None:
            sizes.append(len(chunk))

    pickle.Pickler(File(), protocol=5).dump(obj)
    return sizes


def test_a_flush_after_what_looks_like_the_header_of_its_length(carry: Carry) -> None:
    """A frame of pickle's may end in any bytes: here in a double that spells the next one's length."""
    filling = [float(number) for number in range(1, 30_000)]
    first, second, *_ = chunk_sizes(filling)
    header = pickle.BINBYTES + struct.pack("<I", second)
    double = struct.unpack(">d", b"\x40\x09\x21" + header)[0]
    # Floats take 9 bytes each, and what pickle says of lists and frames a few; one of these is the last.
    for position in range(first // 9 - 8, first // 9 + 1):
        doctored = [*filling[:position], double, *filling[position + 1 :]]
        table, _ = encode(doctored)
        assert table.buffers == ()
        assert carry(doctored) == doctored


def test_bytes_of_more_than_four_gigabytes_have_an_opcode_of_their_own() -> None:
    untouched = bytes((1 << 32) + 1)  # zeros of the kernel, which take no memory
    table, frames = encode([untouched, 1])
    assert table.buffers[0].size == len(untouched)
    assert pickle.loads(frames[0], buffers=[b"in its place"]) == [b"in its place", 1]


def test_no_payload_takes_more_frames_than_a_message_may_have() -> None:
    pieces = [content(LARGE_BYTES)] * 2 + [content(LARGE_BYTES, number) for number in range(3)]
    many = [bytes(LARGE_BYTES - 1) + bytes([number % 256]) for number in range(MAX_LARGE_FRAMES + 20)]
    table, frames = encode([pieces, many])
    assert table.frames == len(frames) == MAX_LARGE_FRAMES + 1
    assert decode(table, frames) == [pieces, many]


def test_many_bytes_objects_take_one_block_that_is_free_again_at_once() -> None:
    arena, reader = Arena(budget_bytes=1 << 27), ArenaReader(os.getpid())
    pieces = [content(LARGE_BYTES + number, number) for number in range(400)]
    for _ in range(3):
        table, frames = encode(pieces, arena=arena)
        carried = decode(table, frames, reader=reader)
        assert carried == pieces
        assert arena.segments == 1


def test_bytes_beside_tensors_in_an_arena_that_has_room_for_neither_or_one() -> None:
    pieces: list[Any] = [torch.arange(LARGE_BYTES), content(LARGE_BYTES), [content(200_000)], torch.arange(3)]
    for budget in (0, 100_000, 400_000, 1 << 20, 1 << 22):
        arena, reader = Arena(budget_bytes=budget), ArenaReader(os.getpid())
        table, frames = encode(pieces, arena=arena)
        carried = decode(table, frames, reader=reader)
        assert carried[1:3] == pieces[1:3]
        assert torch.equal(carried[0], pieces[0])
        assert torch.equal(carried[3], pieces[3])


@pytest.mark.usefixtures("uncollected")
def test_bytes_are_kept_as_long_as_the_frames_and_no_longer() -> None:
    original = content(LARGE_BYTES)
    unused = sys.getrefcount(original)
    table, frames = encode([original])
    assert sys.getrefcount(original) > unused
    carried = decode(table, frames)
    del frames
    assert sys.getrefcount(original) == unused
    assert carried == [original]


pieces = st.one_of(
    st.builds(content, st.sampled_from([*SIZES, 100, 70_000]), st.integers(0, 3)),
    st.builds(lambda head, size: head + bytes(size), st.binary(max_size=12), st.sampled_from(SIZES)),
    st.builds(lambda size: pickle.FRAME + bytes(size), st.sampled_from(SIZES)),
)
likes = st.one_of(
    pieces,
    pieces.map(bytearray),
    pieces.map(Named),
    st.builds(lambda size, letter: letter * size, st.sampled_from(SIZES), st.sampled_from("aé\udcff")),
    st.integers(1000, 70_000).map(lambda count: [*range(count)]),
    st.builds(lambda size: np.zeros(size, np.uint8), st.sampled_from(SIZES)),
)
objects = st.recursive(
    st.one_of(likes, st.integers(), st.floats(allow_nan=False), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.integers(0, 9), inner, max_size=4),
    ),
    max_leaves=8,
)


def same(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, np.ndarray):
        return np.array_equal(ours, theirs)
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(obj=objects, shared=st.booleans())
@example(obj=(content(LARGE_BYTES), bytearray(LARGE_BYTES), content(LARGE_BYTES)), shared=False)
def test_any_mixture_comes_back_as_it_was(obj: Any, shared: bool) -> None:
    assert same((carry_shared if shared else carry_inline)(obj), obj)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(
    some=st.lists(pieces, min_size=1, max_size=4, unique_by=id),
    order=st.lists(st.integers(0, 3), max_size=8),
    shared=st.booleans(),
)
def test_identities_come_back_as_plain_pickle_has_them(some: list[bytes], order: list[int], shared: bool) -> None:
    chosen = [some[position % len(some)] for position in order]
    ours = (carry_shared if shared else carry_inline)([chosen, tuple(chosen)])
    theirs = pickle.loads(pickle.dumps([chosen, tuple(chosen)], protocol=5))
    assert ours == theirs
    flat, plain = [*ours[0], *ours[1]], [*theirs[0], *theirs[1]]
    assert [flat.index(x) for x in flat] == [plain.index(x) for x in plain]
    assert [[a is b for a in flat] for b in flat] == [[a is b for a in plain] for b in plain]
