"""Reader of flows whose samples a cluster loads once for all jobs (thesis, section 3.3.2)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, SubsetRandomSampler, default_collate

from torch_dpflow._core.checks import MAX_INT64, MIN_INT64, check_int, check_type
from torch_dpflow._core.processes import PerProcess
from torch_dpflow.cluster.client.open_job import FlowDefinition, JobReading, SharedJob, open_job
from torch_dpflow.cluster.client.options import JobOptions
from torch_dpflow.cluster.shard.sample_source import TwoStageDataset
from torch_dpflow.datasets.store import DatasetStore
from torch_dpflow.errors import OptionError
from torch_dpflow.flows.flow import DataLoadFlow
from torch_dpflow.flows.read import DataLoadFlowRead, LocalDataLoadFlowReader, Skips, without_failed
from torch_dpflow.flows.stage import Failed, Stage, StagedDataset

if TYPE_CHECKING:
    from torch_dpflow.loader import DPFlowDataLoader


@dataclass(frozen=True)
class FailedSample(Failed):
    """Placeholder for sample `index` of a shared flow, which a worker could not load; `error` is the reason."""

    index: int


def stand_in(index: int, error: Exception) -> FailedSample:
    """Return the placeholder for a failed sample, so that the other samples of its batch are delivered."""
    return FailedSample(error, index)


class PerDrawStages:
    """Function that applies the stages whose output is not kept: the first with `cache="never"`, and later ones."""

    def __init__(self, stages: Sequence[Stage], flow: str) -> None:
        self._staged = StagedDataset((), stages, flow)

    def __call__(self, sample: Any, index: int) -> Any:
        return self._staged.through(index, sample)


@dataclass(frozen=True, kw_only=True)
class SharedFlow:
    """Description of a cluster's flow, with which a job joins it. Jobs must give the same name, version and dataset."""

    name: str
    version: int
    #: The dataset that its workers load.
    dataset: Any
    address: str | None
    #: Number of loading processes, if this job starts the flow.
    workers: int
    options: JobOptions

    def open(self) -> SharedJob:
        """Join the flow, and return the job, whose batches are lists of samples.

        Raises the errors of `cluster.client.open_job.open_job`.
        """
        return open_job(
            FlowDefinition(name=self.name, dataset=self.dataset, version=self.version, workers=self.workers),
            JobReading(collate_fn=list, cacheable_only=True),
            address=self.address,
            # No name: each process is a separate job, and a name is for one job.
            options=replace(self.options, name=None),
        )


class ClusterSamples(Dataset[Any]):
    """Map-style dataset of a shared flow's samples: the output of the cacheable stages.

    Each process, also a forked child, joins the flow at its first request. It leaves the flow when it ends or when this
    object is freed. Thread-safe; the threads of a process wait for each other.
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
        """Return the samples, in order. Raises the error of a failed sample."""
        samples = self.read_each(indices)
        for sample in samples:
            if isinstance(sample, FailedSample):
                raise sample.error
        return samples

    def read_each(self, indices: list[int]) -> list[Any]:
        """Return the samples, in order. If the flow skips samples that fail, a FailedSample stands in place of each."""
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
    """Job of one process, which joins at its first use under a lock: two threads may construct this object at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.job: SharedJob | None = None


class _Order(Sized, Protocol):
    def __iter__(self) -> Iterator[Any]: ...


