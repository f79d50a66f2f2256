"""Tasks of a shared flow as one frame, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.cluster.messages.shard import key_to_load, pack_task, unpack_task
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.serialization.codec import decode, encode

NUMBERS = st.integers(0, 2**63 - 1)


@given(NUMBERS, NUMBERS)
def test_a_task_without_input_is_its_numbers(key: int, draw: int) -> None:
    task = unpack_task(memoryview(pack_task(key, draw, None)))
    assert (task.key, task.draw, task.input) == (key, draw, None)


@pytest.mark.parametrize("value", [None, "text", b"x" * 100_000, [torch.arange(5), torch.ones(3, 40_000)]], ids=type)
def test_an_input_travels_with_its_task_and_is_the_workers_own(value: Any) -> None:
    table, frames = encode(value)
    task = unpack_task(memoryview(pack_task(7, 9, (table, frames))))
    assert (task.key, task.draw) == (7, 9)
    assert task.input is not None
    for _ in range(2):
        opened = decode(*task.input)
        assert repr(opened) == repr(value)
    if isinstance(opened, list):
        opened[1].zero_()
        assert value[1].sum() == 120_000


def unpacked_input(packed: bytes) -> Any:
    task = unpack_task(memoryview(packed))
    assert task.input is not None
    return decode(*task.input)


@given(st.integers(0, 200), st.binary(max_size=3))
def test_what_is_cut_short_or_longer_is_refused(cut: int, more: bytes) -> None:
    table, frames = encode(torch.arange(9))
    packed = bytes(pack_task(7, 9, (table, frames)))
    changed = packed[:cut] + more
    if changed != packed:
        with pytest.raises(MessageError):
            unpacked_input(changed)


@given(NUMBERS, st.integers(0, 30))
def test_the_key_of_a_task_that_loads_is_read_off_it(key: int, cut: int) -> None:
    packed = bytes(pack_task(key, 1, None))
    assert key_to_load(memoryview(packed)) == key
    assert key_to_load(memoryview(packed)[:cut]) == (key if cut >= len(packed) else None)
    assert key_to_load(memoryview(pack_task(key, 1, encode(torch.arange(9))))) is None
