"""For any object that a batch may be: what comes out of a payload is what went in."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.headers import PayloadTable
from torch_dpflow.ipc.serialization.codec import LARGE_BYTES, decode, encode

_settings = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

DTYPES = [
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Dense tensors, contiguous or a view of something larger; some of them large."""
    dtype = draw(st.sampled_from(DTYPES))
    count = draw(st.sampled_from([0, 1, 7, 64, 1000, LARGE_BYTES // dtype.itemsize + 5]))
    base = torch.randint(0, 255, (count,), generator=torch.Generator().manual_seed(count)).to(dtype)
    return draw(views(base))


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """Some view of a one-dimensional tensor."""
    count = base.numel()
    start = draw(st.integers(0, count))
    step = draw(st.integers(1, 3))
    view = base[start::step]
    if draw(st.booleans()) and view.numel() % 2 == 0:
        view = view.view(2, -1).t()
    if draw(st.booleans()):
        view = view.unsqueeze(0).expand(draw(st.integers(0, 3)), *view.shape)
    return view


arrays = hnp.arrays(
    dtype=st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(),
        hnp.floating_dtypes(),
        hnp.complex_number_dtypes(),
        hnp.datetime64_dtypes(),
        hnp.unicode_string_dtypes(),
        hnp.byte_string_dtypes(),
        hnp.array_dtypes(),
    ),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(max_size=100_000),
)
leaves = st.one_of(scalars, arrays, tensors())
objects = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
    ),
    max_leaves=12,
)


def form(tensor: torch.Tensor) -> Any:
    dense = tensor.contiguous().clone()
    bits = torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage()).tolist() if tensor.numel() else []
    return tensor.dtype, tensor.shape, tensor.stride(), bits


def same(ours: Any, theirs: Any) -> bool:
    """Equal in type, dtype, shape, strides and every bit."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, torch.Tensor):
        return form(ours) == form(theirs)
    if isinstance(theirs, np.ndarray):
        return (
            (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            and ours.tobytes() == theirs.tobytes()
            and bool(ours.flags.writeable)
        )
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def carry_inline(obj: Any) -> Any:
    table, frames = encode(obj)
    table = msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=PayloadTable)
    return decode(table, [bytes(frame) for frame in frames])


def carry_shared(obj: Any) -> Any:
    arena = Arena(budget_bytes=1 << 24)
    table, frames = encode(obj, arena=arena)
    return decode(table, [bytearray(frame) for frame in frames], reader=ArenaReader(os.getpid()))


carries = st.sampled_from([carry_inline, carry_shared])


@_settings
@given(obj=objects, carry=carries)
def test_what_comes_out_is_what_went_in(obj: Any, carry: Callable[[Any], Any]) -> None:
    assert same(carry(obj), obj)


def span(view: torch.Tensor) -> int:
    """Elements of its storage from a view's first to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(view.shape, view.stride())) if view.numel() else 0


@_settings
@given(data=st.data(), count=st.sampled_from([4, 300, LARGE_BYTES // 4]), carry=carries)
def test_views_of_one_storage_stay_views_of_one_storage(
    data: st.DataObject, count: int, carry: Callable[[Any], Any]
) -> None:
    base = torch.arange(float(count))
    originals = [base, *data.draw(st.lists(views(base), min_size=1, max_size=4))]
    copies = carry(originals)
    assert same(copies, originals)
    whole = [position for position, view in enumerate(originals) if 2 * span(view) > count]
    originals[0] += 1000
    copies[0] += 1000
    assert same([copies[position] for position in whole], [originals[position] for position in whole])


@_settings
@given(obj=objects)
def test_the_table_tells_the_size(obj: Any) -> None:
    table, frames = encode(obj)
    in_frames = sum(len(frame) for frame in frames)
    padding = 64 * (len(table.buffers) + 1)
    assert in_frames - padding <= table.nbytes <= in_frames
    assert table.frames == len(frames)
