"""Conversions between plain memory, storages, tensors and arrays."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

#: One-dimensional bytes.
Memory: TypeAlias = npt.NDArray[np.uint8]


def from_array(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor over an array, as `torch.from_numpy`; arrays made of it stay valid when the tensor is shared.

    `share_memory_`, and so a queue, moves a storage and drops its former memory. Arrays made of its tensors keep the
    storage alive, so the storage keeps the memory.
    """
    tensor = torch.from_numpy(array)
    storage: Any = tensor.untyped_storage()
    storage.memory = array
    return tensor


def storage_over(memory: Memory) -> torch.UntypedStorage:
    """Return a storage over `memory`, which it keeps alive, even if the storage is shared."""
    return from_array(memory).untyped_storage()


def keeps_memory(storage: torch.UntypedStorage) -> bool:
    """Return whether it was made by `from_array` or `storage_over`."""
    return hasattr(storage, "memory")


def memory_of(storage: Any, start: int = 0, nbytes: int | None = None) -> Memory:
    """Return the bytes of a CPU storage, or a part of them, without a copy."""
    empty: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
    if nbytes is None:
        nbytes = storage.nbytes()
    memory: Memory = empty.set_(storage, start, (nbytes,), (1,)).numpy()
    return memory


def tensor_over(
    storage: Any,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """Return a tensor over `storage`, contiguous without `stride`; a base and not a view of another tensor."""
    # Twice as fast as `torch.empty`.
    empty: Any = _empty(dtype).new_empty(0)
    if stride is None:
        tensor: torch.Tensor = empty.set_(storage, offset, shape)
    else:
        tensor = empty.set_(storage, offset, shape, stride)
    return tensor


@functools.cache
def _empty(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of the array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def is_aligned(memory: memoryview, alignment: int) -> bool:
    """Return whether writable memory begins at a multiple of `alignment`."""
    # Three times as fast as with numpy.
    return not memory.nbytes or ctypes.addressof(ctypes.c_char.from_buffer(memory)) % alignment == 0


def aligned_copy(memory: memoryview) -> Memory:
    """Return a writable copy that begins at a multiple of ALIGNMENT."""
    copy: Memory = torch.empty(len(memory), dtype=torch.uint8, device="cpu").numpy()
    copy.data[:] = memory
    return copy
