"""random_split: disjoint, seeded, of exact sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.flows.flow_cases import Numbers, numbers_flow
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.flows import DataLoadFlowRead, LocalDataLoadFlowReader, random_split


def _read(samples: Any) -> DataLoadFlowRead:
    return numbers_flow(samples).prepare_read(LocalDataLoadFlowReader())


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 2**31))
def test_parts_are_disjoint_and_of_exact_sizes(counts: list[int], seed: int) -> None:
    total = sum(counts)
    parts = random_split(_read(Numbers(total)), counts, seed=seed)
    assert [len(part) for part in parts] == counts
    assert sorted(index for part in parts for index in part.indices()) == list(range(total))
    again = random_split(_read(Numbers(total)), counts, seed=seed)
    assert [list(part.indices()) for part in again] == [list(part.indices()) for part in parts]


@pytest.mark.parametrize(
    "lengths", [[7, 3], [0.8, 0.2], [0.33, 0.33, 0.34], [1.0], [0.05, 0.95], [1, 9], np.array([4, 6])]
)
def test_parts_are_those_of_torch(lengths: list[Any]) -> None:
    ours = random_split(_read(Numbers(10)), lengths, seed=5)
    theirs = torch.utils.data.random_split(Numbers(10), lengths, torch.Generator().manual_seed(5))
    assert [list(part.indices()) for part in ours] == [list(part.indices) for part in theirs]


def test_one_flow_for_each_part() -> None:
    samples = Numbers(10)
    train = numbers_flow(samples).map_data("augment", lambda number: number + 0.5)
    reader = LocalDataLoadFlowReader()
    parts = random_split([train.prepare_read(reader), _read(samples)], [0.8, 0.2])
    found = [[part.to_mapped()[index][0] for index in range(len(part))] for part in parts]
    assert [len(part) for part in found] == [8, 2]
    assert all(number % 1 == 0.5 for number in found[0])
    assert sorted([number - 0.5 for number in found[0]] + found[1]) == list(range(10))


def test_a_part_is_split_again() -> None:
    first, rest = random_split(_read(Numbers(10)), [4, 6])
    inner = random_split(rest, [3, 3], seed=1)
    indices = [set(part.indices()) for part in (first, *inner)]
    assert set().union(*indices) == set(range(10))


def test_the_process_draws_as_if_nothing_was_split() -> None:
    torch.manual_seed(0)
    before = torch.rand(3)
    torch.manual_seed(0)
    random_split(_read(Numbers(10)), [4, 6])
    assert torch.equal(torch.rand(3), before)


@pytest.mark.parametrize(
    ("lengths", "error", "told"),
    [
        ([4, 5], OptionError, "add up to 9; give counts of 10 or shares of 1"),
        ([0.5, 0.6], OptionError, "add up to"),
        ([-1, 11], OptionError, "-1 is out of range"),
        ([float("nan"), 1], OptionError, "nan is out of range"),
        (["a", 1], OptionTypeError, "'a' is no number"),
        ([True, 9], OptionTypeError, "True is no number"),
        ([], OptionError, "give one flow for each length"),
        (10, OptionTypeError, "lengths=10 is of type int"),
    ],
)
def test_wrong_lengths_are_told(lengths: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        random_split(_read(Numbers(10)), lengths)


def test_flows_must_read_the_same_samples() -> None:
    samples = Numbers(10)
    for other in (
        _read(Numbers(9)),
        _read(samples).subset(range(9)),
        _read(samples).subset(range(9, -1, -1)),
    ):
        with pytest.raises(OptionError, match="the same samples in the same order"):
            random_split([_read(samples), other], [0.5, 0.5])
    with pytest.raises(OptionError, match="1 flows and 2 lengths"):
        random_split([_read(samples)], [0.5, 0.5])


def test_datasets_at_hand_are_compared_whatever_they_are() -> None:
    whole = np.arange(10)
    assert [len(part) for part in random_split([_read(whole), _read(whole)], [4, 6])] == [4, 6]
    for other in (whole + 1, np.arange(9)):
        with pytest.raises(OptionError, match="the same samples in the same order"):
            random_split([_read(whole), _read(other)], [4, 6])


@pytest.mark.parametrize("seed", [1.5, "x", None])
def test_wrong_seeds_are_told(seed: Any) -> None:
    with pytest.raises(OptionTypeError, match=f"seed={seed!r} is of type"):
        random_split(_read(Numbers(10)), [4, 6], seed=seed)


def test_flows_must_be_prepared() -> None:
    with pytest.raises(OptionTypeError, match="give what flow"):
        random_split([numbers_flow(Numbers(10))], [10])
    with pytest.raises(OptionTypeError, match="flows="):
        random_split(numbers_flow(Numbers(10)), [10])
