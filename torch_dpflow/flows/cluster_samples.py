"""Samples that a cluster loads: what is sent to its workers, and how a process reads the samples."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset, Sampler

from torch_dpflow._core.processes import PerProcess
from torch_dpflow.cluster.client.open_job import FlowDefinition, JobReading, SharedJob, open_job
from torch_dpflow.cluster.client.options import JobOptions
from torch_dpflow.flows.stage import Stage
from torch_dpflow.flows.staged import Failed, StagedDataset


@dataclass(frozen=True)
class FailedSample(Failed):
    """Placeholder for a sample that a worker could not load."""

    #: Its number in the flow.
    index: int


def stand_in(index: int, error: Exception) -> FailedSample:
    """The placeholder for a failed sample in a flow that skips such samples: the rest of its batch is delivered."""
    return FailedSample(error, index)


class PerDrawStages:
    """The stages of a flow that run for each draw, after those whose output is kept."""

    def __init__(self, stages: Sequence[Stage], flow: str) -> None:
        self._staged = StagedDataset((), stages, flow)

    def __call__(self, sample: Any, index: int) -> Any:
        return self._staged.through(index, sample)


@dataclass(frozen=True, kw_only=True)
class SharedFlow:
    """What jobs must have in common to read one flow of a cluster together."""

    name: str
    version: int
    #: What its workers load.
    dataset: Any
    address: str | None
    workers: int
    options: JobOptions

    def open(self) -> SharedJob:
        """Join as a job that reads lists of cacheable samples. Raises as `cluster.client.open_job.open_job`."""
        return open_job(
            FlowDefinition(name=self.name, dataset=self.dataset, version=self.version, workers=self.workers),
            JobReading(collate_fn=list, cacheable_only=True),
            address=self.address,
            # No name: each process is a job of its own, and a name is for one job.
            options=replace(self.options, name=None),
        )


class ClusterSamples(Dataset[Any]):
    """The output of a shared flow's cacheable stages, by sample number.

    Each process joins the flow at its first request, and leaves when it ends. Thread-safe; the threads of a process
    wait for each other. A forked child joins as another job; a pickle has none.
    """

    def __init__(self, shared: SharedFlow) -> None:
        self._shared = shared
        self._opened = PerProcess(_OpenedFlow)

    def __len__(self) -> int:
        return len(self._shared.dataset)

    def __getitem__(self, index: int) -> Any:
        (sample,) = self.__getitems__([index])
        return sample

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """The samples, in order. Raises the error of one that cannot be loaded."""
        samples = self.read_each(indices)
        for sample in samples:
            if isinstance(sample, FailedSample):
                raise sample.error
        return samples

    def read_each(self, indices: list[int]) -> list[Any]:
        """The samples, in order, with a FailedSample in place of each that failed, if the flow skips samples."""
        if not indices:
            return []
        opened = self._opened.get()
        with opened.lock:
            if opened.job is None:
                opened.job = self._shared.open()
                opened.job.close_with(self)
            batches = opened.job.read([indices], 0)
            try:
                samples: list[Any] = next(batches)
            finally:
                batches.close()
        return samples

    def __reduce__(self) -> tuple[Any, ...]:
        return ClusterSamples, (self._shared,)


class _OpenedFlow:
    """A process's job. Two threads may each construct one at first, so it joins only under the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.job: SharedJob | None = None


class _Order(Sized, Protocol):
    def __iter__(self) -> Iterator[Any]: ...


class SubsetOrder(Sampler[Any]):
    """The order of a sampler over a subset, or its batches, as numbers of the flow's samples.

    Args:
        order: a sampler or batch sampler.
        indices: by place, the sample's number.
    """

    def __init__(self, order: _Order, indices: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._order = order
        self._indices = indices

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        for place in self._order:
            if isinstance(place, Iterable):
                yield [int(self._indices[one]) for one in place]
            else:
                yield int(self._indices[place])
