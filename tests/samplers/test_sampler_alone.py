"""DynaGCSSampler without a group: torch's own orders, to the letter."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from array import array
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, TensorDataset

from torch_dpflow import DPFlowDataLoader
from torch_dpflow.errors import OptionError, OptionTypeError, StateError, UsageError
from torch_dpflow.samplers import DynaGCSSampler
from torch_dpflow.samplers.indices import check_indices


def distributed_cases(count: int) -> Iterator[tuple[int, int, dict[str, Any], int]]:
    """n, replicas, other options, epoch; fewer samples than replicas among them."""
    rng = random.Random(0)
    for _ in range(count):
        n, replicas, drop_last, shuffle = rng.randint(1, 50), rng.randint(1, 9), rng.random() < 0.5, rng.random() < 0.7
        yield (
            n,
            replicas,
            {"shuffle": shuffle, "seed": rng.randrange(10**6), "drop_last": drop_last},
            rng.randrange(100),
        )


def test_every_rank_reads_what_distributed_sampler_gives_it() -> None:
    for n, replicas, options, epoch in distributed_cases(200):
        for rank in range(replicas):
            theirs: Any = DistributedSampler(range(n), replicas, rank, **options)  # type: ignore[arg-type]
            ours = DynaGCSSampler(range(n), num_replicas=replicas, rank=rank, **options)
            theirs.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert list(ours) == list(theirs), (n, replicas, rank, options, epoch)
            assert len(ours) == len(theirs)


@pytest.mark.parametrize("n", [1, 2, 9, 5000])
def test_the_order_is_that_of_random_sampler_seeded_with_seed_and_epoch(n: int) -> None:
    ours = DynaGCSSampler(TensorDataset(torch.zeros(n)), seed=11)
    for epoch in range(3):
        generator = torch.Generator().manual_seed(11 + epoch)
        assert list(ours) == list(RandomSampler(range(n), generator=generator))
        assert ours.epoch == epoch
        assert len(ours) == n


def test_no_samples_make_an_empty_epoch() -> None:
    for nothing in ([], range(0), TensorDataset(torch.zeros(0))):
        assert list(DynaGCSSampler(nothing)) == []  # type: ignore[arg-type]
        assert list(DynaGCSSampler(nothing, num_replicas=3, rank=2)) == []  # type: ignore[arg-type]


def test_without_shuffle_the_order_is_sequential() -> None:
    ours = DynaGCSSampler(TensorDataset(torch.zeros(7)), shuffle=False)
    assert list(ours) == list(ours) == list(SequentialSampler(range(7)))


def test_indices_are_permuted_as_positions_are() -> None:
    kept = [30, 2, 17, 5, 8]
    drawn = torch.randperm(5, generator=torch.Generator().manual_seed(3)).tolist()
    for given_as in (kept, tuple(kept), np.array(kept), torch.tensor(kept, dtype=torch.int32)):
        assert list(DynaGCSSampler(given_as, seed=3)) == [kept[i] for i in drawn]
        assert list(DynaGCSSampler(given_as, shuffle=False)) == kept
    assert list(DynaGCSSampler(range(8, 0, -2), shuffle=False)) == [8, 6, 4, 2]


def test_a_range_of_all_positions_is_drawn_as_far_as_it_is_read() -> None:
    positions = range(1 << 22)
    expected = torch.randperm(1 << 22, generator=torch.Generator().manual_seed(3))[:100].tolist()
    tracemalloc.start()
    try:
        sampler = DynaGCSSampler(positions, seed=3)
        assert [*islice(sampler, 100)] == expected
        assert sampler.state_dict()["indices"] is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_data_sets_of_other_things_are_read_by_position() -> None:
    for data in (["a", "b", "c"], [[0.5], [1.5], [2.5]], [1, "a", True], torch.zeros(3, 2), np.zeros((3, 1))):
        assert sorted(DynaGCSSampler(data)) == [0, 1, 2]


def test_with_ranks_an_epoch_repeats_until_set_epoch_and_without_it_does_not() -> None:
    ranked = DynaGCSSampler(range(50), num_replicas=2, rank=1)
    assert list(ranked) == list(ranked)
    ranked.set_epoch(1)
    assert ranked.epoch == 1
    alone = DynaGCSSampler(range(50))
    first, second = list(alone), list(alone)
    assert first != second
    alone.set_epoch(0)
    assert list(alone) == first
    alone.set_epoch(1)
    assert list(alone) == second


def test_an_abandoned_iteration_does_not_disturb_the_next() -> None:
    ours = DynaGCSSampler(range(20), seed=1)
    abandoned = iter(ours)
    next(abandoned)
    assert sorted(ours) == list(range(20))
    next(abandoned)
    assert ours.state_dict()["position"] == 20


def test_it_works_under_torchs_loader() -> None:
    data = TensorDataset(torch.arange(10, 33))
    ours = DynaGCSSampler(data, seed=4)
    expected = torch.randperm(23, generator=torch.Generator().manual_seed(4)) + 10
    batches = [batch for (batch,) in DataLoader(data, batch_size=4, sampler=ours)]
    assert [len(batch) for batch in batches] == [4] * 5 + [3]
    assert torch.equal(torch.cat(batches), expected)


# -- state ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    n=st.integers(1, 40),
    replicas=st.integers(1, 4),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    at=st.integers(0, 40),
    behind=st.integers(0, 5),
)
def test_a_state_taken_anywhere_goes_on_exactly(
    n: int, replicas: int, drop_last: bool, shuffle: bool, epoch: int, at: int, behind: int
) -> None:
    options: Any = {
        "num_replicas": replicas,
        "rank": replicas - 1,
        "drop_last": drop_last,
        "shuffle": shuffle,
    }
    whole = DynaGCSSampler(range(n), **options)
    whole.set_epoch(epoch)
    order = list(whole)
    stopped = DynaGCSSampler(range(n), **options)
    stopped.set_epoch(epoch)
    at = min(at, len(order))
    running = iter(stopped)
    yielded = [next(running) for _ in range(at)]
    consumed = max(0, at - behind)
    state = pickle.loads(pickle.dumps(stopped.state_dict(consumed)))
    assert state == stopped.state_dict(consumed)
    assert yielded + list(running) == order, "taking a state has no side effect"
    resumed = DynaGCSSampler(range(n), **options)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.set_epoch(epoch)
    assert list(resumed) == (order[consumed:] if consumed < len(order) else order)
    whole.set_epoch(epoch + 1)
    resumed.set_epoch(epoch + 1)
    assert list(resumed) == list(whole)


def test_after_a_finished_epoch_the_next_one_begins() -> None:
    ours = DynaGCSSampler(range(30))
    list(ours)
    resumed = DynaGCSSampler(range(30))
    resumed.load_state_dict(ours.state_dict())
    assert list(resumed) == list(ours)
    assert resumed.epoch == ours.epoch == 1


def test_an_iteration_of_which_nothing_is_read_is_no_epoch() -> None:
    ours = DynaGCSSampler(range(30))
    unread = iter(ours)
    first, second = list(iter(ours)), list(unread)
    expected = DynaGCSSampler(range(30))
    assert (first, second) == (list(expected), list(expected)), "and two that are read are two epochs"


def test_a_loader_saved_before_the_first_batch_of_an_epoch_resumes_in_it() -> None:
    def new_loader() -> DPFlowDataLoader[int]:
        return DPFlowDataLoader(range(30), batch_size=30, sampler=DynaGCSSampler(range(30)))  # type: ignore[arg-type]

    loader = new_loader()
    next(iter(loader))
    begun = iter(loader)
    state = loader.state_dict()
    due = next(begun).tolist()
    resumed = new_loader()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [due]


def test_setting_another_epoch_drops_a_position_that_was_loaded() -> None:
    ours = DynaGCSSampler(range(30))
    next(iter(ours))
    resumed = DynaGCSSampler(range(30))
    resumed.load_state_dict(ours.state_dict())
    resumed.set_epoch(5)
    assert len(list(resumed)) == 30


def test_a_state_is_small_and_plain() -> None:
    ours = DynaGCSSampler(range(100_000))
    next(iter(ours))
    state = ours.state_dict()
    assert len(pickle.dumps(state)) < 500
    assert {type(value) for value in state.values()} <= {int, bool, str, type(None), list}
    assert state["places"] == [[0, 100_000, 1]]


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"data_source": range(31)},
        {"data_source": range(5, 35)},
        {"shuffle": False},
        {"drop_last": True},
    ],
    ids=str,
)
def test_a_state_of_other_arguments_is_refused(changes: dict[str, Any]) -> None:
    state = DynaGCSSampler(range(30)).state_dict()
    options = {"data_source": range(30), **changes}
    other = DynaGCSSampler(options.pop("data_source"), **options)
    with pytest.raises(StateError, match=r"was taken with|make the sampler"):
        other.load_state_dict(state)


def test_a_state_of_other_indices_is_refused_by_their_description() -> None:
    state = DynaGCSSampler([3, 1, 2, 9]).state_dict()
    DynaGCSSampler([3, 1, 2, 9]).load_state_dict(state)
    with pytest.raises(StateError, match=r"'4 samples \[3, 1, 2, ...\] .*, this sampler has '4 samples \[3, 1, 4, ..."):
        DynaGCSSampler([3, 1, 4, 9]).load_state_dict(state)
    positions = DynaGCSSampler(TensorDataset(torch.zeros(4))).state_dict()
    DynaGCSSampler(range(4)).load_state_dict(positions)


#: Places of no epoch of 30 samples, and ranks of no run.
PLACES: list[dict[str, Any]] = [
    *(
        {"places": places}
        for places in (None, 3, [[0, 31, 1]], [[-1, 5, 1]], [[0, 9, 0]], [[0, 9]], [[0, 9, 1], [8, 10, 1]])
    ),
    *({"dealt_at": -1}, {"dealt_at": 1}, {"num_replicas": 0}, {"rank": 1}, {"rank": None}),
]


@pytest.mark.parametrize(
    "damage", [{"position": -1}, {"position": 31}, {"epoch": None}, {"epoch": "1"}, {"version": 1}, *PLACES], ids=str
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    ours = DynaGCSSampler(range(30))
    before = ours.state_dict()
    with pytest.raises(StateError):
        ours.load_state_dict({**before, **damage})
    for nonsense in ({}, [], None, {"position": 3}):
        with pytest.raises(StateError, match="no state"):
            ours.load_state_dict(nonsense)  # type: ignore[arg-type]
    assert ours.state_dict() == before


def test_consumed_must_be_possible() -> None:
    ours = DynaGCSSampler(range(30))
    with pytest.raises(OptionError, match="consumed=1"):
        ours.state_dict(consumed=1)
    running = iter(ours)
    next(running)
    for consumed in (-1, 2):
        with pytest.raises(OptionError, match="consumed"):
            ours.state_dict(consumed)


def test_it_pickles_before_during_and_after_an_epoch() -> None:
    ours = DynaGCSSampler(range(30), seed=2)
    copies = [pickle.loads(pickle.dumps(ours))]
    running = iter(ours)
    next(running)
    copies.append(pickle.loads(pickle.dumps(ours)))
    rest = list(running)
    assert copies[1].state_dict()["position"] == 1
    assert list(copies[0])[1:] == rest
    assert list(copies[1]) == list(ours)


# -- wrong arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_replicas": 0}, "num_replicas=0"),
        ({"num_replicas": 2**63}, "num_replicas=9223372036854775808"),
        ({"num_replicas": 2, "rank": 2}, "rank=2"),
        ({"num_replicas": 2, "rank": -1}, "rank=-1"),
        ({"rank": 1}, "rank=1"),
        ({"seed": -1}, "seed=-1"),
        ({"independence": 2}, "independence=2"),
        ({"strategy": "best"}, "'shared-log'"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], names: str) -> None:
    with pytest.raises(OptionError, match=names):
        DynaGCSSampler(range(10), **options)


@pytest.mark.parametrize("indices", [[1, -1], [2, 2], np.array([0, 5, 0])])
def test_negative_and_repeated_indices_are_refused(indices: Any) -> None:
    with pytest.raises(OptionError, match=r"data_source has .*range\(len"):
        DynaGCSSampler(indices)


@pytest.mark.parametrize(
    "given",
    [
        [3.5],
        [1.0, 2],
        (True, False),
        [2, True],
        [2, np.bool_(True)],
        np.array([1.0]),
        np.array([True, False]),
        torch.tensor([3.5]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([True]),
        [torch.tensor(1.0)],
        array("d", [1.0]),
        {3, 4},
        {3: 0}.values(),
        "data",
        b"data",
    ],
)
def test_numbers_that_are_no_indices_are_not_taken_for_a_data_set(given: Any) -> None:
    with pytest.raises(OptionTypeError, match=r"data_source.*(convert them to int.*range|give a list|is text)"):
        DynaGCSSampler(given)


def test_whole_numbers_of_any_maker_are_indices() -> None:
    numbers = [5, 3, 8]
    makers: list[Any] = [tuple, deque, np.array, torch.tensor, pyarrow.array, partial(array, "q"), single_tensors]
    for make in makers:
        sampler = DynaGCSSampler(make(numbers), shuffle=False)
        assert list(sampler) == numbers, make


def single_tensors(numbers: list[int]) -> list[Any]:
    return [torch.tensor(number) for number in numbers]


@pytest.mark.parametrize(
    ("given", "named"), [([1, True], "bool"), (np.array([2**63], np.uint64), "has 9223372036854775808")]
)
def test_what_numpy_would_make_other_indices_of_is_refused(given: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check_indices(given)


def test_a_range_of_millions_becomes_no_list() -> None:
    for numbers in (range(0), range(9, 0, -2), range(2, 50, 7), range(2**62, 2**62 + 3)):
        assert check_indices(numbers, allow_empty=True).tolist() == [*numbers]
    tracemalloc.start()
    try:
        assert len(check_indices(range(1_000_000))) == 1_000_000
        assert tracemalloc.get_traced_memory()[1] < 20_000_000  # two arrays, and no million ints
    finally:
        tracemalloc.stop()


def test_arguments_of_the_wrong_type_are_refused() -> None:
    with pytest.raises(OptionTypeError, match="without a length"):
        DynaGCSSampler(iter([1]))  # type: ignore[arg-type]
    for option in ("batch_size", "num_replicas", "seed", "shuffle", "drop_last"):
        with pytest.raises(OptionTypeError, match=option):
            DynaGCSSampler(range(10), **{option: "3"})
    with pytest.raises(OptionTypeError, match="sampling_group"):
        DynaGCSSampler(range(10), group="imagenet")  # type: ignore[arg-type]


def test_epochs_start_at_0() -> None:
    with pytest.raises(OptionError, match="epoch=-1"):
        DynaGCSSampler(range(10)).set_epoch(-1)
