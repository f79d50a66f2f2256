"""Draws the batches of one epoch, each for its worker where batches are bound to workers."""

from __future__ import annotations

from torch_dpflow.epoch.planned_batch import PlannedBatch
from torch_dpflow.epoch.progress import EpochProgress
from torch_dpflow.epoch.state import StreamState
from torch_dpflow.errors import WorkerError
from torch_dpflow.loader.in_flight import InFlight, Rotation
from torch_dpflow.log import LOADER


def interrupted_draw() -> WorkerError:
    """The error in place of the end of an epoch where Control-C came while the sampler was asked."""
    return WorkerError(
        "this iteration was interrupted while the sampler was asked for indices, so what is left of "
        "the epoch is not known; begin another iteration"
    )


class BatchPlanner:
    """Plans the batches of one epoch.

    Args:
        progress: of the epoch.
        rotation: which worker gets the next batch; None where any worker may.
        flights: the batches in flight.
    """

    def __init__(self, progress: EpochProgress, rotation: Rotation | None, flights: InFlight) -> None:
        self._progress = progress
        self._rotation = rotation
        self._flights = flights
        self._due = list(progress.due)
        #: A batch that was drawn and is not with the workers yet.
        self.drawn: PlannedBatch | None = None
        #: Batches that are or were with the workers.
        self.planned = 0
        for worker, stream in enumerate(progress.streams):
            if rotation is not None and stream.ended:
                rotation.end(worker)

    def draw(self) -> PlannedBatch | None:
        """The next batch; None where there is none or no worker may have it. The same one until it is `submitted`."""
        plan, rotation = self._progress.plan, self._rotation
        if self.drawn is not None or plan.is_torn:
            return self.drawn
        due, turn, worker = self._due, 0, None
        if rotation is not None:
            worker = due[0] if due else rotation.in_turn(self._flights)
            if worker is None:
                return None
            turn = rotation.next if due else rotation.after(worker)
        try:
            position, index = plan.peek()
            while self._progress.was_delivered(position):
                plan.draw()
                position, index = plan.peek()
        except StopIteration:
            return None
        batch = PlannedBatch(position, index, worker)
        # No call until it is noted that the batch was drawn: Control-C comes before that or after it.
        self.drawn, plan.drawn, plan.held, self._due = batch, position + 1, [], due[1:]
        if rotation is not None:
            rotation.next = turn
        return batch

    def submitted(self) -> None:
        """The drawn batch is with the workers."""
        self.drawn = None
        self.planned += 1

    def end_stream(self, worker: int) -> None:
        """This worker's stream has ended. Idempotent."""
        assert self._rotation is not None
        self._rotation.end(worker)

    def owing(self) -> tuple[list[int], int] | None:
        """The workers that owe the batches in flight, and whose turn it is; None where any worker may load any."""
        if self._rotation is None:
            return None
        # A worker whose stream has ended may have a second report of its end in flight.
        active = [worker for worker in self._flights.workers() if self._rotation.is_active(worker)]
        return active, self._rotation.next


def fit_streams(progress: EpochProgress, workers: int, *, own_stream: bool) -> None:
    """Give each worker a stream of its own, or none; streams of another number of workers cannot be continued."""
    if len(progress.streams) == workers:
        return
    if progress.streams:
        LOADER.warning(
            "resuming with %d workers what %d began: their random numbers start anew",
            workers,
            len(progress.streams),
        )
    progress.streams = [StreamState() for _ in range(workers)] if own_stream else []
    progress.due = []
