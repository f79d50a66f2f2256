"""A dataset with stages, and the epoch that each of its samples is drawn for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch.utils.data import Dataset

from torch_dpflow._core.checks import working
from torch_dpflow.epoch.rng import loading_epoch, preserved_rng, seed_batch
from torch_dpflow.errors import DPFlowError, StageError
from torch_dpflow.flows.stage import Stage
from torch_dpflow.lookahead import Order, announce_order

#: First fields of the counter: whether an epoch was set, which, and the counted epoch.
_IS_SET, _SET, _COUNTED, _HEAD = range(4)


class EpochCounter:
    """Counter that returns the epoch of each sample that is read. Shared by a process and its workers.

    An epoch that was set takes precedence, then the epoch of a DPFlowDataLoader, resumed or not. torch's loader passes
    no epoch to a dataset: the base seed of its workers is random, stays the same for persistent workers, and does not
    exist without workers. So a sample's epoch is the number of times it was read before, and at least the highest epoch
    of any sample. In passes over all samples this is the number of the pass, in any process.

    Two processes that count at the same time may each miss the other's increment; both then see a repeated sample,
    which gives the same epoch.

    Args:
        samples: their number; they are numbered from 0.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        words: Any = torch.zeros(_HEAD + (samples + 1) // 2, dtype=torch.int64)
        self._open(words.share_memory_())

    def set(self, epoch: int) -> None:
        """Set the epoch, also for running workers."""
        self._head[_SET] = epoch
        self._head[_IS_SET] = 1

    def of(self, sample: int) -> int:
        """Return the epoch of this read of the sample."""
        if self._head[_IS_SET]:
            return int(self._head[_SET])
        loading = loading_epoch()
        if loading is not None:
            return loading
        epoch = max(int(self._head[_COUNTED]), int(self._reads[sample]))
        self._head[_COUNTED] = epoch
        self._reads[sample] = epoch + 1
        return epoch

    def _open(self, words: Any) -> None:
        self._words = words
        self._head = words.numpy()[:_HEAD]
        self._reads = words.numpy()[_HEAD:].view("int32")

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            return _shared, (self._samples, self._words)
        # Other processes than workers count for themselves; and a flow's fingerprint must not contain counts.
        was_set = int(self._head[_SET]) if self._head[_IS_SET] else None
        return _without_counts, (self._samples, was_set)


def _shared(samples: int, words: Any) -> EpochCounter:
    counter = EpochCounter.__new__(EpochCounter)
    counter._samples = samples
    counter._open(words)
    return counter


def _without_counts(samples: int, was_set: int | None) -> EpochCounter:
    counter = EpochCounter(samples)
    if was_set is not None:
        counter.set(was_set)
    return counter


@dataclass(frozen=True)
class Failed:
    """The placeholder of a sample that could not be loaded."""

    error: Exception


class StagedDataset(Dataset[Any]):
    """A map-style dataset whose samples stages transform. As thread-safe as the dataset and the stages' functions.

    Args:
        samples: a map-style dataset; its `__getitems__` is used if it has one, so that reads overlap.
        stages: in order.
        flow: names it in errors.
        seed: seeds torch's, Python's and numpy's generators by (seed, epoch, index) for each sample, and restores them
            afterwards; not in threads, which share them. None: stages draw from them as they are.
    """

    def __init__(self, samples: Any, stages: Sequence[Stage], flow: str, *, seed: int | None = None) -> None:
        self._samples = samples
        self._stages = tuple(stages)
        self._flow = flow
        self._seed = seed
        #: Used with a seed only.
        self.epochs = None if seed is None else EpochCounter(len(samples))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self.through(index, self._samples[index])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        together = working(self._samples, "__getitems__")
        if together is None:
            return [self[index] for index in indices]
        samples = list(together(indices))
        if len(samples) != len(indices):
            # The dataset leaves samples out; reading one by one shows which.
            return [self[index] for index in indices]
        return [self.through(index, sample) for index, sample in zip(indices, samples)]

    def announce_order(self, order: Order, spread: int, extends: bool = False) -> None:
        """Announce the order of an epoch to the dataset inside; see `lookahead`."""
        announce_order(self._samples, order, spread, extends)

    def load_each(self, indices: list[int]) -> list[Any]:
        """Return each sample, or a Failed in its place; an error of one does not affect others."""
        return [
            sample if isinstance(sample, Failed) else _attempt(self.through, index, sample)
            for index, sample in zip(indices, _each(self._samples, indices))
        ]

    def through(self, index: int, sample: Any) -> Any:
        """Return the output of the stages for the sample of this number. Raises StageError."""
        if self._seed is None or self.epochs is None:
            return self._staged(index, sample)
        with preserved_rng():
            seed_batch(self._seed, self.epochs.of(index), index)
            return self._staged(index, sample)

    def _staged(self, index: int, sample: Any) -> Any:
        for stage in self._stages:
            try:
                sample = stage.apply(sample)
            except StageError as error:
                text = f"{self._flow}, sample {index}: {error}"
                raise StageError(text, error.stage) from error.__cause__
        return sample


def _each(samples: Any, indices: list[int]) -> list[Any]:
    """Return a dataset's samples, with a Failed for each that fails; read together if the dataset can."""
    if isinstance(samples, StagedDataset):
        return samples.load_each(indices)
    if (read_each := working(samples, "read_each")) is not None:
        found = read_each(indices)
        return [Failed(sample) if isinstance(sample, DPFlowError) else sample for sample in found]
    if (read_together := working(samples, "__getitems__")) is not None:
        together = _attempt(read_together, indices)
        # Fewer samples: it is not known which of them the dataset left out.
        if not isinstance(together, Failed) and len(together) == len(indices):
            return list(together)
    return [_attempt(samples.__getitem__, index) for index in indices]


def _attempt(load: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return load(*arguments)
    except Exception as error:
        return Failed(error)
