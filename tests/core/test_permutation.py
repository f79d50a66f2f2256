"""Permutations that are drawn as they are read, against `torch.randperm`."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow._core import permutation
from torch_dpflow._core.permutation import (
    MIN_LENGTH,
    Permutation,
    advance,
    drawn_as,
    draws_as_torch,
    seeded,
    torch_order,
)


def torchs(length: int, seed: int) -> list[int]:
    numbers: list[int] = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
    return numbers


@given(length=st.integers(0, 6000), seed=st.integers(0, 2**40), cuts=st.lists(st.integers(0, 6000), max_size=5))
def test_pieces_are_those_of_torch_whatever_the_cuts(length: int, seed: int, cuts: list[int]) -> None:
    drawn, expected = Permutation(length, seeded(seed)), torchs(length, seed)
    for cut in cuts:
        assert drawn[cut : cut + 100].tolist() == expected[cut : cut + 100]
        assert drawn[cut % 7 : cut : 3].tolist() == expected[cut % 7 : cut : 3]
    assert drawn[:].tolist() == expected


def test_a_generator_is_left_as_torch_leaves_it() -> None:
    ours, theirs = (torch.Generator().manual_seed(9) for _ in range(2))
    assert draws_as_torch()
    for length in (MIN_LENGTH - 1, MIN_LENGTH, 3 * MIN_LENGTH + 1):
        found = drawn_as(ours, length)
        assert isinstance(found, Permutation) == (length >= MIN_LENGTH)
        assert found[:].tolist() == torch.randperm(length, generator=theirs).tolist()
        assert torch.equal(ours.get_state(), theirs.get_state())
        assert torch.rand(3, generator=ours).tolist() == torch.rand(3, generator=theirs).tolist()


@pytest.mark.parametrize("draws", [0, 1, 623, 624, 625, 10_000])
def test_advance_counts_numbers_of_32_bits(draws: int) -> None:
    ours, theirs = (torch.Generator().manual_seed(2) for _ in range(2))
    advance(ours, draws)
    for _ in range(draws):
        torch.empty((), dtype=torch.int32).random_(generator=theirs)
    assert torch.randperm(50, generator=ours).tolist() == torch.randperm(50, generator=theirs).tolist()


def test_the_first_places_are_drawn_alone() -> None:
    order = torch_order(20_000_000, seed=3)
    assert isinstance(order, Permutation)
    head = order[:256]
    assert len(set(head.tolist())) == 256
    assert order.drawn < 2 * permutation._PIECE


def test_a_longer_one_than_torch_draws_in_this_way_is_uniform_over_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "MAX_TORCH", 1)
    order = Permutation(5000, seeded(1))[:]
    assert sorted(order.tolist()) == list(range(5000))
    assert order.tolist() != torchs(5000, 1)


def test_torch_that_shuffles_otherwise_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    draws_as_torch.cache_clear()
    monkeypatch.setattr(permutation, "advance", lambda generator, draws: None)
    try:
        assert not draws_as_torch()
        found = torch_order(MIN_LENGTH, seed=4)
    finally:
        draws_as_torch.cache_clear()
    assert isinstance(found, np.ndarray)
    assert found.tolist() == torchs(MIN_LENGTH, 4)
