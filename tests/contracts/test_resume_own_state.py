"""States that datasets and samplers keep themselves are given back to them, also to those that were read since."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset, Sampler

from tests.loader_cases import Indices, StatefulSampler
from tests.stateful_parts import SIZE, WORKERS, Noisy, OwnIterator, Spanning, plain
from torch_dpflow import LoaderOptions
from torch_dpflow.errors import StateError
from torch_dpflow.remote.shipping.content_identity import fingerprint


@pytest.mark.parametrize("workers", WORKERS)
def test_a_dataset_that_was_read_goes_back_to_where_it_was(OurLoader: Any, workers: str) -> None:
    """Over the same objects: before anything was asked for, and once an epoch has begun."""
    loader = OurLoader(OwnIterator(), batch_size=3, **WORKERS[workers])
    states = [loader.state_dict()]
    iterator = iter(loader)
    states.append(loader.state_dict())
    expected = plain(iterator)
    assert len(expected) == 4 * max(1, loader.num_workers)
    for state in states:
        loader.load_state_dict(state)
        assert plain(loader) == expected


def test_kept_workers_say_where_an_epoch_begins_whose_forerunner_was_left(OurLoader: Any) -> None:
    """How far they had read ahead nobody else knows."""

    def make() -> Any:
        return OurLoader(OwnIterator(), batch_size=3, **WORKERS["kept workers"])

    loader = make()
    next(iter(loader))
    iterator = iter(loader)
    states = [loader.state_dict()]
    next(iterator)
    states.append(loader.state_dict())
    rest = plain(iterator)
    for state in states:
        again = make()
        again.load_state_dict(state)
        assert plain(again)[-len(rest) :] == rest


def test_the_state_of_each_copy_needs_as_many_workers(OurLoader: Any) -> None:
    def make(num_workers: int) -> Any:
        return OurLoader(Noisy(), batch_size=3, num_workers=num_workers)

    loader = make(2)
    next(iter(loader))
    with pytest.raises(StateError, match="2 workers"):
        make(3).load_state_dict(loader.state_dict())


class Picky(Spanning):
    """Takes no state, or takes it and fails once it is iterated."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.spoilt = False

    def __iter__(self) -> Iterator[int]:
        if self.spoilt:
            raise KeyError("a shard that is gone")
        return super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.when == "at once":
            raise KeyError("a shard that is gone")
        self.spoilt = True


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("when", ["at once", "once it is iterated"])
def test_a_dataset_that_cannot_take_its_state_says_so_at_iter(OurLoader: Any, workers: str, when: str) -> None:
    loader = OurLoader(Picky(when), batch_size=3, **WORKERS[workers])
    iterator = iter(loader)
    batches = plain([next(iterator)])
    state = loader.state_dict()
    batches += plain(iterator)
    again = OurLoader(Picky(when), batch_size=3, **WORKERS[workers])
    for _ in range(2):  # the second time kept workers are there
        again.load_state_dict(state)
        with pytest.raises((StateError, KeyError), match="a shard that is gone"):
            iter(again)
        again.dataset.spoilt = False
        assert plain(again) == batches, "without the state, which is dropped"
        again.dataset.epoch = 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_cannot_take_its_state_says_so_at_iter(OurLoader: Any, num_workers: int) -> None:
    class Other(StatefulSampler):
        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("an epoch that never was")

    def make(sampler: type[StatefulSampler]) -> Any:
        return OurLoader(Indices(SIZE), batch_size=3, sampler=sampler(SIZE), num_workers=num_workers)

    loader = make(Other)
    iterator = iter(loader)
    batches = plain([next(iterator)])
    state = loader.state_dict()
    batches += plain(iterator)
    again = make(Other)
    again.load_state_dict(state)
    with pytest.raises(StateError, match="never was"):
        iter(again)
    assert plain(again) == batches


