"""DataLoadFlowRead: indexing, subsets, loaders, caches, randomness, what cannot be loaded."""

from __future__ import annotations

import logging
import os
import pickle
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.flows.flow_cases import Batched, Numbers, draw, numbers_flow
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.errors import OptionError, OptionTypeError, StageError
from torch_dpflow.flows import DataLoadFlow, DataLoadFlowRead, LocalDataLoadFlowReader
from torch_dpflow.flows.read import Skips


def _read(samples: Any, **options: Any) -> DataLoadFlowRead:
    return numbers_flow(samples, **options).prepare_read(LocalDataLoadFlowReader())


def _numbers(read: DataLoadFlowRead) -> list[int]:
    mapped = read.to_mapped()
    return [mapped[index][0] for index in range(len(mapped))]


def test_a_read_is_indexed() -> None:
    read = _read(Numbers(5))
    mapped = read.to_mapped()
    assert (len(read), len(mapped), list(read.indices())) == (5, 5, [0, 1, 2, 3, 4])
    assert [mapped[index] for index in range(5)] == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1)]
    assert mapped[-1] == mapped[np.int64(4)] == mapped[torch.tensor(4)] == (4, 1)
    for outside in (5, -6):
        with pytest.raises(IndexError, match="has 5 samples"):
            mapped[outside]


def test_what_is_changed_of_a_flow_later_has_no_effect() -> None:
    flow = numbers_flow(Numbers(3))
    read = flow.prepare_read(LocalDataLoadFlowReader())
    flow.map_data("negate", lambda number: -number)
    assert _numbers(read) == [0, 1, 2]


@given(st.lists(st.integers(-6, 5), max_size=8), st.data())
def test_subsets_are_lists_of_places(indices: list[int], data: st.DataObject) -> None:
    whole = list(range(6))
    read = _read(Numbers(6)).subset(indices)
    expected = [whole[index] for index in indices]
    assert list(read.indices()) == _numbers(read) == expected
    if indices:
        again = data.draw(st.lists(st.integers(-len(indices), len(indices) - 1), max_size=5))
        assert _numbers(read.subset(again)) == [expected[index] for index in again]


def test_subsets_leave_the_rest_alone() -> None:
    read = _read(Numbers(6))
    assert (len(read.subset(np.arange(2))), len(read.subset(iter([5]))), len(read)) == (2, 1, 6)
    assert [len(read.subset(nothing)) for nothing in ([], np.array([]), torch.tensor([]))] == [0, 0, 0]


@pytest.mark.parametrize(
    ("indices", "error", "told"),
    [
        ([6], OptionError, "6 is out of range; example/numbers has 6 samples"),
        ([-7], OptionError, "-7 is out of range"),
        ([2**64 - 1], OptionError, "18446744073709551615 is out of range"),
        ([0, 2**80], OptionError, "1208925819614629174706176 is out of range"),
        (5, OptionTypeError, "indices=5 is of type int"),
        (None, OptionTypeError, "indices=None is of type NoneType"),
        ([1, [2]], OptionTypeError, "one dimension of whole numbers"),
        ([1.0], OptionTypeError, "one dimension of whole numbers"),
        (["a"], OptionTypeError, "one dimension of whole numbers"),
        ([[1]], OptionTypeError, "one dimension of whole numbers"),
        ([True], OptionTypeError, "indices has a bool"),
        ([2, True], OptionTypeError, "indices has a bool"),
        (torch.tensor([True, False]), OptionTypeError, "one dimension of whole numbers"),
    ],
)
def test_wrong_subsets_are_told(indices: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        _read(Numbers(6)).subset(indices)


def test_local_functions_come_last() -> None:
    read = _read(Numbers(4))
    local = read.subset([3, 2]).local_map(lambda sample: sample[0] + 1).local_map(str, "text")
    mapped = local.to_mapped()
    assert [mapped[index] for index in range(2)] == ["4", "3"]
    assert str(local) == f"{read} -> LocalMap(local_map) -> LocalMap(text)"
    assert _numbers(read) == [0, 1, 2, 3]


def test_samples_of_a_batch_are_read_together() -> None:
    samples = Batched(8)
    loader = DataLoader(_read(samples).subset([7, 5, 3, 1]).to_mapped(), batch_size=3)
    assert [batch[0].tolist() for batch in loader] == [[7, 5, 3], [1]]
    assert samples.together == [[7, 5, 3], [1]]


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffled_gives_each_sample_once_an_epoch(workers: int) -> None:
    read = _read(Numbers(20))
    with_workers = {"num_workers": workers} if workers else {}
    loader = read.to_shuffled(6, prefetch=2 if workers else None, **with_workers)
    assert isinstance(loader, DPFlowDataLoader)
    orders = [[number for data, _ in loader for number in data.tolist()] for _ in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))


def test_shuffled_takes_what_the_loader_takes() -> None:
    read = _read(Numbers(10)).local_map(lambda sample: sample[0])
    loader = read.to_shuffled(4, collate_fn=tuple, sampler=[3, 1, 2], drop_last=False)
    assert list(loader) == [(3, 1, 2)]
    twice = [list(read.to_shuffled(4, collate_fn=tuple, generator=torch.Generator().manual_seed(3))) for _ in range(2)]
    assert twice[0] == twice[1]


