"""States of parts of a dataset: each is resumed with the part that it was taken with, and refused with any other."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Subset, SubsetRandomSampler, random_split

from tests.loader_cases import Indices
from torch_dpflow import ALSDCache, DynaGCSSampler
from torch_dpflow.errors import StateError
from torch_dpflow.flows import DataLoadFlow, LocalDataLoadFlowReader

SIZE = 24


def split(seed: int) -> Subset[Any]:
    return random_split(Indices(SIZE), [12, 12], torch.Generator().manual_seed(seed))[0]


def read(part: list[int]) -> Any:
    described = DataLoadFlow("core/numbers", 1)
    described.dataset("core/numbers", "v1", "train", samples=Indices(SIZE))
    described.map("number", int)
    return described.prepare_read(LocalDataLoadFlowReader()).subset(part).to_mapped()


#: By kind, makes the arguments of a loader of one of two parts of equal length.
PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "subset": lambda one: {"dataset": Subset(Indices(SIZE), range(one, one + 12))},
    "array": lambda one: {"dataset": Subset(Indices(SIZE), np.arange(one, one + 12))},  # type: ignore[arg-type]
    "tensor": lambda one: {"dataset": Subset(Indices(SIZE), torch.arange(one, one + 12))},  # type: ignore[arg-type]
    "split": lambda one: {"dataset": split(one)},
    "cached": lambda one: {"dataset": ALSDCache(split(one), "1MiB")},
    "nested": lambda one: {"dataset": Subset(Subset(Indices(SIZE), range(one, one + 20)), range(1, 13))},
    "whole": lambda one: {"dataset": Subset(Indices(SIZE), range(SIZE)[:: -1 if one else 1])},
    "list": lambda one: {"dataset": Indices(SIZE), "sampler": list(range(one, one + 12))},
    "batches": lambda one: {"dataset": Indices(SIZE), "batch_sampler": [[one + 1, one], [one + 3, 0]]},
    "drawn": lambda one: {"dataset": Indices(SIZE), "sampler": SubsetRandomSampler(range(one, one + 12))},
    "batched": lambda one: {
        "dataset": Indices(SIZE),
        "batch_sampler": BatchSampler(SubsetRandomSampler(range(one, one + 12)), 2, False),
    },
    "own sampler": lambda one: {"dataset": Indices(SIZE), "sampler": DynaGCSSampler(range(one, one + 12))},
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", PARTS)
def test_a_state_is_resumed_with_its_own_part_and_refused_with_another(OurLoader: Any, kind: str, workers: int) -> None:
    make, size = PARTS[kind], {} if kind in ("batches", "batched") else {"batch_size": 2}
    first = OurLoader(**make(0), **size, num_workers=workers)
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    rest = [batch.tolist() for batch in batches]
    again = OurLoader(**make(0), **size)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    other = OurLoader(**make(2), **size)
    with pytest.raises(StateError, match=r"part (of the dataset )?is .* samples.*, this one's is .* samples \["):
        other.load_state_dict(state)


def test_a_state_of_the_read_of_a_flow_is_refused_with_another_part(OurLoader: Any) -> None:
    first = OurLoader(read([3, 5, 7, 9]), batch_size=2)
    next(iter(first))
    again = OurLoader(read([3, 5, 7, 9]), batch_size=2)
    again.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in again] == [[7, 9]]
    with pytest.raises(StateError, match=r"\[3, 5, 7, \.\.\.\] .* \[3, 5, 7, \.\.\.\]"):
        OurLoader(read([3, 5, 7, 8]), batch_size=2).load_state_dict(first.state_dict())


def test_all_samples_in_their_order_are_no_other_part(OurLoader: Any) -> None:
    first = OurLoader(Indices(SIZE), batch_size=2)
    next(iter(first))
    again = OurLoader(Subset(Indices(SIZE), list(range(SIZE))), batch_size=2)
    again.load_state_dict(first.state_dict())
    assert next(iter(again)).tolist() == [2, 3]


@pytest.mark.parametrize("first", [0, 1])
def test_a_state_makes_no_list_of_a_range_or_an_array(OurLoader: Any, first: int) -> None:
    count = 1 << 20
    given: list[Any] = [range(first, count), np.arange(first, count)]
    for indices in given:
        loader = OurLoader(Subset(Indices(count), indices), batch_size=2)
        next(iter(loader))
        tracemalloc.start()
        try:
            loader.state_dict()
            assert tracemalloc.get_traced_memory()[1] < 3 * 8 * count
        finally:
            tracemalloc.stop()


def test_indices_that_are_no_numbers_are_not_compared(OurLoader: Any) -> None:
    class ByName(Indices):
        def __getitem__(self, name: Any) -> Any:
            return super().__getitem__(ord(name) - ord("a"))

    first = OurLoader(Subset(ByName(SIZE), list("abcd")), batch_size=2)  # type: ignore[arg-type]
    next(iter(first))
    again = OurLoader(Subset(ByName(SIZE), list("abcd")), batch_size=2)  # type: ignore[arg-type]
    again.load_state_dict(first.state_dict())
    assert next(iter(again)).tolist() == [2, 3]