class SubsetOrder(Sampler[Any]):
    """Sampler that translates the indices of a subset to the flow's sample numbers.

    Args:
        order: a sampler or batch sampler of the subset's indices.
        indices: the flow's sample number for each index of the subset.
    """

    def __init__(self, order: _Order, indices: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._order = order
        self.indices = indices

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        for place in self._order:
            if isinstance(place, Iterable):
                yield [int(self.indices[one]) for one in place]
            else:
                yield int(self.indices[place])


class RemoteDataLoadFlowReader:
    """Reader that builds flows on a cluster (`dpflow up`), whose workers load samples for all jobs.

    Jobs that read the same flow must describe it with the same name and version; a changed flow needs a higher version.
    The dataset and stages are sent to the workers, which must be able to open the data: on other hosts a shared mount
    or an object store.

    The output of the stages before the first with `cache="never"` must depend only on the sample. The shards keep this
    output in memory (`JobOptions.memory_bytes`, `policy`), once for all jobs.

    - `to_mapped()` fetches this output from the cluster, and runs the later stages in the process that indexes the
      dataset. Samples equal those of a `LocalDataLoadFlowReader` with the same seed.
    - `to_shuffled()` runs all stages in the cluster's workers. If the first stage has `cache="always"`, the later ones
      run once for each sample, loader seed and epoch while a job wants the result, and draw random numbers by these
      three. Otherwise jobs that read together share one load of each sample, which is kept only while they need it.

    Args:
        store: see `LocalDataLoadFlowReader`.
        address: the cluster's address; "auto": DPFLOW_ADDRESS, or the cluster on this machine.
        workers: number of loading processes, if this job starts the flow; also `num_workers` of `to_shuffled()`.
        job: options of the job; None for the defaults.
        seed: for `to_mapped()` as for `LocalDataLoadFlowReader`; for `to_shuffled()` it seeds the loader's generator if
            none is given.
        source: further options of `LocalDataLoadFlowReader`: `storage_options`, `read_options`, `check`.

    Raises:
        The errors of `LocalDataLoadFlowReader`.
    """

    def __init__(
        self,
        store: DatasetStore | str | os.PathLike[str] | None = None,
        *,
        address: str | None = "auto",
        workers: int = 2,
        job: JobOptions | None = None,
        seed: int | None = None,
        **source: Any,
    ) -> None:
        if job is not None:
            check_type("job", job, JobOptions, "a torch_dpflow.JobOptions or None")
        self._workers = check_int("workers", workers, minimum=1)
        self._seed = None if seed is None else check_int("seed", seed, minimum=MIN_INT64, maximum=MAX_INT64)
        self._local = LocalDataLoadFlowReader(store, **source)
        self._address = address
        self._job = job or JobOptions()

    def read(self, flow: DataLoadFlow) -> DataLoadFlowRead:
        """Build `flow` on the cluster, and return the built flow; its services start when a sample is first read.

        Raises:
            UsageError: the flow has no dataset, or names a stored dataset although no store was given.
            DatasetError, StorageError: the store has no such dataset, or it is damaged or cannot be read.
        """
        flow = flow.clone()
        samples = self._local.open(flow.source)
        cacheable, per_draw = flow.stages[: flow.cacheable], flow.stages[flow.cacheable :]
        if cacheable and self._job.repeatable is not False:
            kept = whole = self._shared(flow, flow.name, samples, cacheable, per_draw)
        else:
            kept = self._shared(flow, f"{flow.name}/prefix", samples, cacheable)
            whole = self._shared(flow, flow.name, samples, flow.stages)
        return RemoteDataLoadFlowRead(flow, kept=kept, whole=whole, seed=self._seed)

    def _shared(
        self,
        flow: DataLoadFlow,
        name: str,
        samples: Any,
        cacheable: tuple[Stage, ...],
        per_draw: tuple[Stage, ...] = (),
    ) -> SharedFlow:
        """Return the description of a cluster's flow with these stages."""
        title = f"{flow.name}:{flow.version}"
        skips = flow.on_error == "skip"
        dataset = TwoStageDataset(
            StagedDataset(samples, cacheable, title),
            PerDrawStages(per_draw, title) if per_draw else None,
            stand_in if skips else None,
        )
        repeatable = 0 < len(cacheable) <= flow.cacheable and self._job.repeatable is not False
        return SharedFlow(
            name=name,
            version=flow.version,
            dataset=dataset,
            address=self._address,
            workers=self._workers,
            options=replace(self._job, repeatable=None if per_draw else repeatable),
        )


class RemoteDataLoadFlowRead(DataLoadFlowRead):
    """A flow that a cluster loads. See `RemoteDataLoadFlowReader`.

    Args:
        flow: the flow that was built.
        kept: the cluster's flow from which the output of the cacheable stages is read.
        whole: the cluster's flow with all stages; can be the same as `kept`.
        seed: the reader's seed.
    """

    def __init__(self, flow: DataLoadFlow, *, kept: SharedFlow, whole: SharedFlow, seed: int | None) -> None:
        per_draw, name = flow.stages[flow.cacheable :], f"{flow.name}:{flow.version}"
        super().__init__(flow, StagedDataset(ClusterSamples(kept), per_draw, name, seed=seed))
        self._whole = whole
        self._seed = seed

    def to_shuffled(
        self,
        batch_size: int | None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch: int | None = None,
        **options: Any,
    ) -> DPFlowDataLoader[Any]:
        """Return a DPFlowDataLoader that reads the shared flow in a new random order in each epoch, by default.

        The services draw this order, together with the orders of other jobs; for a subset this process draws it.
        Functions of `local_map` and `collate_fn` run in the read-ahead thread of the training process, so random draws
        in them would change the training's random draws.

        Args:
            batch_size: number of samples in a batch.
            collate_fn: makes a batch of a list of samples; None: torch's default.
            prefetch: number of batches for each worker that are requested ahead of need; None: `JobOptions.requested`.
            options: further arguments of the loader; `sampler` and `batch_sampler` as with the loader's `flow`.

        Raises:
            OptionError: `batch_size` is None without a batch sampler.
        """
        from torch_dpflow.loader import DPFlowDataLoader  # here, because it imports torch's DataLoader

        if batch_size is None and options.get("batch_sampler") is None:
            raise OptionError("batch_size=None gives no batches; give a number of samples >= 1")
        whole, job = self._whole, self._whole.options
        if prefetch is not None:
            job = replace(job, requested=max(job.ready + 1, prefetch * whole.workers))
        given = {"num_workers": whole.workers, "job": job, **options}
        if self._seed is not None and given.get("generator") is None:
            given["generator"] = torch.Generator().manual_seed(self._seed)
        self._set_order(given)
        return DPFlowDataLoader(
            whole.dataset,
            batch_size,
            collate_fn=self._assembly(collate_fn),
            flow=f"{whole.name}:v{whole.version}",
            address=whole.address,
            **given,
        )

    def _set_order(self, given: dict[str, Any]) -> None:
        """Set the loader's sampler in `given`, if this read is a subset."""
        for kind in ("sampler", "batch_sampler"):
            if given.get(kind) is not None:
                if self._indices is not None:
                    given[kind] = SubsetOrder(given[kind], self._indices)
                return
        shuffle = given.setdefault("shuffle", True)
        if self._indices is not None:
            del given["shuffle"]
            indices = self._indices.tolist()
            given["sampler"] = SubsetRandomSampler(indices, given.get("generator")) if shuffle else indices

    def _assembly(self, collate_fn: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any] | None:
        if not self._local and self._skips is None:
            return collate_fn
        name = f"{self.flow.name}:{self.flow.version}"
        return Assembly(collate_fn or default_collate, self._local, self._skips, name)


@dataclass(frozen=True)
class Assembly:
    """Function that makes a batch: applies local functions to samples, leaves out failed ones, calls `collate_fn`."""

    collate_fn: Callable[[list[Any]], Any]
    local: tuple[Stage, ...]
    #: Counters of the samples that are left out; None: errors are raised instead.
    skips: Skips | None
    flow: str

    def __call__(self, samples: list[Any]) -> Any:
        done = [self._local(sample) for sample in samples]

        def name_of(place: int) -> str:
            return f"sample {done[place].index}" if isinstance(done[place], FailedSample) else "a sample"

        return self.collate_fn(without_failed(done, name_of, self.skips, self.flow))

    def _local(self, sample: Any) -> Any:
        try:
            for stage in () if isinstance(sample, Failed) else self.local:
                sample = stage.apply(sample)
        except Exception as error:
            if self.skips is None:
                raise
            return Failed(error)
        return sample