def test_ragged_samples_are_collated_as_told() -> None:
    flow = DataLoadFlow("a/b", 1).dataset("core/x", samples=Numbers(5))
    flow.map_data("length", lambda data: torch.arange(int(data) + 1))

    def pad(samples: list[Any]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([data for data, _ in samples], batch_first=True)

    loader = flow.prepare_read(LocalDataLoadFlowReader()).to_shuffled(5, collate_fn=pad, num_workers=1)
    assert [batch.shape for batch in loader] == [(5, 5)]


def test_a_mapped_dataset_travels_with_its_code() -> None:
    read = _read(Numbers(3)).local_map(lambda sample: sample[0] * 2)
    mapped = pickle.loads(pickle.dumps(read.to_mapped()))
    assert [mapped[index] for index in range(3)] == [0, 2, 4]


# -- caches -------------------------------------------------------------------------------------------------


def test_what_may_be_kept_is_loaded_once() -> None:
    samples = Numbers(6)
    flow = numbers_flow(samples).map_data("draw", draw)
    mapped = flow.prepare_read(LocalDataLoadFlowReader(cache="1MiB")).to_mapped()
    first = [mapped[index] for index in range(6)]
    second = mapped.__getitems__(list(range(6)))
    assert samples.asked == list(range(6))
    assert [sample[0][0] for sample in first] == [sample[0][0] for sample in second] == list(range(6))
    assert all(before[0][1:] != after[0][1:] for before, after in zip(first, second))


def test_nothing_is_kept_of_a_flow_that_begins_at_random() -> None:
    samples = Numbers(3)
    flow = DataLoadFlow("a/b", 1).dataset("core/x", samples=samples).map_data("draw", draw)
    flow.map_data("still", tuple, cache="always")
    mapped = flow.prepare_read(LocalDataLoadFlowReader(cache=100)).to_mapped()
    assert mapped[0] != mapped[0]
    assert samples.asked == [0, 0]


# -- randomness ---------------------------------------------------------------------------------------------


def test_with_a_seed_the_sample_alone_decides_what_is_drawn() -> None:
    flow = numbers_flow(Numbers(8)).map_data("draw", draw)
    reader = LocalDataLoadFlowReader(seed=7)
    read = flow.prepare_read(reader)
    expected = [read.to_mapped()[index] for index in range(8)]
    assert len({sample[0][1] for sample in expected}) == 8
    backwards = flow.prepare_read(reader).to_mapped()
    assert [backwards[index] for index in reversed(range(8))] == expected[::-1]
    subset = flow.prepare_read(reader).subset([5, 2]).to_mapped()
    assert [subset[0], subset[1]] == [expected[5], expected[2]]
    cached = flow.prepare_read(LocalDataLoadFlowReader(seed=7, cache=4)).to_mapped()
    assert [cached[index] for index in range(8)] == expected
    loader = flow.prepare_read(reader).to_shuffled(3, collate_fn=list, num_workers=2)
    assert sorted(sample for batch in loader for sample in batch) == sorted(expected)
    other = flow.prepare_read(LocalDataLoadFlowReader(seed=8)).to_mapped()
    assert other[0][0][1:] != expected[0][0][1:]


def test_with_a_seed_each_epoch_draws_anew() -> None:
    flow = numbers_flow(Numbers(3)).map_data("draw", draw)
    mapped = flow.prepare_read(LocalDataLoadFlowReader(seed=7)).local_map(tuple).to_mapped()
    first = mapped[0]
    mapped.set_epoch(1)
    assert mapped[0] != first
    mapped.set_epoch(np.int64(0))
    assert mapped[0] == first
    for wrong, error in (("x", OptionTypeError), (1.5, OptionTypeError), (2**63, OptionError)):
        with pytest.raises(error, match="epoch="):
            mapped.set_epoch(wrong)


def test_with_a_seed_the_process_draws_as_if_nothing_was_loaded() -> None:
    mapped = numbers_flow(Numbers(3)).map_data("draw", draw).prepare_read(LocalDataLoadFlowReader(seed=7)).to_mapped()

    def drawn(load: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        if load:
            mapped[1]
        return draw(0)

    assert drawn(load=True) == drawn(load=False)


def test_without_a_seed_the_loader_decides() -> None:
    flow = numbers_flow(Numbers(9)).map_data("draw", draw)

    def drawn(workers: int) -> list[Any]:
        read = flow.prepare_read(LocalDataLoadFlowReader())
        generator = torch.Generator().manual_seed(1)
        loader = read.to_shuffled(2, collate_fn=list, num_workers=workers, generator=generator)
        return [sample for batch in loader for sample in batch]

    assert drawn(1) == drawn(2)


# -- what cannot be loaded ----------------------------------------------------------------------------------


def _halve(number: int) -> float:
    return 1 / (number - 4)


def test_errors_are_raised_unless_the_flow_says_otherwise() -> None:
    read = numbers_flow(Numbers(8, broken=(2,))).map_data("halve", _halve).prepare_read(LocalDataLoadFlowReader())
    with pytest.raises(FileNotFoundError, match="object 2"):
        list(DataLoader(read.to_mapped(), batch_size=4))
    with pytest.raises(StageError, match="sample 4: stage 'halve'"):
        list(DataLoader(read.subset([4]).to_mapped()))
    assert read.skipped() == {}


def test_a_worker_forked_while_a_sample_is_counted_counts_its_own() -> None:
    skips = Skips(["halve"])
    with skips._lock.get():
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            skips.add(ValueError())
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert skips.counts() == {"read": 1}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cache", [None, 100])
def test_skipped_samples_are_left_out_and_counted(
    workers: int, cache: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    flow = numbers_flow(Numbers(12, broken=(2, 3, 9)), on_error="skip").map_data("halve", _halve)
    read = flow.prepare_read(LocalDataLoadFlowReader(cache=cache))
    options = LoaderOptions(seeding="worker")  # no batch is loaded twice, so that counts are exact
    loader = DPFlowDataLoader(read.to_mapped(), batch_size=4, num_workers=workers, collate_fn=list, options=options)
    with caplog.at_level(logging.WARNING, "torch_dpflow.flows"):
        batches = list(loader)
    assert [[round(4 + 1 / data) for data, _ in batch] for batch in batches] == [
        [0, 1],
        [5, 6, 7],
        [8, 10, 11],
    ]
    assert read.skipped() == {"read": 3, "halve": 1}
    if workers == 0:
        assert "example/numbers:1, sample 9 is left out: FileNotFoundError: object 9" in caplog.text


def test_each_read_counts_for_itself() -> None:
    read = _read(Numbers(6, broken=(1, 4)), on_error="skip")
    subset = read.subset([0, 1])
    assert len(subset.to_mapped().__getitems__([0, 1])) == 1
    assert (subset.skipped(), read.skipped()) == ({"read": 1}, {})


def _fail_at(number: int) -> Any:
    def check(sample: Any) -> Any:
        if sample[0] == number:
            raise ZeroDivisionError
        return sample

    return check


@pytest.mark.parametrize("workers", [0, 1])
def test_stages_of_one_name_are_counted_together(workers: int) -> None:
    flow = numbers_flow(Numbers(12, broken=(2,)), on_error="skip")
    flow.map("read", _fail_at(3)).map("local_map", _fail_at(4))
    read = flow.prepare_read(LocalDataLoadFlowReader()).local_map(_fail_at(5)).local_map(_fail_at(6))
    batches = DataLoader(read.to_mapped(), batch_size=12, num_workers=workers, collate_fn=list)
    assert [[number for number, _ in batch] for batch in batches] == [[0, 1, 7, 8, 9, 10, 11]]
    assert read.skipped() == {"read": 2, "local_map": 3}


def test_what_fails_in_the_flow_below_counts_as_read() -> None:
    below = DataLoadFlow("a/below", 1).dataset("core/x", samples=Numbers(6))
    below.map_data("inner", lambda data: 1 / (int(data) - 3))
    samples = below.prepare_read(LocalDataLoadFlowReader()).to_mapped()
    read = _read(samples, on_error="skip")
    assert len(read.to_mapped().__getitems__([1, 3, 4])) == 2
    assert read.skipped() == {"read": 1}


def test_what_the_flow_below_leaves_out_is_counted_and_shifts_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    below = _read(Numbers(6, broken=(1,)), on_error="skip").to_mapped()
    flow = DataLoadFlow("a/above", 1, on_error="skip").dataset("core/x", samples=below)
    flow.map_data("halve", _halve)
    read = flow.prepare_read(LocalDataLoadFlowReader())
    with caplog.at_level(logging.WARNING, "torch_dpflow.flows"):
        assert len(read.to_mapped().__getitems__([0, 1, 4, 5])) == 2
    assert read.skipped() == {"read": 1, "halve": 1}
    assert "a/above:1, sample 4 is left out" in caplog.text


def test_what_the_flow_below_leaves_out_is_an_error_above_a_flow_that_raises() -> None:
    below = _read(Numbers(6, broken=(1,)), on_error="skip").to_mapped()
    flow = DataLoadFlow("a/above", 1).dataset("core/x", samples=below)
    read = flow.prepare_read(LocalDataLoadFlowReader())
    assert len(read.to_mapped().__getitems__([0, 2, 4])) == 3
    with pytest.raises(FileNotFoundError):
        read.to_mapped().__getitems__([0, 1, 4])


def test_a_sample_by_itself_cannot_be_skipped() -> None:
    mapped = _read(Numbers(6, broken=(1, 2)), on_error="skip").to_mapped()
    with pytest.raises(FileNotFoundError):
        mapped[1]
    with pytest.raises(FileNotFoundError, match="object 2"):
        mapped.__getitems__([1, 2])
    with pytest.raises(IndexError):
        mapped.__getitems__([0, 6])
