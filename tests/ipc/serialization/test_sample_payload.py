"""A worker's samples as payloads: the short cut and the long way give the same samples."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpflow.errors import NotPicklableError
from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.serialization import fast_path as sample_payload
from torch_dpflow.ipc.serialization.codec import decode, discard, encode
from torch_dpflow.ipc.serialization.fast_path import encode_sample

DTYPES = (torch.uint8, torch.bool, torch.int64, torch.float32, torch.float64, torch.bfloat16, torch.complex64)
#: Below, between and above what lies beside the head, in a frame of its own, or in shared memory.
SHAPES = ((), (1,), (3, 32, 32), (40_000,), (3, 120, 120), (2, 3, 40, 40), (300, 300))


class Labelled(NamedTuple):
    image: torch.Tensor
    label: int


@contextmanager
def shared_memory() -> Iterator[tuple[Arena, ArenaReader]]:
    arena, reader = Arena(budget_bytes=1 << 26), ArenaReader(os.getpid())
    try:
        yield arena, reader
    finally:
        arena.close()
        reader.close()


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return (
            type(left) is type(right)
            and (left.dtype, left.shape, left.requires_grad) == (right.dtype, right.shape, right.requires_grad)
            and torch.equal(left, right)
        )
    if isinstance(left, tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.sampled_from(SHAPES))
    count = torch.Size(shape).numel()
    tensor = torch.arange(count).to(draw(st.sampled_from(DTYPES))).reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[draw(st.integers(0, 1)) :: draw(st.integers(1, 2))]
    return tensor


numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False))
samples = st.one_of(
    tensors(),
    st.tuples(tensors()),
    st.builds(lambda first, rest: (first, *rest), tensors(), st.lists(numbers, max_size=9)),
)


@settings(deadline=None)
@given(sample=samples, shared=st.booleans(), keep_layout=st.booleans())
def test_what_is_packed_is_what_comes_out(sample: Any, shared: bool, keep_layout: bool) -> None:
    with shared_memory() as (arena, reader):
        table, frames = encode_sample(sample, arena=arena if shared else None, keep_layout=keep_layout)
        arrived = decode(table, [memoryview(bytearray(frame)) for frame in frames], reader=reader)
        assert same(sample, arrived)


@pytest.mark.parametrize("sample", [torch.ones(3, 120, 120), (torch.ones(8, 8).t(), 1.5, None)])
def test_what_comes_out_is_as_from_the_long_way(sample: Any) -> None:
    quick, slow = decode(*encode_sample(sample)), decode(*encode(sample, contiguous=True))
    assert same(quick, slow)
    tensor, other = (one[0] if isinstance(one, tuple) else one for one in (quick, slow))
    assert tensor.stride() == other.stride()
    assert tensor.is_leaf
    assert tensor._base is None
    tensor.resize_(0)  # it owns its storage


@pytest.mark.parametrize(
    "sample",
    [
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        (torch.ones(2), "a text"),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), [1]),
        Labelled(torch.ones(2), 1),
        (1, torch.ones(2)),
        (),
        torch.empty(0, 3),
    ],
)
def test_what_is_less_common_goes_the_long_way(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def noted(obj: Any, **given: Any) -> Any:
        asked.append(obj)
        return encode(obj, **given)

    monkeypatch.setattr(sample_payload, "encode", noted)
    arrived = decode(*encode_sample(sample))
    assert asked[0] is sample
    assert type(arrived) is type(sample)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("beside", [(), (7, 0.5)])
def test_an_image_stays_pixel_by_pixel_where_its_layout_is_kept(shared: bool, beside: tuple[Any, ...]) -> None:
    image = (torch.arange(150 * 120 * 3) % 251).to(torch.uint8).reshape(150, 120, 3).permute(2, 0, 1)
    sample: Any = (image, *beside) if beside else image
    with shared_memory() as (arena, reader):
        table, frames = encode_sample(sample, arena=arena if shared else None, keep_layout=True)
        arrived = decode(table, [memoryview(bytearray(frame)) for frame in frames], reader=reader)
        assert same(sample, arrived)
        assert (arrived[0] if beside else arrived).stride() == image.stride()


def test_a_tensor_that_is_there_twice_stays_one() -> None:
    tensor = torch.ones(5)
    first, second = decode(*encode_sample((tensor, tensor)))
    assert first is second


def test_a_part_of_a_tensor_travels_alone() -> None:
    whole = torch.arange(200_000)
    with shared_memory() as (arena, reader):
        table, _ = encode_sample(whole[1000:101_000], arena=arena)
        assert table.nbytes < 101_000 * 8
        discard(table, reader=reader)


def test_without_room_in_shared_memory_it_goes_as_frames() -> None:
    sample = (torch.arange(120 * 120 * 3).reshape(120, 120, 3).permute(2, 0, 1), 4)
    table, frames = encode_sample(sample, arena=Arena(budget_bytes=1000))
    assert not table.blocks
    assert same(sample, decode(table, frames))


def test_the_memory_of_a_payload_that_was_opened_is_lent_again() -> None:
    with shared_memory() as (arena, reader):
        held = []
        for number in range(20):
            table, frames = encode_sample(torch.full((3, 150, 150), number), arena=arena)
            assert int(decode(table, frames, reader=reader)[2, 149, 149]) == number
            held.append(arena.allocated_bytes)
        assert held[10:] == [held[10]] * 10


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(NotPicklableError, match="lambda"):
        encode_sample((torch.ones(2), lambda: None))


def test_the_head_is_what_pickle_itself_reads() -> None:
    table, frames = encode_sample((torch.ones(4), 2**70, -1, True, 0.5))
    head = memoryview(frames[0])[: table.head.size]
    assert pickle.loads(head, buffers=[bytearray(16)])[1:] == (2**70, -1, True, 0.5)
