"""A dataset whose samples pass stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from torch_dpflow.epoch.rng import preserved_rng, seed_batch
from torch_dpflow.errors import DPFlowError, StageError
from torch_dpflow.flows.epochs import EpochCounter
from torch_dpflow.flows.stage import Stage


@dataclass(frozen=True)
class Failed:
    """Stands for a sample that could not be loaded."""

    error: Exception


class StagedDataset(Dataset[Any]):
    """A map-style dataset behind stages. As thread-safe as the dataset and the stages' functions are.

    Args:
        samples: a map-style dataset; its `__getitems__` is used if it has one, so that reads overlap.
        stages: in order.
        flow: what errors call it.
        seed: stages draw from torch's, Python's and numpy's generators as (seed, epoch, index) alone decides,
            and leave them as they were; not in threads, which share them. None: they draw from them as they
            are.
    """

    def __init__(self, samples: Any, stages: Sequence[Stage], flow: str, *, seed: int | None = None) -> None:
        self._samples = samples
        self._stages = tuple(stages)
        self._flow = flow
        self._seed = seed
        #: which pass it is; only `seed` heeds it
        self.epochs = None if seed is None else EpochCounter(len(samples))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self.through(index, self._samples[index])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        together = getattr(self._samples, "__getitems__", None)
        if together is None:
            return [self[index] for index in indices]
        samples = list(together(indices))
        if len(samples) != len(indices):
            # A dataset that leaves samples out gives fewer, and does not say which; one by one it does.
            return [self[index] for index in indices]
        return [self.through(index, sample) for index, sample in zip(indices, samples)]

    def load_each(self, indices: list[int]) -> list[Any]:
        """Each sample, or a Failed in its place; no error of one touches another."""
        return [
            sample if isinstance(sample, Failed) else _attempt(self.through, index, sample)
            for index, sample in zip(indices, _each(self._samples, indices))
        ]

    def through(self, index: int, sample: Any) -> Any:
        """What the stages make of a sample of this number. Raises StageError."""
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
    """What a dataset gives, with a Failed for each sample that it cannot; read together where it can."""
    if isinstance(samples, StagedDataset):
        return samples.load_each(indices)
    if hasattr(samples, "read_each"):
        found = samples.read_each(indices)
        return [Failed(sample) if isinstance(sample, DPFlowError) else sample for sample in found]
    if hasattr(samples, "__getitems__"):
        together = _attempt(samples.__getitems__, indices)
        # A dataset that leaves samples out gives fewer, and does not say which.
        if not isinstance(together, Failed) and len(together) == len(indices):
            return list(together)
    return [_attempt(samples.__getitem__, index) for index in indices]


def _attempt(load: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return load(*arguments)
    except Exception as error:
        return Failed(error)
