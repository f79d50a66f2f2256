"""The constructor, the attributes, the length, and what may be done with the class itself."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
import warnings
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    SequentialSampler,
    Subset,
    TensorDataset,
    random_split,
)

from tests.loader_cases import Indices, Stream, assert_same

ORDER = SequentialSampler(range(8))
WRONG: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": -1},
    {"prefetch_factor": 2},
    {"prefetch_factor": -2, "num_workers": 1},
    {"persistent_workers": True},
    {"multiprocessing_context": "fork"},
    {"multiprocessing_context": "spoon", "num_workers": 1},
    {"multiprocessing_context": object, "num_workers": 1},
    {"sampler": ORDER, "shuffle": True},
    {"batch_sampler": BatchSampler(ORDER, 2, False), "batch_size": 3},
    {"batch_sampler": BatchSampler(ORDER, 2, False), "drop_last": True},
    {"batch_sampler": BatchSampler(ORDER, 2, False), "shuffle": True},
    {"batch_size": None, "drop_last": True},
    {"batch_size": 0},
    {"batch_size": 1.5},
    {"no_such_argument": 1},
    {"dataset": Stream(4), "shuffle": True},
    {"dataset": Stream(4), "sampler": ORDER},
    {"dataset": Stream(4), "batch_sampler": [[0]]},
    {"dataset": Indices(0), "shuffle": True},
]


def refusal(loader_class: Any, arguments: dict[str, Any]) -> tuple[type, str] | None:
    try:
        loader_class(**{"dataset": Indices(8), **arguments})
    except Exception as error:
        return type(error), str(error).replace(loader_class.__name__, "DataLoader")
    return None


@pytest.mark.parametrize("arguments", WRONG, ids=", ".join)
def test_wrong_arguments_are_refused_as_by_torch(Loader: Any, arguments: dict[str, Any]) -> None:
    refused = refusal(Loader, arguments)
    assert refused == refusal(DataLoader, arguments)


def test_torchs_parameters_come_first_and_ours_are_keyword_only(Loader: Any) -> None:
    expected = list(inspect.signature(DataLoader.__init__).parameters.values())
    parameters = inspect.signature(Loader.__init__).parameters
    for parameter in expected:
        assert parameters[parameter.name].kind is parameter.kind
        assert parameters[parameter.name].default == parameter.default
    assert list(parameters)[: len(expected)] == [parameter.name for parameter in expected]
    added = list(parameters.values())[len(expected) :]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in added)


def test_positional_arguments(Loader: Any) -> None:
    generator = torch.Generator()
    given = (Indices(5), 2, False, None, None, 1, None, False, True, 3.0, None, "fork", generator)
    loader = Loader(*given)
    assert (loader.batch_size, loader.num_workers, loader.drop_last, loader.timeout) == (2, 1, True, 3.0)
    assert loader.generator is generator
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"batch_size": None}, {"num_workers": 2}, {"dataset": Stream(3)}, {"shuffle": True}],
    ids=", ".join,
)
def test_public_attributes_equal_torchs(Loader: Any, arguments: dict[str, Any]) -> None:
    def attributes(loader_class: Any) -> dict[str, Any]:
        loader = loader_class(**{"dataset": Indices(8), **arguments})
        names = {*vars(loader), "multiprocessing_context"}
        return {name: getattr(loader, name) for name in names if not name.startswith("_")}

    actual = attributes(Loader)
    for name, value in attributes(DataLoader).items():
        assert isinstance(actual[name], type(value)), name


@pytest.mark.parametrize(
    "attribute", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_the_iterator_is_made_of_cannot_be_set_afterwards(Loader: Any, attribute: str) -> None:
    loader = Loader(Indices(4))
    message = f"{attribute} attribute should not be set after {Loader.__name__} is initialized"
    with pytest.raises(ValueError, match=message):
        setattr(loader, attribute, None)


def test_other_attributes_may_be_set_before_iteration(Loader: Any) -> None:
    loader = Loader(Indices(6), batch_size=2)
    loader.num_workers = 2
    loader.prefetch_factor = 1
    loader.collate_fn = sum
    loader.multiprocessing_context = "fork"
    assert list(loader) == [1, 5, 9]
    loader.num_workers = 0
    assert list(loader) == [1, 5, 9]


@pytest.mark.parametrize("size", [0, 1, 7, 8])
@pytest.mark.parametrize(
    ("batch_size", "drop_last"),
    [(None, False), *itertools.product([1, 3, 8, 9], [False, True])],
)
def test_len_is_the_number_of_batches(Loader: Any, size: int, batch_size: int | None, drop_last: bool) -> None:
    for num_workers in (0, 1) if batch_size == 3 else (0,):
        loader = Loader(Indices(size), batch_size=batch_size, drop_last=drop_last, num_workers=num_workers)
        assert len(loader) == len(DataLoader(Indices(size), batch_size=batch_size, drop_last=drop_last))
        assert len(list(loader)) == len(loader)


def test_the_number_of_workers_is_what_was_given(Loader: Any) -> None:
    """It is written to hyperparameters and checkpoints by readers that take plain numbers alone."""
    loader = Loader(Indices(4), num_workers=2)
    assert type(loader.num_workers) is int
    assert msgspec.json.encode({"workers": loader.num_workers}) == b'{"workers":2}'
    checkpoint = io.BytesIO()
    torch.save({"workers": loader.num_workers}, checkpoint)
    checkpoint.seek(0)
    assert torch.load(checkpoint, weights_only=True) == {"workers": 2}


@pytest.mark.parametrize("num_workers", [1, 3])
def test_nothing_to_load(Loader: Any, num_workers: int) -> None:
    assert list(Loader(Indices(0), num_workers=num_workers)) == []
    assert list(Loader(Indices(3), sampler=[], num_workers=num_workers)) == []
    assert list(Loader(Indices(2), batch_size=3, drop_last=True, num_workers=num_workers)) == []


def test_a_dataset_may_grow_between_epochs(Loader: Any) -> None:
    rows = [torch.ones(2) for _ in range(4)]
    loader = Loader(rows, num_workers=1)
    assert len(list(loader)) == 4
    rows.append(torch.ones(2))
    assert len(loader) == 5
    assert len(list(loader)) == 5


def test_datasets_of_datasets(Loader: Any) -> None:
    whole = ConcatDataset([Indices(3), Indices(4)])
    part, rest = random_split(TensorDataset(torch.arange(9)), [4, 5], torch.Generator().manual_seed(0))
    for dataset in (whole, Subset(whole, [6, 0, 3]), part, rest, list(range(5)), "letters", {0: "a", 1: "b"}):
        assert_same(
            list(Loader(dataset, batch_size=2, num_workers=2)),
            list(DataLoader(dataset, batch_size=2)),
        )


def test_subclasses(Loader: Any) -> None:
    class Doubling(Loader):  # type: ignore[misc]
        def __init__(self, size: int, factor: int, **arguments: Any) -> None:
            self.factor = factor
            super().__init__(Indices(size), **arguments)

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch * self.factor

    loader = Doubling(4, 2, batch_size=2, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]
    assert isinstance(loader, DataLoader)
    with pytest.raises(ValueError, match="batch_size attribute should not be set after Doubling"):
        loader.batch_size = 3


def test_the_class_can_be_parametrised(Loader: Any) -> None:
    assert list(Loader[int](Indices(2), batch_size=None)) == [0, 1]


def test_a_loader_can_be_copied_and_pickled(Loader: Any) -> None:
    loader = Loader(Indices(6), batch_size=4, num_workers=1)
    list(loader)
    for copied in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert [batch.tolist() for batch in copied] == [[0, 1, 2, 3], [4, 5]]


def test_an_iterator_cannot_be_pickled(Loader: Any) -> None:
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(iter(Loader(Indices(6), num_workers=1)))


def test_more_workers_than_processors_warn(Loader: Any) -> None:
    with pytest.warns(UserWarning, match="excessive worker creation"):
        Loader(Indices(6), num_workers=1000)


def test_pinning_without_an_accelerator_warns_as_torch_does_and_loads(Loader: Any) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    for num_workers in (0, 1):
        told: dict[Any, list[str]] = {}
        for kind in (torch.utils.data.DataLoader, Loader):
            loader = kind(Indices(2), batch_size=2, num_workers=num_workers, pin_memory=True)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                (batch,) = loader
            told[kind] = [str(one.message) for one in caught if one.category is UserWarning]
        assert told[Loader] == told[torch.utils.data.DataLoader]  # torch 2.6 gives none
        assert batch.tolist() == [0, 1]
        assert not batch.is_pinned()


def test_no_batch_ahead_is_refused_as_by_torch(Loader: Any) -> None:
    """An empty epoch in its place would go unseen."""
    with pytest.raises(AssertionError, match="prefetch_factor must be greater than 0"):
        iter(Loader(Indices(6), num_workers=1, prefetch_factor=0))


def test_a_timeout_that_no_worker_can_keep_is_refused_as_by_torch(Loader: Any) -> None:
    with pytest.raises(AssertionError, match="timeout == 0"):
        iter(Loader(Indices(6), timeout=1))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_indices_need_no_length(Loader: Any, num_workers: int) -> None:
    loader = Loader(Indices(6), batch_sampler=[iter([1, 2]), iter([3])], num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == [[1, 2], [3]]
