"""One loader's iteration over workers: plan ahead, keep batches in flight, deliver them in order."""

from __future__ import annotations

import weakref
from multiprocessing.util import Finalize
from typing import Any

import torch

from torch_dpflow.epoch.plan import is_drawn_at_start, samples_in
from torch_dpflow.epoch.position import OPENING_AGAIN, OPENING_WORKERS
from torch_dpflow.epoch.state import StreamState
from torch_dpflow.errors import LoaderTimeoutError, PoisonTaskError, WorkerError, WorkerStartError
from torch_dpflow.loader.assignment import assignment_of, has_own_streams
from torch_dpflow.loader.in_flight import InFlight, InFlightBatch, Rotation
from torch_dpflow.loader.pinning import Pin
from torch_dpflow.loader.private_shard import PrivateShard
from torch_dpflow.loader.shard_events import Arrived, Broken, Died, Event, Poisoned, Started, Starved, Totals
from torch_dpflow.loader.start import begin
from torch_dpflow.log import LOADER
from torch_dpflow.options import LoaderOptions
from torch_dpflow.platforms.base import Handle
from torch_dpflow.platforms.fork_server import local_platform
from torch_dpflow.platforms.local import LocalHandle
from torch_dpflow.remote.wire.headers import END, FAILURE
from torch_dpflow.remote.worker.batch_worker import POSITION_BITS, POSITION_MASK
from torch_dpflow.remote.worker.batches import Begun, EpochOrder
from torch_dpflow.torch_private import BaseDataLoaderIter, ExceptionWrapper

#: How many more workers than there are may end one after the other while none has ever loaded anything.
FALSE_STARTS = 2
RAISE_THE_LIMIT = " Raise LoaderOptions(restart_limit=...) if they are killed from outside."


