"""MixtureSampler: proportions, phases, ranks, and loaders that resume it."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from fractions import Fraction
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader

from tests.contracts.index_samplers import MixtureContract
from torch_dpflow import DPFlowDataLoader
from torch_dpflow._core.permutation import torch_order
from torch_dpflow.errors import OptionError, OptionTypeError, StateError
from torch_dpflow.samplers import BudgetBatchSampler, MixtureSampler, Phase
from torch_dpflow.samplers.epoch_sampler import mixed_seed
from torch_dpflow.samplers.mixture import MAX_PARTS, Schedule, turns_of, whole_parts


class TestMixtureSampler(MixtureContract):
    def make_mixture(self, lengths: Any, weights: Any, **options: Any) -> MixtureSampler:
        return MixtureSampler(lengths, weights, **options)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 10) | st.integers(0, 150), min_size=1, max_size=8).filter(any))
def test_turns_deviate_by_no_more_than_tijdemans_bound(parts: list[int]) -> None:
    """For k sources the bound is 1 - 1/m with m = 2k - 2; compared in whole numbers."""
    turns, period = np.array(turns_of(parts)), sum(parts)
    m = max(1, 2 * sum(part > 0 for part in parts) - 2)
    for source, part in enumerate(parts):
        drawn = np.cumsum(turns == source)
        assert (abs(drawn * period - np.arange(1, period + 1) * part) * m <= (m - 1) * period).all()
        assert drawn[-1] == part


_weights = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)


@settings(max_examples=60, deadline=None)
@given(_weights, st.lists(st.tuples(st.integers(1, 60), _weights), max_size=3), st.integers(0, 250))
def test_phases_are_computed_at_any_place_as_in_sequence(first: Any, later: Any, deep: int) -> None:
    phases = [Phase(0, first)]
    for after, weights in later:
        phases.append(Phase(phases[-1].start + after, weights))
    schedule = Schedule(phases, 3)
    sources, numbers = schedule.at(np.arange(300))
    for number, phase in enumerate(phases):
        stop = phases[number + 1].start if number + 1 < len(phases) else 300
        part, n = sources[phase.start : stop], np.arange(1, 1 + stop - phase.start)
        for source, weight in enumerate(phase.weights):
            wished = n * weight / sum(phase.weights)
            assert (abs(np.cumsum(part == source) - wished) <= 0.75 + 1e-9).all()
    for source in range(3):
        assert numbers[sources == source].tolist() == list(range((sources == source).sum()))
    anew = Schedule(phases, 3)
    assert anew.counts(deep).tolist() == np.bincount(sources[:deep], minlength=3).tolist()
    assert [part.tolist() for part in anew.at(np.array([deep]))] == [[sources[deep]], [numbers[deep]]]


def test_weights_are_whole_parts_or_rounded_to_them() -> None:
    assert whole_parts([0.7, 0.2, 0.1], 3) == (7, 2, 1)
    assert whole_parts([3, Fraction(1, 2)], 2) == (6, 1)
    assert whole_parts([np.float64(0.5), np.int64(2)], 2) == (1, 4)
    third = whole_parts([1 / 3, 2 / 3, 0.01], 3)
    assert sum(third) == MAX_PARTS
    assert third == pytest.approx(np.array([1 / 3, 2 / 3, 0.01]) / 1.01 * MAX_PARTS, abs=1)
    with pytest.raises(OptionError, match=r"source 1 is 1\.0e-09 of the sum"):
        whole_parts([1, 1e-9], 2)


def test_a_source_is_drawn_in_the_phases_that_give_it_a_weight() -> None:
    sampler = MixtureSampler([10, 10], [Phase(0, [1, 0]), Phase(30, [1, 1]), Phase(50, [0, 1])], samples=80)
    read = list(sampler)
    assert max(read[:30]) < 10 <= min(read[50:])
    assert sampler.counts(80) == [40, 40]
    assert sampler.counts(30) == [30, 0]


def test_a_position_deep_in_a_run_is_restored_at_once() -> None:
    """Turns of at most one period are computed: drawing a million million samples would not end."""
    weights = [Phase(0, [0.25, 0.75]), Phase(10**12, [1, 2])]
    sampler = MixtureSampler([1000, 50], weights, samples=10**6)
    sampler.set_epoch(2 * 10**6)
    before = list(islice(sampler, 5))
    state = sampler.state_dict()
    assert state["drawn"] == 2 * 10**12 + 5
    again = MixtureSampler([1000, 50], weights, samples=10**6)
    again.load_state_dict(state)
    whole = MixtureSampler([1000, 50], weights, samples=10**6)
    whole.set_epoch(2 * 10**6)
    assert before + list(islice(again, 5)) == list(islice(whole, 10))
    assert sampler.counts(10**12) == [25 * 10**10, 75 * 10**10]


def test_a_large_source_is_drawn_as_far_as_it_is_read() -> None:
    sampler = MixtureSampler([10, 1 << 22], [1, 3], seed=5)
    expected = torch_order(1 << 22, mixed_seed(5, 1, 0))[:75] + 10
    tracemalloc.start()
    try:
        read = [*islice(sampler, 100)]
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
    assert [sample for sample in read if sample >= 10] == expected.tolist()


def test_weights_of_later_phases_may_change_and_those_of_earlier_ones_not() -> None:
    def make(*phases: Phase) -> MixtureSampler:
        return MixtureSampler([10, 10], phases, samples=40)

    sampler = make(Phase(0, [1, 1]))
    before = list(islice(sampler, 10))
    state = json.loads(json.dumps(sampler.state_dict()))
    changed = make(Phase(0, [1, 1]), Phase(10, [0, 1]))
    changed.load_state_dict(state)
    assert min(list(changed)) >= 10
    assert len(before) == 10
    for other in (make(Phase(0, [1, 1]), Phase(9, [0, 1])), make(Phase(0, [1, 2]))):
        with pytest.raises(StateError, match="of a run with other weights"):
            other.load_state_dict(state)
    with pytest.raises(StateError, match="sources"):
        MixtureSampler([10, 11], [1, 1], samples=40).load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (([], [1]), OptionError, "sources is empty"),
        ((7, [1]), OptionTypeError, "sources=7"),
        (([5, None], [1, 1]), OptionTypeError, r"sources\[1\]=None"),
        (([5, 0], [1, 1]), OptionError, "source 1 is empty and has a weight"),
        (([5, 5], 1), OptionTypeError, "weights=1"),
        (([5, 5], [Phase(0, 1)]), OptionTypeError, "weights=1"),
        (([5, 5], [1, "x"]), OptionTypeError, "weight='x'"),
        (([5, 5], [Phase(1, [1, 1])]), OptionError, r"phases start at \[1\]"),
        (([5, 5], [Phase(0, [1, 1]), Phase(0, [1, 1])]), OptionError, r"phases start at \[0, 0\]"),
        (([5, 5], [Phase(0, [1, 1]), 1]), OptionTypeError, "not both"),
    ],
)  # fmt: skip
def test_what_is_no_mixture_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MixtureSampler(*given)


def new_sampler(**options: Any) -> MixtureSampler:
    return MixtureSampler(ConcatDataset([range(20), range(100, 130)]), [0.6, 0.4], samples=40, seed=1, **options)


def test_it_pickles_with_its_position() -> None:
    sampler = new_sampler()
    rest = iter(sampler)
    next(rest)
    again = pickle.loads(pickle.dumps(sampler))
    assert again.state_dict() == sampler.state_dict()
    assert again.counts(40) == [24, 16]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["ours", "ours, workers", "torchdata"])
def test_loaders_read_it_and_resume_it(kind: str) -> None:
    dataset: Any = ConcatDataset([range(20), range(100, 130)])

    def make() -> Any:
        if kind == "torchdata":
            stateful = pytest.importorskip("torchdata.stateful_dataloader")
            return stateful.StatefulDataLoader(dataset, batch_size=4, sampler=new_sampler())
        workers = 2 if "workers" in kind else 0
        return DPFlowDataLoader(dataset, batch_size=4, sampler=new_sampler(), num_workers=workers)

    plain = DataLoader(dataset, batch_size=4, sampler=new_sampler())
    expected = [[batch.tolist() for batch in plain] for _ in range(2)]
    assert all(sum(value < 20 for value in chain.from_iterable(epoch)) == 24 for epoch in expected)
    loader = make()
    batches = iter(loader)
    begun = [next(batches).tolist() for _ in range(3)]
    state = loader.state_dict()
    del batches
    resumed = make()
    resumed.load_state_dict(state)
    assert begun + [batch.tolist() for batch in resumed] == expected[0]
    assert [batch.tolist() for batch in resumed] == expected[1]


@pytest.mark.parametrize("kind", ["mixture", "budget"])
def test_a_loader_of_other_ranks_continues_an_epoch(kind: str) -> None:
    """Four ranks become three, with another batch size; each sample is read once."""
    lengths = [1 + number % 20 for number in range(90)]

    def make(ranks: int, rank: int, batch_size: int) -> DPFlowDataLoader[Any]:
        ranked: dict[str, Any] = {"num_replicas": ranks, "rank": rank}
        if kind == "budget":
            return DPFlowDataLoader(range(90), batch_sampler=BudgetBatchSampler(lengths, 40, **ranked))
        sampler = MixtureSampler([30, 60], [2, 1], samples=90, **ranked)
        return DPFlowDataLoader(range(90), batch_size=batch_size, sampler=sampler)

    loaders = [make(4, rank, 3) for rank in range(4)]
    iterators = [iter(loader) for loader in loaders]
    read = [key for iterator in iterators for _ in range(3) for key in next(iterator).tolist()]
    state = json.loads(json.dumps(loaders[0].state_dict()))
    others = [make(3, rank, 5) for rank in range(3)]
    for other in others:
        other.load_state_dict(state)
        read += [key for batch in other for key in batch.tolist()]
    assert sorted(read) == sorted(key for batch in make(1, 0, 3) for key in batch.tolist())


def test_weights_of_a_phase_that_ranks_out_of_step_have_reached_are_fixed() -> None:
    def make(ranks: int, rank: int, later: list[float], start: int = 60) -> MixtureSampler:
        phases = [Phase(0, [0.5, 0.5]), Phase(start, later)]
        return MixtureSampler([50, 50], phases, samples=100, num_replicas=ranks, rank=rank)

    states, read = [], []
    for rank, steps in enumerate((20, 20, 20, 13)):  # places 52 to 78 are read but for those of rank 3
        sampler = make(4, rank, [0.5, 0.5])
        read += list(islice(sampler, steps))
        states.append(sampler.state_dict())
    alone = make(1, 0, [0.5, 0.5])
    alone.load_state_dict(states)
    state = alone.state_dict()
    assert state["drawn"] == 80
    for other in (states, state):
        with pytest.raises(StateError, match="of a run with other weights"):
            make(1, 0, [0.9, 0.1]).load_state_dict(other)
    changed = make(1, 0, [0.9, 0.1], start=80)
    with pytest.raises(StateError, match="of a run with other weights"):
        changed.load_state_dict(state)
    assert sorted(read + list(alone)) == list(range(100))


def test_what_was_drawn_is_the_whole_epoch_if_only_places_of_slower_ranks_are_left() -> None:
    states = []
    for rank, steps in enumerate((25, 25, 25, 13)):
        sampler = MixtureSampler([50, 50], [1, 1], num_replicas=4, rank=rank)
        list(islice(sampler, steps))
        states.append(sampler.state_dict())
    alone = MixtureSampler([50, 50], [1, 1], num_replicas=1, rank=0)
    alone.load_state_dict(states)
    assert alone.state_dict()["drawn"] == 100
    next(iter(alone))
    assert alone.state_dict()["drawn"] == 100
