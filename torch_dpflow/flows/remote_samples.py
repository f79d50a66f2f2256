"""Samples that the services of a cluster load: what travels to their workers, and how a process asks for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset, Sampler

from torch_dpflow.datasets.storage.per_process import PerProcess
from torch_dpflow.flows.stage import Stage
from torch_dpflow.flows.staged import Failed, StagedDataset
from torch_dpflow.remote.job.client import SharedJob, open_job
from torch_dpflow.remote.job.job_options import JobOptions


@dataclass(frozen=True)
class FailedSample(Failed):
    """Stands for a sample that a worker could not load."""

    #: Its number in the flow.
    index: int


def stand_in(index: int, error: Exception) -> FailedSample:
    """What the workers of a flow that skips samples give for one that fails, so that its batch is not lost with it."""
    return FailedSample(error, index)


class Rest:
    """The stages of a flow after those whose output is kept: makes samples of that."""

    def __init__(self, stages: Sequence[Stage], flow: str) -> None:
        self._staged = StagedDataset((), stages, flow)

    def __call__(self, sample: Any, index: int) -> Any:
        return self._staged.through(index, sample)


@dataclass(frozen=True, kw_only=True)
class SharedFlow:
    """What jobs have to say alike to read one flow of a cluster together."""

    name: str
    version: int
    #: What its workers load.
    dataset: Any
    address: str | None
    workers: int
    options: JobOptions

    def open(self) -> SharedJob:
        """Join as a job that reads what may be kept, in lists. Raises as `torch_dpflow.remote.job.client.open_job`."""
        return open_job(
            self.name,
            self.dataset,
            address=self.address,
            version=self.version,
            collate_fn=list,
            workers=self.workers,
            first_part=True,
            # One name is one job; every process that asks is a job of its own.
            options=replace(self.options, name=None),
        )


class RemoteSamples(Dataset[Any]):
    """What a shared flow gives that may be kept, by number.

    Each process joins the flow when it first asks, and leaves at its end. Thread-safe; threads of a process wait for
    each other. A forked child joins anew; a pickle carries no job.
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
        """The samples, in order, with a FailedSample in place of each that failed where the workers tell of it so."""
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
        return RemoteSamples, (self._shared,)


class _OpenedFlow:
    """A process's job. Made twice where two threads come first, which is why it joins only under the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.job: SharedJob | None = None


class _Order(Sized, Protocol):
    def __iter__(self) -> Iterator[Any]: ...


class SubsetOrder(Sampler[Any]):
    """The places that a sampler gives of a subset, or batches of them, as numbers of the flow's samples.

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
