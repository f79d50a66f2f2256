"""Iterable datasets: shares by worker, their order, short batches, lengths, chains and data pipes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from tests.loader_cases import WORKERS, Stream, Uneven, assert_same, epochs


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "persistent_workers"),
    [
        (None, False, False),
        (None, False, True),
        (1, True, True),
        (3, False, True),
        (3, True, False),
    ],
)
def test_uneven_shares_arrive_in_torchs_order(
    Loader: Any, batch_size: int | None, drop_last: bool, persistent_workers: bool
) -> None:
    arguments = {"batch_size": batch_size, "drop_last": drop_last, "persistent_workers": persistent_workers}

    def run(loader_class: Any, sizes: list[int]) -> list[list[Any]]:
        return epochs(loader_class(Uneven(sizes), num_workers=len(sizes), **arguments), 2)

    # Where all are empty nothing is put together, whatever the size of a batch.
    for sizes in ([0, 4, 11], [7, 1], *([[0, 0]] if batch_size is None else [])):
        assert_same(run(Loader, sizes), run(DataLoader, sizes), f"sizes {sizes}")


@pytest.mark.parametrize(("num_workers", "prefetch_factor"), [(0, 1), (1, 4), (2, 1), (3, 4), (3, 1)])
def test_every_number_once(Loader: Any, num_workers: int, prefetch_factor: int) -> None:
    ahead = {"prefetch_factor": prefetch_factor} if num_workers else {}
    loader = Loader(Stream(50), batch_size=4, num_workers=num_workers, **ahead)
    for epoch in epochs(loader, 2):
        assert sorted(int(number) for batch in epoch for number in batch) == list(range(50))


def test_a_stream_without_end_can_be_left(Loader: Any) -> None:
    iterator = iter(Loader(Endless(), batch_size=2, num_workers=2))
    assert [next(iterator).tolist() for _ in range(6)] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]


class Endless(IterableDataset):
    """Counts for ever."""

    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_length_is_the_datasets_and_exceeding_it_warns(Loader: Any, num_workers: int) -> None:
    class Longer(Stream):
        def share(self) -> range:
            return range(self.size + 2)

    loader = Loader(Longer(4), batch_size=None, num_workers=num_workers)
    iterator = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            next(iterator)
    assert len(loader) == 4
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    hint = "not properly configuring" if num_workers else ""
    with pytest.warns(UserWarning, match=f"was reported to be 4.*but 5 samples have been fetched.*{hint}"):
        next(iterator)


@pytest.mark.parametrize(("batch_size", "drop_last"), [(1, False), (3, False), (3, True), (None, False)])
def test_len_equals_torchs(Loader: Any, batch_size: int | None, drop_last: bool) -> None:
    arguments = {"batch_size": batch_size, "drop_last": drop_last, "num_workers": 2}
    assert len(Loader(Stream(10), **arguments)) == len(DataLoader(Stream(10), **arguments))
    with pytest.raises(TypeError, match="does not know its length"):
        len(Loader(Stream(10, sized=False), **arguments))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_chained_streams(Loader: Any, num_workers: int) -> None:
    for dataset in (ChainDataset([Stream(7), Stream(4)]), Stream(7) + Stream(4)):
        assert_same(
            list(Loader(dataset, batch_size=2, num_workers=num_workers)),
            list(DataLoader(dataset, batch_size=2, num_workers=num_workers)),
        )


class Remembering(IterableDataset):
    """Counts, within one copy of the dataset, how often it was iterated."""

    def __init__(self) -> None:
        self.iterations = 0

    def __iter__(self) -> Iterator[int]:
        self.iterations += 1
        yield self.iterations


def test_persistent_workers_keep_their_copy_of_the_dataset(Loader: Any) -> None:
    kept = Loader(Remembering(), batch_size=None, num_workers=2, persistent_workers=True)
    assert epochs(kept, 3) == [[1, 1], [2, 2], [3, 3]]
    afresh = Loader(Remembering(), batch_size=None, num_workers=2)
    assert epochs(afresh, 3) == [[1, 1]] * 3


class FailsAt(IterableDataset):
    """Every worker's copy raises at its third number."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from (10 * (info.id if info else 0) + offset for offset in range(2))
        raise ValueError("no third number")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_the_stream_ends_it_as_in_torch(Loader: Any, num_workers: int) -> None:
    def run(loader_class: Any) -> list[Any]:
        iterator = iter(loader_class(FailsAt(), batch_size=None, num_workers=num_workers))
        seen: list[Any] = []
        while True:
            try:
                seen.append(next(iterator))
            except StopIteration:
                return seen
            except ValueError as error:
                seen.append(re.search("no third number", str(error)) and type(error))

    assert run(Loader) == run(DataLoader)


class FailsToBegin(IterableDataset):
    """Raises in `__iter__`."""

    def __iter__(self) -> Iterator[int]:
        raise LookupError("no stream here")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_iter_arrives(Loader: Any, num_workers: int) -> None:
    loader = Loader(FailsToBegin(), num_workers=num_workers)
    for _ in range(2):
        with pytest.raises(LookupError, match="no stream here"):
            list(loader)


@pytest.mark.parametrize(("num_workers", "persistent_workers"), WORKERS)
def test_iterable_data_pipes_shuffle_and_shard_as_in_torch(
    Loader: Any, num_workers: int, persistent_workers: bool
) -> None:
    def run(loader_class: Any) -> list[list[Any]]:
        pipe = IterableWrapper(range(20)).shuffle().sharding_filter()
        torch.manual_seed(5)
        loader = loader_class(
            pipe, batch_size=3, shuffle=True, num_workers=num_workers, persistent_workers=persistent_workers
        )
        return epochs(loader, 3)

    assert_same(run(Loader), run(DataLoader))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_map_data_pipes(Loader: Any, num_workers: int) -> None:
    def run(loader_class: Any) -> list[Any]:
        return list(loader_class(SequenceWrapper(range(9)), batch_size=2, num_workers=num_workers))

    assert_same(run(Loader), run(DataLoader))
