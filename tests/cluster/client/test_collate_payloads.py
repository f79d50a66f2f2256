"""A batch made of payloads that are not opened one by one is the batch that torch's default collate makes."""

from __future__ import annotations

import gc
import os
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from torch_dpflow._core.channels_last import collate_channels_last
from torch_dpflow.cluster.client.collate import collate_payloads, collate_samples
from torch_dpflow.cluster.messages.shard import SAMPLE
from torch_dpflow.cluster.shard.worker_messages import detach
from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.headers import Frame, PayloadTable
from torch_dpflow.ipc.serialization.codec import decode
from torch_dpflow.ipc.serialization.fast_path import encode_sample

NUMBERS = st.tuples(st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.booleans())
DTYPES = (torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.int64, torch.complex64)


class Labelled(NamedTuple):
    image: torch.Tensor
    label: int


def image(value: int, dtype: torch.dtype = torch.uint8, size: int = 160) -> torch.Tensor:
    count = 3 * size * size
    return ((torch.arange(count) + value) % 251).to(dtype).reshape(3, size, size)


def in_pixels(value: int) -> torch.Tensor:
    return image(value).permute(1, 2, 0).contiguous().permute(2, 0, 1)


def payloads_of(
    samples: list[Any], *, in_a_row: bool, keep_layout: bool = False
) -> list[tuple[PayloadTable, list[Frame]]]:
    """As workers pack them, and a shard hands them over."""
    arena, reader = Arena(budget_bytes=1 << 26), ArenaReader(os.getpid())
    settled = []
    for sample in samples:
        table, frames = encode_sample(sample, arena=arena, keep_layout=keep_layout)
        settled.append(detach(SAMPLE, table, [memoryview(bytearray(frame)) for frame in frames], reader))
    arena.close()
    reader.close()
    room = memoryview(bytearray(sum(one.nbytes for one in settled)))
    payloads: list[tuple[PayloadTable, list[Frame]]] = []
    begin = 0
    for one in settled:
        frames: list[Frame] = []
        for number, frame in enumerate(one.frames):
            if in_a_row and number == 1:
                size = len(memoryview(frame))
                place, begin = room[begin : begin + size], begin + size
                place[:] = memoryview(frame).cast("B")
                frames.append(place)
            else:
                frames.append(memoryview(bytearray(frame)))
        payloads.append((one.table, frames))
    return payloads


def opened(samples: list[Any]) -> Any:
    return collate_samples([decode(*payload) for payload in payloads_of(samples, in_a_row=False)])


