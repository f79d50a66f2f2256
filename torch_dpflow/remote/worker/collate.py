"""Collates in a worker of the private loader: torch's default collate stacks into shared memory, without a copy.

A shared flow's batches are collated in the job, by `job/collate`.

torch's `default_collate_fn_map` is its public registry of collate functions. Ours differs from torch's only in where
the result lies: whatever it does not handle, and whatever fails, goes to torch's function, so that results and errors
are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_dpflow.remote.parcel.codec import LARGE_BYTES
from torch_dpflow.remote.shm.arena import Arena
from torch_dpflow.remote.shm.memory import storage_over, tensor_over
from torch_dpflow.torch_private import collate_tensor_fn, default_collate_fn_map

_arena: Arena | None = None


def install(arena: Arena) -> None:
    """Let torch's default collate stack into blocks of `arena`, unless the user has a function there."""
    global _arena
    if default_collate_fn_map.get(torch.Tensor) in (collate_tensor_fn, _collate_tensors):
        _arena = arena
        default_collate_fn_map[torch.Tensor] = _collate_tensors


def _collate_tensors(
    batch: tuple[torch.Tensor, ...] | list[torch.Tensor],
    *,
    collate_fn_map: dict[Any, Callable[..., Any]] | None = None,
) -> Any:
    first = batch[0]
    if _is_dense(first) and set(map(type, batch)) == {torch.Tensor}:
        # In a worker torch's function stacks with `out=` as well. Unequal shapes, dtypes that do not fit and tensors
        # that require grad fail here as they do there, and then torch's function raises its own error.
        try:
            return torch.stack(batch, 0, out=_room_for(first, len(batch)))
        except RuntimeError:
            pass
    return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)


def _is_dense(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _room_for(first: torch.Tensor, count: int) -> torch.Tensor:
    shape = (count, *first.shape)
    nbytes = first.numel() * first.itemsize * count
    block = _arena.allocate(nbytes) if _arena is not None and nbytes >= LARGE_BYTES else None
    if block is None:
        # Not in torch's shared memory, whose file would be made in vain: encoding copies small buffers anyway.
        return torch.empty(shape, dtype=first.dtype, device="cpu")
    return tensor_over(storage_over(block.memory), first.dtype, shape)
