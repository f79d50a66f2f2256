"""The layout against real memory: whatever is stored, read and moved, bytes are where they are said to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.invariants import validate
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.pool.planning.block_allocator import BlockAllocator

CAPACITY = 64
steps = st.lists(
    st.one_of(st.lists(st.integers(0, 20), min_size=0, max_size=4), st.floats(0, 1, exclude_max=True)),
    max_size=40,
)


def contents(key: int, length: int) -> bytes:
    return bytes((key * 31 + place) % 251 for place in range(length))


@given(steps=steps)
def test_bytes_are_where_they_are_said_to_be(steps: list[list[int] | float]) -> None:
    space = BlockAllocator(CAPACITY)
    memory = bytearray(CAPACITY)
    held: dict[int, int] = {}
    number = 0
    for step in steps:
        if isinstance(step, float):
            if held:
                key = list(held)[int(step * len(held))]
                offset, _ = space.locate(key)
                assert memory[offset : offset + held[key]] == contents(key, held[key])
                space.spend(key)
                del held[key]
        else:
            samples = [(number + place, length) for place, length in enumerate(step)]
            number += len(samples)
            if space.store(samples):
                for key, length in samples:
                    offset, _ = space.locate(key)
                    memory[offset : offset + length] = contents(key, length)
                held |= dict(samples)
        validate(space)
        assert sum(held.values()) <= space.used <= CAPACITY
        for key, length in held.items():
            offset, stored_length = space.locate(key)
            assert stored_length == length
            assert memory[offset : offset + length] == contents(key, length)
    for key in held:
        space.spend(key)
    assert space.store([(-1, CAPACITY)])  # all of it can be given out again


def test_a_block_is_free_once_all_of_it_was_read_and_nothing_moves() -> None:
    space = BlockAllocator(40)
    space.store([(0, 10), (1, 10)])
    space.store([(2, 20)])
    space.spend(0)
    assert not space.store([(3, 5)])
    assert space.used == 40
    space.spend(1)
    assert space.store([(3, 5)])
    assert space.locate(3) == (0, 5)
    assert space.locate(2) == (20, 20)


def test_what_is_wrong_is_said_and_changes_nothing() -> None:
    space = BlockAllocator(10)
    space.store([("a", 1)])
    with pytest.raises(UsageError, match="stored already"):
        space.store([("b", 1), ("a", 1)])
    with pytest.raises(UsageError, match="stored already"):
        space.store([("b", 1), ("b", 1)])
    with pytest.raises(UsageError, match="length -1"):
        space.store([("b", -1)])
    with pytest.raises(UsageError, match="'b'"):
        space.spend("b")
    assert not space.store([("b", 10)])
    assert space.used == 1
    with pytest.raises(UsageError, match="'b'"):
        space.locate("b")
    validate(space)


def test_a_capacity_is_a_positive_number() -> None:
    with pytest.raises(OptionError, match="capacity"):
        BlockAllocator(0)
