"""Planning of one epoch's batches: which batch is drawn next, which worker gets it, and how many are in flight.

A batch is in flight from when it is drawn until it is delivered.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch_dpflow._core.torch_private import BaseDataLoaderIter, DatasetKind, is_profiled, mark_for_profilers
from torch_dpflow.epoch.plan import TAKEN, Plan, PlannedBatch
from torch_dpflow.epoch.progress import EpochProgress
from torch_dpflow.epoch.state import StreamState
from torch_dpflow.errors import WorkerError
from torch_dpflow.ipc.memory.headroom import Headroom
from torch_dpflow.loader.runtime import LoaderRuntime
from torch_dpflow.log import LOADER

#: Factors by which the number of batches in flight may exceed torch's by default: while the additional batches have
#: less than GROWTH_BYTES, and while they have less than the available memory / GROWTH_FRACTION. In a simulation, eight
#: workers with one slow sample in a hundred wait for 2% of the time with a factor of 8, and for 32% with 2.
SMALL_GROWTH, GROWTH = 8, 2
GROWTH_BYTES, GROWTH_FRACTION = 64 << 20, 4


def interrupted_draw() -> WorkerError:
    """Return the error to raise at the end of an epoch whose sampler Control-C has interrupted."""
    return WorkerError(
        "this iteration was interrupted while the sampler drew indices, so the rest of the epoch is not known; "
        "begin another iteration"
    )


def next_undelivered(plan: Plan, progress: EpochProgress) -> tuple[int, Any]:
    """Return (position, indices) of the next undelivered batch, without drawing it. Raises StopIteration at the end."""
    plan.forget(progress.position)
    position, index = plan.peek()
    while progress.was_delivered(position):
        plan.draw()
        position, index = plan.peek()
    return position, index


class DeliveringIterator(BaseDataLoaderIter):
    """Base class of a loader's iterators. Each batch is delivered once, even if Control-C interrupts `next` anywhere.

    `_next_data` sets `_head` to the next batch, and returns the same batch at each call until `__next__` has marked it
    as taken: see `PlannedBatch`.
    """

    _runtime: LoaderRuntime
    #: The batch to deliver next.
    _head: Any
    #: The latest batch that the meter has counted.
    _metered: Any = None

    def __next__(self) -> Any:
        # torch's `__next__` marks the batch for profilers, which takes 6 µs also where none runs; and it compares the
        # length of iterable datasets.
        if is_profiled() or self._dataset_kind == DatasetKind.Iterable:
            batch = super().__next__()
        else:
            with mark_for_profilers(self._profile_name):  # of a profiler that was started from outside
                batch = self._next_data()
            self._num_yielded += 1
        # If Control-C comes before this line, the same batch is the next one again.
        self._head.outcome = TAKEN
        return batch

    def _next_data(self) -> Any:
        raise NotImplementedError

    def _meter_once(self, samples: int, nbytes: int = 0) -> bool:
        """Count the batch `_head` in the meter; return False if it was counted before."""
        if self._metered is self._head:
            return False
        self._metered = self._head
        self._runtime.meter.delivered(samples, nbytes)
        return True


class InFlight:
    """Batches in flight, by position, with their outcomes.

    Args:
        in_order: deliver in the order of positions; otherwise in the order of arrival.
    """

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        self._batches: dict[int, PlannedBatch] = {}
        self._arrived: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: PlannedBatch) -> None:
        """Add a planned batch. Its position must be higher than those of the batches added before."""
        self._batches[batch.position] = batch

    def arrive(self, position: int, outcome: Any) -> None:
        """Set the outcome of a batch, if it is in flight. Idempotent."""
        batch = self._batches.get(position)
        if batch is not None and batch.outcome is None:
            if not self._in_order:
                self._arrived.append(position)
            batch.outcome = outcome

    def due(self) -> PlannedBatch | None:
        """Return the batch to deliver next, or None if it has not arrived. Until `remove`, it is the same batch."""
        if self._in_order:
            batch = next(iter(self._batches.values()), None)
            return batch if batch is not None and batch.outcome is not None else None
        while self._arrived:
            batch = self._batches.get(self._arrived[0])
            if batch is not None:
                return batch
            self._arrived.popleft()
        return None

    def remove(self, position: int) -> None:
        """Remove the batch at this position. Idempotent."""
        self._batches.pop(position, None)

    def waiting(self, worker: int) -> list[int]:
        """Return the positions of the batches that are bound to this worker and have not arrived."""
        return [b.position for b in self._batches.values() if b.worker == worker and b.outcome is None]

    def workers(self) -> list[int]:
        """Return the worker of each batch in flight that is bound to a worker, in the order of positions."""
        return [batch.worker for batch in self._batches.values() if batch.worker is not None]

    def first_waiting(self) -> PlannedBatch | None:
        return next((batch for batch in self._batches.values() if batch.outcome is None), None)


class InFlightLimit:
    """Limit of the number of batches in flight.

    The limit is torch's `prefetch_factor * num_workers` by default. It is lower if batches of remote workers would fill
    this process's memory. It grows while a worker is idle because the next batch to deliver is late, and shrinks again
    when larger batches arrive.

    Args:
        usual: torch's number.
        workers: the number of workers; each may always have one batch.
        budget: maximum size of all batches together, bytes; None: no limit.
        growth: factor by which the number may exceed `usual`; None: by default, see `SMALL_GROWTH`.
    """

    def __init__(self, usual: int, workers: int, budget: int | None, growth: float | None = None) -> None:
        self._usual = usual
        self._workers = workers
        self._budget = budget
        self._growth = growth
        #: The highest limit that batches of any size may have.
        self.most = int(usual * (growth or SMALL_GROWTH))
        #: The size of the largest batch with which the number in flight was last allowed to stay above `usual`.
        self._fitting = 0

    def at_start(self, largest: int) -> int:
        """Return how many batches to plan at an epoch's start. The largest batch has `largest` bytes; 0 if unknown."""
        if self._budget is None:
            return self._usual
        return max(self._workers, min(self._usual, self._budget // largest if largest else 0))

    def next(self, largest: int, in_flight: int, ahead: int | None = None) -> int:
        """Return how many batches to plan when one is delivered: up to 2. `in_flight` still includes this batch.

        ahead: for items of a stream, a number of batches that may be in flight even if the limit is lower.
        """
        if ahead is None and self._budget is None:
            if in_flight > self._usual and largest != self._fitting:  # larger batches have arrived since it grew
                if not self.may_grow(in_flight, largest):
                    return 0
                self._fitting = largest
            return 1
        return max(0, min(2, max(self.at_start(largest), ahead or 0) - in_flight + 1))

    def may_grow(self, batches: int, largest: int) -> bool:
        """Return whether `batches` batches of `largest` bytes may be in flight; False for 0 bytes."""
        if batches > self.most or not largest or self.at_start(largest) < min(batches, self._usual):
            return False
        more = (batches - self._usual) * largest
        if more < GROWTH_BYTES:
            return True
        if self._growth is None and batches > self._usual * GROWTH:
            return False
        try:
            return more < Headroom().available() // GROWTH_FRACTION
        except OSError:  # no descriptor is left to read it by
            return False


class Rotation:
    """Torch's assignment of batches to workers: round robin, without workers whose stream has ended.

    Args:
        in_flight: the batches in flight.
        in_order: if False, also skip workers that already have their share of batches in flight.
        limit: maximum number of batches in flight.
        first: the worker to begin with.
    """

    def __init__(self, workers: int, in_flight: InFlight, *, in_order: bool, limit: int, first: int = 0) -> None:
        self._active = [True] * workers
        self._in_flight = in_flight
        self._in_order = in_order
        self._limit = limit
        self.next = first % workers

    def in_turn(self) -> int | None:
        """Return the worker for the next batch; None if none may get one. The caller sets `next` to `after(worker)`."""
        share = self._limit // max(1, sum(self._active))
        for turn in range(len(self._active)):
            worker = (self.next + turn) % len(self._active)
            if self._active[worker] and (self._in_order or self._in_flight.workers().count(worker) < share):
                return worker
        return None

    def after(self, worker: int) -> int:
        return (worker + 1) % len(self._active)

    def end(self, worker: int) -> None:
        """Record that this worker's stream has ended. Idempotent."""
        self._active[worker] = False

    def order(self) -> tuple[list[int], int]:
        """Return (worker of each batch in flight, without those whose streams have ended; the worker that is next)."""
        # A worker whose stream has ended may have a second report of its end in flight.
        return [worker for worker in self._in_flight.workers() if self._active[worker]], self.next


class BatchPlanner:
    """Planner that draws one epoch's batches, and assigns each to a worker if batches are bound to workers.

    Args:
        rotation: chooses a batch's worker; None if any worker may load any batch.
    """

    def __init__(self, progress: EpochProgress, rotation: Rotation | None = None) -> None:
        self._progress = progress
        self._rotation = rotation
        #: The workers of the next batches, if a resumed state names them.
        self._scheduled = list(progress.due)
        #: The batch that was drawn and not submitted yet.
        self.drawn: PlannedBatch | None = None
        #: How many batches were submitted.
        self.planned = 0
        for worker, stream in enumerate(progress.streams):
            if rotation is not None and stream.ended:
                rotation.end(worker)

    def draw(self) -> PlannedBatch | None:
        """Return the next batch, the same until `submitted` is called; None if none is left or no worker may get it."""
        plan, rotation = self._progress.plan, self._rotation
        if self.drawn is not None or plan.is_torn:
            return self.drawn
        scheduled, turn, worker = self._scheduled, 0, None
        if rotation is not None:
            worker = scheduled[0] if scheduled else rotation.in_turn()
            if worker is None:
                return None
            turn = rotation.next if scheduled else rotation.after(worker)
        try:
            position, index = next_undelivered(plan, self._progress)
        except StopIteration:
            return None
        batch = PlannedBatch(position, index, worker)
        # No call before all of this is assigned: Control-C comes before it or after it.
        self.drawn, plan.drawn, plan.held, self._scheduled = batch, position + 1, [], scheduled[1:]
        if rotation is not None:
            rotation.next = turn
        return batch

    def submitted(self) -> None:
        """Record that the drawn batch was submitted to the workers."""
        # No call in between: Control-C comes before both or after them.
        self.drawn, self.planned = None, self.planned + 1


def fit_streams(progress: EpochProgress, workers: int, *, own_stream: bool) -> None:
    """Replace the progress's streams if their number is not `workers`: by new ones if `own_stream`, else by none.

    Streams of a different number of workers cannot continue: they are dropped, with a warning.
    """
    if len(progress.streams) == workers:
        return
    if progress.streams:
        LOADER.warning(
            "resuming with %d workers what %d began: their random numbers start from scratch",
            workers,
            len(progress.streams),
        )
    progress.streams = [StreamState() for _ in range(workers)] if own_stream else []
    progress.due = []
