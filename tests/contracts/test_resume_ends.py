"""Ends of streams and samplers, errors within streams, and what a state says about both."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, SubsetRandomSampler, WeightedRandomSampler, get_worker_info

from tests.loader_cases import Indices

SIZE = 12


class Numbered(IterableDataset[int]):
    """A worker's share of the numbers, plus 100 for each epoch before; restored as the subclass says."""

    def __init__(self) -> None:
        self.at, self.epoch, self.is_loaded = 0, 0, False

    def read(self) -> Iterator[int]:
        while self.at < len(self.share()):
            self.at += 1
            yield self.share()[self.at - 1] + 100 * self.epoch

    def share(self) -> range:
        worker = get_worker_info()
        return range(SIZE) if worker is None else range(worker.id, SIZE, worker.num_workers)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch, self.is_loaded = state["at"], state["epoch"], True

    def _begin(self) -> None:
        if not self.is_loaded:
            self.at, self.epoch = 0, self.epoch + 1
        self.is_loaded = False


class ResetsAtItsEnd(Numbered):
    def __iter__(self) -> Iterator[int]:
        yield from self.read()
        self.at, self.epoch = 0, self.epoch + 1


class BeginsAtItsFirstSample(Numbered):
    """A generator: `iter` alone runs none of it, so the loaded position stays for the next iteration."""

    def __iter__(self) -> Iterator[int]:
        self._begin()
        yield from self.read()


class BeginsAtIter(Numbered):
    def __iter__(self) -> Iterator[int]:
        self._begin()
        return self.read()


