"""Encodes a worker's sample, the common ones without pickle: a tensor, or a tuple of one and plain numbers.

A worker encodes a sample just after the sample's own code has filled the processor's caches. So the amount of code
counts, and not how fast it runs when repeated: the way through `ParcelPickler` takes 27 µs in a loop and 180 µs in a
worker that decodes images.
"""

from __future__ import annotations

import ctypes
import pickle
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torch_dpflow.log import TRANSPORT
from torch_dpflow.remote.parcel.codec import LARGE_BYTES, decode, encode
from torch_dpflow.remote.parcel.pickling import ParcelPickler, is_plain
from torch_dpflow.remote.shm.arena import Arena, Block
from torch_dpflow.remote.shm.memory import address_of, storage_over, tensor_over
from torch_dpflow.remote.wire.alignment import ALIGNMENT
from torch_dpflow.remote.wire.parcel_table import BufferSpan, Frame, ParcelTable
from torch_dpflow.remote.wire.shared_blocks import SHARED_BYTES

#: Most items of a tuple for the fast path.
_MOST_ITEMS = 8
_NUMBERS = frozenset((int, float, bool, type(None)))
_BEGIN = pickle.PROTO + b"\x05"
#: From this many bytes in a row on, numpy's strided copy is at least as fast as torch's, and takes fewer steps.
_ROW_BYTES = 16


def encode_sample(sample: Any, *, arena: Arena | None = None) -> tuple[ParcelTable, list[Frame]]:
    """Encode a sample for `decode`. As `parcel.encode` with `contiguous`, whose errors it raises."""
    if not _QUICK:
        quick = None
    elif type(sample) is torch.Tensor:
        quick = _encode_tensor(sample, None, arena)
    elif type(sample) is tuple and 0 < len(sample) <= _MOST_ITEMS and type(sample[0]) is torch.Tensor:
        quick = _encode_tensor(sample[0], sample[1:], arena)
    else:
        quick = None
    return quick or encode(sample, arena=arena, contiguous=True)


def numbers_beside(head: bytes, tensor: torch.Tensor, *, alone: bool) -> tuple[Any, ...] | None:
    """The numbers beside such a tensor in the head of a sample's parcel; None where the head has something else.

    alone: whether the sample should be the tensor, and not a tuple that begins with it.
    """
    if not _QUICK:
        return None
    if alone:
        is_so = head == _BEGIN + _instructions(tensor.dtype, tensor.shape) + pickle.STOP
        return () if is_so else None
    begin = _BEGIN + pickle.MARK + _instructions(tensor.dtype, tensor.shape)
    if not head.startswith(begin):
        return None
    numbers: tuple[Any, ...] = pickle.loads(_BEGIN + pickle.MARK + head[len(begin) :])
    return numbers


def _encode_tensor(
    tensor: torch.Tensor, numbers: tuple[Any, ...] | None, arena: Arena | None
) -> tuple[ParcelTable, list[Frame]] | None:
    """The parcel; None where the sample is of another kind, or where there is no shared memory for it.

    numbers: the other items of the tuple; None: the sample is the tensor.
    """
    if not is_plain(tensor) or not all(type(number) in _NUMBERS for number in numbers or ()):
        return None
    nbytes, in_order = tensor.nbytes, tensor.is_contiguous()
    large = nbytes >= LARGE_BYTES
    if not (large or 0 < nbytes < SHARED_BYTES) or not (in_order or (large and tensor.dim() <= 3)):
        return None
    value = _instructions(tensor.dtype, tensor.shape)
    if numbers is not None:
        rest = [pickle.dumps(number, 2)[2:-1] for number in numbers]
        value = b"".join((pickle.MARK, value, *rest, pickle.TUPLE))
    head = _BEGIN + value + pickle.STOP
    if not large:
        return _beside(head, tensor, nbytes)
    block = None if arena is None else arena.allocate(nbytes)
    if arena is None or block is None:
        return None
    if in_order:
        ctypes.memmove(block.address, tensor.data_ptr(), nbytes)
    else:
        _lay_out(tensor, block)
    place = BufferSpan(-1, 0, nbytes)
    return ParcelTable(1, (arena.publish(block),), BufferSpan(0, 0, len(head)), (place,)), [head]


def _beside(head: bytes, tensor: torch.Tensor, nbytes: int) -> tuple[ParcelTable, list[Frame]]:
    """A small tensor in the frame of its head."""
    start = len(head) + -len(head) % ALIGNMENT
    frame = np.zeros(start + nbytes, np.uint8)
    frame.data[: len(head)] = head
    ctypes.memmove(address_of(frame) + start, tensor.data_ptr(), nbytes)
    return ParcelTable(1, (), BufferSpan(0, 0, len(head)), (BufferSpan(0, start, nbytes),)), [frame.data]


def _lay_out(tensor: torch.Tensor, block: Block) -> None:
    if tensor.dtype is torch.uint8 and tensor.shape[-1] >= _ROW_BYTES:
        np.copyto(block.memory.reshape(tensor.shape), tensor.numpy())
    else:
        tensor_over(storage_over(block.memory), tensor.dtype, tensor.shape).copy_(tensor)


@lru_cache(maxsize=512)
def _instructions(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """The pickle that makes a contiguous tensor of the parcel's first buffer, without its begin and end."""
    pickler = ParcelPickler()
    pickler.dump(torch.empty(shape, dtype=dtype, device="cpu"))
    head = b"".join(pickler.chunks)[2:-1]
    return head[9:] if head.startswith(pickle.FRAME) else head


def _writes_as_pickle() -> bool:
    """Self-test: whether heads that are composed of pieces of this Python's pickles unpickle to what they should."""
    tensor, numbers = torch.arange(6, device="cpu").reshape(2, 3), (1, 2**70, -1.5, True, None)
    samples: tuple[tuple[Any, tuple[Any, ...] | None], ...] = ((tensor, None), ((tensor, *numbers), numbers))
    try:
        for sample, rest in samples:
            table, frames = _encode_tensor(tensor, rest, None) or encode(None)
            beside = numbers_beside(bytes(frames[0][: table.head.size]), tensor, alone=rest is None)
            found = decode(table, frames)
            first, *others = found if isinstance(sample, tuple) else (found,)
            if type(found) is not type(sample) or not torch.equal(first, tensor):
                return False
            if not (tuple(others) == beside == (rest or ())):
                return False
    except Exception:
        return False
    return True


_QUICK = True
_QUICK = _writes_as_pickle()
if not _QUICK:
    TRANSPORT.warning(
        "this Python writes pickles in another form than torch_dpflow expects: samples are encoded by pickle, which "
        "takes a worker up to 0.2 ms more for each"
    )
