"""The indices that a sampler is given in the place of a data set."""

from __future__ import annotations

from array import array as array_of_numbers
from collections import deque
from collections.abc import Set, ValuesView
from numbers import Number
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.samplers.indices import IndexArray, check_indices, has_flags


def given_indices(data_source: object) -> IndexArray | None:
    """Return the indices, if `data_source` is a sequence of whole numbers; None if it is a data set.

    Raises:
        OptionTypeError: it is a sequence of other numbers, or numbers without an order, or text.
        OptionError: an index is negative, too large, or there twice.
    """
    if isinstance(data_source, str | bytes | bytearray):
        raise OptionTypeError(f"data_source={data_source!r:.80} is text; give a data set, or the indices to read")
    numbers = _numbers_of(data_source)
    if numbers is None:
        return None
    if not len(numbers):
        return np.empty(0, np.int64)
    if isinstance(numbers, np.ndarray) and numbers.dtype.kind not in "iu":
        raise OptionTypeError(
            f"data_source is a {type(data_source).__name__} of {numbers.dtype} numbers. Whole numbers are taken as "
            "indices: convert them to int, or those of a mask by numpy.flatnonzero(mask); for a data set made of them "
            "pass range(len(...))"
        )
    try:
        return check_indices(numbers, name="data_source")
    except OptionError as error:
        raise OptionError(
            f"{error}. Whole numbers are taken as indices; for a data set made of them pass range(len(...))"
        ) from error


def _numbers_of(data_source: Any) -> range | NDArray[Any] | None:
    """Return what is a row of numbers, of any type; None for anything else.

    Raises OptionTypeError for numbers without an order.
    """
    if isinstance(data_source, range):
        return data_source
    if isinstance(data_source, torch.Tensor):
        is_small_float = data_source.is_floating_point()  # NumPy lacks some of torch's types
        array = (data_source.float() if is_small_float else data_source).numpy(force=True)
        return array if array.ndim == 1 else None
    if callable(getattr(type(data_source), "__array__", None)):  # of NumPy, pandas and others
        is_row = len(getattr(data_source, "shape", (0,))) == 1
        row = np.asarray(data_source) if is_row else None
        return row if row is not None and row.ndim == 1 and row.dtype.kind in "iufcb" else None
    if isinstance(data_source, Set | ValuesView) and len(data_source) and all(map(_is_number, data_source)):
        raise OptionTypeError(
            f"data_source is a {type(data_source).__name__} of numbers, which have no order; give a list, as "
            "sorted(...)"
        )
    if isinstance(data_source, list | tuple | deque | array_of_numbers) and all(map(_is_number, data_source)):
        values = [one.item() if isinstance(one, torch.Tensor) else one for one in data_source]
        array = np.asarray(values or np.empty(0, np.int64))
        return array.astype(bool) if has_flags(values) else array
    return None


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.ndim
    return isinstance(value, Number | np.number | np.bool_)
