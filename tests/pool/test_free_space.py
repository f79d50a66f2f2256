"""The free bytes against real memory: whatever is taken and freed, no byte is given out twice, and none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.invariants import validate
from torch_dpflow.errors import OptionError
from torch_dpflow.pool.planning.free_space import FreeSpace

CAPACITY = 64


@given(steps=st.lists(st.one_of(st.integers(0, 40), st.floats(0, 1, exclude_max=True)), max_size=60))
def test_no_byte_is_given_out_twice_and_none_is_lost(steps: list[int | float]) -> None:
    space, taken, held = FreeSpace(CAPACITY), bytearray(CAPACITY), list[tuple[int, int]]()
    for step in steps:
        if isinstance(step, int):
            offset = space.take(step)
            if offset is None:
                assert bytes(step) not in taken  # no gap of this size
            else:
                assert not any(taken[offset : offset + step])
                taken[offset : offset + step] = b"x" * step
                held.append((offset, step))
        elif held:
            offset, size = held.pop(int(step * len(held)))
            taken[offset : offset + size] = bytes(size)
            space.free(offset, size)
        validate(space)
        assert space.used == taken.count(b"x")
    for offset, size in held:
        space.free(offset, size)
    assert space.take(CAPACITY) == 0  # all of it can be given out again
    with pytest.raises(OptionError):
        FreeSpace(0)
