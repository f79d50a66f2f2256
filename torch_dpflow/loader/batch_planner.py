"""Draws the batches of one epoch, each for its worker where batches are bound to workers."""

from __future__ import annotations

from torch_dpflow.epoch.progress import EpochProgress
from torch_dpflow.epoch.state import StreamState
from torch_dpflow.errors import WorkerError
from torch_dpflow.loader.in_flight import InFlight, InFlightBatch, Rotation
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
        progress: of the epoch; its `due` and `next_worker` are kept up to date.
        rotation: which worker gets the next batch; None where any worker may.
    """

    def __init__(self, progress: EpochProgress, rotation: Rotation | None) -> None:
        self._progress = progress
        self._rotation = rotation
        self._due = list(progress.due)
        #: A batch that was drawn and is not with the workers yet.
        self.drawn: InFlightBatch | None = None
        #: Whether Control-C came during a draw. It ends a sampler's generator, which looks like its last batch.
        self.is_interrupted = False
        for worker, stream in enumerate(progress.streams):
            if rotation is not None and stream.ended:
                rotation.end(worker)

    def draw(self) -> InFlightBatch | None:
        """The next batch; None where there is none or no worker may have it. The same one until it is `submitted`."""
        if self.drawn is not None or self.is_interrupted:
            return self.drawn
        try:
            worker = None
            if self._rotation is not None:
                worker = self._rotation.assign(self._due.pop(0) if self._due else None)
                if worker is None:
                    return None
            position, index = self._progress.plan.draw()
            while self._progress.was_delivered(position):
                position, index = self._progress.plan.draw()
            self.drawn = InFlightBatch(position, index, worker)
        except StopIteration:
            return None
        except KeyboardInterrupt:
            self.is_interrupted = self.drawn is None
            raise
        return self.drawn

    def submitted(self) -> None:
        """The drawn batch is with the workers."""
        self.drawn = None

    def delivered(self, worker: int | None) -> None:
        """A batch of this worker was taken for delivery."""
        if self._rotation is not None and worker is not None:
            self._rotation.delivered(worker)

    def undelivered(self, worker: int | None) -> None:
        """Undo `delivered`."""
        if self._rotation is not None and worker is not None:
            self._rotation.assign(worker)

    def end_stream(self, worker: int, stream: StreamState) -> None:
        """This worker's stream has ended."""
        assert self._rotation is not None
        self._progress.streams[worker] = stream
        self._rotation.end(worker)

    def note_assignment(self, flights: InFlight) -> None:
        """Record which workers owe the batches in flight."""
        if self._rotation is not None:
            # A worker whose stream has ended may have a second report of its end in flight.
            streams = self._progress.streams
            self._progress.due = [worker for worker in flights.workers() if not streams[worker].ended]
            self._progress.next_worker = self._rotation.next


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
