"""Collate in a worker of the private loader: torch's default collate stacks into shared memory, without a copy.

The batches of a shared flow are collated in the job, by `cluster/client/collate`.

A dataset of rows may get the block for its batch (`let_fill`), so that its rows need not be stacked.

torch's `default_collate_fn_map` is its public registry of collate functions. Ours differs from torch's only in the
memory of the result. Other types, and tensors for which it fails, go to torch's function, so that results and errors
are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

from torch_dpflow._core.torch_private import collate_tensor_fn, default_collate_fn_map
from torch_dpflow.ipc.memory.arena import Arena, Block
from torch_dpflow.ipc.memory.conversions import Memory, storage_over, tensor_over
from torch_dpflow.ipc.serialization.codec import LARGE_BYTES

_arena: Arena | None = None
#: Addresses of blocks that were lent to datasets.
_filled: set[int] = set()


def install(arena: Arena) -> None:
    """Let torch's default collate stack into blocks of `arena`, unless the user has replaced its function."""
    global _arena
    if default_collate_fn_map.get(torch.Tensor) in (collate_tensor_fn, _collate_tensors):
        _arena = arena
        default_collate_fn_map[torch.Tensor] = _collate_tensors


def let_fill(dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
    """Lend datasets that have `fill_batches` the memory of their batches, after `install`.

    Only if torch's default collate alone uses the rows: any other code that kept a row would see it change.
    """
    if collate_fn is default_collate:
        for one in _fillers(dataset) or ():
            one.fill_batches(lend)


def lend(nbytes: int) -> Memory | None:
    """Lend the memory of a block of the arena; None if there is none, or `nbytes` is too small."""
    block = _lend(nbytes)
    if block is None:
        return None
    _filled.add(block.address)
    return block.memory


def _fillers(dataset: Any) -> list[Any] | None:
    """Return the parts of a dataset that fill their batches; None if other code may use the rows."""
    if type(dataset) is Subset:
        return _fillers(dataset.dataset)
    if type(dataset) is TensorDataset:
        return []
    if type(dataset) is StackDataset:
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        found = [_fillers(one) for one in parts]
        return None if None in found else [one for own in found for one in own or ()]
    # Of this very class: a subclass may keep rows.
    return [dataset] if "fill_batches" in vars(type(dataset)) else None


def _collate_tensors(
    batch: tuple[torch.Tensor, ...] | list[torch.Tensor],
    *,
    collate_fn_map: dict[Any, Callable[..., Any]] | None = None,
) -> Any:
    first = batch[0]
    if _is_dense(first) and set(map(type, batch)) == {torch.Tensor}:
        if _filled and (filled := _as_they_lie(batch)) is not None:
            return filled
        # In a worker torch's function stacks with `out=` as well. Unequal shapes, other dtypes and tensors that require
        # grad fail here as they do there, and then torch's function raises its own error.
        try:
            return torch.stack(batch, 0, out=_out_for(first, len(batch)))
        except RuntimeError:
            pass
    return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)


def _is_dense(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _out_for(first: torch.Tensor, count: int) -> torch.Tensor:
    shape = (count, *first.shape)
    nbytes = first.numel() * first.itemsize * count
    block = _lend(nbytes)
    if block is None:
        # Not in torch's shared memory, whose file would be wasted: encoding copies small buffers anyway.
        return torch.empty(shape, dtype=first.dtype, device="cpu")
    return tensor_over(storage_over(block.memory), first.dtype, shape)


def _lend(nbytes: int) -> Block | None:
    block = _arena.allocate(nbytes) if _arena is not None and nbytes >= LARGE_BYTES else None
    if block is not None:
        _filled.discard(block.address)  # its former batch has failed
    return block


def _as_they_lie(batch: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> torch.Tensor | None:
    """Return the block that these rows fill in this order, as their batch; None if they do not."""
    first, start = batch[0], batch[0].data_ptr()
    if start not in _filled or _arena is None:
        return None
    _filled.discard(start)
    form = first.dtype, first.shape, first.stride()
    for number, row in enumerate(batch):
        is_next = row.data_ptr() == start + number * first.nbytes
        if not is_next or (row.dtype, row.shape, row.stride()) != form:
            return None
    block = _arena.block_at(start, len(batch) * first.nbytes)
    if block is None or not first.is_contiguous():
        return None
    return tensor_over(storage_over(block.memory), first.dtype, (len(batch), *first.shape))
