"""What a batch may hold, and what arrives of it: types, dtypes, bits and aliases as from torch's loader."""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import fractions
import itertools
import pathlib
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, StackDataset, TensorDataset

from tests.loader_cases import Batched, Indices, Pair, Rows, Samples, assert_same


class Words(list):  # type: ignore[type-arg]
    """A sequence type of the user's."""


class Record(dict):  # type: ignore[type-arg]
    """A mapping type of the user's."""


class Tagged(torch.Tensor):
    """A tensor type of the user's."""


@dataclasses.dataclass
class Point:
    """Not known to torch's collation; passes as it is with `batch_size=None`."""

    x: float
    y: torch.Tensor


class Box:
    """A batch type of the user's, with the method by which torch pins it."""

    def __init__(self, samples: list[int]) -> None:
        self.content = torch.tensor(samples)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and torch.equal(self.content, other.content)

    __hash__ = None  # type: ignore[assignment]

    def pin_memory(self) -> Box:
        return self


COLLATED: dict[str, list[Any]] = {
    "int": [1, 2, 3, 4],
    "bool": [True, False, True, True],
    "float": [0.1, float("inf"), float("nan"), -0.0],
    "str": ["a", "", "ü", "\0"],
    "bytes": [b"", b"\0", b"abc", b"x" * 100_000],
    "tuple": [(i, float(i), str(i)) for i in range(4)],
    "list": [[i, [i, i]] for i in range(4)],
    "dict": [{"b": i, "a": {"deep": torch.full((2,), i)}} for i in range(4)],
    "ordered dict": [OrderedDict(z=i, a=-i) for i in range(4)],
    "default dict": [defaultdict(int, a=i) for i in range(4)],
    "mapping type": [Record(a=i) for i in range(4)],
    "sequence type": [Words([i, i]) for i in range(4)],
    "named tuple": [Pair(i, Pair(torch.tensor([i]), "x")) for i in range(4)],
    "numpy scalar": [np.float16(i) for i in range(4)],
    "numpy array": [np.full((2, 3), i, dtype=np.uint8) for i in range(4)],
    "zero dimensions": [torch.tensor(float(i)) for i in range(4)],
    "empty tensor": [torch.empty(0, 3) for _ in range(4)],
    "large tensor": [torch.full((512, 512), i, dtype=torch.float64) for i in range(4)],
    "transposed": [torch.arange(6).view(2, 3).t() + i for i in range(4)],
    "complex": [torch.tensor([1 + 2j * i]) for i in range(4)],
}

UNTOUCHED: dict[str, Any] = {
    "none": None,
    "int": 7,
    "huge int": 1 << 200,
    "decimal": decimal.Decimal("1.10"),
    "fraction": fractions.Fraction(1, 3),
    "path": pathlib.PurePosixPath("a/b"),
    "set": {1, 2},
    "range": range(3),
    "slice": slice(1, 2),
    "class": Point,
    "dtype": torch.float32,
    "size": torch.Size([1, 2]),
    "numpy dtype": np.dtype("int16"),
    "numpy structured": np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
    "numpy strings": np.array(["a", "bcd"]),
    "numpy objects": np.array([1, "a", None], dtype=object),
    "many strings": [f"word {number}" for number in range(10_000)],
    "nested": {"a": [(torch.ones(2), {"b": "c"})]},
    "channels last": torch.arange(120.0).view(1, 2, 3, 20).contiguous(memory_format=torch.channels_last),
    "strided": torch.arange(20)[::3],
    "expanded": torch.tensor([1.0]).expand(5, 3),
    "sparse": torch.eye(4).to_sparse(),
    "tensor type": torch.arange(3).as_subclass(Tagged),
}


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse, an index twice": lambda: torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,)),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "sparse columns": lambda: torch.eye(4).to_sparse_csc(),
    "sparse blocks": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}

#: What torch's loader breaks: it gives other numbers, or what cannot be read.
BROKEN_BY_TORCH: dict[str, Callable[[], torch.Tensor]] = {
    "conjugate": lambda: torch.tensor([1 + 2j, -3j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, -3j]).conj().imag,
    "quantised": lambda: torch.quantize_per_tensor(torch.arange(30.0), 0.5, 1, torch.qint8),
    "quantised by channel": lambda: torch.quantize_per_channel(
        torch.arange(30.0).view(2, 15), torch.tensor([0.5, 1.0]), torch.tensor([1, 0]), 0, torch.quint8
    ),
}


def as_it_is(sample: Any) -> Any:
    return sample


def batch_of_each(loader_class: Any, groups: Mapping[str, list[Any]], **arguments: Any) -> dict[str, Any]:
    """One batch of each group of samples, all from one worker."""
    numbers = itertools.count()
    batches = [[next(numbers) for _ in samples] for samples in groups.values()]
    dataset = Samples([sample for samples in groups.values() for sample in samples])
    return dict(zip(groups, loader_class(dataset, batch_sampler=batches, num_workers=1, **arguments), strict=True))


def one_batch(loader_class: Any, samples: list[Any], **arguments: Any) -> Any:
    (batch,) = loader_class(Samples(samples), num_workers=1, **arguments)
    return batch


