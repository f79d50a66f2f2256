"""A dataset is told the order of an epoch, and nothing else changes: batches, random numbers, states."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torch_dpflow import DPFlowDataLoader
from torch_dpflow.caches import ALSDCache
from torch_dpflow.flows import DataLoadFlow, LocalDataLoadFlowReader
from torch_dpflow.lookahead import Order

COUNT = 23


class Plain(Dataset[int]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return int(index)


class Told(Plain):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.orders: list[list[int]] = []

    def announce_order(self, order: Order, spread: int, extends: bool = False) -> None:
        assert spread >= 1
        if extends:
            self.orders[-1] += order().tolist()
        else:
            self.orders.append(order().tolist())


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


SAMPLERS: dict[str, Callable[[Plain], dict[str, Any]]] = {
    "shuffle": lambda data: {"shuffle": True, "batch_size": 4},
    "own generator": lambda data: {"shuffle": True, "batch_size": 4, "generator": generator()},
    "drop last": lambda data: {"shuffle": True, "batch_size": 4, "drop_last": True, "generator": generator()},
    "sequential": lambda data: {"batch_size": 4},
    "fewer": lambda data: {
        "batch_size": 4,
        "sampler": RandomSampler(data, num_samples=9, generator=generator()),
    },
    "replacement": lambda data: {"batch_size": 4, "sampler": RandomSampler(data, replacement=True)},
    "weighted": lambda data: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * COUNT, 11)},
    "subset": lambda data: {"batch_size": 4, "sampler": SubsetRandomSampler(range(0, COUNT, 2))},
    "ranks": lambda data: {"batch_size": 4, "sampler": DistributedSampler(data, 2, 0)},
    "batches": lambda data: {"batch_sampler": BatchSampler(SequentialSampler(data), 4, drop_last=False)},
}


def states_and_batches(dataset: Plain, how: str, workers: int, resume_at: int) -> list[Any]:
    """Two epochs, the second from its state in the midst, and what was drawn from torch's own generator by then."""
    torch.manual_seed(0)
    seen: list[Any] = []

    def make() -> Any:
        return DPFlowDataLoader(dataset, num_workers=workers, collate_fn=list, **SAMPLERS[how](dataset))

    loader = make()
    seen.extend((batch, loader.state_dict()) for batch in loader)
    iterator = iter(loader)
    seen.extend((next(iterator), loader.state_dict()) for _ in range(resume_at))
    state = loader.state_dict()
    del iterator
    again = make()
    again.load_state_dict(state)
    seen.extend((batch, again.state_dict()) for batch in again)
    return [*seen, torch.rand(1).item()]


@pytest.mark.parametrize("how", SAMPLERS)
def test_nothing_else_changes(how: str) -> None:
    told = Told()
    with_it = states_and_batches(told, how, 0, 1)
    assert with_it == states_and_batches(Plain(), how, 0, 1)
    delivered = [one for batch, _ in with_it[:-1] for one in batch]
    assert len(told.orders) == 3
    first, _, resumed = told.orders
    assert first == delivered[: len(first)]
    short = {"own generator": COUNT % 4, "fewer": 1}.get(how, 0)  # the end of such a sampler draws
    assert resumed == delivered[len(delivered) - len(resumed) - short : len(delivered) - short]


def test_nor_with_workers() -> None:
    told, plain = (states_and_batches(data, "own generator", 2, 3) for data in (Told(), Plain()))
    for _, state in [*told[:-1], *plain[:-1]]:
        held = json.loads(state["state"])
        del held["generator"]  # how far it was drawn ahead differs between runs
        state["state"] = held
    assert told == plain


class CallableSampler(Sampler[Any]):
    """Gives what a function returns."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __iter__(self) -> Any:
        return self._draw()


class Changing(Sampler[int]):
    """Whose order may depend on what happens meanwhile."""

    def __iter__(self) -> Any:
        yield from range(COUNT)


def test_an_order_that_may_change_is_not_drawn_ahead() -> None:
    told = Told()
    assert [*DPFlowDataLoader(told, batch_size=None, sampler=Changing())] == [*range(COUNT)]
    assert told.orders == [[]]


def test_with_workers_it_is_told_as_it_is_drawn() -> None:
    told = Told()
    loader = DPFlowDataLoader(told, batch_size=4, sampler=Changing(), num_workers=1, collate_fn=list)
    running = iter(loader)
    assert told.orders == [[*range(8)]]  # what is in flight
    batches = [next(running) for _ in range(3)]
    state = loader.state_dict()
    assert [*running] == [*map(list, np.split(np.arange(12, 20), 2)), [20, 21, 22]]
    assert batches == [[*range(start, start + 4)] for start in (0, 4, 8)]
    assert told.orders == [[*range(COUNT)]]
    loader.load_state_dict(state)
    assert [one for batch in loader for one in batch] == told.orders[1] == [*range(12, COUNT)]


def test_a_batch_that_is_no_list_of_numbers_is_not_told() -> None:
    told = Told()
    batches: Any = [iter([0, 1]), ["2"], np.array([3])]
    loader = DPFlowDataLoader(
        told, batch_sampler=CallableSampler(lambda: iter(batches)), num_workers=1, collate_fn=list
    )
    assert [*loader] == [[0, 1], [2], [3]]
    assert told.orders == [[]]


def test_it_goes_through_datasets_of_datasets() -> None:
    told = Told()
    flow = DataLoadFlow("example/numbers", version=1).dataset("core/numbers", samples=told)
    flow.map("keep", int, cache="always")
    mapped = flow.prepare_read(LocalDataLoadFlowReader(cache=10)).to_mapped()
    subset = Subset(ALSDCache(mapped, 5), [7, 3, 5])
    assert [*DPFlowDataLoader(subset, batch_size=None)] == [7, 3, 5]
    part = DPFlowDataLoader(Subset(told, np.array([9, 8])), batch_size=4, collate_fn=list)
    assert [*part] == [[9, 8]]
    assert [*DPFlowDataLoader(Subset(told, range(9, 2, -3)), batch_size=None)] == [9, 6, 3]
    assert told.orders == [[7, 3, 5], [9, 8], [9, 6, 3]]
