"""Collating into shared memory: torch's results and torch's errors, inside torch's own workers."""

from __future__ import annotations

import collections
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.serialization.codec import LARGE_BYTES, decode, encode
from torch_dpflow.workers import batch_worker
from torch_dpflow.workers.batch_worker import collate_into, let_fill

BIG = LARGE_BYTES // 4


class Pair(NamedTuple):
    image: Any
    label: Any


class Labelled(torch.Tensor):
    pass


class Calls(Dataset[Any]):
    """Runs a function in a worker of torch's loader, where `get_worker_info()` is set."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        assert get_worker_info() is not None
        return self.function()


def in_worker(function: Callable[[], Any]) -> Any:
    loader: DataLoader[Any] = DataLoader(
        Calls(function), batch_size=None, num_workers=1, multiprocessing_context="fork", collate_fn=_as_is
    )
    (result,) = loader
    return result


def _as_is(value: Any) -> Any:
    return value


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Arena]:
    """Installs a new arena wherever it is called."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch makes it when meta tensors are stacked

    def install() -> Arena:
        arena = Arena(budget_bytes=1 << 26)
        collate_into(arena)
        return arena

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, collate_tensor_fn)
    monkeypatch.setattr(batch_worker, "_arena", None)
    monkeypatch.setattr(batch_worker, "_filled", set())
    return install


