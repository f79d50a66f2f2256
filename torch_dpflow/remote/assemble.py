"""A batch put together in the training process, by one thread.

torch's default collate stacks large tensors with all threads of the process. In a training process that wakes
threads which the training loop uses itself: on a busy machine it was measured to take thirty times as long as one
thread takes.

Tensors that lie one behind the other already, as a shard hands over those of one answer, are not copied at all: the
batch is the memory in which they came.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from torch_dpflow.remote.memory import storage_over, tensor_over

#: Below this size torch stacks with one thread as well, bytes.
_SMALL_BYTES = 1 << 15


def assembler(collate_fn: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any]:
    """What makes a batch of samples as `collate_fn` does; None stands for torch's default."""
    return assemble if collate_fn is None or collate_fn is default_collate else collate_fn


def assemble(samples: list[Any]) -> Any:
    """As torch's `default_collate`, with the same results and errors.

    The samples are given away: their memory may become the batch's.
    """
    mapping: dict[Any, Callable[..., Any]] = {**default_collate_fn_map}
    if mapping.get(torch.Tensor) is collate_tensor_fn:
        mapping[torch.Tensor] = partial(_stack, used=set())
    return collate(samples, collate_fn_map=mapping)


def _stack(
    batch: list[torch.Tensor],
    *,
    used: set[int],
    collate_fn_map: dict[Any, Callable[..., Any]] | None = None,
) -> Any:
    """One tensor of all. used: where batches of these samples begin that were not copied."""
    first = batch[0]
    if first.nbytes < _SMALL_BYTES or not all(_is_alike(one, first) for one in batch):
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    if _are_in_a_row(batch) and first.data_ptr() not in used:
        # Once: a sample may hold the same tensor twice, and what torch makes of them are two batches.
        used.add(first.data_ptr())
        memory = np.asarray(_Row(batch))
        return tensor_over(storage_over(memory), first.dtype, (len(batch), *first.shape))
    out = torch.empty((len(batch), *first.shape), dtype=first.dtype)
    rows = _bytes_of(out).reshape(len(batch), first.nbytes)
    for row, one in zip(rows, batch):
        np.copyto(row, _bytes_of(one))
    return out


class _Row:
    """The memory of tensors that lie one behind the other, to numpy; what numpy makes of it keeps them alive."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        first = tensors[0]
        self._tensors = tensors
        self.__array_interface__ = {
            "version": 3,
            "data": (first.data_ptr(), False),
            "shape": (len(tensors) * first.nbytes,),
            "typestr": "|u1",
        }


def _are_in_a_row(batch: list[torch.Tensor]) -> bool:
    """Whether each begins where the one before ends. A single one may overlap with others of its sample."""
    begin, nbytes = batch[0].data_ptr(), batch[0].nbytes
    return len(batch) > 1 and all(one.data_ptr() == begin + place * nbytes for place, one in enumerate(batch))


def _is_alike(one: torch.Tensor, first: torch.Tensor) -> bool:
    return (
        type(one) is torch.Tensor
        and one.layout is torch.strided
        and one.is_cpu
        and one.dtype == first.dtype
        and one.shape == first.shape
        and one.is_contiguous()
        and not (one.requires_grad or one.is_quantized or one.is_conj() or one.is_neg())
    )


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat
