"""Iterable datasets of shards resume with another number of workers and ranks: every sample once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpflow import DPFlowDataLoader, ShardedIterableDataset
from torch_dpflow.errors import OptionError, StateError


class Shards(ShardedIterableDataset):
    """Shards of these sizes; a sample is its number in all of them."""

    def __init__(self, sizes: list[int], **ranks: int) -> None:
        super().__init__(len(sizes), **ranks)
        self.sizes = sizes

    def read_shard(self, number: int, start: int) -> Iterator[int]:
        first = sum(self.sizes[:number])
        return iter(range(first + start, first + self.sizes[number]))


def loader_of(dataset: Any, workers: int, batch_size: int = 3, **options: Any) -> DPFlowDataLoader[Any]:
    return DPFlowDataLoader(dataset, batch_size=batch_size, num_workers=workers, **options)


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


SIZES = [7, 0, 5, 11, 3, 1, 8]
EVERYTHING = Counter(range(sum(SIZES)))


@pytest.mark.parametrize(("before", "after"), [(0, 2), (1, 3), (3, 1), (2, 0), (2, 2)])
def test_at_every_batch_with_another_number_of_workers(before: int, after: int) -> None:
    first = loader_of(Shards(SIZES), before)
    read: list[int] = []
    states = [(first.state_dict(), list(read))]
    for batch in first:
        read += batch.tolist()
        states.append((first.state_dict(), list(read)))
    for state, begun in states[:-1:3]:
        second = loader_of(Shards(SIZES), after)
        second.load_state_dict(state)
        assert Counter(begun + numbers(second)) == EVERYTHING
    assert Counter(numbers(second)) == EVERYTHING  # the epoch after it
    at_end = loader_of(Shards(SIZES), after)
    at_end.load_state_dict(states[-1][0])
    assert Counter(numbers(at_end)) in (Counter(), EVERYTHING)


@pytest.mark.parametrize("persistent", [False, True])
def test_several_sizes_in_one_epoch(persistent: bool) -> None:
    state, read = None, []
    for workers, batches, batch_size in ((3, 2, 4), (1, 1, 4), (2, 3, 4), (3, 100, 4)):
        loader = loader_of(Shards(SIZES), workers, batch_size, persistent_workers=persistent)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        read += numbers(islice(iterator, batches))
        state = loader.state_dict()
        del iterator, loader
    assert Counter(read) == EVERYTHING


def _states(sizes: list[int], replicas: int, workers: int, batches: int) -> tuple[list[dict[str, Any]], list[int]]:
    states, read = [], []
    for rank in range(replicas):
        loader = loader_of(Shards(sizes, num_replicas=replicas, rank=rank), workers)
        read += numbers(islice(iter(loader), batches))
        states.append(loader.state_dict())
    return states, read


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    batches=st.integers(0, 4),
)
@settings(max_examples=25)
def test_another_number_of_ranks_from_all_their_states(sizes: list[int], before: int, after: int, batches: int) -> None:
    states, read = _states(sizes, before, 0, batches)
    if any(state["fresh"] for state in states) != all(state["fresh"] for state in states):
        return  # some ranks have ended their epoch
    if all(state["fresh"] for state in states):
        read = []
    for rank in range(after):
        loader = loader_of(Shards(sizes, num_replicas=after, rank=rank), 0)
        loader.load_state_dict(states)
        read += numbers(loader)
    assert Counter(read) == Counter(range(sum(sizes)))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_rank_s_own_state_is_enough_for_another_number_of_workers(before: int, after: int) -> None:
    read: list[int] = []
    for rank in range(2):
        first = loader_of(Shards(SIZES, num_replicas=2, rank=rank), before)
        read += numbers(islice(iter(first), 2))
        second = loader_of(Shards(SIZES, num_replicas=2, rank=rank), after)
        second.load_state_dict(first.state_dict())
        read += numbers(second)
    assert Counter(read) == EVERYTHING


def test_more_ranks_of_as_many_workers_continue_the_state_of_one() -> None:
    first = loader_of(Shards(SIZES, num_replicas=1, rank=0), 2)
    read = numbers(islice(iter(first), 4))
    for rank in range(3):
        loader = loader_of(Shards(SIZES, num_replicas=3, rank=rank), 2)
        loader.load_state_dict(first.state_dict())
        read += numbers(loader)
    assert Counter(read) == EVERYTHING


def test_other_ranks_need_all_states() -> None:
    states, _ = _states(SIZES, 2, 0, 1)
    loader = loader_of(Shards(SIZES, num_replicas=1, rank=0), 0)
    loader.load_state_dict(states[0])
    with pytest.raises(StateError, match="give load_state_dict\\(\\) a list of the states of all ranks"):
        list(loader)
    same = loader_of(Shards(SIZES, num_replicas=2, rank=1), 0)
    same.load_state_dict(states[1])
    assert numbers(same)


def test_states_of_other_shards_are_refused() -> None:
    loader = loader_of(Shards(SIZES), 2)
    next(iter(loader))
    state = loader.state_dict()
    other = loader_of(Shards([*SIZES, 1]), 1)
    other.load_state_dict(state)
    with pytest.raises(StateError, match="7 shards, this one has 8"):
        list(other)
    dataset = Shards(SIZES)
    for damaged in (
        None,
        {},
        dataset.state_dict() | {"shards": {"99": 1}},
        dataset.state_dict() | {"shards": {"1": -2}},
    ):
        with pytest.raises(StateError, match="is no state of a ShardedIterableDataset"):
            dataset.load_state_dict(damaged)  # type: ignore[arg-type]


def test_a_dataset_without_shards_is_refused_as_before_with_the_hint() -> None:
    class Plain(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    loader = loader_of(Plain(), 2)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(StateError, match="a ShardedIterableDataset resumes with any number"):
        loader_of(Plain(), 1).load_state_dict(state)


def test_numbers_of_shards_are_checked() -> None:
    with pytest.raises(OptionError, match="num_shards=0"):
        Shards([])