class Emptied(IterableDataset[int]):
    """Hands out the very list that it empties."""

    def __init__(self) -> None:
        self.left = list(range(12))

    def __iter__(self) -> Iterator[int]:
        while self.left:
            yield self.left.pop(0)

    def state_dict(self) -> dict[str, list[int]]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.left = state["left"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_neither_reading_on_nor_resuming_changes_a_state(OurLoader: Any, num_workers: int) -> None:
    loader = OurLoader(Emptied(), batch_size=2, num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    assert len(rest) == 5
    for _ in range(2):
        resumed = OurLoader(Emptied(), batch_size=2, num_workers=num_workers)
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == rest


class Curriculum(Indices):
    """Loads more from its state than it saves in it."""

    shift = 0

    def __getitem__(self, index: int) -> int:
        return super().__getitem__(index) + self.shift

    def state_dict(self) -> dict[str, int]:
        return {"stage": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.shift = 100 * state["stage"]


@pytest.mark.parametrize(("workers", "threads"), [(0, 1), (2, 1), (2, 3)])
def test_a_state_is_loaded_also_where_the_dataset_has_an_equal_one(OurLoader: Any, workers: int, threads: int) -> None:
    def make() -> Any:
        return OurLoader(Curriculum(4), batch_size=2, num_workers=workers, options=LoaderOptions(read_threads=threads))

    loader = make()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[102, 103]]


class ByProperty:
    """Names that only our loader looks for are there, and fail."""

    error: type[Exception] = KeyError

    def _fails(self) -> Any:
        raise self.error("not set up yet")

    state_dict = load_state_dict = epoch = batch_size = announce_order = property(_fails)


class ByLookup:
    """Whatever it has not is looked up, and not found."""

    error: type[Exception] = KeyError

    def __getattr__(self, name: str) -> Any:
        if name == "__getitems__":  # for which torch looks too
            raise AttributeError(name)
        raise type(self).error(name)


class Once(IterableDataset[int]):
    """Its iterator, too, is one of these."""

    def __init__(self, touchy: type) -> None:
        self.touchy = touchy

    def __iter__(self) -> Iterator[int]:
        class Iterated(self.touchy):  # type: ignore[misc, name-defined]
            rest = iter(range(7))

            def __iter__(self) -> Any:
                return self

            def __next__(self) -> int:
                return next(self.rest)

        return Iterated()


def touchy(of: type, touchy: type, error: type[Exception]) -> Any:
    return type(f"{touchy.__name__}{of.__name__}", (touchy, of), {"error": error})


@pytest.mark.parametrize(("error", "num_workers"), [(KeyError, 1), (RuntimeError, 0), (NotImplementedError, 0)])
@pytest.mark.parametrize("how", [ByProperty, ByLookup])
@pytest.mark.parametrize("part", ["dataset", "iterable", "sampler", "batch_sampler"])
def test_attributes_that_fail_are_as_if_they_were_not_there(
    Loader: Any, part: str, how: type, error: type[Exception], num_workers: int
) -> None:
    given: dict[str, Any] = {"dataset": Indices(7), "batch_size": 2}
    if part == "dataset":
        given["dataset"] = touchy(Indices, how, error)(7)
    elif part == "iterable":
        given["dataset"] = touchy(Once, how, error)(touchy(object, how, error))
    elif part == "sampler":
        given["sampler"] = touchy(StatelessSampler, how, error)(7)
    else:
        del given["batch_size"]
        given["batch_sampler"] = touchy(StatelessBatches, how, error)(7)
    loader = Loader(**given, num_workers=num_workers)
    batches = plain(loader)
    assert batches == [[0, 1], [2, 3], [4, 5], [6]]
    if hasattr(loader, "state_dict"):
        iterator = iter(loader)
        next(iterator)
        loader.load_state_dict(loader.state_dict())
        assert plain(loader) == batches[1:]


class StatelessSampler(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class StatelessBatches(StatelessSampler):
    def __iter__(self) -> Iterator[Any]:
        return iter([[*range(first, min(first + 2, self.size))] for first in range(0, self.size, 2)])


def test_a_dataset_that_looks_up_all_names_can_be_read_by_threads_and_is_digested(OurLoader: Any) -> None:
    """torch's own fetcher fails on it, as it asks for `__getitems__` too."""

    class Looks(Indices):
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    options = LoaderOptions(read_threads=2)
    assert plain(OurLoader(Looks(4), batch_size=2, num_workers=1, options=options)) == [[0, 1], [2, 3]]
    # Python 3.10 cannot pickle such an object, so it is equal to itself only.
    assert (fingerprint(Looks(4)) == fingerprint(Looks(4))) == (sys.version_info >= (3, 11))


class Position(dict[str, int]):
    """A state of which is counted how many there are."""

    alive: weakref.WeakSet[Position] = weakref.WeakSet()

    def __new__(cls, *_values: Any) -> Position:  # called for copies too
        made = super().__new__(cls)
        cls.alive.add(made)
        return made

    def __hash__(self) -> int:
        return id(self)


class Positioned(StatefulSampler):
    """Its states are counted."""

    def state_dict(self) -> dict[str, int]:
        return Position(super().state_dict())


@pytest.mark.parametrize("workers", ["in the process", "workers"])
def test_states_of_a_sampler_before_delivered_batches_are_dropped(OurLoader: Any, workers: str) -> None:
    loader = OurLoader(Indices(200), sampler=Positioned(200), **WORKERS[workers])
    most = 0
    for number, _ in enumerate(loader):
        if number % 20 == 19:  # a collection takes longer than all else
            gc.collect()
            most = max(most, len(Position.alive))
    assert most < 12
