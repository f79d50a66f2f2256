"""The indices of torch's own samplers, in torch's order, without torch's list of all of them.

torch's RandomSampler makes a list of Python integers for each pass: 36 bytes a sample, drawn as a whole before the
first batch and again at the end. Here a pass takes 4 bytes a sample, and is drawn as it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch.utils.data import BatchSampler, RandomSampler

from torch_dpflow._core.permutation import Permutation, drawn_as

#: Indices that are converted to Python integers at once.
_CHUNK = 4096


def batches_of(index_sampler: Any) -> Iterator[Any]:
    """Return an iteration of a loader's `_index_sampler`."""
    if type(index_sampler) is BatchSampler and is_drawn_here(index_sampler.sampler):
        indices = indices_of(index_sampler.sampler)
        return iter(BatchSampler(indices, index_sampler.batch_size, index_sampler.drop_last))
    return indices_of(index_sampler) if is_drawn_here(index_sampler) else iter(index_sampler)


def is_drawn_here(sampler: Any) -> TypeGuard[RandomSampler]:
    """Return whether `indices_of` draws the indices of this sampler: a RandomSampler without replacement."""
    return type(sampler) is RandomSampler and not sampler.replacement


def in_chunks(order: Any, start: int, stop: int) -> Iterator[int]:
    """Yield the numbers of an order from place `start` to before `stop`."""
    for first in range(start, stop, _CHUNK):
        yield from order[first : min(stop, first + _CHUNK)].tolist()


def indices_of(sampler: RandomSampler, skip: int = 0) -> Iterator[int]:
    """Yield a RandomSampler's indices after the first `skip`; draw at torch's times, from the same generators."""
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
