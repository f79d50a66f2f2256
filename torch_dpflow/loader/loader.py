"""DPFlowDataLoader: torch's DataLoader with workers that are replaced, a position that can be saved, and figures."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import DataLoader, Dataset, Sampler

from torch_dpflow._core.checks import check_type
from torch_dpflow.epoch.own_state import Unsaved, at_rest, copied
from torch_dpflow.epoch.plan import sampler_before
from torch_dpflow.epoch.progress import LoaderShape
from torch_dpflow.epoch.rng import generator_state
from torch_dpflow.epoch.state import LoaderState
from torch_dpflow.errors import OptionError, OptionTypeError, StateError
from torch_dpflow.loader.arguments import (
    check_divided_once,
    check_options,
    check_options_type,
    check_platform_arguments,
    check_shareable,
    check_types,
    has_processes,
    name_of,
    undivided,
)
from torch_dpflow.loader.inline_iterator import SingleProcessIterator
from torch_dpflow.loader.loaded_state import (
    as_own,
    check_fits,
    end_of_epoch,
    read_states,
    set_counted_epoch,
    with_seed_of,
)
from torch_dpflow.loader.prepared_loaders import keep_class_when_prepared
from torch_dpflow.loader.runtime import LoaderRuntime
from torch_dpflow.loader.worker_iterator import WorkerIterator
from torch_dpflow.loader.worker_processes import PRELOAD
from torch_dpflow.metrics import LoaderStats
from torch_dpflow.options import LoaderOptions

if TYPE_CHECKING:
    from torch_dpflow.cluster.client.options import JobOptions
    from torch_dpflow.loader.explanation import Explanation
    from torch_dpflow.loader.runtime import Workload
    from torch_dpflow.remote.launchers.contract import PlatformSpec

T = TypeVar("T", covariant=True)


class DPFlowDataLoader(DataLoader[T]):
    """A drop-in replacement for `torch.utils.data.DataLoader`.

    It takes torch's arguments with torch's meaning, yields the samples in the same order for the same seed, and raises
    the same errors. Random augmentation in workers equals torch's only with `LoaderOptions(seeding="worker")`. In
    addition:

    - A worker that dies is replaced and its batches are loaded again; the training loop continues.
    - Idle workers take over tasks that wait behind a slow one.
    - Random augmentation does not depend on the number of workers, a crash or a resume (see `LoaderOptions.seeding`;
      not with `num_workers=0`, which draws from the process's generators).
    - `state_dict()` and `load_state_dict()` save and restore the position, also in another process with a different
      number of workers or ranks, or at a different batch size.
    - `stats()` returns how long the training loop waited; `explain()` returns the cause, and what to change.

    Not thread-safe: iterate, save and load in one thread. A forked child can iterate the loader again.

    With `flow`, jobs that read the same data share the loading: the workers of a cluster (`dpflow up`) load each sample
    once for all jobs, and this process collates batches. See `JobOptions`.

    Args:
        options: a `LoaderOptions`; None for its defaults.
        flow: the name of the shared flow, as "imagenet/train"; with ":v2" and so on once the dataset has changed.
        address: the cluster of the flow: a connection file, or "auto" for the cluster that DPFLOW_ADDRESS names or that
            runs on this machine. None: "auto".
        job: a `JobOptions`, the options of this job of the flow; None for its defaults.
        platform: where workers run, if not on this host: "processes", or a platform of `torch_dpflow.remote`.

    The other arguments are torch's; see its documentation.

    Raises:
        OptionError, OptionTypeError: an argument is not allowed, or cannot be combined with others.
        MissingExtraError: the library of `platform` is not installed.
        ValueError, TypeError: as torch's loader.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        options: LoaderOptions | None = None,
        flow: str | None = None,
        address: str | None = None,
        job: JobOptions | None = None,
        platform: str | PlatformSpec | None = None,
    ) -> None:
        check_options_type(options)
        self.flow = flow  # both before torch's constructor, which warns about too many workers
        self.platform = platform
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            undivided(sampler, dataset),
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        check_types(self, address)
        check_divided_once(self)
        # Lightning rebuilds a loader from the attributes that have the names of arguments.
        self.options = options
        self.address = address
        self.job = job
        self._runtime = LoaderRuntime()
        if num_workers > 0:
            for module in PRELOAD:  # else the first iteration would import them before it forks
                import_module(module)
        self._check_sharing()
        if platform is not None:
            check_platform_arguments(self)
        elif options is not None:
            check_options(options, flow)
        watched_at = None if options is None else options.watch
        if watched_at is not None or os.environ.get("DPFLOW_WATCH"):
            from torch_dpflow.loader.watch import watch

            watch(self, watched_at)
        if os.environ.get("DPFLOW_TRACE"):
            from torch_dpflow.loader.trace import trace

            trace(self)

    def __len__(self) -> int:
        """Return the number of batches of an epoch; while a loaded state is pending or read, of the epoch it resumes.

        The number includes the batches before the state. So programs that count batches from a saved step read to the
        end of an epoch that was begun with a different number of ranks or batch size.

        Raises:
            TypeError: the number is not known, such as for an iterable dataset without a length, or for an epoch of a
                flow that other ranks began.
        """
        runtime = self._runtime
        if (end := runtime.end_of_epoch()) is None:
            runtime.is_measured = True
            return super().__len__()
        if end < 0:
            raise OptionTypeError(
                "the epoch was begun with a different number of ranks or batch size, and the flow's router decides "
                "its order, so the number of its batches is not known: read until the iterator ends"
            )
        return end

    def __iter__(self) -> Any:
        if self.flow is not None:
            from torch_dpflow.loader.flow_iterator import SharedLoaderIterator

            return SharedLoaderIterator(self)
        if isinstance(self._iterator, WorkerIterator) and self._iterator.closed:
            self._iterator = None  # its persistent workers have ended, or belong to the parent process
        return super().__iter__()

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return SingleProcessIterator(self)
        if not has_processes(self.multiprocessing_context):
            return super()._get_iterator()
        self.check_worker_number_rationality()
        iterator = WorkerIterator(self)
        self._runtime.iterator = weakref.ref(iterator)
        return iterator

    def check_worker_number_rationality(self) -> None:
        """Warn like torch about more workers than processors, if the workers run on this machine."""
        if self.flow is None and self.platform is None:
            super().check_worker_number_rationality()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest iteration as a dict with the same keys at every position.

        It includes the states of a dataset or sampler that has a `state_dict`. Pickle, `torch.save` and
        `torch.distributed.checkpoint` can store it; JSON too, if these states are plain types. No sample is read; the
        first state of an epoch reads the indices of a `Subset` or of a sampler. Valid at any time: before the first
        batch, after any, after the last.

        The result includes the state of the loader's `generator`, and the states of the process's generators from which
        this epoch was drawn. The remaining epoch is therefore always exact. Later epochs are exact if a `generator` was
        given, or if the training script restores torch's random state.

        Raises:
            StateError: among others, the `state_dict` of the dataset or sampler failed, or the workers are threads.
        """
        self._check_workers()
        runtime = self._runtime
        if runtime.pending is not None:
            return as_own(runtime.pending, self).as_dict()
        if runtime.progress is not None:
            return runtime.progress.state(runtime.held()).as_dict()
        shape = LoaderShape(self)
        state = LoaderState(
            kind=shape.kind,
            generator=generator_state(self.generator),
            sampler_generators=shape.generators(self.generator),
            length=shape.length(),
            made_of=shape.parts(),
            sampler=None if self.flow is not None else sampler_before(self._index_sampler, self.sampler),
            dataset=None if self.num_workers or self.flow is not None else _dataset_before(self.dataset),
        )
        return state.as_dict()

    def load_state_dict(self, state_dict: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Make the next iteration begin at the position of `state_dict`. The number of workers may have changed.

        Indices are drawn again up to the position, unless the sampler has a state; samples are not loaded. An iterable
        dataset needs the same number of workers, unless it is a `ShardedIterableDataset`. It continues from its own
        state if it has one; otherwise the samples that were delivered are skipped. A dataset or sampler that cannot
        restore its own state raises at the next `iter`.

        A map-style dataset may be read at a different batch size. With torch's DistributedSampler or a `DynaGCSSampler`
        it may also be read by a different number of ranks, which divide the remaining epoch.

        Args:
            state_dict: what `state_dict()` returned in this rank; or a list of the states of all ranks, in any order,
                of which a rank of an iterable dataset uses its own. If all ranks have read the same number of batches,
                the state of any rank is enough. Otherwise a single state would lose or repeat samples without an error.

        Raises:
            StateError: the state is damaged; it was taken with other data, other samples of the data, another sampler
                or another shared flow; a list lacks ranks; the remaining epoch cannot be divided again; the epoch would
                end at a different batch than an earlier `len()` returned; or the workers are threads. Nothing is
                changed then.
        """
        self._check_workers()
        rank = LoaderShape(self).rank()
        state = read_states(state_dict, rank, self.num_workers, self.dataset)
        check_fits(self, state)
        self._runtime.resumed_end = end_of_epoch(self, state)
        self._runtime.pending = with_seed_of(state, rank)
        set_counted_epoch(self, state)
        self._iterator = None  # persistent workers have read ahead, and begin epochs differently from new ones

    def stats(self) -> LoaderStats:
        """Return the counters of all iterations of this loader; figures of a shared flow can be some seconds old."""
        stats, jobs = self._runtime.meter.snapshot(), self._runtime.jobs.values()
        if not jobs:
            return stats
        latest = max((job.sharing for job in jobs), key=lambda sharing: sharing.served)
        times = max((job.times for job in jobs), key=lambda times: times.samples)
        limited_by = next((job.limited_by for job in jobs if job.limited_by), "")
        costs = [job.cost() for job in jobs]
        return replace(
            stats,
            worker_s=sum(cost.job_s for cost in costs),
            flow_worker_s=max(cost.flow_s for cost in costs),
            flow_served=latest.served,
            flow_decodes=latest.decodes,
            sharing=latest.why,
            limited_by=limited_by,
            times=times,
        )

    def explain(self) -> Explanation:
        """Explain the speed so far: return its limit, the measurements, and a change that helps. `print` shows them.

        Call it in the training thread, in or after an iteration. `limited_by` names the limit for programs; it is empty
        if the limit is not known.
        """
        return self._explain(self._runtime.workload)

    def _explain(self, workload: Workload) -> Explanation:
        from torch_dpflow.loader.explanation import Observed, explain

        meter, options = self._runtime.meter, self.options or LoaderOptions()
        workload.look()
        name = self.platform if isinstance(self.platform, str) else type(self.platform).__name__
        seen = Observed(
            stats=self.stats(),
            iterating_s=meter.iterating_s,
            turns_s=meter.turns_s,
            longest_start_s=meter.longest_start_s,
            turn_stall_s=meter.turn_stall_s,
            num_workers=self.num_workers,
            persistent=self.persistent_workers,
            read_threads=options.read_threads,
            processors=len(os.sched_getaffinity(0)),
            watched_s=workload.watched_s,
            cpu_s=workload.cpu_s,
            queued_s=workload.queued_s,
            flow=self.flow or "",
            platform=name if self.platform is not None else "",
            working=workload.working,
            refused=workload.refused,
        )
        return explain(seen)

    def _check_workers(self) -> None:
        if self.flow is None and self.num_workers and not has_processes(self.multiprocessing_context):
            raise StateError(
                f"workers of multiprocessing_context={name_of(self.multiprocessing_context)} are threads, which "
                "torch's own iterator runs; it has no position: use processes, or num_workers=0"
            )

    def _check_sharing(self) -> None:
        if self.flow is None and self.address is None and self.job is None:
            return
        # Imported here: it takes a fifth of this module's import time, and private loaders do not need it.
        from torch_dpflow.cluster.client.options import JobOptions

        hint = "; it is given as options=" if isinstance(self.job, LoaderOptions) else ""
        check_type("job", self.job, (JobOptions, NoneType), f"a torch_dpflow.JobOptions or None{hint}")
        if self.flow is not None:
            check_shareable(self)
        else:
            given = "job=JobOptions(...)" if self.address is None else f"address={self.address!r}"
            raise OptionError(f"{given} without a flow: name the flow that the jobs share, as flow='imagenet/train'")


def _dataset_before(dataset: Any) -> Any:
    """Return the dataset's own state before any iteration; None if its `state_dict` fails."""
    kept = copied(dataset, at_rest(dataset))
    return None if isinstance(kept, Unsaved) else kept


keep_class_when_prepared(DPFlowDataLoader)
