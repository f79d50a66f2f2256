"""Sets of sample numbers: the types that callers can pass, and checks of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, Union

import numpy as np
from numpy.typing import NDArray

from torch_dpflow._core.permutation import Permutation
from torch_dpflow.errors import OptionError, OptionTypeError

if TYPE_CHECKING:
    import torch

IndexArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
#: Sample numbers as the strategies store them: int32 where that is wide enough, else int64.
CompactArray: TypeAlias = NDArray[np.signedinteger[Any]]
#: An order of sample numbers, whose slices are arrays.
Order: TypeAlias = CompactArray | Permutation
#: Types that callers can pass as a set of sample numbers.
Indices: TypeAlias = Union[Iterable[int], NDArray[np.integer[Any]], "torch.Tensor"]

#: Maximum seed: torch.Generator.manual_seed accepts numbers of 64 bits.
MAX_SEED = 2**63 - 1


def check_indices(
    indices: Indices, size: int | None = None, *, name: str = "indices", allow_empty: bool = False
) -> IndexArray:
    """Check sample numbers, and return them as a new int64 array, in the order given.

    Raises:
        OptionTypeError: `indices` are not whole numbers in one dimension.
        OptionError: an index is negative, not below `size` (None: 2**63 - 1), or repeated; or `indices` is empty and
            `allow_empty` is False.
    """
    given = whole_numbers(indices, name)
    if not len(given) and not allow_empty:
        raise OptionError(f"{name} is empty; a job needs at least one sample")
    lowest, highest = (int(given.min()), int(given.max())) if len(given) else (0, 0)
    if lowest < 0:
        raise OptionError(f"{name} has {lowest}; sample numbers start at 0")
    if len(given) and highest >= (MAX_SEED if size is None else size):
        allowed = f"with {size} samples, 0 to {size - 1} are" if size is not None else "numbers below 2**63 - 1 are"
        raise OptionError(f"{name} has {highest}; {allowed} allowed")
    array = given.astype(np.int64)
    if not isinstance(indices, range) and (repeated := _first_repeated(array)) is not None:
        raise OptionError(f"{name} has {repeated} more than once; an epoch reads every sample once")
    return array


def _is_tensor(indices: object) -> TypeGuard[torch.Tensor]:
    # A caller with a tensor has imported torch; services must not import it for this check.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(indices, torch.Tensor)


def has_flags(values: Iterable[Any]) -> bool:
    """Return whether any value is a bool. Callers refuse bools: NumPy would read a mask as the samples 0 and 1."""
    return not {bool, np.bool_}.isdisjoint(map(type, values))


def whole_numbers(indices: Indices, name: str = "indices") -> NDArray[Any]:
    """Return the numbers as an array of integers, or of objects if no integer type is wide enough.

    Raises OptionTypeError: `indices` are not whole numbers in one dimension.
    """
    if isinstance(indices, range) and all(abs(end) < MAX_SEED for end in (indices.start, indices.stop, indices.step)):
        return np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)  # a list of millions takes minutes
    if _is_tensor(indices):
        indices = indices.numpy(force=True)
    elif not isinstance(indices, np.ndarray):
        if isinstance(indices, str | bytes) or not isinstance(indices, Iterable):
            raise OptionTypeError(f"{name}={indices!r} is of type {type(indices).__name__}; give sample numbers")
        values = list(indices)
        if has_flags(values):
            raise OptionTypeError(f"{name} has a bool; give sample numbers, those of a mask by numpy.flatnonzero(mask)")
        try:
            indices = np.asarray(values or np.empty(0, np.int64))
        except ValueError as error:  # rows of several lengths
            raise OptionTypeError(f"{name}={values!s:.80}: one dimension of whole numbers is required") from error
    is_long = indices.dtype == object and all(isinstance(index, int) for index in indices.flat)
    if indices.ndim != 1 or not (is_long or indices.dtype.kind in "iu" or not indices.size):
        raise OptionTypeError(
            f"{name}: one dimension of whole numbers is required, got dtype {indices.dtype} and shape {indices.shape}"
        )
    return indices if indices.size else indices.astype(np.int64)


def _first_repeated(array: IndexArray) -> int | None:
    ordered = np.sort(array)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(repeated[0]) if len(repeated) else None


def mark(marks: NDArray[np.uint8], samples: CompactArray) -> None:
    """Set the bits of samples in the bitmap `marks`; sample 0 is the most significant bit of the first byte."""
    np.bitwise_or.at(marks, samples >> 3, (128 >> (samples & 7)).astype(np.uint8))


def compact(size: int) -> type[np.signedinteger[Any]]:
    """Return int32 if it can hold the sample numbers below `size`, else int64."""
    return np.int32 if size <= np.iinfo(np.int32).max else np.int64
