"""BudgetBatchSampler: budget, padding, ranks, and loaders that resume it."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.contracts.index_samplers import BudgetContract, deal
from torch_dpflow import DPFlowDataLoader
from torch_dpflow._core.permutation import torch_order
from torch_dpflow.errors import OptionError, OptionTypeError, StateError
from torch_dpflow.samplers import BudgetBatchSampler
from torch_dpflow.samplers.budget import _permutation, upper_edges

LENGTHS = np.random.default_rng(1).lognormal(3, 0.7, 3000).clip(1, 400)


class TestBudgetBatchSampler(BudgetContract):
    def make_batches(self, lengths: Any, budget: float, **options: Any) -> BudgetBatchSampler:
        return BudgetBatchSampler(lengths, budget, **options)


@settings(deadline=None)
@given(
    longest=st.floats(1, 1000),
    ratio=st.floats(1, 1e4),
    room=st.floats(1, 1e4),
    spread=st.floats(0.01, 2),
)
def test_buckets_are_no_wider_than_the_spread(longest: float, ratio: float, room: float, spread: float) -> None:
    edges = upper_edges(longest, longest / ratio, longest * room, spread)
    assert edges[-1] == longest
    assert (edges[1:] > edges[:-1]).all()
    assert (edges[1:] <= edges[:-1] * (1 + spread) * (1 + 1e-9)).all()
    assert edges[0] < longest / ratio * (1 + spread) * (1 + 1e-9)


@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_padding_is_within_the_spread(spread: float) -> None:
    batches = list(BudgetBatchSampler(LENGTHS, 2000, spread=spread))
    cost = sum(len(batch) * LENGTHS[batch].max() for batch in batches)
    assert 1 - LENGTHS.sum() / cost < spread / (1 + spread)


@pytest.mark.parametrize("length", [1, 7, 100_000])
def test_the_order_is_that_of_earlier_states(length: int) -> None:
    """States of epochs that were drawn by `torch_order` can be continued."""
    assert np.array_equal(_permutation(length, 5), torch_order(length, 5)[:])


def test_epochs_have_other_batches_and_other_steps() -> None:
    sampler = BudgetBatchSampler(LENGTHS, 2000, seed=4)
    one, other = ([frozenset(batch) for batch in sampler] for _ in range(2))
    assert len(one) == len(other) == len(sampler)
    assert len({*one} & {*other}) < len(one) / 10
    longest = [LENGTHS[list(batch)].max() for batch in one]
    assert longest != sorted(longest)
    plain = list(BudgetBatchSampler(LENGTHS, 2000, shuffle=False))
    assert [LENGTHS[batch].max() for batch in plain] == sorted(LENGTHS[batch].max() for batch in plain)


def test_no_batch_is_always_left_out() -> None:
    """The batches that divide into no step are others in each epoch; no rank has the longest ones always."""
    dropped, longest = [], [0, 0, 0, 0]
    for epoch in range(8):
        ranks = [list(sampler) for sampler in deal(make, 4, epoch, drop_last=True)]
        read = {*chain.from_iterable(chain.from_iterable(ranks))}
        dropped.append({*range(len(LENGTHS))} - read)
        for step in zip(*ranks):
            longest[max(range(4), key=lambda rank: LENGTHS[step[rank]].max())] += 1
    assert not set.intersection(*dropped)
    assert max(longest) < 2 * min(longest)


def make(**options: Any) -> BudgetBatchSampler:
    return BudgetBatchSampler(LENGTHS, 2000, **options)


def test_lengths_may_be_an_array_or_a_tensor() -> None:
    lengths = [3, 1, 2, 5]
    assert [sorted(batch) for batch in BudgetBatchSampler(lengths, 1e308, spread=100)] == [[0, 1, 2, 3]]
    of_list = list(BudgetBatchSampler(lengths, 6))
    for other in (np.array(lengths), torch.tensor(lengths), torch.tensor(lengths, dtype=torch.float32)):
        assert list(BudgetBatchSampler(other, 6)) == of_list


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((["x"], 5), OptionTypeError, "dimension of numbers"),
        (([[1.0]], 5), OptionTypeError, r"shape \(1, 1\)"),
        (([1, 7, 9], 5), OptionError, r"lengths\[1\]=7: it is longer than budget=5; .* \(2 of 3 are so\)"),
        (([1], 0), OptionError, "budget=0"),
    ],
)
def test_what_makes_no_batches_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BudgetBatchSampler(*given)


def test_a_state_of_other_lengths_is_refused() -> None:
    state = BudgetBatchSampler([1, 2, 3], 5).state_dict()
    for other in (BudgetBatchSampler([1, 2, 2], 5), BudgetBatchSampler([1, 2, 3], 5, spread=0.2)):
        with pytest.raises(StateError, match="was taken with"):
            other.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["ours", "ours, workers", "torchdata"])
def test_loaders_read_it_and_resume_it(kind: str) -> None:
    def make_loader() -> Any:
        batches = BudgetBatchSampler(LENGTHS[:200], 500, seed=3)
        if kind == "torchdata":
            stateful = pytest.importorskip("torchdata.stateful_dataloader")
            return stateful.StatefulDataLoader(range(200), batch_sampler=batches)
        return DPFlowDataLoader(range(200), batch_sampler=batches, num_workers=2 if "workers" in kind else 0)

    plain: Any = DataLoader(range(200), batch_sampler=BudgetBatchSampler(LENGTHS[:200], 500, seed=3))  # type: ignore[arg-type]
    expected = [[batch.tolist() for batch in plain] for _ in range(2)]
    loader = make_loader()
    batches = iter(loader)
    begun = [next(batches).tolist() for _ in range(3)]
    state = loader.state_dict()
    del batches
    resumed = make_loader()
    resumed.load_state_dict(state)
    assert begun + [batch.tolist() for batch in resumed] == expected[0]
    assert [batch.tolist() for batch in resumed] == expected[1]


def test_a_state_that_more_ranks_began_than_its_batches_is_read() -> None:
    """Batches that fill no step come last, however many ranks would make one."""
    made = [BudgetBatchSampler([1] * 6, 1, num_replicas=ranks, rank=0) for ranks in (40, 50, 1)]
    orders = [list(islice(sampler, 1)) for sampler in made[:2]]
    assert orders[0] == orders[1]
    state = {**made[0].state_dict(), "began_with": 10**30}
    with pytest.raises(StateError, match="began_with"):
        made[2].load_state_dict(state)
