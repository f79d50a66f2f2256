"""Descriptions of the samples that a loader reads, by which a state saved for other samples is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, RandomSampler, Subset, SubsetRandomSampler, WeightedRandomSampler

from torch_dpflow._core.checks import working
from torch_dpflow._core.dealing import describe_numbers, row_of

#: Description of all samples of a dataset, in their order.
WHOLE = "all samples"


def part_of_dataset(dataset: Any) -> str | None:
    """Return a text that identifies the samples of a `Subset`, also if it is nested or inside this package's datasets.

    Returns `WHOLE` if no `Subset` leaves out or reorders samples, and None if an index is not a whole number.
    """
    levels = [_described(indices) for indices in _levels(dataset)]
    return None if None in levels else " of ".join(map(str, levels)) or WHOLE


def part_of_sampler(index_sampler: Any) -> str | None:
    """Return a text that identifies the indices in a sampler; None if it holds none, or an index is not a whole number.

    Lists, arrays, a SubsetRandomSampler and some samplers of this package hold indices.
    """
    while type(index_sampler) is BatchSampler:
        index_sampler = index_sampler.sampler
    if _is_row(index_sampler):
        return _described(index_sampler)
    if isinstance(index_sampler, SubsetRandomSampler) or _is_ours(index_sampler):
        indices = working(index_sampler, "indices")
        return None if indices is None else _described(indices)
    return None


def drawing_of(index_sampler: Any) -> str | None:
    """Return a text that identifies how a RandomSampler or WeightedRandomSampler draws; None for any other sampler."""
    while type(index_sampler) is BatchSampler:
        index_sampler = index_sampler.sampler
    weights = ""
    if isinstance(index_sampler, WeightedRandomSampler):
        numbers = np.ascontiguousarray(torch.as_tensor(index_sampler.weights).double().numpy(force=True))
        weights = f", by weights of digest {hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest()}"
    elif not isinstance(index_sampler, RandomSampler):
        return None
    has_replacement = working(index_sampler, "replacement", False)
    return f"{'with' if has_replacement else 'without'} replacement{weights}"


def _levels(dataset: Any) -> Iterator[Any]:
    """Yield the indices of each `Subset`, from the outermost."""
    while isinstance(dataset, Subset) or _is_ours(dataset):
        indices, below = working(dataset, "indices"), working(dataset, "dataset")
        if indices is not None and not _is_everything(indices, below):
            yield indices
        dataset = below


def _is_ours(part: Any) -> bool:
    return str(getattr(type(part), "__module__", "")).startswith("torch_dpflow.")


def _is_row(part: Any) -> bool:
    return isinstance(part, list | tuple | range | np.ndarray | torch.Tensor)


def _is_everything(indices: Any, below: Any) -> bool:
    """Return whether the indices are all samples of `below` in their order."""
    try:
        if isinstance(indices, range):
            return indices == range(len(below))
        return len(indices) == len(below) and np.array_equal(_row_of(indices), np.arange(len(below)))
    except Exception:  # one of them has no length
        return False


def _row_of(indices: Any) -> NDArray[Any]:
    """Return indices, of samples or in batches, as one array. Other values raise an error of any kind."""
    if isinstance(indices, torch.Tensor):
        return indices.numpy(force=True)
    is_batches = isinstance(indices, list | tuple) and indices and _is_row(indices[0])
    return row_of(list(chain.from_iterable(indices)) if is_batches else indices)


def _described(indices: Any) -> str | None:
    try:
        numbers = _row_of(indices)
    except Exception:  # no numbers, or batches of several kinds
        return None
    is_row = numbers.ndim == 1 and (numbers.dtype.kind in "iu" or not len(numbers))
    return describe_numbers(numbers) if is_row else None