def described(value: Any) -> Any:
    """All there is to a collated batch, in plain values."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().as_subclass(torch.Tensor)
        meta = dense.is_meta or dense.is_quantized
        content = None if meta else torch.empty(0, dtype=torch.uint8).set_(dense.contiguous().untyped_storage())
        head = (type(value).__name__, str(value.dtype), tuple(value.shape), value.stride(), value.device.type)
        return (*head, value.requires_grad, None if content is None else content.tolist()[: value.nbytes])
    if isinstance(value, dict):
        return type(value).__name__, {key: described(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [described(entry) for entry in value]
    return repr(value)


def outcome(batch: Any) -> Any:
    try:
        return described(default_collate(batch))
    except Exception as error:
        return type(error).__name__, str(error).split("Exception raised from")[0]


def tensors(*shape: int, count: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.arange(int(np.prod(shape))).reshape(shape).to(dtype) + index for index in range(count)]


def quantised() -> list[torch.Tensor]:
    return [torch.quantize_per_tensor(tensor, 0.5, 1, torch.qint8) for tensor in tensors(3)]


BATCHES: dict[str, Callable[[], Any]] = {
    "small": lambda: tensors(3),
    "big": lambda: tensors(BIG),
    "one": lambda: tensors(BIG, count=1),
    "bytes": lambda: tensors(BIG, dtype=torch.uint8),
    "bfloat16": lambda: tensors(BIG, dtype=torch.bfloat16),
    "bool": lambda: tensors(BIG, dtype=torch.bool),
    "0-d": lambda: [torch.tensor(1), torch.tensor(2)],
    "nothing": lambda: tensors(0, 3),
    "complex": lambda: tensors(BIG, dtype=torch.complex64),
    "conjugate": lambda: [tensor.conj() for tensor in tensors(BIG, dtype=torch.complex64)],
    "negative": lambda: [tensor.conj().imag for tensor in tensors(BIG, dtype=torch.complex64)],
    "permuted": lambda: [tensor.permute(2, 0, 1) for tensor in tensors(64, 64, 3)],
    "permuted, small": lambda: [tensor.permute(2, 0, 1) for tensor in tensors(4, 4, 3)],
    "channels last": lambda: [tensor.to(memory_format=torch.channels_last) for tensor in tensors(2, 3, 64, 64)],
    "stepped": lambda: [tensor[::3] for tensor in tensors(3 * BIG)],
    "expanded": lambda: [tensor.expand(BIG, 4) for tensor in tensors(1, 4)],
    "same twice": lambda: tensors(BIG, count=1) * 2,
    "unequal": lambda: [*tensors(3), *tensors(4)],
    "unequal, big": lambda: [*tensors(BIG), *tensors(BIG + 1)],
    "unequal, smaller after": lambda: [*tensors(BIG), *tensors(3)],
    "unequal dimensions": lambda: [*tensors(BIG), *tensors(1, BIG)],
    "wider dtype after": lambda: [*tensors(BIG), *tensors(BIG, dtype=torch.float64)],
    "narrower dtype after": lambda: [*tensors(BIG, dtype=torch.float64), *tensors(BIG)],
    "floats after integers": lambda: [*tensors(BIG, dtype=torch.int32), *tensors(BIG)],
    "integers after floats": lambda: [*tensors(BIG), *tensors(BIG, dtype=torch.int32)],
    "requires grad": lambda: [tensor.requires_grad_() for tensor in tensors(BIG)],
    "requires grad, small": lambda: [tensor.requires_grad_() for tensor in tensors(3)],
    "parameters": lambda: [torch.nn.Parameter(tensor, requires_grad=False) for tensor in tensors(BIG)],
    "a subclass": lambda: [tensor.as_subclass(Labelled) for tensor in tensors(BIG)],
    "a subclass after": lambda: [*tensors(BIG), *(tensor.as_subclass(Labelled) for tensor in tensors(BIG))],
    "sparse": lambda: [tensor.to_sparse() for tensor in tensors(3)],
    "sparse after": lambda: [*tensors(BIG), *(tensor.to_sparse() for tensor in tensors(BIG))],
    "nested": lambda: [torch.nested.nested_tensor([torch.ones(2)])] * 2,
    "quantised": quantised,
    "meta": lambda: [torch.empty(BIG, device="meta")] * 2,
    "meta after": lambda: [*tensors(BIG), torch.empty(BIG, device="meta")],
    "not a tensor after": lambda: [*tensors(BIG), 3],
    "arrays": lambda: [tensor.numpy() for tensor in tensors(BIG)],
    "small arrays": lambda: [tensor.numpy() for tensor in tensors(2, 2)],
    "unequal arrays": lambda: [np.zeros(BIG), np.zeros(BIG + 1)],
    "arrays of text": lambda: [np.array(["a"])] * 2,
    "numpy scalars": lambda: [np.float32(1), np.float32(2)],
    "numbers": lambda: [1, 2],
    "text": lambda: ["a", "b"],
    "pairs": lambda: [(tensor, index) for index, tensor in enumerate(tensors(BIG))],
    "named pairs": lambda: [Pair(tensor, index) for index, tensor in enumerate(tensors(BIG))],
    "mappings": lambda: [{"x": tensor, "y": [tensor[:2], "t"]} for tensor in tensors(BIG)],
    "ordered mappings": lambda: [collections.OrderedDict(x=tensor) for tensor in tensors(BIG)],
    "unequal lists": lambda: [[1, 2], [1]],
    "objects": lambda: [object(), object()],
    "none": lambda: [None],
}


def test_results_and_errors_are_torch_s(arena: Callable[[], Arena]) -> None:
    def compare() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = {name: outcome(batch()) for name, batch in BATCHES.items()}
            arena()
            return theirs, {name: outcome(batch()) for name, batch in BATCHES.items()}

    theirs, ours = in_worker(compare)
    assert ours == theirs


def test_big_batches_are_stacked_where_they_are_published(arena: Callable[[], Arena]) -> None:
    ours = arena()
    batch = default_collate([(tensor, index) for index, tensor in enumerate(tensors(BIG))])
    block = ours.block_at(batch[0].data_ptr(), batch[0].nbytes)
    assert block is not None
    table, frames = encode(batch, arena=ours)
    assert table.blocks[0].segment == block.segment.number
    assert ours.segments == 1
    reader = ArenaReader(os.getpid())
    carried, count = decode(table, frames, reader=reader)
    carried[0, 0] = -1
    assert batch[0][0, 0] == -1
    assert count.tolist() == [0, 1, 2, 3]


def test_a_batch_sent_twice_is_copied_the_second_time(arena: Callable[[], Arena]) -> None:
    ours = arena()
    batch = default_collate(tensors(BIG))
    reader = ArenaReader(os.getpid())
    first = decode(*encode(batch, arena=ours), reader=reader)
    second = decode(*encode(batch, arena=ours), reader=reader)
    first.zero_()
    assert torch.equal(second, torch.stack(tensors(BIG)))


def test_the_result_is_a_base_of_its_own(arena: Callable[[], Arena]) -> None:
    arena()
    batch = default_collate(tensors(BIG))
    assert batch._base is None
    assert batch.untyped_storage().nbytes() == batch.nbytes


def test_no_shared_memory_of_torch_s_is_made(arena: Callable[[], Arena]) -> None:
    def collated() -> tuple[bool, bool]:
        ours = arena()
        kept = [default_collate(tensors(BIG)) for _ in range(2)]
        full = Arena(budget_bytes=0)
        collate_into(full)
        small, big = default_collate(tensors(3)), default_collate(tensors(BIG))
        return ours.segments == len(kept), small.is_shared() or big.is_shared()

    assert in_worker(collated) == (True, False)


def test_a_function_of_the_user_s_stays() -> None:
    def theirs(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return "theirs"

    default_collate_fn_map[torch.Tensor] = theirs
    try:
        collate_into(Arena(budget_bytes=1 << 20))
        assert default_collate(tensors(2)) == "theirs"
    finally:
        default_collate_fn_map[torch.Tensor] = collate_tensor_fn


class Filling(Dataset[Any]):
    """Rows of numbers, read into what it is lent."""

    def __init__(self) -> None:
        self.lend: Any = lambda nbytes: None

    def fill_batches(self, lend: Any) -> None:
        self.lend = lend

    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        memory = self.lend(len(indices) * BIG)
        rows = np.empty((len(indices), BIG), np.uint8) if memory is None else memory.reshape(-1, BIG)
        rows[:] = np.array(indices)[:, None]
        return [*torch.from_numpy(rows)]


class Keeping(Filling):
    """Might keep rows."""


NUMBERS = [3, 1, 4, 1, 5]


def test_rows_that_were_read_into_the_batch_are_not_copied(arena: Callable[[], Arena]) -> None:
    ours, filling = arena(), Filling()
    let_fill(Subset(filling, range(8)), default_collate)
    rows = filling.__getitems__(NUMBERS)
    address = rows[0].data_ptr()
    batch = default_collate(rows)
    assert (batch.data_ptr(), batch._base) == (address, None)
    again = default_collate(rows)
    assert again.data_ptr() != address
    del rows
    found = decode(*encode([batch, again], arena=ours), reader=ArenaReader(os.getpid()))
    expected = torch.tensor(NUMBERS, dtype=torch.uint8)[:, None].expand(-1, BIG)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)
    assert ours.segments == 2


def test_rows_in_another_order_or_form_are_stacked(arena: Callable[[], Arena]) -> None:
    arena()
    filling = Filling()
    let_fill(filling, default_collate)
    changes: list[Callable[[list[torch.Tensor]], list[torch.Tensor]]] = [
        lambda rows: rows[::-1],
        lambda rows: rows[:1] * 5,
        lambda rows: [row.view(2, -1) for row in rows[:-1]],
        lambda rows: [row.view(torch.int8) for row in rows],
        lambda rows: [row[:-1] for row in rows],
        lambda rows: [rows[0], *(row.clone() for row in rows[1:])],
        lambda rows: rows[1:],
        lambda rows: rows[:1],
    ]
    for change in changes:
        rows = change(filling.__getitems__(NUMBERS))
        assert torch.equal(default_collate(rows), torch.stack(rows))


def test_memory_is_lent_where_only_torch_s_collate_sees_the_rows(arena: Callable[[], Arena]) -> None:
    arena()

    def lends(dataset: Any, collate_fn: Callable[[Any], Any] = default_collate) -> bool:
        filling.lend = nothing
        let_fill(dataset, collate_fn)
        return filling.lend is not nothing

    def nothing(nbytes: int) -> None:
        return None

    filling = Filling()
    labels = TensorDataset(torch.arange(8))
    assert lends(filling)
    assert lends(Subset(Subset(filling, range(4)), range(2)))
    assert lends(StackDataset(filling, labels))
    assert lends(StackDataset(one=filling, other=Subset(labels, range(8))))
    assert not lends(filling, _as_is)
    assert not lends(StackDataset(filling, [*range(8)]))
    assert not lends(StackDataset(filling, Keeping()))
    filling = Keeping()
    assert not lends(filling)
