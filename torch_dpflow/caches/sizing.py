"""The size of a sample in memory, and a deep copy of it.

Both follow lists, tuples, dicts, sets and attributes of objects, and handle tensors, numpy arrays and Pillow images. An
object that is referenced twice counts once, and is one object in the copy too.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from torch_dpflow._core.checks import working
from torch_dpflow.errors import OptionTypeError

_UNCHANGEABLE = frozenset(
    {int, float, complex, bool, str, bytes, range, type(None), type(...), torch.dtype, torch.device}
)

#: Objects of the program that a sample may refer to, but that are not part of it.
_PROGRAM = (type, FunctionType, BuiltinFunctionType, ModuleType)

#: Bytes that Pillow takes for a pixel; in other modes 4, "RGB" among them.
_BYTES_PER_PIXEL = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}

#: The components of sparse tensors.
_COMPONENTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def measure(sample: object) -> int:
    """Return the bytes of `sample` and all it refers to; a view of a tensor or array counts its own extent."""
    total = 0
    seen: dict[int, object] = {}
    waiting = [sample]
    while waiting:
        part = waiting.pop()
        if id(part) not in seen and not isinstance(part, _PROGRAM):
            seen[id(part)] = part
            total += _own_size(part)
            waiting.extend(_parts(part))
    return total


def duplicate(sample: Any) -> Any:
    """Copy `sample` deeply; tensors keep their device and are detached.

    Raises OptionTypeError where something in it cannot be copied.
    """
    try:
        return _duplicate(sample, {})
    except (TypeError, ValueError, RuntimeError, copy.Error) as error:
        raise OptionTypeError(
            f"a sample of type {type(sample).__name__} cannot be copied ({error}); "
            "pass copy=False if nothing writes to the samples that the cache returns"
        ) from error


def _own_size(part: Any) -> int:
    """Return the bytes of one object without those that it refers to."""
    size = sys.getsizeof(part)
    if isinstance(part, torch.Tensor):
        components = _COMPONENTS.get(part.layout)
        tensors = [part] if components is None else [getattr(part, name)() for name in components]
        size += sum(tensor.nbytes for tensor in tensors)
    elif isinstance(part, memoryview) or (isinstance(part, np.ndarray) and part.base is not None):
        size += part.nbytes  # sys.getsizeof leaves out the buffer of a view
    elif _is_image(part):
        size += part.width * part.height * _BYTES_PER_PIXEL.get(part.mode, 4)
    return size


def _parts(part: Any) -> Iterable[object]:
    """Return the objects that one object refers to."""
    if isinstance(part, (str, bytes, bytearray, memoryview, torch.Tensor)) or _is_image(part):
        return ()
    if isinstance(part, np.ndarray):
        return part.flat if part.dtype.hasobject and part.dtype.names is None else ()
    parts: list[object] = []
    if isinstance(part, Mapping):
        parts += part.keys()
        parts += part.values()
    elif isinstance(part, (list, tuple, set, frozenset, deque)):
        parts += part
    parts += working(part, "__dict__", {}).values()
    for kind in type(part).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        parts += (value for name in names if (value := working(part, name)) is not None)
    return parts


def _duplicate(part: Any, memo: dict[int, Any]) -> Any:
    kind = type(part)
    if kind in _UNCHANGEABLE:
        return part
    if id(part) in memo:
        return memo[id(part)]
    result: Any
    if kind is torch.Tensor:
        result = part.detach().clone().requires_grad_(part.requires_grad)
    elif kind is np.ndarray and not part.dtype.hasobject:
        result = part.copy(order="K")
    elif _is_image(part):
        result = part.copy()
    elif kind in (list, tuple):
        result = kind(map(partial(_duplicate, memo=memo), part))
    elif kind is dict:
        result = {key: _duplicate(value, memo) for key, value in part.items()}
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        result = kind(*map(partial(_duplicate, memo=memo), part))
    else:
        return copy.deepcopy(part, memo)
    memo[id(part)] = result
    return result


def _is_image(part: object) -> bool:
    # Pillow is optional: if it was not imported, nothing is an image.
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(part, pillow.Image)
