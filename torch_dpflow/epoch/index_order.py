"""Indices of torch's samplers, drawn in less memory; and whether an epoch's order is fixed at its first batch.

torch's RandomSampler draws each pass at once, as a list of Python integers: 36 bytes per sample. This module yields the
same indices from 4 bytes per sample. Those of long passes are drawn as they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torch_dpflow._core.checks import length_or_none
from torch_dpflow._core.permutation import Permutation, drawn_as

#: Indices that are converted to Python integers at once.
_CHUNK = 4096


def batches_of(index_sampler: Any) -> Iterator[Any]:
    """Return an iterator over a loader's `_index_sampler`, with the same batches and order as in torch."""
    if type(index_sampler) is BatchSampler and is_drawn_here(index_sampler.sampler):
        indices = indices_of(index_sampler.sampler)
        return iter(BatchSampler(indices, index_sampler.batch_size, index_sampler.drop_last))
    return indices_of(index_sampler) if is_drawn_here(index_sampler) else iter(index_sampler)


def is_drawn_here(sampler: Any) -> TypeGuard[RandomSampler]:
    """Return whether `indices_of` supports this sampler: a RandomSampler without replacement, but no subclass."""
    return type(sampler) is RandomSampler and not sampler.replacement


def in_chunks(order: Any, start: int, stop: int) -> Iterator[int]:
    """Yield the items of `order[start:stop]` as Python integers."""
    for first in range(start, stop, _CHUNK):
        yield from order[first : min(stop, first + _CHUNK)].tolist()


def indices_of(sampler: RandomSampler, skip: int = 0) -> Iterator[int]:
    """Yield the indices of a sampler that passes `is_drawn_here`, without the first `skip`. Draws as torch does."""
    length = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    passes, rest = divmod(sampler.num_samples, length)
    for number in range(passes + 1):
        stop = length if number < passes else rest
        if not stop and sampler.generator is None:
            return  # torch draws one more pass, of which it reads nothing, and drops this generator
        order: Permutation | Any = drawn_as(generator, length)
        yield from in_chunks(order, min(skip, stop), stop)
        skip -= min(skip, stop)


def is_drawn_at_start(index_sampler: Any) -> bool:
    """Return whether an epoch's order is fixed at its first batch, so that drawing further ahead cannot change it.

    True for known samplers only: others may draw from a generator that the training loop uses too.
    """
    if type(index_sampler) is BatchSampler:
        index_sampler = index_sampler.sampler
    check = _FIXED_ORDER.get(type(index_sampler))
    return check is not None and check(index_sampler)


def draws_at_end(index_sampler: Any) -> bool:
    """Return whether the end of an epoch may draw from a user's generator, as with a RandomSampler that has one."""
    sampler = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    return type(sampler) is RandomSampler and sampler.generator is not None


def settled_length(index_sampler: Any, end: int | None = None) -> int:
    """Return how many batches from an epoch's start are fixed once the first batch is drawn; 0 if unknown.

    They can be drawn together with the first batch. A last batch that may draw random numbers is not counted
    (`draws_at_end`).

    end: number of batches in a resumed epoch, including batches before the resume; None for a whole epoch.
    """
    usual = length_or_none(index_sampler)
    length = usual if end is None else end
    if length is None or not is_drawn_at_start(index_sampler):
        return 0
    if type(index_sampler) is BatchSampler and draws_at_end(index_sampler):
        # To find that a batch is short is to get to the end.
        inner: Any = index_sampler.sampler
        is_short = length != usual or len(inner) % index_sampler.batch_size
        return length - 1 if is_short and not index_sampler.drop_last else length
    return length


def _random_sampler_is_fixed(sampler: RandomSampler) -> bool:
    # Without a generator it seeds a private one; from the user's it draws a chunk or a pass at a time.
    if sampler.generator is None:
        return True
    length = length_or_none(sampler.data_source)
    return not sampler.replacement and length is not None and sampler.num_samples <= length


def _always(_sampler: Any) -> bool:
    return True


_FIXED_ORDER: dict[type, Callable[[Any], bool]] = {
    SequentialSampler: _always,
    RandomSampler: _random_sampler_is_fixed,
    SubsetRandomSampler: _always,
    WeightedRandomSampler: _always,
    DistributedSampler: _always,
    list: _always,
    tuple: _always,
    range: _always,
}
