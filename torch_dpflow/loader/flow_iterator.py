"""The iterator of a shared flow: the services load samples, this process collates batches."""

from __future__ import annotations

import hashlib
import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DistributedSampler

from torch_dpflow._core.torch_private import BaseDataLoaderIter, DatasetKind
from torch_dpflow.cluster.client.options import MAX_NAME, JobOptions
from torch_dpflow.cluster.client.ready_batches import ReadyBatch
from torch_dpflow.epoch.plan import Plan, generator_state, is_drawn_at_start, settled_length
from torch_dpflow.epoch.planned_batch import TAKEN
from torch_dpflow.epoch.progress import OPENING_ALONE, EpochProgress, LoaderShape
from torch_dpflow.epoch.rng import restore_generator
from torch_dpflow.epoch.state import LoaderState
from torch_dpflow.errors import OptionError, StateError, UsageError
from torch_dpflow.loader.announced_epoch import flat_keys
from torch_dpflow.loader.flow_plan import FlowPlanner
from torch_dpflow.loader.iteration_start import LoaderView, begin
from torch_dpflow.loader.pinning import Pin
from torch_dpflow.loader.runtime import LoaderRuntime

if TYPE_CHECKING:
    from torch_dpflow.cluster.client.description import FlowDefinition
    from torch_dpflow.cluster.client.epoch_reader import EpochReader
    from torch_dpflow.cluster.client.shared_job import SharedJob
    from torch_dpflow.loader.flow_order import RoutedOrder

#: Digits of the highest version.
MAX_VERSION_DIGITS = 9
_FLOW = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._/-]{0,99})(:v(?P<version>[1-9][0-9]*))?")


def flow_version(flow: str) -> tuple[str, int]:
    """The name and the version in "name" (version 1) or "name:v3".

    Raises:
        OptionError: it is neither.
    """
    parts = _FLOW.fullmatch(flow) if isinstance(flow, str) else None
    if parts is None:
        raise OptionError(
            f"flow={flow!r}: give a name of 1 to 100 of the characters A-Z a-z 0-9 . _ / -, a letter or "
            "digit first, and after it ':v' and a number where the dataset has changed, as in 'imagenet/train:v2'"
        )
    digits = parts["version"] or "1"
    if len(digits) > MAX_VERSION_DIGITS:
        raise OptionError(
            f"flow={flow!r}: its version has {len(digits)} digits, at most {MAX_VERSION_DIGITS} are allowed; count "
            "versions from 1"
        )
    return parts["name"], int(digits)