class WorkerIterator(BaseDataLoaderIter):
    """Delivers what a private shard's workers load.

    Belongs to one thread, the one that calls `next()`: it plans, waits, and starts replacements for workers that
    died. Made and reset by `DPFlowDataLoader.__iter__`.

    Args:
        loader: the `DPFlowDataLoader`.
    """

    def __init__(self, loader: Any) -> None:
        self._run = loader._run
        self._options: LoaderOptions = loader.options or LoaderOptions()
        self._own_stream = has_own_streams(loader, self._options)
        self._in_order = loader.in_order
        self._most = loader.prefetch_factor * loader.num_workers
        if self._most <= 0:  # torch's constructor lets 0 pass, and its iterator stops here, with these words
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        self._generation = 0
        self._deaths = 0
        self._has_loaded = False
        self._exit_report = ""
        self._ended_workers: list[Any] = []
        self._counted = Totals(duplicates=0, steals=0)
        self._shard: PrivateShard | None = None
        epoch, pending, progress = self._run.epoch, self._run.pending, self._run.progress
        self._progress = begin(self, loader, OPENING_WORKERS, self._start_as_torch)
        self._begin_epoch(loader, resumes=pending is not None)
        try:
            self._shard = PrivateShard(
                local_platform(loader.multiprocessing_context or torch.multiprocessing),
                assignment_of(self, loader, self._options, own_stream=self._own_stream),
                workers=self._num_workers,
                order=self._order(),
                streams=self._progress.streams,
                poison_limit=self._options.poison_limit,
                task_timeout_s=self._options.task_timeout_s,
                pin=Pin(self._pin_memory_device) if self._pin_memory else None,
            )
        except BaseException:
            self._run.epoch, self._run.pending, self._run.progress = epoch, pending, progress
            raise
        # Of multiprocessing's kind: a process that it has started runs no others at its end. And before it ends
        # the workers, which could not clear away any more.
        self._close = Finalize(self, self._shard.close, exitpriority=0)
        self._take_up(epoch, pending, progress)

    @property
    def closed(self) -> bool:
        """Whether its workers have been ended, or are not this process's."""
        return self._shard is None or not self._shard.is_own

    @property
    def _workers(self) -> list[Any]:
        # By the name, and with the processes, by which code that looks into torch's iterator finds them.
        if self._shard is None:
            return self._ended_workers
        handles = self._shard.handles
        return [handle.process for handle in handles if isinstance(handle, LocalHandle)]

    # -- an epoch ----------------------------------------------------------------------------------------

    def _start_as_torch(self, loader: Any) -> None:
        super().__init__(loader)
        # torch asks the sampler again, and a data pipe's seed is drawn again; but the workers get the first one.
        first = self._dataset, self._shared_seed
        super()._reset(loader, first_iter=True)
        self._dataset, self._shared_seed = first

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin another epoch with the workers that are there (torch's name and arguments)."""
        assert self._shard is not None
        epoch, pending, progress = self._run.epoch, self._run.pending, self._progress
        again = progress.streams_of_next()
        self._progress = begin(self, loader, OPENING_AGAIN, super()._reset)
        if self._own_stream and not self._progress.streams:
            self._progress.streams = again
        self._generation += 1
        self._begin_epoch(loader, resumes=pending is not None)
        self._shard.begin_epoch(self._order(), self._progress.streams)
        self._take_up(epoch, pending, progress)

    def _begin_epoch(self, loader: Any, *, resumes: bool) -> None:
        progress = self._progress
        self._resumes = resumes
        #: Workers that have not said yet where their streams begin.
        self._unbegun = set(range(self._num_workers)) if self._own_stream else set()
        #: What the first of them has failed with that could not begin.
        self._refusal: ExceptionWrapper | None = None
        if self._own_stream:
            # Not by a reference: the workers go with the last one to this iterator.
            progress.await_streams = weakref.WeakMethod(self._await_beginnings)
        if len(progress.streams) != self._num_workers:
            if progress.streams:
                LOADER.warning(
                    "resuming with %d workers what %d began: their random numbers start anew",
                    self._num_workers,
                    len(progress.streams),
                )
            progress.streams = [StreamState() for _ in range(self._num_workers)] if self._own_stream else []
            progress.due = []
        self._flights = InFlight(in_order=self._in_order)
        self._rotation: Rotation | None = None
        if self._own_stream:
            self._rotation = Rotation(
                self._num_workers, in_order=self._in_order, most=self._most, first=progress.next_worker
            )
            for worker, stream in enumerate(progress.streams):
                if stream.ended:
                    self._rotation.end(worker)
        self._due = list(progress.due)
        #: Drawn, and not yet with the workers for sure.
        self._drawn: InFlightBatch | None = None
        #: Whether a draw was interrupted: a sampler's generator ends with it, which looks like its last batch.
        self._cut = False
        self._starved = False
        grows = self._in_order and not self._own_stream and is_drawn_at_start(loader._index_sampler)
        self._limit = int(self._most * self._options.window_growth) if grows else self._most
        self._run.meter.begin_epoch()

    def _take_up(self, epoch: int, pending: Any, progress: Any) -> None:
        """Have the first batches loaded, and see that all workers' datasets took the states that they were given.

        Raises:
            StateError, or what a dataset raised instead: one did not. The loader is as before, without the state.
            What the sampler raises, or Control-C: the loader is as before; a state stays for the next iteration.
        """
        if not self._resumes:
            self._prime()
            return
        try:
            self._prime()
            if any(stream.dataset is not None for stream in self._progress.streams):
                self._await_beginnings()
            if self._refusal is not None:
                self._refusal.reraise()
        except BaseException:
            self._run.epoch, self._run.progress = epoch, progress
            self._run.pending = pending if self._refusal is None else None
            self._shutdown_workers()
            raise

    def _await_beginnings(self) -> None:
        """Wait until every worker has said where its stream begins."""
        while self._unbegun and not self.closed and self._shard is not None:
            if (event := self._shard.wait(None)) is not None:
                self._take_in(event)

    def _prime(self) -> None:
        for _ in range(max(self._most, len(self._due))):
            self._plan_one()

    def _plan_one(self) -> bool:
        """Draw the next batch and have it loaded; False where there is none."""
        assert self._shard is not None
        if self._drawn is None:
            self._draw()
        flight = self._drawn
        if flight is None:
            return False
        # Both may be done again: where they are interrupted, the flight is still there for the next time.
        self._flights.add(flight)
        self._shard.submit([(self._task(flight.position), flight.index)], pinned_to=flight.worker)
        self._drawn = None
        self._starved = False
        return True

    def _draw(self) -> None:
        """Note the next batch as drawn, if there is one and a worker may have it."""
        if self._cut:
            return
        try:
            worker = None
            if self._rotation is not None:
                worker = self._rotation.assign(self._due.pop(0) if self._due else None)
                if worker is None:
                    return
            position, index = self._progress.plan.draw()
            while self._progress.was_delivered(position):
                position, index = self._progress.plan.draw()
            self._drawn = InFlightBatch(position, index, worker)
        except StopIteration:
            return
        except KeyboardInterrupt:
            self._cut = self._drawn is None
            raise

    def _task(self, position: int) -> int:
        return self._generation << POSITION_BITS | position

    # -- delivery ----------------------------------------------------------------------------------------

    def _next_data(self) -> Any:
        with self._run.meter.waiting():
            if self._drawn is not None:
                self._plan_one()
            while True:
                flight = self._next_flight()
                if flight.outcome.__class__ is Arrived and flight.outcome.kind == END:
                    self._end_stream(flight)
                    continue
                return self._deliver(flight)

    def _next_flight(self) -> InFlightBatch:
        """Wait for the batch that is due. Raises StopIteration at the end of the epoch."""
        self._take_in_what_happened()
        while True:
            flight = self._flights.take()
            if flight is not None:
                return flight
            if not len(self._flights):
                if self._cut:
                    raise WorkerError(
                        "this iteration was interrupted while the sampler was asked for indices, so what is left of "
                        "the epoch is not known; begin another iteration"
                    )
                self._finish()
                raise StopIteration
            if self._shard is None:
                raise WorkerError(
                    "the workers of this iteration were shut down after an error; begin another one"
                )
            self._await_event()

    def _deliver(self, flight: InFlightBatch) -> Any:
        samples = samples_in(flight.index) if self._auto_collation else 1
        outcome = flight.outcome
        self._refill(flight)
        self._progress.passed(flight.position, samples)
        if flight.worker is not None and isinstance(outcome, Arrived) and outcome.stream is not None:
            self._progress.streams[flight.worker] = outcome.stream
        self._note_assignment()
        if isinstance(outcome, Poisoned):
            raise self._poison_error(flight, outcome)
        if outcome.kind == FAILURE:
            assert isinstance(outcome.value, ExceptionWrapper)
            outcome.value.reraise()
        self._run.meter.delivered(samples, outcome.size)
        self._count()
        return outcome.value

    def _refill(self, flight: InFlightBatch) -> None:
        """Have another batch loaded in place of this one. If that fails, as the sampler may, this one is due again."""
        rotation, worker = self._rotation, flight.worker
        if rotation is not None and worker is not None:
            rotation.delivered(worker)
        try:
            self._plan_one()
        except BaseException:
            self._flights.put_back(flight)
            if rotation is not None and worker is not None:
                rotation.assign(worker)
            raise

    def _end_stream(self, flight: InFlightBatch) -> None:
        """A worker's iterable dataset has no more: what it owes will not come."""
        assert self._rotation is not None
        assert self._shard is not None
        assert flight.worker is not None
        dropped = self._flights.drop_waiting(flight.worker)
        self._shard.cancel([self._task(waiting.position) for waiting in dropped])
        for gone in (flight, *dropped):
            self._progress.passed(gone.position, 0)
        self._progress.streams[flight.worker] = flight.outcome.stream
        self._rotation.end(flight.worker)
        self._plan_one()
        self._note_assignment()

    def _note_assignment(self) -> None:
        if self._rotation is not None:
            # Of a worker that has said twice that its stream has ended, the second word is still in flight.
            streams = self._progress.streams
            self._progress.due = [w for w in self._flights.workers() if not streams[w].ended]
            self._progress.next_worker = self._rotation.next

    def _finish(self) -> None:
        self._progress.finish()
        if not self._persistent_workers:
            self._shutdown_workers()

    def _shutdown_workers(self) -> None:
        """End the workers (torch's name)."""
        if self._shard is not None:
            self._ended_workers = self._workers
            self._count()
            self._close()
            self._shard = None

    # -- events ------------------------------------------------------------------------------------------

    def _take_in_what_happened(self) -> None:
        while self._shard is not None and (event := self._shard.poll()) is not None:
            self._take_in(event)

    def _await_event(self) -> None:
        """Wait for something to happen, and take it in."""
        assert self._shard is not None
        if self._starved and len(self._flights) < self._limit:
            # A worker is idle because the batch that is due is late: the others need not wait for it.
            self._plan_one()
        event = self._shard.wait(self._timeout or None)
        if event is None:
            waiting = self._flights.first_waiting()
            late = (
                "" if waiting is None or waiting.index is None else f"; it waits for {_named(waiting.index)}"
            )
            raise LoaderTimeoutError(f"DataLoader timed out after {self._timeout} seconds{late}")
        self._take_in(event)

    def _take_in(self, event: Event) -> None:
        match event:
            case Arrived() | Poisoned():
                self._deaths = 0
                self._has_loaded = True
                if event.task >> POSITION_BITS == self._generation:
                    self._flights.arrive(event.task & POSITION_MASK, event)
            case Started(worker, begun):
                self._note_beginning(worker, begun)
            case Starved():
                self._starved = True
            case Died(worker, handle):
                self._replace(worker, handle)
            case Broken(error):
                self._shutdown_workers()
                raise error
        assert self._shard is not None
        self._shard.taken()

    def _note_beginning(self, worker: int, begun: Begun) -> None:
        if begun.generation == self._generation and worker in self._unbegun:
            self._progress.streams[worker] = begun.stream or self._progress.streams[worker]
            self._refusal = self._refusal or begun.failure
            self._unbegun.discard(worker)

    def _replace(self, worker: int, dead: Handle) -> None:
        assert self._shard is not None
        self._deaths += 1
        limit = self._options.restart_limit
        if not self._has_loaded:
            limit = min(limit, self._num_workers + FALSE_STARTS)
        if self._deaths > limit:
            self._exit_report = self._shard.reap(worker)
            self._shutdown_workers()
            raise WorkerStartError(
                f"{self._deaths} workers ended one after the other and no batch came in between; the last one, "
                f"worker {worker}, {self._exit_report}\nRun with num_workers=0 to see where it happens."
                + (RAISE_THE_LIMIT if self._has_loaded else "")
            )
        self._exit_report = self._shard.replace_worker(worker, dead)
        self._run.meter.restarts += 1
        LOADER.warning("worker %d is replaced: %s", worker, self._exit_report)

    def _count(self) -> None:
        """Add what the shard has counted since the last time."""
        assert self._shard is not None
        before, self._counted = self._counted, self._shard.totals()
        self._run.meter.count(
            self._counted.duplicates - before.duplicates, self._counted.steals - before.steals
        )

    def _poison_error(self, flight: InFlightBatch, poisoned: Poisoned) -> PoisonTaskError:
        return PoisonTaskError(
            f"the batch of {_named(flight.index)} took down {len(poisoned.workers)} workers one after the other "
            f"and is given up; the last one, {self._exit_report}\nLoad these samples with num_workers=0 to see why; "
            "the loader can go on with the batches after it"
        )

    # -- what workers are told -----------------------------------------------------------------------------

    def _order(self) -> EpochOrder:
        return EpochOrder(
            epoch=self._progress.epoch,
            base_seed=int(self._base_seed),
            shared_seed=self._shared_seed,
            stream=None,
            generation=self._generation,
            resumes=self._resumes,
        )


def _named(index: Any) -> str:
    """The indices of a batch, for people."""
    if index is None or (isinstance(index, list) and all(i is None for i in index)):
        return "the next samples of the stream"
    text = repr(index)
    return f"index {text}" if len(text) <= 400 else f"indices {text[:400]}… ({len(index)} of them)"
