"""Payloads whose tensors are laid out in the order of their elements, for jobs that put them together."""

from __future__ import annotations

import os

import pytest
import torch

from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.serialization.codec import decode, encode


def travelled(obj: object) -> object:
    return decode(*encode(obj, contiguous=True))


def image() -> torch.Tensor:
    """As `pil_to_tensor` makes it: channels first to look at, last in memory."""
    return torch.arange(120 * 120 * 3, dtype=torch.int32).reshape(120, 120, 3).permute(2, 0, 1)


def test_an_image_is_laid_out_once_and_keeps_its_values() -> None:
    arrived = travelled(image())
    assert isinstance(arrived, torch.Tensor)
    assert torch.equal(arrived, image())
    assert arrived.is_contiguous()
    assert not decode(*encode(image())).is_contiguous(), "without being asked for, strides stay"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8, 3, 64, 64).contiguous(memory_format=torch.channels_last),  # chosen by who made it
        torch.zeros(10, 20).T,  # too small to matter
    ],
    ids=["four dimensions", "small"],
)
def test_others_keep_their_strides(tensor: torch.Tensor) -> None:
    arrived = travelled(tensor)
    assert isinstance(arrived, torch.Tensor)
    assert arrived.stride() == tensor.stride()


def test_views_of_one_storage_keep_their_values() -> None:
    whole = image()
    arrived = travelled({"whole": whole, "row": whole[0], "again": whole.permute(1, 2, 0)})
    assert isinstance(arrived, dict)
    assert torch.equal(arrived["whole"], whole)
    assert torch.equal(arrived["row"], whole[0])
    assert torch.equal(arrived["again"], whole.permute(1, 2, 0))


def test_with_shared_memory_an_image_is_laid_out_where_it_travels() -> None:
    arena, reader = Arena(budget_bytes=1 << 22), ArenaReader(os.getpid())
    table, frames = encode(image(), arena=arena, contiguous=True)
    assert len(table.blocks) == arena.segments == 1
    arrived = decode(table, frames, reader=reader)
    assert torch.equal(arrived, image())
    assert arrived.is_contiguous()


def test_without_room_in_shared_memory_an_image_is_laid_out_all_the_same() -> None:
    table, frames = encode(image(), arena=Arena(budget_bytes=1000), contiguous=True)
    assert not table.blocks
    arrived = decode(table, frames)
    assert torch.equal(arrived, image())
    assert arrived.is_contiguous()
