"""The batches, their order and what a random state is drawn for: equal to torch's loader, bit for bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.loader_cases import (
    EagerSampler,
    Indices,
    LazySampler,
    Rows,
    assert_same,
    epochs,
    global_rng,
    seed_everything,
)


def random_arguments(number: int) -> Callable[[], dict[str, Any]]:
    """One of many possible sets of arguments; each call makes it afresh, so that no state is shared."""
    draw = random.Random(number)
    size = draw.choice([1, 2, 7, 30, 64])
    num_workers = draw.choice([0, 0, 1, 2])
    kind = draw.choice(["plain", "shuffle", "shuffle", "sampler", "sampler", "batch_sampler", "unbatched"])
    batch_size = draw.choice([1, 2, 5, 8, size, size + 1])
    drop_last = draw.random() < 0.3
    sampler_number = draw.randrange(len(SAMPLERS))
    generator_seed = draw.choice([None, None, 3, 4])
    workers: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        workers["persistent_workers"] = draw.random() < 0.3
        workers["prefetch_factor"] = draw.choice([None, 1, 2, 5])

    def arguments() -> dict[str, Any]:
        generator = None if generator_seed is None else torch.Generator().manual_seed(generator_seed)
        sampler = SAMPLERS[sampler_number](size, generator)
        given: dict[str, Any] = {"dataset": Rows(size), "generator": generator, **workers}
        if kind == "plain":
            given |= {"batch_size": batch_size, "drop_last": drop_last}
        elif kind == "shuffle":
            given |= {"batch_size": batch_size, "drop_last": drop_last, "shuffle": True}
        elif kind == "sampler":
            given |= {"batch_size": batch_size, "drop_last": drop_last, "sampler": sampler}
        elif kind == "batch_sampler":
            given |= {"batch_sampler": BatchSampler(sampler, batch_size, drop_last)}
        else:
            given |= {"batch_size": None, "sampler": sampler}
        return given

    return arguments


SAMPLERS: list[Callable[[int, torch.Generator | None], Any]] = [
    lambda size, _: SequentialSampler(range(size)),
    lambda size, _: list(range(size))[::-1],
    lambda size, generator: RandomSampler(range(size), generator=generator),
    lambda size, generator: RandomSampler(range(size), replacement=True, num_samples=2 * size, generator=generator),
    lambda size, generator: RandomSampler(range(size), num_samples=size + 3, generator=generator),
    lambda size, generator: SubsetRandomSampler(range(size // 2 + 1), generator=generator),
    lambda size, generator: WeightedRandomSampler([1.0] * size, size, generator=generator),
    lambda size, _: DistributedSampler(range(size), num_replicas=2, rank=1),
    lambda size, _: EagerSampler(size),
    lambda size, _: LazySampler(size),
]


@pytest.mark.parametrize("number", range(32))
def test_two_epochs_equal_torchs_bit_for_bit(Loader: Any, number: int) -> None:
    arguments = random_arguments(number)

    def run(loader_class: Any) -> tuple[list[list[Any]], Any]:
        seed_everything(number)
        loader = loader_class(**arguments())
        return epochs(loader, 2), global_rng()

    expected, expected_rng = run(DataLoader)
    actual, actual_rng = run(Loader)
    assert_same(actual, expected, "epochs")
    assert actual_rng == expected_rng, "the loader drew from the process's generators otherwise than torch's does"


def test_explicit_list_of_batches(Loader: Any) -> None:
    batches = [[3, 1], [2], [0, 4, 5]]
    loader = Loader(Indices(6), batch_sampler=batches, num_workers=2)
    assert len(loader) == 3
    assert [batch.tolist() for batch in loader] == batches


def test_generator_alone_decides_the_order(Loader: Any) -> None:
    def order(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        loader = Loader(Indices(40), batch_size=None, shuffle=True, num_workers=2, generator=generator)
        return [*loader, *loader]

    torch.manual_seed(1)
    first = order(5)
    torch.manual_seed(2)
    assert order(5) == first
    assert order(6) != first
    assert sorted(first) == sorted([*range(40), *range(40)])


def test_sampler_runs_in_the_thread_of_the_caller_and_only_inside_the_loader(Loader: Any) -> None:
    """Else a sampler's draws from the global generator would race with those of the training loop."""
    callers = set()

    class Watching(EagerSampler):
        def __iter__(self) -> Any:
            for index in range(self.size):
                callers.add(threading.current_thread())
                yield index

    assert sum(len(batch) for batch in Loader(Indices(50), sampler=Watching(50), num_workers=2)) == 50
    assert callers == {threading.current_thread()}


def test_draws_of_a_lazy_sampler_interleave_with_the_training_loop_as_in_torch(Loader: Any) -> None:
    def run(loader_class: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = loader_class(Indices(40), batch_size=4, sampler=LazySampler(40), num_workers=2)
        return [(batch, torch.rand(())) for batch in loader]

    assert_same(run(Loader), run(DataLoader))


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_how_far_a_sampler_is_drawn_ahead(Loader: Any, num_workers: int, prefetch_factor: int) -> None:
    """An unknown sampler is never drawn further ahead than by torch's loader."""
    drawn = 0

    class Watching(EagerSampler):
        def __iter__(self) -> Any:
            nonlocal drawn
            for index in range(self.size):
                drawn += 1
                yield index

    loader = Loader(Indices(100), sampler=Watching(100), num_workers=num_workers, prefetch_factor=prefetch_factor)
    iterator = iter(loader)
    window = num_workers * prefetch_factor
    assert drawn == window
    for taken in range(1, 20):
        next(iterator)
        assert drawn == taken + window


class Asked(Indices):
    """A row is what it is asked for: an index, or several."""

    def __init__(self) -> None:
        super().__init__(5)

    def __getitem__(self, index: Any) -> Any:
        return index


class StartsAnew(Sampler[list[int]]):
    """Is its own iterator, and starts its epoch anew whenever it is asked for one."""

    def __init__(self) -> None:
        self._left: list[list[int]] = []

    def __iter__(self) -> StartsAnew:
        self._left = [[0, 1], [2, 3], [4]]
        return self

    def __next__(self) -> list[int]:
        if not self._left:
            raise StopIteration
        return self._left.pop(0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_is_its_own_iterator(Loader: Any, num_workers: int) -> None:
    for how in ({"batch_sampler": StartsAnew()}, {"sampler": StartsAnew(), "batch_size": None}):
        loader = Loader(Asked(), num_workers=num_workers, collate_fn=list, **how)
        for _ in range(2):
            # Beyond its end, which one that starts anew over and over has not.
            assert list(islice(loader, 5)) == [[0, 1], [2, 3], [4]]