@pytest.mark.parametrize("in_a_row", [True, False])
@settings(deadline=None, max_examples=25)
@given(st.lists(NUMBERS, min_size=1, max_size=6), st.sampled_from(DTYPES), st.integers(0, 3))
def test_what_is_alike_is_put_together_as_torch_does(
    in_a_row: bool, numbers: list[tuple[Any, ...]], dtype: torch.dtype, beside: int
) -> None:
    samples = [(image(place, dtype), *row[:beside]) for place, row in enumerate(numbers)]
    made = collate_payloads(payloads_of(samples, in_a_row=in_a_row))
    expected = default_collate(samples)
    assert type(made) is list
    for ours, theirs in zip(made, expected, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(ours, theirs)


@settings(deadline=None, max_examples=25)
@given(st.lists(NUMBERS, min_size=1, max_size=6), st.sampled_from(DTYPES), st.integers(0, 3), st.integers(1, 99))
def test_small_tensors_are_put_together_as_torch_does(
    numbers: list[tuple[Any, ...]], dtype: torch.dtype, beside: int, length: int
) -> None:
    samples = [((torch.arange(length) + place).to(dtype), *row[:beside]) for place, row in enumerate(numbers)]
    made = collate_payloads(payloads_of(samples, in_a_row=False))
    expected = default_collate(samples)
    assert type(made) is list
    for ours, theirs in zip(made, expected, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("in_a_row", [True, False])
def test_tensors_alone_and_channels_last(in_a_row: bool) -> None:
    samples = [in_pixels(value) for value in range(4)]
    made = collate_payloads(payloads_of(samples, in_a_row=in_a_row))
    assert made is not None
    assert torch.equal(made, default_collate(samples))
    assert made.is_contiguous()
    made += 1  # it is the job's own memory, and stays when what it came in is gone
    gc.collect()
    assert torch.equal(made, default_collate(samples) + 1)


@pytest.mark.parametrize("in_a_row", [True, False])
@pytest.mark.parametrize("beside", [None, 3])
def test_images_whose_pixels_stay_where_they_are(in_a_row: bool, beside: int | None) -> None:
    samples: list[Any] = [in_pixels(value) for value in range(4)]
    if beside is not None:
        samples = [(one, beside + place) for place, one in enumerate(samples)]
    payloads = payloads_of(samples, in_a_row=in_a_row, keep_layout=True)
    assert collate_payloads(payloads) is None, "the default collate makes planes"
    assert torch.equal(*(one if beside is None else one[0] for one in (opened(samples), default_collate(samples))))
    made, expected = collate_payloads(payloads, keep_layout=True), collate_channels_last(samples)
    if beside is not None:
        assert torch.equal(made[1], expected[1])
        made, expected = made[0], expected[0]
    assert made.stride() == expected.stride()
    assert torch.equal(made, expected)
    made += 1  # it is the job's own memory
    assert torch.equal(made, expected + 1)


def test_planes_stay_planes_where_a_layout_is_kept() -> None:
    samples = [image(value) for value in range(3)]
    made = collate_payloads(payloads_of(samples, in_a_row=True, keep_layout=True), keep_layout=True)
    assert made is not None
    assert made.is_contiguous()
    assert torch.equal(made, default_collate(samples))


def test_one_layout_beside_the_other_is_left_to_where_each_is_opened() -> None:
    payloads = payloads_of([in_pixels(1), image(2)], in_a_row=False, keep_layout=True)
    assert collate_payloads(payloads, keep_layout=True) is None


@pytest.mark.parametrize(
    "samples",
    [
        [image(1), (image(2),)],
        [image(1), image(2, torch.int8)],
        [image(1), image(2, size=161)],
        [image(1), image(2).reshape(3, 80, 320)],
        [(image(1), 1), (image(2), 1, 2)],
        [(image(1), 1), (image(2), "b")],
        [(image(1), 1), Labelled(image(2), 2)],
        [Labelled(image(1), 1), Labelled(image(2), 2)],
        [{"image": image(1)}, {"image": image(2)}],
        [(1, image(1)), (2, image(2))],
        [(image(1), image(2)), (image(3), image(4))],
        [torch.zeros(3), torch.ones(4)],
        [torch.zeros(3), torch.ones(3, dtype=torch.int32)],
        [{"row": torch.zeros(3)}, {"row": torch.ones(3)}],
        [torch.zeros(0), torch.ones(0)],
        [1, 2],
        [image(1), 7],
        [],
    ],
)
def test_all_else_is_left_to_where_each_is_opened(samples: list[Any]) -> None:
    assert collate_payloads(payloads_of(samples, in_a_row=False)) is None


def test_kinds_that_torch_widens_come_as_torch_makes_them() -> None:
    samples = [(image(0), 1), (image(1), 2.5), (image(2), True)]
    made = collate_payloads(payloads_of(samples, in_a_row=True))
    assert made is not None
    assert made[1].tolist() == opened(samples)[1].tolist() == default_collate(samples)[1].tolist()
    assert made[1].dtype == default_collate(samples)[1].dtype


def test_a_rule_of_the_users_for_tensors_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, **_: len(batch))
    assert collate_payloads(payloads_of([image(1), image(2)], in_a_row=True)) is None


def test_a_small_frame_that_is_cut_short_is_not_believed() -> None:
    payloads = payloads_of([torch.arange(8), torch.arange(8)], in_a_row=False)
    table, (frame,) = payloads[1]
    assert collate_payloads(payloads) is not None
    assert collate_payloads([payloads[0], (table, [memoryview(frame)[:64]])]) is None


@pytest.mark.parametrize("cut", ["head", "buffer"])
def test_frames_that_do_not_fit_are_not_believed(cut: str) -> None:
    payloads = payloads_of([image(1), image(2)], in_a_row=False)
    table, (head, buffer) = payloads[1]
    short = [head[:-1], buffer] if cut == "head" else [head, buffer[:-64]]
    assert collate_payloads([payloads[0], (table, short)]) is None