class SharedLoaderIterator(BaseDataLoaderIter):
    """One epoch of a job that shares its flow with others.

    With `shuffle=True`, and with the samplers that `routed_order` names, the flow's router decides the order,
    together with those of the other jobs: every order is equally likely, and each sample comes once. With any other
    sampler its order is kept, and so it is where several processes of torch.distributed may have to read the same.

    Args:
        loader: a `DPFlowDataLoader` with a `flow`.
    """

    def __init__(self, loader: Any) -> None:
        self._runtime: LoaderRuntime = loader._runtime
        self._progress: EpochProgress | RoutedProgress
        #: The batch that is due.
        self._head: ReadyBatch
        #: Batches that have been counted.
        self._counted = 0
        #: Draws the batches of a sampler whose order may change; None where the order is fixed.
        self._planner: FlowPlanner | None = None
        epoch, pending, progress = self._runtime.epoch, self._runtime.pending, self._runtime.progress
        try:
            order = _order_of(loader)
            self._batches = (
                self._begin_plan(loader) if order is None else self._begin_traversal(loader, order)
            )
        except StateError:
            self._runtime.epoch = epoch
            raise
        except BaseException:
            self._runtime.epoch, self._runtime.pending, self._runtime.progress = epoch, pending, progress
            raise
        # An iterator that is dropped in mid-epoch releases its samples in the shards.
        weakref.finalize(self, self._batches.abandon).atexit = False
        self._pin = Pin(self._pin_memory_device) if self._pin_memory else None
        self._runtime.meter.begin_epoch()

    def _begin_traversal(self, loader: Any, order: RoutedOrder) -> EpochReader:
        state = self._runtime.take_pending()
        if state is not None and not state.fresh and state.shared is None:
            raise StateError(
                "the state was taken with another sampler or without a flow; resume as it was taken, or begin the "
                "epoch afresh"
            )
        if state is not None and state.generator is not None and loader.generator is not None:
            restore_generator(loader.generator, state.generator)
        if state is None or state.base_seed is None:
            super().__init__(loader)
        else:
            view: Any = LoaderView(loader)
            super().__init__(view)
            self._index_sampler = loader._index_sampler
            self._base_seed = state.base_seed
        return self._traverse(loader, order, _ResumedEpoch.of(state))

    def _traverse(self, loader: Any, order: RoutedOrder, resumed: _ResumedEpoch) -> EpochReader:
        base_seed = int(self._base_seed)
        job = job_of(loader, base_seed if order.seed is None else order.seed, order, resumed.seed)
        iteration, self._runtime.epoch = self._runtime.epoch, self._runtime.epoch + 1
        epoch = order.next_epoch(iteration, resumed.epoch, resumes=resumed.done is not None)
        batches = job.traverse(epoch, done=resumed.done, draw_seed=base_seed)
        self._runtime.progress = self._progress = RoutedProgress(job, loader, iteration, epoch, base_seed)
        return batches

    def _begin_plan(self, loader: Any) -> EpochReader:
        self._progress = progress = begin(self, loader, OPENING_ALONE, super().__init__)
        job = job_of(loader, int(self._base_seed))
        # What the reader reads must not refer to this iterator: reading ends when the iterator is freed.
        batched = self._auto_collation
        plan: Any
        order = None
        if is_drawn_at_start(loader._index_sampler):
            order = _settled_order(loader, progress.plan)
            positions: dict[int, int] = {}
            plan = _drawn_by_reader(progress, positions, batched=batched)
        else:
            ahead = (loader.prefetch_factor or 0) * int(loader.num_workers)
            self._planner = FlowPlanner(progress, ahead=ahead, batched=batched)
            plan, positions = self._planner.feed, self._planner.positions

        def passed(number: int, samples: int) -> None:
            position = positions.get(number)
            if position is not None:  # None: this call was interrupted and is repeated
                progress.passed(position, samples)
                positions.pop(number)

        batches = job.read(plan, progress.epoch, order=order, draw_seed=progress.base_seed, passed=passed)
        self._runtime.progress = _PlannedProgress(progress, batches)
        return batches

    def __next__(self) -> Any:
        batch = super().__next__()
        # If Control-C comes before this line, the same batch is the next one again: see `epoch.planned_batch`.
        self._head.value = TAKEN
        return batch

    def _next_data(self) -> Any:
        with self._runtime.meter.waiting():
            if self._planner is not None:
                self._planner.draw_due(self._batches.taken)
            try:
                ready = self._head = self._batches.head(self._timeout or None)
            except StopIteration:
                if self._planner is not None:
                    self._planner.check_end()
                self._progress.finished = True
                raise
            if self._planner is not None:
                self._planner.draw_beyond(ready.number + 1)
        if ready.number >= self._counted:
            self._runtime.meter.delivered(len(ready.keys), 0)
            self._counted = ready.number + 1
        return ready.value if self._pin is None else self._pin(ready.value)


def _drawn_by_reader(progress: EpochProgress, positions: dict[int, int], *, batched: bool) -> Iterator[Any]:
    """The keys of an order that is fixed, and may be drawn in the reader's thread.

    positions: by number, the position in the plan of each batch is put there.
    """
    for number in itertools.count():
        try:
            position, index = progress.plan.draw()
            while progress.was_delivered(position):
                position, index = progress.plan.draw()
        except StopIteration:
            return
        positions[number] = position
        yield index if batched else [index]


