"""DynaGCSSampler in a group: epochs are whole, states resume, wrong groups are refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from torch_dpflow.errors import OptionError, StateError, UsageError
from torch_dpflow.samplers import STRATEGIES, DynaGCSSampler, sampling_group

EVERYTHING = list(range(60))


def pair(strategy: str = "shared-log", **options: Any) -> tuple[DynaGCSSampler, DynaGCSSampler]:
    group = sampling_group(strategy, 60, capacity=20)
    one, other = (
        DynaGCSSampler(range(60), group=group, strategy=strategy, batch_size=4, seed=seed, **options)
        for seed in (5, 10**6)
    )
    return one, other


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_samplers_read_whole_epochs_side_by_side(strategy: str) -> None:
    one, other = pair(strategy)
    assert one.group is other.group
    for _ in range(2):
        orders = list(zip(one, other, strict=True))
        assert sorted(x for x, _ in orders) == sorted(y for _, y in orders) == EVERYTHING


def test_jobs_in_step_read_the_same_batches() -> None:
    one, other = pair()
    running = iter(one), iter(other)
    same = 0
    for _ in range(15):
        batches = [[next(r) for _ in range(4)] for r in running]
        same += set(batches[0]) == set(batches[1])
    assert same >= 13


def test_alone_in_its_group_a_sampler_reads_its_private_order() -> None:
    ours = DynaGCSSampler(range(60), group=sampling_group("shared-log", 60), seed=9)
    for epoch in range(2):
        assert list(ours) == list(torch.randperm(60, generator=torch.Generator().manual_seed(9 + epoch)))


def test_with_full_independence_a_run_can_be_repeated_among_others() -> None:
    one, other = pair(independence=1.0)
    again, beside = pair(independence=1.0)
    assert list(zip(one, other, strict=True)) == list(zip(again, beside, strict=True))
    again, _ = pair(independence=1.0)
    lonely, _ = pair(independence=1.0)
    assert list(lonely) == list(again), "whatever the others do"


def test_subsets_are_shared_where_they_overlap() -> None:
    group = sampling_group("shared-log", 60, capacity=30)
    low = DynaGCSSampler(range(40), group=group, batch_size=4)
    high = DynaGCSSampler(range(20, 60), group=group, batch_size=4)
    orders = list(zip(low, high, strict=True))
    assert sorted(x for x, _ in orders) == list(range(40))
    assert sorted(y for _, y in orders) == list(range(20, 60))


def test_it_works_under_torchs_loader() -> None:
    one, other = pair()
    data = TensorDataset(torch.arange(60))
    loaders = [DataLoader(data, batch_size=4, sampler=s, num_workers=0) for s in (one, other)]
    for _ in range(2):
        seen: list[list[int]] = [[], []]
        for batches in zip(*loaders, strict=True):
            for values, (batch,) in zip(seen, batches, strict=True):
                values += batch.tolist()
        assert sorted(seen[0]) == sorted(seen[1]) == EVERYTHING


def test_ranks_take_consecutive_slices_of_one_epoch() -> None:
    ranks = [
        DynaGCSSampler(
            range(60),
            group=sampling_group("shared-log", 60),
            batch_size=4,
            num_replicas=3,
            rank=rank,
        )
        for rank in range(3)
    ]
    parts = [list(rank) for rank in ranks]
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    expected = [[x for k in range(0, 60, 12) for x in order[k + 4 * r : k + 4 * r + 4]] for r in range(3)]
    assert parts == expected


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_uneven_epoch_is_filled_up_or_cut(drop_last: bool) -> None:
    group = sampling_group("shared-log", 10)
    parts = []
    for rank in range(4):
        copy = pickle.loads(pickle.dumps(group))
        ours = DynaGCSSampler(range(10), group=copy, batch_size=2, num_replicas=4, rank=rank, drop_last=drop_last)
        parts.append(list(ours))
        assert len(ours) == len(parts[-1]) == (2 if drop_last else 3)
    read = [x for part in parts for x in part]
    assert len(set(read)) == (8 if drop_last else 10)


# -- state ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    strategy=st.sampled_from(sorted(STRATEGIES)),
    at=st.integers(0, 60),
    behind=st.integers(0, 9),
    ahead=st.integers(0, 60),
)
def test_a_resumed_epoch_reads_exactly_what_was_not_consumed(strategy: str, at: int, behind: int, ahead: int) -> None:
    one, other = pair(strategy)
    beside = iter(other)
    for _ in range(ahead):
        next(beside)
    running = iter(one)
    yielded = []
    for _ in range(at):
        yielded.append(next(running))
        next(beside, None)
    consumed = max(0, at - behind)
    state = pickle.loads(pickle.dumps(one.state_dict(consumed)))
    resumed, _ = pair(strategy)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    rest = list(resumed)
    if consumed < 60:
        assert rest[: at - consumed] == yielded[consumed:]
        assert sorted(yielded[:consumed] + rest) == EVERYTHING
    else:
        assert sorted(rest) == EVERYTHING
    assert sorted(resumed) == EVERYTHING
    assert sorted(yielded + list(running)) == EVERYTHING, "taking a state has no side effect"


def test_a_resumed_job_that_was_alone_goes_on_in_its_private_order() -> None:
    ours = DynaGCSSampler(range(60), group=sampling_group("shared-log", 60), seed=9, batch_size=8)
    running = iter(ours)
    for _ in range(21):
        next(running)
    state = ours.state_dict(consumed=13)
    resumed = DynaGCSSampler(range(60), group=sampling_group("shared-log", 60), seed=9, batch_size=8)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert rest == torch.randperm(60, generator=torch.Generator().manual_seed(9)).tolist()[13:]


def test_a_state_can_be_taken_and_resumed_again_and_again() -> None:
    sampler, _ = pair()
    read = []
    while len(read) < 60:
        running = iter(sampler)
        read += [next(running) for _ in range(min(7, 60 - len(read)))]
        state = sampler.state_dict()
        sampler, _ = pair()
        sampler.load_state_dict(state)
    assert sorted(read) == EVERYTHING


def test_in_a_group_an_iteration_of_which_nothing_is_read_is_no_epoch() -> None:
    one, _ = pair()
    running = iter(one)
    read = [next(running) for _ in range(7)]
    state = one.state_dict()
    one, _ = pair()
    one.load_state_dict(state)
    iter(one)
    assert sorted(read + list(one)) == EVERYTHING
    assert one.epoch == 0


def test_a_state_says_which_group_and_rank_it_is_of() -> None:
    one, _ = pair()
    next(iter(one))
    state = one.state_dict()
    with pytest.raises(StateError, match="strategy"):
        DynaGCSSampler(range(60), seed=5).load_state_dict(state)
    with pytest.raises(StateError, match="damaged"):
        one.load_state_dict({**state, "shared": None})
    for damage in ({"done": "!"}, {"done": ""}, {"head": None}, {"rank": 1}):
        fresh, _ = pair()
        fresh.load_state_dict({**state, "shared": {**state["shared"], **damage}})
        with pytest.raises(StateError):
            iter(fresh)


def test_it_pickles_with_a_copy_of_its_group() -> None:
    one, other = pair()
    running = iter(one)
    first = [next(running) for _ in range(10)]
    copy = pickle.loads(pickle.dumps(one))
    assert copy.group is not one.group
    assert copy.group.jobs == one.group.jobs  # type: ignore[union-attr]
    assert sorted(first + list(running)) == sorted(copy) == sorted(other) == EVERYTHING


# -- wrong use -----------------------------------------------------------------------------------------------


def test_after_leaving_it_cannot_be_used() -> None:
    one, other = pair()
    running = iter(one)
    next(running)
    assert one.group is not None
    assert one.group.jobs == (one.job, other.job)
    one.leave()
    one.leave()
    assert one.group.jobs == (other.job,)
    with pytest.raises(UsageError, match="left its group"):
        iter(one)
    with pytest.raises(UsageError, match="left its group"):
        list(running)
    assert sorted(other) == EVERYTHING


def test_only_the_latest_iteration_goes_on() -> None:
    one, _ = pair()
    old = iter(one)
    next(old)
    new = iter(one)
    next(new)
    with pytest.raises(UsageError, match="newer iteration"):
        list(old)
    assert len(list(new)) == 59


def test_a_group_of_another_strategy_or_size_is_refused() -> None:
    group = sampling_group("joader", 60)
    with pytest.raises(OptionError, match="strategy='joader'"):
        DynaGCSSampler(range(60), group=group)
    with pytest.raises(OptionError, match="60 samples, the data set has 61"):
        DynaGCSSampler(TensorDataset(torch.zeros(61)), group=group, strategy="joader")
    with pytest.raises(OptionError, match="with 60 samples, 0 to 59"):
        DynaGCSSampler([3, 60], group=group, strategy="joader")
    with pytest.raises(OptionError, match="shuffle=False"):
        DynaGCSSampler(range(60), group=group, strategy="joader", shuffle=False)
    assert group.jobs == ()
