"""BlockShuffleSampler: every row once, few blocks at a time, and resumed at any position with any number of ranks."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpflow.errors import OptionError, OptionTypeError, StateError
from torch_dpflow.samplers import BlockShuffleSampler
from torch_dpflow.samplers.block_shuffle import block_order


class Blocks:
    """A dataset of blocks."""

    def __init__(self, sizes: list[int]) -> None:
        self.blocks = np.array(sizes, np.int64)

    def __len__(self) -> int:
        return int(self.blocks.sum())


SIZES = st.lists(st.integers(0, 20), min_size=1, max_size=20).filter(sum)


@given(sizes=SIZES, window=st.integers(1, 30), ranks=st.integers(1, 9), seed=st.integers(0, 2**40))
def test_an_order_has_every_row_once(sizes: list[int], window: int, ranks: int, seed: int) -> None:
    order = block_order(np.array(sizes, np.int64).tobytes(), window, ranks, seed)
    assert sorted(order.tolist()) == [*range(sum(sizes))]


@pytest.mark.parametrize("ranks", [1, 3])
def test_drawing_an_order_takes_little_more_memory_than_the_order(ranks: int) -> None:
    blocks = np.random.default_rng(ranks).integers(900, 1_100, 1_000).tobytes()
    tracemalloc.start()
    try:
        order = block_order(blocks, 8, ranks, 0)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * order.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_rank_reads_the_blocks_of_a_window_at_a_time(replicas: int) -> None:
    dataset = Blocks([50] * 64)
    read: list[set[int]] = []
    for rank in range(replicas):
        rows = [*BlockShuffleSampler(dataset, window=4, num_replicas=replicas, rank=rank)]
        blocks = np.array(rows) // 50
        windows = blocks.reshape(-1, 4 * 50)
        assert all(len({*window}) == 4 for window in windows.tolist())
        assert any(window[:50].tolist() != sorted(window[:50].tolist()) for window in windows)
        read.append({*blocks.tolist()})
    assert sum(map(len, read)) == 64  # no block is read by two ranks


def test_epochs_and_seeds_differ_and_repeat() -> None:
    dataset = Blocks([5] * 20)
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (7, 0), (0, 0)):
        sampler = BlockShuffleSampler(dataset, seed=seed)
        sampler.set_epoch(epoch)
        orders.append([*sampler])
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    sampler = BlockShuffleSampler(dataset)
    assert [[*sampler], [*sampler]] == orders[:2]


@given(data=st.data(), sizes=SIZES, window=st.integers(1, 8), drop_last=st.booleans())
@settings(max_examples=60)
def test_an_epoch_resumes_with_any_number_of_ranks(data: Any, sizes: list[int], window: int, drop_last: bool) -> None:
    dataset, total = Blocks(sizes), sum(sizes)
    read: list[int] = []
    state: dict[str, Any] | None = None
    replicas = data.draw(st.lists(st.integers(1, 8), min_size=2, max_size=4))
    for turn, count in enumerate(replicas):
        samplers = [
            BlockShuffleSampler(dataset, window=window, num_replicas=count, rank=rank, drop_last=drop_last)
            for rank in range(count)
        ]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        is_last = turn == len(replicas) - 1
        if drop_last and total - len(read) < count:  # all that is left is dropped
            break
        left = samplers[0].samples_left
        steps = left if is_last else data.draw(st.integers(0, left))
        iterators = [iter(sampler) for sampler in samplers]
        read += [next(iterator) for _ in range(steps) for iterator in iterators]
        state = samplers[0].state_dict()
        if steps == left:  # the next iteration is another epoch
            break
    counts = np.bincount(read, minlength=total)
    if drop_last:
        assert counts.max(initial=0) <= 1
        assert (counts == 0).sum() < sum(replicas)
    else:
        assert counts.min() >= 1
        assert (counts > 1).sum() < sum(replicas)


def test_the_next_epoch_is_that_of_a_run_that_began_with_these_ranks() -> None:
    dataset = Blocks([5] * 20)
    before = BlockShuffleSampler(dataset, num_replicas=4, rank=0)
    iterator = iter(before)
    [next(iterator) for _ in range(3)]
    after = BlockShuffleSampler(dataset, num_replicas=2, rank=1)
    after.load_state_dict(before.state_dict())
    assert len([*after]) == (100 - 12) // 2
    after.set_epoch(1)
    fresh = BlockShuffleSampler(dataset, num_replicas=2, rank=1)
    fresh.set_epoch(1)
    assert [*after] == [*fresh]


def test_states_of_other_blocks_are_refused() -> None:
    state = BlockShuffleSampler(Blocks([5, 5])).state_dict()
    for other in (BlockShuffleSampler(Blocks([4, 6])), BlockShuffleSampler(Blocks([5, 5]), window=2)):
        with pytest.raises(StateError, match="the state was taken with"):
            other.load_state_dict(state)
    for ranks in (None, 0, "2", True):
        with pytest.raises(StateError, match="damaged"):
            BlockShuffleSampler(Blocks([5, 5])).load_state_dict(state | {"began_with": ranks})


def test_what_is_no_dataset_of_blocks_is_refused() -> None:
    for dataset in ([1, 2], SimpleNamespace(blocks=[1])):
        with pytest.raises(OptionTypeError, match="without `blocks`"):
            BlockShuffleSampler(dataset)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="window=0"):
        BlockShuffleSampler(Blocks([1]), window=0)
