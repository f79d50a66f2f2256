"""Receive memory against every order of loans and drops: nothing that somebody sees is ever lent again."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.errors import OptionError
from torch_dpflow.pool.transport.data_connection import ReceiveMemory

SIZES = st.sampled_from([1, 2, 63, 64, 65, 100, 110])
#: What a user may keep of a view, each as something that can be compared with bytes.
KEPT = {
    "view": lambda view: view,
    "slice": lambda view: view[len(view) // 2 :],
    "cast": lambda view: view.toreadonly().cast("c").cast("B"),
    "array": lambda view: np.frombuffer(view, np.uint8)[::2],
    "tensor": lambda view: torch.frombuffer(view, dtype=torch.uint8),
}
steps = st.lists(st.one_of(st.tuples(SIZES, st.sampled_from([*KEPT])), st.floats(0, 1, exclude_max=True)), max_size=60)


def written(kept: object) -> set[int]:
    return {*np.asarray(kept).view(np.uint8).tolist()}


@given(steps=steps, max_bytes=st.sampled_from([0, 100, 1_000, 1 << 20]))
def test_what_somebody_sees_is_not_lent_again(steps: list[tuple[int, str] | float], max_bytes: int) -> None:
    memory = ReceiveMemory(max_bytes)
    held: dict[int, object] = {}
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            size, kind = step
            view = memory.lend(size)
            assert view.nbytes == size
            view[:] = bytes([number]) * size
            held[number] = KEPT[kind](view)
            del view
        elif held:
            del held[[*held][int(step * len(held))]]
        for one, kept in held.items():
            assert written(kept) <= {one}


@pytest.mark.parametrize("kind", [*KEPT])
def test_what_nobody_sees_any_more_is_used_again(kind: str) -> None:
    memory = ReceiveMemory(1 << 20)
    view = memory.lend(110_000)
    place = np.frombuffer(view, np.uint8).ctypes.data
    kept = KEPT[kind](view)
    del view
    other = memory.lend(110_000)
    assert np.frombuffer(other, np.uint8).ctypes.data != place
    del kept
    again = memory.lend(109_000)  # a record of about the size
    assert np.frombuffer(again, np.uint8).ctypes.data == place


def test_other_threads_may_drop_what_was_lent() -> None:
    memory = ReceiveMemory(1 << 20)
    held = [[memory.lend(1_000) for _ in range(50)] for _ in range(4)]
    threads = [threading.Thread(target=own.clear) for own in held]
    for thread in threads:
        thread.start()
    kept = [memory.lend(1_000) for _ in range(200)]
    for thread in threads:
        thread.join()
    kept += [memory.lend(1_000) for _ in range(200)]
    for number, view in enumerate(kept):
        view[:] = number.to_bytes(2, "little") * 500
    assert [int.from_bytes(view[:2], "little") for view in kept] == [*range(400)]


def is_used_again(memory: ReceiveMemory, size: int) -> bool:
    """Whether a loan has what the last one of this size has written; new memory has zeros."""
    memory.lend(size)[:] = b"\1" * size
    return memory.lend(size)[0] == 1


def test_blocks_of_sizes_that_are_asked_for_no_more_are_given_up() -> None:
    memory = ReceiveMemory(10_240)
    assert is_used_again(memory, 10_000)
    found = [is_used_again(memory, 5_000) for _ in range(4)]
    assert found == [False, False, True, True]
    assert not is_used_again(ReceiveMemory(0), 1)


def test_what_is_kept_is_a_number_of_bytes() -> None:
    with pytest.raises(OptionError, match="max_bytes"):
        ReceiveMemory(-1)
