"""Both layouts against real memory: whatever is stored, read and moved, bytes are where they are said to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sliding_space import SlidingSpace
from torch_dpflow.dataservice.planning.spaces import BlockSpace, Space
from torch_dpflow.errors import OptionError, UsageError

CAPACITY = 64
steps = st.lists(
    st.one_of(st.lists(st.integers(0, 20), min_size=0, max_size=4), st.floats(0, 1, exclude_max=True)),
    max_size=40,
)


def contents(key: int, length: int) -> bytes:
    return bytes((key * 31 + place) % 251 for place in range(length))


@given(steps=steps, threshold=st.sampled_from([None, 0, 16, 48, CAPACITY]))
def test_bytes_are_where_they_are_said_to_be(steps: list[list[int] | float], threshold: int | None) -> None:
    space = BlockSpace(CAPACITY) if threshold == 0 else SlidingSpace(CAPACITY, threshold)
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
            stored = space.store(samples)
            if stored is None:
                assert isinstance(space, BlockSpace) or sum(step) > CAPACITY - space.live
            else:
                for source, target, length in stored.moves:
                    assert target < source
                    memory[target : target + length] = memory[source : source + length]
                for (key, length), offset in zip(samples, stored.offsets):
                    memory[offset : offset + length] = contents(key, length)
                held |= dict(samples)
        space.validate()
        assert space.live == sum(held.values())
        for key, length in held.items():
            offset, stored_length = space.locate(key)
            assert stored_length == length
            assert memory[offset : offset + length] == contents(key, length)
    for key in held:
        space.spend(key)
    assert space.store([(-1, CAPACITY)]) is not None  # all of it can be given out again


def test_the_line_is_compacted_when_it_reaches_its_threshold_and_neighbours_move_at_once() -> None:
    space = SlidingSpace(100, 50)
    assert space.store([(key, 10) for key in range(5)]) == ([], [0, 10, 20, 30, 40])
    for key in (0, 2):
        space.spend(key)
    stored = space.store([(5, 10)])
    assert stored is not None
    assert [tuple(move) for move in stored.moves] == [(10, 0, 10), (30, 10, 20)]
    assert stored.offsets == [30]
    assert space.moved == 3


def test_a_block_is_free_once_all_of_it_was_read_and_nothing_moves() -> None:
    space = BlockSpace(40)
    space.store([(0, 10), (1, 10)])
    space.store([(2, 20)])
    space.spend(0)
    assert space.store([(3, 5)]) is None
    assert space.used == 40
    space.spend(1)
    assert space.store([(3, 5)]) == ([], [0])
    assert space.moved == 0


@pytest.mark.parametrize("space", [SlidingSpace(10), BlockSpace(10)], ids=["line", "blocks"])
def test_what_is_wrong_is_said_and_changes_nothing(space: Space) -> None:
    space.store([("a", 1)])
    with pytest.raises(UsageError, match="stored already"):
        space.store([("b", 1), ("a", 1)])
    with pytest.raises(UsageError, match="stored already"):
        space.store([("b", 1), ("b", 1)])
    with pytest.raises(UsageError, match="length -1"):
        space.store([("b", -1)])
    with pytest.raises(UsageError, match="'b'"):
        space.spend("b")
    assert space.store([("b", 10)]) is None
    assert space.live == 1
    assert not space.holds("b")
    space.validate()


def test_a_threshold_lies_within_the_capacity() -> None:
    with pytest.raises(OptionError, match="threshold=11"):
        SlidingSpace(10, 11)
    with pytest.raises(OptionError, match="capacity"):
        BlockSpace(0)
