"""The iterator over a shared flow: the cluster's workers load samples, this process collates batches."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.torch_private import pin_memory
from torch_dpflow.cluster.client.collate import PlanFeed
from torch_dpflow.cluster.client.options import JobOptions
from torch_dpflow.cluster.control.lookaheads import MAX_WHOLE
from torch_dpflow.epoch.index_order import draws_at_end, is_drawn_at_start, settled_length
from torch_dpflow.epoch.plan import Plan
from torch_dpflow.epoch.progress import OPENING_ALONE, EpochProgress, LoaderShape
from torch_dpflow.epoch.rng import generator_state, restore_generator
from torch_dpflow.epoch.state import LoaderState, held_ahead
from torch_dpflow.errors import StateError
from torch_dpflow.loader.batch_planner import BatchPlanner, DeliveringIterator, interrupted_draw
from torch_dpflow.loader.flow_job import RoutedOrder, job_of, routed_order
from torch_dpflow.loader.iteration_start import LoaderView, begin, flat_keys
from torch_dpflow.loader.runtime import LoaderRuntime

if TYPE_CHECKING:
    from torch_dpflow.cluster.client.epoch_reader import EpochReader
    from torch_dpflow.cluster.client.shared_job import SharedJob


class SharedLoaderIterator(DeliveringIterator):
    """Iterator over one epoch of a loader with a shared flow.

    If `routed_order` supports the sampler, such as that of `shuffle=True`, the flow's router draws the orders of all
    jobs together: every order is equally likely, and contains each sample once. Otherwise the sampler's order is kept.

    Args:
        loader: a `DPFlowDataLoader` with a `flow`.
    """

    def __init__(self, loader: Any) -> None:
        self._runtime: LoaderRuntime = loader._runtime
        self._progress: EpochProgress | RoutedProgress
        #: Draws the batches of a sampler whose order may change; None where the order is fixed.
        self._planner: FlowPlanner | None = None
        epoch, pending, progress = self._runtime.epoch, self._runtime.pending, self._runtime.progress
        try:
            order = _order_of(loader, pending)
            self._batches = self._begin_plan(loader) if order is None else self._begin_traversal(loader, order)
        except StateError:
            self._runtime.epoch = epoch
            raise
        except BaseException:
            self._runtime.epoch, self._runtime.pending, self._runtime.progress = epoch, pending, progress
            raise
        # Releases the samples in the shards if the iterator is dropped in mid-epoch.
        weakref.finalize(self, self._batches.abandon).atexit = False
        self._runtime.meter.begin_epoch()

    def _begin_traversal(self, loader: Any, order: RoutedOrder) -> EpochReader:
        state = self._runtime.take_pending()
        if state is not None and not state.fresh and state.shared is None:
            raise StateError(
                "the state was taken with another sampler or without a flow; resume as it was taken, or begin the "
                "epoch again"
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
        # The plan must not refer to this iterator, whose end stops the reader.
        batched = self._auto_collation
        plan: Any
        is_fixed = is_drawn_at_start(loader._index_sampler)
        order = _settled_order(loader, progress.plan) if is_fixed else None
        if is_fixed and not draws_at_end(loader._index_sampler):
            positions: dict[int, int] = {}
            plan = _drawn_by_reader(progress, positions, batched=batched)
        else:
            self._planner = FlowPlanner(
                progress,
                ahead=(loader.prefetch_factor or 0) * int(loader.num_workers),
                settled=settled_length(loader._index_sampler, progress.plan.end) - progress.plan.drawn,
                settled_ahead=(loader.job or JobOptions()).requested,
                batched=batched,
            )
            plan, positions = self._planner.feed, self._planner.positions

        def passed(number: int, samples: int) -> None:
            position = positions.get(number)
            if position is not None:  # None: this call was interrupted and is repeated
                progress.passed(position, samples)
                positions.pop(number)

        batches = job.read(plan, progress.epoch, order=order, draw_seed=progress.base_seed, passed=passed)
        self._runtime.progress = _PlannedProgress(progress, batches)
        return batches

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
        self._meter_once(len(ready.keys))
        return pin_memory(ready.outcome, self._pin_memory_device) if self._pin_memory else ready.outcome


def _order_of(loader: Any, pending: LoaderState | None) -> RoutedOrder | None:
    """Return the router's order for the next epoch; None if the sampler decides, as in an epoch that it began.

    A resumed rank may have had peers that read the same samples, so that the sampler decided, and have none now.
    """
    order = routed_order(loader)
    is_planned = pending is not None and not pending.fresh and pending.shared is None
    return None if order is None or (is_planned and not order.advances) else order


def _drawn_by_reader(progress: EpochProgress, positions: dict[int, int], *, batched: bool) -> Iterator[Any]:
    """Yield the keys of each batch. The sampler's order must be fixed, because the reader's thread draws from it.

    positions: this function stores each batch's position in the plan here, by the batch's number.
    """
    for number in itertools.count():
        progress.plan.forget(progress.position)
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
    """Position in the router's order from a loader's saved state; all fields are None without such a state."""

    #: Seed and epoch of the order.
    seed: int | None = None
    epoch: int | None = None
    #: The samples of the epoch that the job had read; None at its beginning.
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
    """Progress of an epoch whose order the sampler decides."""

    progress: EpochProgress
    batches: EpochReader

    @property
    def finished(self) -> bool:
        return self.progress.finished

    def state(self, held: int = 0) -> LoaderState:
        """Return the state to resume the iteration, as `EpochProgress.state` does."""
        if not held:
            self.batches.note_delivered()
        return self.progress.state(held)


class RoutedProgress:
    """Progress of an epoch whose order the router decides.

    Args:
        iteration: number of the loader's iteration, from 0.
        epoch: epoch of the router's order.
    """

    def __init__(self, job: SharedJob, loader: Any, iteration: int, epoch: int, base_seed: int) -> None:
        self._job = job
        self._generator = loader.generator
        self._shape = LoaderShape(loader)
        self._base_seed = base_seed
        self._iteration = iteration
        self.epoch = epoch
        self.finished = False

    def state(self, held: int = 0) -> LoaderState:
        """Return the state to resume the epoch, or to begin the next epoch if this one has ended.

        Its size grows with the flow: up to three bits for each sample, as base64 text.

        Raises StateError: a trainer holds batches (`held`, see `LoaderRuntime`) and the epoch has not ended.
        """
        if held and not self.finished:
            raise held_ahead(held)
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


def _settled_order(loader: Any, plan: Plan) -> npt.NDArray[np.int64] | None:
    """Return the remaining keys of an epoch whose order is fixed at its start; None for other or very long orders."""
    if len(loader.dataset) > MAX_WHOLE:
        plan.settle(plan.drawn + 1)  # the order's seed is drawn here and now, and not by the reader's thread
        return None
    settled = plan.settle(settled_length(loader._index_sampler, plan.end))
    # Any other batch may be an iterator, which can be read once.
    if not settled or not all(type(batch) in (list, tuple, int) for batch in settled):
        return None
    try:
        return flat_keys(settled)
    except (TypeError, ValueError, OverflowError):  # no numbers: the batch itself is refused when it is read
        return None


class FlowPlanner:
    """Planner of batches whose sampler may change the order during the epoch. Only the training thread uses it.

    Like torch, it draws `prefetch_factor * num_workers` batches when an iteration begins, and one more before it
    returns each batch. Without workers it draws a batch when that batch is requested.

    Args:
        ahead: number of batches to draw beyond those that were taken.
        settled: number of batches whose order can no longer change; up to `settled_ahead` of these may be drawn ahead.
        batched: True if the sampler returns batches, False if it returns single keys.
    """

    def __init__(
        self, progress: EpochProgress, *, ahead: int, batched: bool, settled: int = 0, settled_ahead: int = 0
    ) -> None:
        self._plan, self._planner = progress.plan, BatchPlanner(progress)
        self._ahead, self._settled, self._settled_ahead = ahead, settled, settled_ahead
        self._batched = batched
        self._has_ended = False
        self.feed = PlanFeed()
        #: By number, the position in the plan of each batch that was drawn and not delivered.
        self.positions: dict[int, int] = {}
        self.draw_beyond(0)

    def draw_due(self, taken: int) -> None:
        """Draw the batch after the first `taken`, and those that `ahead` allows, unless they were drawn before."""
        self._draw(taken, max(1, self._ahead))

    def draw_beyond(self, taken: int) -> None:
        """Draw the batches that `ahead` allows beyond the first `taken`. Raises the errors of the sampler."""
        self._draw(taken, self._ahead)

    def _draw(self, taken: int, ahead: int) -> None:
        goal = max(taken + ahead, min(taken + self._settled_ahead, self._settled))
        while (number := self._planner.planned) < goal and not self._has_ended:
            batch = None if self._plan.is_torn else self._planner.draw()
            if batch is None:  # what was drawn before is delivered
                self._has_ended = True
                self.feed.end()
                return
            self.positions[number] = batch.position
            self.feed.put(number, self._keys(batch.index))
            self._planner.submitted()

    def check_end(self) -> None:
        """Raise WorkerError if Control-C ended the epoch early."""
        if self._plan.is_torn:
            raise interrupted_draw()

    def _keys(self, index: Any) -> list[Any]:
        if not self._batched:
            return [index]
        try:
            return list(index)
        except KeyboardInterrupt:
            if iter(index) is index:  # what was read of it is lost
                self._plan.is_torn = True
            raise
