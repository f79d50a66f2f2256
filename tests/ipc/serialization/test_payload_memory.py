"""Where the memory of a payload lies, and when it is given back."""

from __future__ import annotations

import os
import weakref

import numpy as np
import pytest
import torch

from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.serialization.codec import LARGE_BYTES, decode, discard, encode


def test_small_buffers_share_a_frame_and_big_ones_have_their_own() -> None:
    small = [torch.full((8,), index) for index in range(50)]
    big = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    table, frames = encode([small, big])
    assert table.frames == len(frames) == 2
    assert isinstance(frames[1], memoryview)
    assert np.shares_memory(np.asarray(frames[1]), big.numpy())


def test_big_buffers_leave_the_frames_for_the_arena() -> None:
    arena = Arena(budget_bytes=1 << 28)
    table, frames = encode([torch.zeros(1 << 20), b"x" * 1_000_000], arena=arena)
    assert sum(len(frame) for frame in frames) < 1000
    assert table.nbytes > (4 << 20) + 1_000_000


def test_without_room_in_the_arena_the_bytes_travel_in_frames() -> None:
    arena = Arena(budget_bytes=0)
    tensor = torch.randn(1 << 16)
    table, frames = encode(tensor, arena=arena)
    assert torch.equal(decode(table, frames), tensor)


def test_a_discarded_payload_gives_its_memory_back() -> None:
    arena = Arena(budget_bytes=1 << 26)
    reader = ArenaReader(os.getpid())
    for _ in range(20):
        table, _ = encode([torch.zeros(1 << 20), b"x" * 1_000_000], arena=arena)
        discard(table, reader=reader)
    assert arena.segments == 2
    discard(table, reader=reader)
    discard(encode(torch.zeros(1 << 20))[0])


@pytest.mark.parametrize("missing", [False, True], ids=["head of nulls", "no frames"])
def test_a_payload_that_fails_to_open_gives_its_memory_back(missing: bool) -> None:
    arena = Arena(budget_bytes=1 << 26)
    reader = ArenaReader(os.getpid())
    for _ in range(20):
        table, frames = encode([torch.zeros(1 << 20), torch.ones(1 << 20)], arena=arena)
        with pytest.raises(MessageError):
            decode(table, [] if missing else [bytes(len(frames[0]))], reader=reader)
    assert arena.segments == 2


@pytest.mark.usefixtures("uncollected")
def test_memory_is_free_as_soon_as_nobody_uses_it() -> None:
    arena = Arena(budget_bytes=1 << 26)
    reader = ArenaReader(os.getpid())
    for _ in range(10):
        table, frames = encode({"x": torch.zeros(1 << 18), "y": np.zeros(1 << 18)}, arena=arena)
        carried = decode(table, frames, reader=reader)
        assert arena.segments == 2
        del carried


@pytest.mark.usefixtures("uncollected")
def test_an_encoded_object_is_not_kept() -> None:
    array = np.zeros(1 << 18)
    alive = weakref.ref(array)
    table, frames = encode([array])
    del array
    assert alive() is not None  # the frames are not sent yet
    assert table.nbytes > 1 << 21
    del frames
    assert alive() is None
