"""A payload that a service keeps: whole, unopened, and free of its worker's shared memory."""

from __future__ import annotations

import os

import pytest
import torch

from torch_dpflow.cluster.messages.shard import SAMPLE
from torch_dpflow.cluster.shard.worker_messages import detach, text_payload
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.serialization.codec import decode, encode


@pytest.mark.parametrize("width", [1, 10_000, 200_000])
def test_what_lay_in_shared_memory_is_copied_and_given_back(width: int) -> None:
    arena, reader = Arena(budget_bytes=1 << 24), ArenaReader(os.getpid())
    sample = {"image": torch.arange(float(width)), "label": 3, "mask": torch.ones(width, dtype=torch.bool)}
    table, frames = encode(sample, arena=arena)
    views = [memoryview(bytearray(frame)) for frame in frames]
    payload = detach(SAMPLE, table, views, reader)
    assert payload.table.blocks == ()
    assert payload.table.frames == len(payload.frames)
    for _ in range(2):
        copies = [memoryview(bytearray(frame)) for frame in payload.frames]
        back = decode(payload.table, copies)
        assert torch.equal(back["image"], sample["image"])
        assert torch.equal(back["mask"], sample["mask"])
    held = arena.allocated_bytes
    for _ in range(5):
        table, frames = encode(sample, arena=arena)
        detach(SAMPLE, table, [memoryview(bytearray(frame)) for frame in frames], reader)
    assert arena.allocated_bytes == held
    arena.close()
    reader.close()


def test_what_does_not_fit_is_refused() -> None:
    table, frames = encode([1, 2])
    with pytest.raises(MessageError, match="came with 0"):
        detach(SAMPLE, table, [], None)
    arena = Arena(budget_bytes=1 << 24)
    table, frames = encode(torch.zeros(200_000), arena=arena)
    with pytest.raises(MessageError, match="cannot be read here"):
        detach(SAMPLE, table, [memoryview(frame) for frame in frames], None)
    arena.close()


def test_a_text_is_a_payload_too() -> None:
    payload = text_payload(SAMPLE, "what happened")
    assert bytes(payload.frames[0]) == b"what happened"
    assert payload.nbytes == len("what happened")
