"""Encoding without pickle of common samples: a tensor, a list of one tensor, or a tuple of a tensor and numbers.

A worker encodes a sample just after the code that loads samples has filled the processor's caches. So the time depends
on the amount of code that runs: `PayloadPickler` takes 27 µs in a loop, and 180 µs in a worker that decodes images.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torch_dpflow._core.channels_last import has_channels_last
from torch_dpflow.ipc.memory.arena import Arena, Block
from torch_dpflow.ipc.memory.segment import storage_over, tensor_over
from torch_dpflow.ipc.messages.headers import SHARED_BYTES, BufferSpan, Frame, PayloadTable, aligned
from torch_dpflow.ipc.serialization.codec import LARGE_BYTES, decode, encode
from torch_dpflow.ipc.serialization.pickling import PayloadPickler, is_plain
from torch_dpflow.log import TRANSPORT

#: Maximum items of a tuple on the fast path.
_MAX_ITEMS = 8
_NUMBERS = frozenset((int, float, bool, type(None)))
_BEGIN = pickle.PROTO + b"\x05"
#: What comes before and after the instructions of an item.
_LIST_OF_ONE = pickle.EMPTY_LIST, pickle.APPEND
#: For this many bytes in a row, numpy's strided copy is at least as fast as torch's, and takes fewer steps.
_ROW_BYTES = 16


def encode_sample(
    sample: Any, *, arena: Arena | None = None, keep_layout: bool = False, name: str = "batch"
) -> tuple[PayloadTable, list[Frame]]:
    """Encode a sample for `decode`. For the result and errors see `codec.encode`.

    keep_layout: keep the memory layout of tensors; otherwise big ones are encoded as with `contiguous=True` there.
    name: name of `sample` in the error.
    """
    if not _QUICK:
        quick = None
    elif type(sample) is torch.Tensor:
        quick = _encode_tensor(sample, None, arena, keep_layout)
    elif type(sample) is list and len(sample) == 1 and type(sample[0]) is torch.Tensor:
        quick = _encode_tensor(sample[0], None, arena, keep_layout, around=_LIST_OF_ONE)
    elif type(sample) is tuple and 0 < len(sample) <= _MAX_ITEMS and type(sample[0]) is torch.Tensor:
        quick = _encode_tensor(sample[0], sample[1:], arena, keep_layout)
    else:
        quick = None
    return quick or encode(sample, arena=arena, contiguous=not keep_layout, name=name)


def numbers_beside(heads: Sequence[bytes], tensor: torch.Tensor, *, alone: bool) -> list[tuple[Any, ...]] | None:
    """Return the numbers in each sample that follow its tensor, such as a label; None if a sample has another form.

    heads: the pickled head of each encoded sample.
    tensor: a tensor with the dtype, shape and layout that every sample's tensor must have.
    alone: whether the samples are tensors without numbers; otherwise they are tuples (tensor, number, ...).
    """
    value = _instructions(tensor.dtype, tensor.shape, _is_in_pixels(tensor))
    if alone:
        whole = _BEGIN + value + pickle.STOP
        return [()] * len(heads) if _QUICK and all(head == whole for head in heads) else None
    begin = _BEGIN + pickle.MARK + value
    if not _QUICK or not all(head.startswith(begin) for head in heads):
        return None
    return [pickle.loads(_BEGIN + pickle.MARK + head[len(begin) :]) for head in heads]


def _is_in_pixels(tensor: torch.Tensor) -> bool:
    return not tensor.is_contiguous() and has_channels_last(tensor)


def _encode_tensor(
    tensor: torch.Tensor,
    numbers: tuple[Any, ...] | None,
    arena: Arena | None,
    keep_layout: bool = False,
    *,
    around: tuple[bytes, bytes] = (b"", b""),
) -> tuple[PayloadTable, list[Frame]] | None:
    """Encode a tensor, or a tuple that begins with it; None if this fast path does not apply, or no memory is shared.

    numbers: the other items of the tuple; None: the sample is the tensor. around: pickle opcodes before and after the
        tensor.
    """
    if not is_plain(tensor) or (numbers and not _NUMBERS.issuperset(map(type, numbers))):
        return None
    nbytes, in_order = tensor.nbytes, tensor.is_contiguous()
    large = nbytes >= LARGE_BYTES
    in_pixels = keep_layout and large and _is_in_pixels(tensor)
    if not (large or 0 < nbytes < SHARED_BYTES):
        return None
    if not (in_order or in_pixels or (large and tensor.dim() <= 3 and not keep_layout)):
        return None
    value = _instructions(tensor.dtype, tensor.shape, in_pixels)
    if numbers is not None:
        rest = [pickle.dumps(number, 2)[2:-1] for number in numbers]
        value = b"".join((pickle.MARK, value, *rest, pickle.TUPLE))
    head = b"".join((_BEGIN, around[0], value, around[1], pickle.STOP))
    if not large:  # in the same frame as its head
        gap, behind, table = _layout_beside(len(head), nbytes)
        return table, [b"".join((head, gap, ctypes.string_at(tensor.data_ptr(), nbytes), behind))]
    block = None if arena is None else arena.block_at(tensor.data_ptr(), nbytes) or arena.allocate(nbytes)
    if arena is None or block is None:
        return None
    if in_order or in_pixels:
        if block.address != tensor.data_ptr():
            ctypes.memmove(block.address, tensor.data_ptr(), nbytes)
    else:
        _lay_out(tensor, block)
    return PayloadTable(1, (arena.publish(block),), *_layout_in_block(len(head), nbytes)), [head]


@lru_cache(maxsize=512)
def _layout_in_block(head: int, nbytes: int) -> tuple[BufferSpan, tuple[BufferSpan, ...]]:
    """Return the spans of a head in a frame and of its buffer in a block; the same objects, so payloads are grouped."""
    return BufferSpan(0, 0, head), (BufferSpan(-1, 0, nbytes),)


@lru_cache(maxsize=512)
def _layout_beside(head: int, nbytes: int) -> tuple[bytes, bytes, PayloadTable]:
    """Return (padding after the head, padding after the buffer, table) of a payload with these sizes, in bytes.

    Payloads of equal sizes get the same table object, so they travel as a group. The padding keeps a group's buffers
    aligned.
    """
    start = aligned(head)
    table = PayloadTable(1, (), BufferSpan(0, 0, head), (BufferSpan(0, start, nbytes),))
    return bytes(start - head), bytes(aligned(nbytes) - nbytes), table


def _lay_out(tensor: torch.Tensor, block: Block) -> None:
    if tensor.dtype is torch.uint8 and tensor.shape[-1] >= _ROW_BYTES:
        np.copyto(block.memory.reshape(tensor.shape), tensor.numpy())
    else:
        tensor_over(storage_over(block.memory), tensor.dtype, tensor.shape).copy_(tensor)


@lru_cache(maxsize=512)
def _instructions(dtype: torch.dtype, shape: torch.Size, in_pixels: bool = False) -> bytes:
    """Return the pickle opcodes that make a tensor of the payload's first buffer, without PROTO and STOP.

    in_pixels: the tensor is an image with channels last in memory; otherwise the tensor is contiguous.
    """
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    pickler = PayloadPickler()
    pickler.dump(tensor.permute(1, 2, 0).contiguous().permute(2, 0, 1) if in_pixels else tensor)
    head = b"".join(pickler.chunks)[2:-1]
    return head[9:] if head.startswith(pickle.FRAME) else head


def _writes_as_pickle() -> bool:
    """Self-test: return whether heads composed of pieces of this Python's pickles unpickle as expected."""
    tensor, numbers = torch.arange(6, device="cpu").reshape(2, 3), (1, 2**70, -1.5, True, None)
    samples: tuple[tuple[Any, tuple[Any, ...] | None], ...] = ((tensor, None), ((tensor, *numbers), numbers))
    try:
        for sample, rest in samples:
            table, frames = _encode_tensor(tensor, rest, None) or encode(None)
            beside = numbers_beside([bytes(frames[0][: table.head.size])], tensor, alone=rest is None)
            found = decode(table, frames)
            first, *others = found if isinstance(sample, tuple) else (found,)
            if type(found) is not type(sample) or not torch.equal(first, tensor):
                return False
            if beside != [tuple(others)] or tuple(others) != (rest or ()):
                return False
        listed = decode(*encode_sample([tensor]))
    except Exception:
        return False
    return type(listed) is list and torch.equal(listed[0], tensor)


_QUICK = True
_QUICK = _writes_as_pickle()
if not _QUICK:
    TRANSPORT.warning(
        "this Python writes pickles in an unexpected form: samples are encoded by pickle, which "
        "takes a worker up to 0.2 ms more for each"
    )