@dataclass(frozen=True)
class _ResumedEpoch:
    """What a state holds of an order that the router decides; empty without a state."""

    #: Of the order.
    seed: int | None = None
    epoch: int | None = None
    #: What the job had read of the epoch; None at its beginning.
    done: dict[str, Any] | None = None

    @classmethod
    def of(cls, state: LoaderState | None) -> _ResumedEpoch:
        if state is None or state.shared is None:
            return cls()
        seed, epoch = state.shared.get("seed"), state.shared.get("epoch")
        if not isinstance(seed, int) or not isinstance(epoch, int):
            raise StateError(f"the job's state is damaged: seed {seed!r}, epoch {epoch!r}; give two numbers")
        return cls(seed, epoch, None if state.fresh else state.shared)


@dataclass(frozen=True)
class _PlannedProgress:
    """The progress of an epoch, read once all delivered batches are counted in it."""

    progress: EpochProgress
    batches: EpochReader

    def state(self) -> LoaderState:
        """As `EpochProgress.state`."""
        self.batches.note_delivered()
        return self.progress.state()


class RoutedProgress:
    """The progress of an epoch whose order the router decides: the job records what it has delivered.

    Args:
        iteration: counts the loader's.
        epoch: of the order.
    """

    def __init__(self, job: SharedJob, loader: Any, iteration: int, epoch: int, base_seed: int) -> None:
        self._job = job
        self._generator = loader.generator
        self._shape = LoaderShape(loader)
        self._base_seed = base_seed
        self._iteration = iteration
        self.epoch = epoch
        self.finished = False

    def state(self) -> LoaderState:
        """The state to resume the epoch from, or the next one if it is over: a bit for each sample of the flow."""
        after = {"seed": self._job.seed, "epoch": self.epoch + 1}
        return LoaderState(
            epoch=self._iteration + self.finished,
            fresh=self.finished,
            base_seed=None if self.finished else self._base_seed,
            generator=generator_state(self._generator),
            length=self._shape.length(),
            made_of=self._shape.parts(),
            shared=after if self.finished else self._job.state(),
        )


def job_of(
    loader: Any, seed: int, order: RoutedOrder | None = None, resumed_seed: int | None = None
) -> SharedJob:
    """An unused job of the loader, opened if there is none; closed with the loader.

    So iterations may run concurrently, as torch's may. Those of one rank read the same job, so that ranks need not
    begin equally many.

    Args:
        seed: of the order, if it is the loader's first job.
        order: the order that the router decides; None where the sampler decides it.
        resumed_seed: the seed of the run that is resumed; a job with another seed is opened anew.

    Raises:
        as `torch_dpflow.cluster.client.open_job.open_job`.
    """
    runtime: LoaderRuntime = loader._runtime
    jobs = runtime.jobs
    changed = _close_outdated(loader, order)
    if resumed_seed is not None:
        seed = resumed_seed
    elif jobs:
        seed = next(reversed(jobs.values())).seed
    for number, job in list(jobs.items()):
        if not job.is_read:
            if job.seed == seed:
                job.collate_with(_assembling(loader))
                return job
            job.close()
            del jobs[number]
    number = next(free for free in itertools.count(1) if free not in jobs)
    try:
        job = jobs[number] = _open(loader, seed, order, number)
    except UsageError as error:
        if not changed:
            raise
        raise UsageError(
            f"the dataset, its transform, worker_init_fn or a setting has changed since the loader was iterated last: "
            f"{error}. If the samples are the same, give JobOptions(fingerprint=...)"
        ) from error
    job.close_with(runtime)
    return job


def _close_outdated(loader: Any, order: RoutedOrder | None) -> bool:
    """Close jobs whose flow, options, order or content are not the loader's any more; returns whether there were any.

    Workers have the content of when the job was opened. The cluster accepts or refuses the present one, as it would
    from another loader.
    """
    runtime: LoaderRuntime = loader._runtime
    reads = None if order is None else (order.seed, order.replica)
    opened_for = (loader.flow, loader.address, loader.job, reads, _part_of(loader.dataset))
    idle = {number: job for number, job in runtime.jobs.items() if not job.is_read}
    if idle and opened_for == runtime.opened_for:
        # About as long as pickling the dataset takes, once an epoch.
        from torch_dpflow.cluster.client.open_job import content_of_flow

        content = content_of_flow(_definition(loader), loader.job or JobOptions())
        idle = {number: job for number, job in idle.items() if job.content != content}
    runtime.opened_for = opened_for
    for number, job in idle.items():
        job.close()
        del runtime.jobs[number]
    return bool(idle)


