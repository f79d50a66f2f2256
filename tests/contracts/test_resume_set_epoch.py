"""`set_epoch` decides which epoch is read next, also after a state was loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from tests.loader_cases import Indices
from torch_dpflow import BudgetBatchSampler, DynaGCSSampler, MixtureSampler
from torch_dpflow.errors import StateError
from torch_dpflow.samplers import BlockShuffleSampler

SIZE, RANKS = 60, {"num_replicas": 2, "rank": 0}
BY_RANK: dict[str, Any] = {
    "DistributedSampler": lambda **ranks: {"sampler": DistributedSampler(Indices(SIZE), **ranks)},
    "DynaGCSSampler": lambda **ranks: {"sampler": DynaGCSSampler(range(SIZE), **ranks)},
    "BlockShuffleSampler": lambda **ranks: {"sampler": BlockShuffleSampler(Blocked(SIZE), **ranks)},
    "MixtureSampler": lambda **ranks: {"sampler": MixtureSampler([SIZE], [1], samples=40, **ranks)},
    "BudgetBatchSampler": lambda **ranks: {"batch_sampler": BudgetBatchSampler([1] * SIZE, 5, **ranks)},
}
OURS = sorted(set(BY_RANK) - {"DistributedSampler"})


class Blocked(Indices):
    """Has rows in blocks of 15."""

    blocks = np.full(SIZE // 15, 15)


def make(loader_class: Any, kind: str, **ranks: Any) -> tuple[Any, Any]:
    (arguments,) = [BY_RANK[kind](**ranks)]
    more = {} if "batch_sampler" in arguments else {"batch_size": 5}
    return loader_class(Indices(SIZE), **arguments, **more), next(iter(arguments.values()))


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


def epoch_of(loader_class: Any, kind: str, epoch: int, **ranks: Any) -> list[int]:
    loader, sampler = make(loader_class, kind, **ranks)
    sampler.set_epoch(epoch)
    return flat(loader)


@pytest.mark.parametrize("first", ["set_epoch", "load_state_dict"])
@pytest.mark.parametrize("kind", BY_RANK)
@pytest.mark.parametrize("ranks", [RANKS, {}], ids=["ranks", "alone"])
def test_a_state_between_epochs_does_not_undo_set_epoch(
    OurLoader: Any, kind: str, first: str, ranks: dict[str, Any]
) -> None:
    if kind == "DistributedSampler" and not ranks:
        ranks = {"num_replicas": 1, "rank": 0}  # it needs ranks
    before, sampler = make(OurLoader, kind, **ranks)
    states = [before.state_dict()]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        flat(before)
        states.append(before.state_dict())
    for state in states:
        for epoch in (2, 1, 0):
            loader, sampler = make(OurLoader, kind, **ranks)
            if first == "set_epoch":
                sampler.set_epoch(epoch)
            loader.load_state_dict(state)
            if first != "set_epoch":
                sampler.set_epoch(epoch)
            assert flat(loader) == epoch_of(OurLoader, kind, epoch, **ranks)


@pytest.mark.parametrize("kind", OURS)
def test_a_state_between_epochs_continues_without_set_epoch(OurLoader: Any, kind: str) -> None:
    """Without ranks each iteration is another epoch; with ranks the latest that was set is read again."""
    for ranks, following in (({}, 2), (RANKS, 1)):
        before, sampler = make(OurLoader, kind, **ranks)
        sampler.set_epoch(1)
        flat(before)
        loader, _ = make(OurLoader, kind, **ranks)
        loader.load_state_dict(before.state_dict())
        assert flat(loader) == epoch_of(OurLoader, kind, following, **ranks)


@pytest.mark.parametrize("first", ["set_epoch", "load_state_dict"])
@pytest.mark.parametrize("kind", BY_RANK)
def test_a_state_in_mid_epoch_is_continued_in_its_epoch_only(OurLoader: Any, kind: str, first: str) -> None:
    before, sampler = make(OurLoader, kind, **RANKS)
    sampler.set_epoch(1)
    iterator = iter(before)
    next(iterator)
    state = before.state_dict()
    rest = flat(iterator)
    for epoch in (1, 2, 0):
        loader, sampler = make(OurLoader, kind, **RANKS)
        if first == "set_epoch":
            sampler.set_epoch(epoch)
        loader.load_state_dict(state)
        if first != "set_epoch":
            sampler.set_epoch(epoch)
        if epoch == 1:
            assert flat(loader) == rest
            continue
        with pytest.raises(StateError, match=r"call set_epoch\(1\) before the iteration"):
            iter(loader)
        assert flat(loader) == epoch_of(OurLoader, kind, epoch, **RANKS), "the state is dropped"


@pytest.mark.parametrize("kind", BY_RANK)
def test_a_state_before_the_first_batch_is_of_any_epoch(OurLoader: Any, kind: str) -> None:
    before, _ = make(OurLoader, kind, **RANKS)
    iterator = iter(before)
    loader, sampler = make(OurLoader, kind, **RANKS)
    loader.load_state_dict(before.state_dict())
    sampler.set_epoch(3)
    assert flat(loader) == epoch_of(OurLoader, kind, 3, **RANKS)
    assert flat(iterator) == epoch_of(OurLoader, kind, 0, **RANKS)


@pytest.mark.parametrize("kind", ["DynaGCSSampler", "MixtureSampler"])
def test_set_epoch_in_mid_epoch_leaves_the_position(OurLoader: Any, kind: str) -> None:
    loader, sampler = make(OurLoader, kind, **RANKS)
    iterator = iter(loader)
    next(iterator)
    sampler.set_epoch(1)
    state = loader.state_dict()
    resumed, _ = make(OurLoader, kind, **RANKS)
    resumed.load_state_dict(state)
    assert flat(resumed) == flat(iterator)


def test_a_batch_sampler_without_batches_gets_its_state(OurLoader: Any) -> None:
    """A sampler of length 0 is false."""

    def none() -> Any:
        sampler = BudgetBatchSampler([10, 20], 20, num_replicas=3, rank=0, drop_last=True)
        return OurLoader(range(2), batch_sampler=sampler)

    loader = none()
    states = [loader.state_dict()]
    iterator = iter(loader)
    states.append(loader.state_dict())
    assert flat(iterator) == []
    states.append(loader.state_dict())
    for state in states:
        resumed = none()
        resumed.load_state_dict(state)
        assert flat(resumed) == []


class Seeded(RandomSampler):
    """Makes its generator when it is first iterated, and seeds it by the epoch, as accelerate's seedable sampler."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        self.generator = self.generator or torch.Generator()
        self.generator.manual_seed(7 + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)


@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_a_sampler_that_makes_its_generator_when_it_is_iterated(OurLoader: Any, epochs: int) -> None:
    def made(epoch: int) -> Any:
        sampler = Seeded(range(10))
        sampler.set_epoch(epoch)
        return OurLoader(range(10), 2, sampler=sampler)

    saved, resumed, other = made(0), made(epochs), made(5)
    for _ in range(epochs):
        list(saved)
    iterator = iter(saved)
    for _ in range(2):
        next(iterator)
    state = saved.state_dict()
    due = [[batch.tolist() for batch in part] for part in (iterator, saved)]
    resumed.load_state_dict(state)
    assert [[batch.tolist() for batch in resumed] for _ in due] == due
    other.load_state_dict(state)
    with pytest.raises(StateError, match=f"in epoch {epochs} of the loader's sampler, which is at epoch 5"):
        iter(other)