def test_collated_batches_equal_torchs(Loader: Any) -> None:
    assert_same(batch_of_each(Loader, COLLATED), batch_of_each(DataLoader, COLLATED))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_unbatched_items_equal_torchs(Loader: Any) -> None:
    def items(loader_class: Any) -> dict[str, Any]:
        dataset = Samples([*UNTOUCHED.values()])
        return dict(zip(UNTOUCHED, loader_class(dataset, batch_size=None, collate_fn=as_it_is, num_workers=1)))

    found = items(Loader)
    assert found.keys() == UNTOUCHED.keys()
    assert_same(found, items(DataLoader))


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
def test_tensors_of_any_layout_arrive(Loader: Any) -> None:
    samples = {name: [make() for _ in range(2)] for name, make in LAYOUTS.items()}
    assert_same(batch_of_each(Loader, samples, collate_fn=as_it_is), samples)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage is deprecated")
def test_lazy_and_quantised_tensors_arrive(OurLoader: Any) -> None:
    samples = {name: [make() for _ in range(2)] for name, make in BROKEN_BY_TORCH.items()}
    assert_same(batch_of_each(OurLoader, samples, collate_fn=as_it_is), samples)


def numeric_dtypes() -> list[torch.dtype]:
    """Those of which torch can make a tensor from numbers; the others are only names of bits."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                torch.zeros(1).to(dtype)
                found.append(dtype)
    return sorted(found, key=str)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_arrives_bit_for_bit(Loader: Any) -> None:
    samples = [torch.randint(0, 2, (3, 5)).to(dtype) for dtype in numeric_dtypes()]
    assert len(samples) >= 15
    assert_same(list(Loader(Samples(samples), batch_size=None, num_workers=2)), samples)


def test_leaf_parameters_keep_requires_grad(Loader: Any) -> None:
    batch = one_batch(Loader, [torch.ones(2, requires_grad=True)], batch_size=None)
    assert batch.requires_grad
    parameter = one_batch(Loader, [torch.nn.Parameter(torch.ones(2))], batch_size=None)
    assert isinstance(parameter, torch.nn.Parameter)


def as_box(samples: list[int]) -> Box:
    return Box(samples)


def as_images(samples: list[int]) -> list[Image.Image]:
    return [Image.new("RGB", (4, 3), (i, i, i)) for i in samples]


def as_packed(samples: list[int]) -> Any:
    return pack_sequence([torch.arange(i + 1) for i in samples], enforce_sorted=False)


def test_custom_batch_type(Loader: Any) -> None:
    assert list(Loader(Indices(4), batch_size=2, collate_fn=as_box, num_workers=2)) == [
        Box([0, 1]),
        Box([2, 3]),
    ]


def test_images(Loader: Any) -> None:
    (images,) = Loader(Indices(3), batch_size=3, collate_fn=as_images, num_workers=1)
    assert [image.getpixel((0, 0)) for image in images] == [(i, i, i) for i in range(3)]


def test_packed_sequence(Loader: Any) -> None:
    (packed,) = Loader(Indices(3), batch_size=3, collate_fn=as_packed, num_workers=1)
    expected = as_packed([0, 1, 2])
    assert type(packed) is type(expected)
    assert_same(tuple(packed), tuple(expected))


def test_dataclass(Loader: Any) -> None:
    point = one_batch(Loader, [Point(1.5, torch.ones(2))], batch_size=None)
    assert isinstance(point, Point)
    assert_same([point.x, point.y], [1.5, torch.ones(2)])


def test_one_tensor_twice_in_a_batch_is_one_tensor(Loader: Any) -> None:
    tensor = torch.zeros(3)
    first, second = one_batch(Loader, [(tensor, tensor)], batch_size=None)
    assert first is second


@pytest.mark.parametrize("width", [3, 200_000])
def test_batches_are_writable_and_independent(Loader: Any, width: int) -> None:
    """Whatever is done to one batch, and however long it is kept, the others keep their content."""
    rows = Rows(8, width)
    kept = []
    for indices, vectors, _words in Loader(rows, batch_size=2, num_workers=2, prefetch_factor=1):
        kept.append((indices.clone(), vectors))
        if len(kept) == 1:
            vectors.zero_()
    assert not kept[0][1].any()
    for indices, vectors in kept[1:]:
        assert_same(vectors, torch.stack([rows[int(i)][1] for i in indices]))


def test_numpy_arrays_are_writable(Loader: Any) -> None:
    array = one_batch(Loader, [np.zeros(70_000)], batch_size=None, collate_fn=list_of_one)[0]
    array += 1
    assert array.sum() == 70_000


def list_of_one(sample: Any) -> list[Any]:
    return [sample]


def test_batches_outlive_loader_and_workers(Loader: Any) -> None:
    rows = Rows(6, 50_000)
    loader = Loader(rows, batch_size=3, num_workers=2)
    batches = list(loader)
    del loader
    assert_same(
        [vectors for _, vectors, _ in batches],
        [torch.stack([rows[i][1] for i in part]) for part in ((0, 1, 2), (3, 4, 5))],
    )


def test_dataset_that_loads_a_batch_at_once(Loader: Any) -> None:
    dataset = Batched(5)
    loaded = list(Loader(dataset, batch_size=2, num_workers=2))
    assert_same(loaded, list(DataLoader(dataset, batch_size=2)))
    assert loaded[-1][1] == ("1 at once",)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stacked_and_tensor_datasets(Loader: Any, num_workers: int) -> None:
    columns = TensorDataset(torch.arange(6), torch.arange(6.0).view(6, 1))
    for dataset in (columns, StackDataset(a=columns, b=Indices(6)), StackDataset(columns, Batched(6))):
        assert_same(
            list(Loader(dataset, batch_size=4, num_workers=num_workers)),
            list(DataLoader(dataset, batch_size=4, num_workers=num_workers)),
        )