def _order_of(loader: Any) -> RoutedOrder | None:
    # Imported here and below, so that private loaders import neither samplers nor the services' client.
    from torch_dpflow.loader.flow_order import routed_order

    return routed_order(loader)


def _open(loader: Any, seed: int, order: RoutedOrder | None, number: int) -> SharedJob:
    from torch_dpflow.cluster.client.open_job import JobReading, open_job
    from torch_dpflow.loader.flow_order import common_name, process_rank
    from torch_dpflow.samplers import DynaGCSSampler

    options, replica = loader.job or JobOptions(), None if order is None else order.replica
    rank, ranks = process_rank()
    if ranks == 1 and isinstance(loader.sampler, DistributedSampler | DynaGCSSampler):
        rank, ranks = loader.sampler.rank, loader.sampler.num_replicas
    if order is None and options.name is not None and ranks > 1:
        # Every process of a job may be given its name; where the sampler decides, each of them is a job to the flow.
        options = replace(options, name=f"{options.name:.{MAX_NAME - 12}}~rank{rank}")
    if replica is not None and loader._runtime.jobs:
        options = replace(options, name=next(iter(loader._runtime.jobs.values())).name)
    elif options.name is not None and number > 1 and replica is None:
        options = replace(options, name=f"{options.name:.{MAX_NAME - 5}}~{number}")
    elif replica is not None and options.name is None:
        options = replace(options, name=common_name(loader.flow, seed))
    flow = _definition(loader)
    reading = JobReading(
        batch_size=loader.batch_size or 1,
        drop_last=loader.drop_last,
        collate_fn=_assembling(loader),
        seed=seed,
        indices=None if order is None else order.indices,
        replica=replica,
        side=number,
        independence=0.0 if order is None else order.independence,
    )
    return open_job(flow, reading, address=loader.address, options=options)


def _definition(loader: Any) -> FlowDefinition:
    from torch_dpflow.cluster.client.open_job import FlowDefinition

    name, version = flow_version(loader.flow)
    return FlowDefinition(
        name=name,
        dataset=loader.dataset,
        version=version,
        workers=max(1, int(loader.num_workers)),
        worker_init_fn=loader.worker_init_fn,
    )


def _part_of(dataset: Any) -> bytes:
    """Identifies which samples of a flow's dataset a torch `Subset` has; empty for any other dataset."""
    from torch_dpflow.caches import ALSDCache
    from torch_dpflow.cluster.client.flow_registration import without_subset

    _, places = without_subset(dataset.dataset if isinstance(dataset, ALSDCache) else dataset)
    return b"" if places is None else hashlib.sha256(places.tobytes()).digest()


def _settled_order(loader: Any, plan: Plan) -> npt.NDArray[np.int64] | None:
    """What is left of an epoch whose order is fixed at its start; None for any other."""
    settled = plan.settle(settled_length(loader._index_sampler))
    # A batch of another type may be an iterator, which can be read once.
    if not settled or not all(type(batch) in (list, tuple, int) for batch in settled):
        return None
    try:
        return flat_keys(settled)
    except (TypeError, ValueError, OverflowError):  # no numbers: the batch itself is refused when it is read
        return None


def _assembling(loader: Any) -> Callable[[list[Any]], Any]:
    collate: Callable[[Any], Any] = loader.collate_fn
    if loader._auto_collation:
        return collate
    return lambda samples: collate(samples[0])


def check_shareable(loader: Any) -> None:
    """Raise OptionError if the loader cannot read a shared flow."""
    flow_version(loader.flow)
    if loader._dataset_kind == DatasetKind.Iterable:
        raise OptionError(
            "flow= is for map-style datasets, whose samples have numbers; leave it out for an IterableDataset"
        )
