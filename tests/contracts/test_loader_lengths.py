"""Datasets and samplers that cannot say how long they are: torch's loader does not ask while it iterates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from tests.loader_cases import StatefulSampler

ERRORS = [TypeError, NotImplementedError, ValueError, AttributeError, KeyError, OverflowError, RuntimeError]
SIZE = 12


def no_length(error: type[Exception]) -> int:
    raise error("this has no length")


class Squares(Dataset):
    """Item `i` is its square; nobody knows how many there are."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __getitem__(self, index: int) -> int:
        return index * index

    def __len__(self) -> int:
        return no_length(self.error)


class Packs:
    """Batches of as many samples as fit, so that nobody knows how many batches there will be."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __iter__(self) -> Iterator[list[int]]:
        begin = 0
        for size in (3, 1, 5, 2, 1):
            yield list(range(begin, begin + size))
            begin += size

    def __len__(self) -> int:
        return no_length(self.error)


class Counting(Squares):
    """Counts how often it is asked for its length."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return SIZE


class CountingSampler(StatefulSampler):
    """Likewise."""

    asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return super().__len__()


class Endless(IterableDataset):
    """Says that it is longer than any index."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))

    def __len__(self) -> int:
        return 1 << 70


class Bag(list):
    """A batch's indices that do not tell their number."""

    def __len__(self) -> int:
        return no_length(ValueError)


def plain(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("error", ERRORS)
def test_a_batch_sampler_that_does_not_know_is_used(Loader: Any, num_workers: int, error: type[Exception]) -> None:
    loader = Loader(Squares(error), batch_sampler=Packs(error), num_workers=num_workers)
    expected = [[index * index for index in batch] for batch in Packs(error)]
    assert [plain(loader), plain(loader)] == [expected, expected]
    with pytest.raises(error):
        len(loader)


# Whichever error it is was told apart above.
@pytest.mark.parametrize(("error", "num_workers"), [*((error, 0) for error in ERRORS), (ERRORS[0], 2)])
def test_it_is_resumed(OurLoader: Any, num_workers: int, error: type[Exception]) -> None:
    def make() -> Any:
        return OurLoader(Squares(error), batch_sampler=Packs(error), num_workers=num_workers)

    loader = make()
    states = [loader.state_dict()]
    iterator = iter(loader)
    next(iterator)
    states.append(loader.state_dict())
    rest = plain(iterator)
    states.append(loader.state_dict())
    found = []
    for state in states:
        again = make()
        again.load_state_dict(state)
        found.append(plain(again)[-4:])
    assert found == [rest, rest, rest]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nobody_asks_while_it_iterates(Loader: Any, num_workers: int) -> None:
    dataset, sampler = Counting(), CountingSampler(SIZE)
    loader = Loader(dataset, batch_size=5, sampler=sampler, num_workers=num_workers)
    assert [len(plain(loader)) for _ in range(2)] == [3, 3]  # list(loader) would ask
    assert (dataset.asked, sampler.asked) == (0, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_length_beyond_any_index(Loader: Any, num_workers: int) -> None:
    loader = Loader(Endless(), batch_size=5, num_workers=num_workers)
    assert len(plain(loader)) == 3 * max(1, num_workers)
    with pytest.raises(OverflowError):
        len(loader)


def test_indices_that_do_not_tell_their_number(Loader: Any) -> None:
    batches = [Bag([1, 2]), Bag([3])]
    assert plain(Loader(Squares(ValueError), batch_sampler=batches)) == [[1, 4], [9]]