class SavesATensor(BeginsAtItsFirstSample):
    def state_dict(self) -> dict[str, Any]:
        return {"numbers": torch.tensor([self.at, self.epoch])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch, self.is_loaded = *state["numbers"].tolist(), True


class IsItsOwnIterator(Numbered):
    def __iter__(self) -> Iterator[int]:
        self._begin()
        return self

    def __next__(self) -> int:
        return next(self.read())


class IsItsOwnAndResets(Numbered):
    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        for number in self.read():
            return number
        self.at, self.epoch = 0, self.epoch + 1
        raise StopIteration


class CountsItsIterators(Numbered):
    """Each has a state, and to make one counts as an epoch."""

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return _Counted(self)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class _Counted(IsItsOwnIterator):
    def __init__(self, dataset: Numbered) -> None:
        self.at, self.epoch, self.is_loaded = 0, dataset.epoch, False


KINDS = [
    ResetsAtItsEnd,
    BeginsAtItsFirstSample,
    BeginsAtIter,
    SavesATensor,
    IsItsOwnIterator,
    IsItsOwnAndResets,
    CountsItsIterators,
]
#: Batch sizes that do and do not divide the stream, and workers that keep their datasets.
WAYS = [(size, 0) for size in (None, 4, 5)] + [(4, 2)]


def as_read(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_end_of_an_epoch_the_next_one_is_whole(OurLoader: Any, kind: Any) -> None:
    for (size, workers), epochs in itertools.product(WAYS, (1, 2)):

        def make(size: Any = size, workers: int = workers) -> Any:
            keeps = {"num_workers": workers, "persistent_workers": bool(workers)}
            return OurLoader(kind(), size, collate_fn=as_read, **keeps)

        saved, resumed = make(), make()
        for _ in range(epochs):
            list(saved)
        resumed.load_state_dict(saved.state_dict())
        due = [list(saved), list(saved)]
        numbers = due[0] if size is None else [number for batch in due[0] for number in batch]
        assert sorted(number % 100 for number in numbers) == list(range(SIZE))
        assert [list(resumed), list(resumed)] == due, (size, workers, epochs)


class Faulty(IterableDataset[int]):
    """Raises at one number itself, or has none of that; it goes on after the error. Without a state."""

    def __init__(self, wrong: int | None) -> None:
        self.wrong = wrong

    def __iter__(self) -> Iterator[int]:
        return _Faulty(self.wrong)


class _Faulty(Iterator[int]):
    def __init__(self, wrong: int | None) -> None:
        self._wrong, self._next = wrong, 0

    def __next__(self) -> int:
        number, self._next = self._next, self._next + 1
        if number == self._wrong:
            raise ValueError(f"sample {number}")
        if number >= SIZE:
            raise StopIteration
        return number


def refuse_one(batch: Any) -> Any:
    numbers = batch if isinstance(batch, list) else [batch]
    if 1 in numbers:
        raise ValueError("sample 1")
    return numbers


def next_or_error(iterator: Any) -> Any:
    try:
        return next(iterator)
    except ValueError:
        return "error"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_read_wrong", [False, True], ids=["collate_fn", "dataset"])
def test_an_error_that_the_loop_catches_is_a_batch(OurLoader: Any, is_read_wrong: bool, num_workers: int) -> None:
    for size in (None, 2):

        def make(size: Any = size) -> Any:
            collate_fn = as_read if is_read_wrong else refuse_one
            return OurLoader(Faulty(1 if is_read_wrong else None), size, collate_fn=collate_fn, num_workers=num_workers)

        saved, resumed = make(), make()
        iterator = iter(saved)
        assert "error" in [next_or_error(iterator) for _ in range(3)]
        resumed.load_state_dict(saved.state_dict())
        assert list(resumed) == list(iterator)


def test_a_new_error_before_the_saved_position_is_raised(OurLoader: Any) -> None:
    saved = OurLoader(Faulty(None), 2)
    iterator = iter(saved)
    next(iterator)
    resumed = OurLoader(Faulty(1), 2)
    resumed.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="sample 1"):
        iter(resumed)


class Restarting:
    """Begins again once it has ended, as iterators do that reset themselves."""

    def __init__(self, items: list[Any]) -> None:
        self._items, self._at = items, 0

    def __iter__(self) -> Restarting:
        return self

    def __next__(self) -> Any:
        if self._at == len(self._items):
            self._at = 0
            raise StopIteration
        self._at += 1
        return self._items[self._at - 1]


class RestartingStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(Restarting([0, 1, 2, 3]))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_iterator_that_has_ended_is_not_asked_again(OurLoader: Any, num_workers: int) -> None:
    """torch asks it once more for each batch that it prefetches."""
    loaders = {
        "sampler": OurLoader(Indices(4), sampler=Restarting([0, 1, 2, 3]), num_workers=num_workers),
        "batch sampler": OurLoader(Indices(4), batch_sampler=Restarting([[0], [1], [2], [3]]), num_workers=num_workers),
        "stream": OurLoader(RestartingStream(), num_workers=num_workers),
        "stream without batches": OurLoader(RestartingStream(), None, num_workers=num_workers),
    }
    for name, loader in loaders.items():
        iterator = iter(loader)
        numbers = sorted(int(batch) for batch in itertools.islice(iterator, 100))
        copies = max(1, num_workers) if "stream" in name else 1
        assert numbers == sorted([0, 1, 2, 3] * copies), name
        assert list(itertools.islice(iterator, 1)) == [], name


def test_a_state_from_before_errors_were_counted_is_read(OurLoader: Any) -> None:
    saved, resumed = OurLoader(Faulty(None), 2), OurLoader(Faulty(None), 2)
    iterator = iter(saved)
    next(iterator)
    state = saved.state_dict()
    values = json.loads(state["state"])
    assert values["streams"][0].pop("failed") == 0
    resumed.load_state_dict({**state, "state": json.dumps(values)})
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in iterator]


SAMPLERS: dict[str, Any] = {
    "shuffle": lambda: {"shuffle": True},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(SIZE))},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * SIZE, SIZE)},
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(("epochs", "steps"), [(0, 0), (1, 0), (1, 1)])
def test_between_iter_and_the_first_batch_the_order_is_still_to_be_drawn(
    OurLoader: Any, name: str, epochs: int, steps: int
) -> None:
    """With torch's random state restored, later epochs also equal the saved run's."""
    torch.manual_seed(5)
    saved = OurLoader(Indices(SIZE), 4, **SAMPLERS[name]())
    for _ in range(epochs):
        list(saved)
    iterator = iter(saved)
    for _ in range(steps):
        next(iterator)
    state, random = saved.state_dict(), torch.get_rng_state()
    due = [[batch.tolist() for batch in batches] for batches in (iterator, saved, saved)]
    for is_restored in (True, False):
        torch.manual_seed(77)
        resumed = OurLoader(Indices(SIZE), 4, **SAMPLERS[name]())
        if is_restored:
            torch.set_rng_state(random)
        resumed.load_state_dict(state)
        read = [[batch.tolist() for batch in resumed] for _ in range(3)]
        assert (read if is_restored else read[:1]) == (due if is_restored else due[:1])
