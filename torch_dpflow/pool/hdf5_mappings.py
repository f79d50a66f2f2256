"""Mappings of HDF5's virtual datasets: which rows have a source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def first_without_source(h5py: Any, data: Any) -> int | None:
    """Return the first row of a virtual dataset of which an element has no source; None if there is none.

    The sources have all mapped elements; those of mappings without a limit may be of unequal size.
    """
    h5s = h5py.h5s
    shape = data.shape
    if not data.size:
        return None
    mapped = h5s.create_simple(shape)
    mapped.select_none()
    for one in data.virtual_sources():
        for start, count, stride, block in _boxes(h5s, one, shape, data.file[one.dset_name].shape):
            mapped.select_hyperslab(start, count, stride, block, op=h5s.SELECT_OR)
    per_row = data.size // shape[0]
    low, high = 0, shape[0]  # rows before `low` are complete; bisection
    while low < high:
        middle = (low + high) // 2
        rows = mapped.copy()
        rows.select_hyperslab((0,) * len(shape), (1,) * len(shape), None, (middle + 1, *shape[1:]), op=h5s.SELECT_AND)
        if rows.get_select_npoints() == (middle + 1) * per_row:
            low = middle + 1
        else:
            high = middle
    return low if low < shape[0] else None


_Box = tuple[Any, Any, Any, Any]


def _boxes(h5s: Any, mapped: Any, shape: tuple[int, ...], source: tuple[int, ...]) -> Iterator[_Box]:
    """Yield start, count, stride and block of the hyperslabs that a mapping fills; `source` is its source's shape."""
    space, ones = mapped.vspace, (1,) * len(shape)
    kind = space.get_select_type()
    if kind == h5s.SEL_ALL:
        yield (0,) * len(shape), ones, None, shape
    elif kind == h5s.SEL_HYPERSLABS and space.is_regular_hyperslab():
        start, stride, count, block = space.get_regular_hyperslab()
        axis = _unlimited_axis(h5s, count, block)
        if axis is None:
            yield start, count, stride, block
            return
        left = _available(h5s, mapped.src_space, source)
        size = left if block[axis] == h5s.UNLIMITED else block[axis]
        full, rest = divmod(left, size) if size else (0, 0)
        for first, number, length in ((0, full, size), (full, 1, rest)):
            if number and length:
                begin = start[axis] + first * stride[axis]
                yield (
                    _replaced(start, axis, begin),
                    _replaced(count, axis, number),
                    stride,
                    _replaced(block, axis, length),
                )
    elif kind == h5s.SEL_HYPERSLABS:
        for low, high in space.get_select_hyper_blocklist():
            yield tuple(low), ones, None, tuple(last - one + 1 for one, last in zip(low, high))


def _available(h5s: Any, space: Any, source: tuple[int, ...]) -> int:
    """Return how many indices of a source are selected in the dimension without a limit."""
    start, stride, count, block = space.get_regular_hyperslab()
    axis = _unlimited_axis(h5s, count, block)
    assert axis is not None, "HDF5 requires limits of both selections or of neither"
    left = max(0, source[axis] - int(start[axis]))
    if block[axis] == h5s.UNLIMITED:
        return left
    full, rest = divmod(left, stride[axis])
    return int(full * block[axis] + min(rest, block[axis]))


def _unlimited_axis(h5s: Any, count: Sequence[int], block: Sequence[int]) -> int | None:
    return next((axis for axis in range(len(count)) if h5s.UNLIMITED in (count[axis], block[axis])), None)


def _replaced(values: Sequence[int], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
