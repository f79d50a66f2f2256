"""The iterator with worker processes: plans ahead, keeps batches in flight, delivers them in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

import torch

from torch_dpflow._core.torch_private import BaseDataLoaderIter, ExceptionWrapper
from torch_dpflow.epoch.plan import is_drawn_at_start, samples_in
from torch_dpflow.epoch.planned_batch import TAKEN, PlannedBatch
from torch_dpflow.epoch.progress import OPENING_AGAIN, OPENING_WORKERS
from torch_dpflow.errors import LoaderTimeoutError, WorkerError, WorkerStartError
from torch_dpflow.ipc.memory.headroom import machine_total
from torch_dpflow.ipc.messages.headers import END, FAILURE
from torch_dpflow.loader.announced_epoch import EpochAnnouncement
from torch_dpflow.loader.batch_planner import BatchPlanner, fit_streams, interrupted_draw
from torch_dpflow.loader.flight_growth import FlightGrowth
from torch_dpflow.loader.in_flight import BoundedRoom, FlightRoom, InFlight, Rotation
from torch_dpflow.loader.iteration_start import begin
from torch_dpflow.loader.load_spec import has_own_streams, load_spec
from torch_dpflow.loader.pinning import Pin
from torch_dpflow.loader.private_shard import PrivateShard
from torch_dpflow.loader.remote_start import workers_of
from torch_dpflow.loader.restarts import Restarts, named
from torch_dpflow.loader.shard_events import (
    Arrived,
    Broken,
    Died,
    Event,
    MemberLost,
    Poisoned,
    Started,
    Starved,
    Totals,
)
from torch_dpflow.loader.worker_processes import WorkerProcesses
from torch_dpflow.options import LoaderOptions
from torch_dpflow.workers.batch_worker import POSITION_BITS, POSITION_MASK
from torch_dpflow.workers.batches import SHARED_FRACTION, Begun, EpochSpec
from torch_dpflow.workers.fork_server import local_platform
from torch_dpflow.workers.local_platform import LocalHandle
from torch_dpflow.workers.platform import Handle


class WorkerIterator(BaseDataLoaderIter):
    """Delivers what a private shard's workers load.

    Belongs to one thread, the one that calls `next()`: it plans, waits, and starts replacements for workers that
    died. Made and reset by `DPFlowDataLoader.__iter__`.

    Args:
        loader: the `DPFlowDataLoader`.
    """

    def __init__(self, loader: Any) -> None:
        self._runtime = loader._runtime
        self._options: LoaderOptions = loader.options or LoaderOptions()
        self._own_stream = has_own_streams(loader, self._options)
        self._in_order = loader.in_order
        self._most = loader.prefetch_factor * loader.num_workers
        if self._most <= 0:  # torch's constructor accepts 0, and its iterator raises this
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        #: Bytes of the largest batch that has come.
        self._largest = 0
        self._room = FlightRoom(self._most)
        if loader.platform is not None:
            self._room = BoundedRoom(self._most, loader.num_workers, machine_total() // SHARED_FRACTION)
        self._generation = 0
        self._restarts = Restarts(self._options.restart_limit, loader.num_workers, self._runtime.meter)
        self._ended_workers: list[Any] = []
        self._counted = Totals(duplicates=0, steals=0)
        self._shard: PrivateShard | None = None
        epoch, pending, progress = self._runtime.epoch, self._runtime.pending, self._runtime.progress
        self._progress = begin(self, loader, OPENING_WORKERS, self._start_as_torch)
        try:
            self._begin_epoch(loader, resumes=pending is not None)
            shard, workers = self._make_workers(loader)
            self._shard = shard(
                workers,
                order=self._order(),
                streams=self._progress.streams,
                poison_limit=self._options.poison_limit,
                task_timeout_s=self._options.task_timeout_s,
                pin=Pin(self._pin_memory_device) if self._pin_memory else None,
            )
        except BaseException:
            self._runtime.epoch, self._runtime.pending, self._runtime.progress = epoch, pending, progress
            raise
        self._runtime.workload.begin(self._shard)
        # multiprocessing's finalizers are the only ones that run in a process which multiprocessing started. With
        # priority 0 it runs before multiprocessing kills the workers, which could not clean up after that.
        self._close = Finalize(self, self._shard.close, exitpriority=0)
        self._start_loading(epoch, pending, progress)

    def _make_workers(self, loader: Any) -> tuple[Callable[..., PrivateShard], Any]:
        """The workers, not started yet, and what makes the shard that they need."""
        spec = load_spec(self, loader, self._options, own_stream=self._own_stream)
        if loader.platform is not None:
            return workers_of(loader, self._options, spec)
        platform = local_platform(loader.multiprocessing_context or torch.multiprocessing)
        return PrivateShard, WorkerProcesses(platform, spec, self._num_workers)

    @property
    def closed(self) -> bool:
        """Whether its workers have been ended, or are not this process's."""
        return self._shard is None or not self._shard.is_own

    @property
    def _workers(self) -> list[Any]:
        # torch's name: code of others looks into torch's iterator for the processes.
        if self._shard is None:
            return self._ended_workers
        local = self._shard.processes.local
        handles = () if local is None else local.handles
        return [handle.process for handle in handles if isinstance(handle, LocalHandle)]

    # -- an epoch ----------------------------------------------------------------------------------------

    def _start_as_torch(self, loader: Any) -> None:
        super().__init__(loader)
        # torch asks the sampler and draws a data pipe's seed a second time, but its workers get the first seed.
        first = self._dataset, self._shared_seed
        super()._reset(loader, first_iter=True)
        self._dataset, self._shared_seed = first

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin another epoch with the workers that are there (torch's name and arguments)."""
        assert self._shard is not None
        epoch, pending, progress = self._runtime.epoch, self._runtime.pending, self._progress
        again = progress.streams_of_next()
        self._progress = begin(self, loader, OPENING_AGAIN, super()._reset)
        if self._own_stream and not self._progress.streams:
            self._progress.streams = again
        self._generation += 1
        self._begin_epoch(loader, resumes=pending is not None)
        self._shard.begin_epoch(self._order(), self._progress.streams)
        self._start_loading(epoch, pending, progress)

    def _begin_epoch(self, loader: Any, *, resumes: bool) -> None:
        progress = self._progress
        self._resumes = resumes
        #: Workers that have not reported yet where their streams begin.
        self._unreported = set(range(self._num_workers)) if self._own_stream else set()
        #: The error of the first worker whose dataset did not take its state.
        self._refusal: ExceptionWrapper | None = None
        if self._own_stream:
            # Weak: the workers end when the last reference to this iterator is dropped.
            progress.await_streams = weakref.WeakMethod(self._await_beginnings)
        fit_streams(progress, self._num_workers, own_stream=self._own_stream)
        self._flights = InFlight(in_order=self._in_order)
        rotation = None
        if self._own_stream:
            rotation = Rotation(
                self._num_workers, in_order=self._in_order, most=self._most, first=progress.next_worker
            )
        self._planner = BatchPlanner(progress, rotation, self._flights)
        #: The batch that is due, and how many are planned once another one is in its place.
        self._head: PlannedBatch
        self._goal = 0
        #: The latest batch that was counted in the figures.
        self._metered: PlannedBatch | None = None
        self._has_idle_worker = False
        grows = self._in_order and not self._own_stream and is_drawn_at_start(loader._index_sampler)
        limit = int(self._most * self._options.prefetch_growth) if grows else self._most
        self._growth = FlightGrowth(self._most, limit)
        # Before new workers copy the dataset.
        self._announcement = EpochAnnouncement(loader, progress.plan, limit)
        self._runtime.meter.begin_epoch()

    def _start_loading(self, epoch: int, pending: Any, progress: Any) -> None:
        """Submit the first batches, and check that all workers' datasets took the states that they were given.

        Raises:
            StateError, or what a dataset raised instead: one did not. The loader is unchanged, without the state.
            What the sampler raises, or Control-C: the loader is unchanged; the state stays for the next iteration.
        """
        if not self._resumes:
            self._submit_ahead()
            return
        try:
            self._submit_ahead()
            if any(stream.dataset is not None for stream in self._progress.streams):
                self._await_beginnings()
            if self._refusal is not None:
                self._refusal.reraise()
        except BaseException:
            self._runtime.epoch, self._runtime.progress = epoch, progress
            self._runtime.pending = pending if self._refusal is None else None
            self._shutdown_workers()
            raise

    def _await_beginnings(self) -> None:
        """Wait until every worker has reported where its stream begins."""
        while self._unreported and not self.closed and self._shard is not None:
            if (event := self._shard.wait(None)) is not None:
                self._handle(event)

    def _submit_ahead(self) -> None:
        for _ in range(max(self._room.at_start(self._largest), len(self._progress.due))):
            self._plan_one()

    def _plan_one(self) -> bool:
        """Draw the next batch and submit it; False where there is none."""
        assert self._shard is not None
        flight = self._planner.draw()
        if flight is None:
            return False
        # Both may be repeated: if Control-C interrupts them, the flight is still drawn the next time.
        self._announcement.drawn(flight.position, flight.index)
        self._flights.add(flight)
        self._shard.submit([(self._task(flight.position), flight.index)], pinned_to=flight.worker)
        self._planner.submitted()
        self._has_idle_worker = False
        return True

    def _task(self, position: int) -> int:
        return self._generation << POSITION_BITS | position

    # -- delivery ----------------------------------------------------------------------------------------

    def __next__(self) -> Any:
        batch = super().__next__()
        # If Control-C comes before this line, the same batch is the next one again: see `epoch.planned_batch`.
        self._head.outcome = TAKEN
        return batch

    def _next_data(self) -> Any:
        progress = self._progress
        if self._shard is None and not progress.finished:
            raise WorkerError(
                "the workers of this iteration were shut down after an error; begin another one"
            )
        with self._runtime.meter.waiting():
            if self._planner.drawn is not None:
                self._plan_one()
            while True:
                progress.note_taken()
                if progress.head is None:
                    flight, goal = (
                        self._due(),
                        self._planner.planned + self._room.next(self._largest, len(self._flights)),
                    )
                    # It stays the head until it is taken. All that is done to it before that may be repeated.
                    self._head, self._goal, progress.head = flight, goal, flight
                head = self._head
                if head.outcome.__class__ is Arrived and head.outcome.kind == END:
                    self._end_stream(head)
                    continue
                return self._deliver(head)

    def _due(self) -> PlannedBatch:
        """Wait for the batch that is due. Raises StopIteration at the end of the epoch."""
        self._handle_pending()
        while True:
            flight = self._flights.due()
            if flight is not None:
                return flight
            if not len(self._flights):
                if self._progress.plan.is_torn:
                    raise interrupted_draw()
                self._finish()
                raise StopIteration
            self._await_event()

    def _deliver(self, head: PlannedBatch) -> Any:
        outcome = head.outcome
        head.samples = samples_in(head.index) if self._auto_collation else 1
        self._refill(head)
        if isinstance(outcome, Poisoned):
            error = self._restarts.poison_error(head.index, len(outcome.workers))
            head.outcome = TAKEN
            raise error
        if outcome.kind == FAILURE:
            assert isinstance(outcome.value, ExceptionWrapper)
            head.outcome = TAKEN
            outcome.value.reraise()
        if self._metered is not head:
            self._metered = head
            self._runtime.meter.delivered(head.samples, outcome.size)
            self._count()
        return outcome.value

    def _refill(self, head: PlannedBatch) -> None:
        """Submit another batch in place of this one, which stays due if that fails, as the sampler may."""
        self._flights.remove(head.position)
        while self._planner.planned < self._goal and self._plan_one():
            pass
        if head.worker is not None:
            head.stream, head.owing = getattr(head.outcome, "stream", None), self._planner.owing()

    def _end_stream(self, head: PlannedBatch) -> None:
        """A worker's iterable dataset has ended: drop the batches that it still owes."""
        assert self._shard is not None
        assert head.worker is not None
        self._planner.end_stream(head.worker)
        head.dropped = head.dropped or self._flights.waiting(head.worker)
        self._shard.cancel([self._task(position) for position in head.dropped])
        for position in head.dropped:
            self._flights.remove(position)
        self._refill(head)
        head.outcome = TAKEN

    def _finish(self) -> None:
        self._progress.finish()
        if not self._persistent_workers:
            with self._runtime.meter.ending():
                self._shutdown_workers()

    def _shutdown_workers(self) -> None:
        """End the workers (torch's name)."""
        if self._shard is not None:
            self._ended_workers = self._workers
            self._runtime.workload.end()
            self._count()
            # Not by the finalizer: it would do nothing the second time, after Control-C.
            self._shard.close()
            self._close.cancel()
            self._shard = None

    # -- events ------------------------------------------------------------------------------------------

    def _handle_pending(self) -> None:
        while self._shard is not None and (event := self._shard.poll()) is not None:
            self._handle(event)

    def _await_event(self) -> None:
        """Wait for an event, and handle it."""
        assert self._shard is not None
        if self._has_idle_worker and self._growth.allows(len(self._flights) + 1, self._largest):
            # A worker is idle because the due batch is late: the others need not wait for it.
            self._plan_one()
        event = self._shard.wait(self._timeout or None)
        if event is None:
            waiting = self._flights.first_waiting()
            late = (
                "" if waiting is None or waiting.index is None else f"; it waits for {named(waiting.index)}"
            )
            raise LoaderTimeoutError(f"DataLoader timed out after {self._timeout} seconds{late}")
        self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case Arrived() | Poisoned():
                self._restarts.note_result()
                if isinstance(event, Arrived):
                    self._largest = max(self._largest, event.size)
                if event.task >> POSITION_BITS == self._generation:
                    self._flights.arrive(event.task & POSITION_MASK, event)
            case Started(worker, begun):
                self._on_begun(worker, begun)
            case Starved():
                self._has_idle_worker = True
            case Died(worker, handle):
                self._replace(worker, handle)
            case MemberLost(worker, how):
                self._or_shut_down(self._restarts.note_lost, worker, how)
            case Broken(error):
                self._shutdown_workers()
                raise error
        assert self._shard is not None
        self._shard.acknowledge()

    def _on_begun(self, worker: int, begun: Begun) -> None:
        if begun.generation == self._generation and worker in self._unreported:
            self._progress.streams[worker] = begun.stream or self._progress.streams[worker]
            self._refusal = self._refusal or begun.failure
            self._unreported.discard(worker)

    def _replace(self, worker: int, dead: Handle) -> None:
        assert self._shard is not None
        assert self._shard.processes.local is not None
        self._or_shut_down(self._restarts.replace, self._shard.processes.local, worker, dead)

    def _or_shut_down(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        except WorkerStartError:
            self._shutdown_workers()
            raise

    def _count(self) -> None:
        """Add the shard's counts since the last time to the meter."""
        assert self._shard is not None
        before, self._counted = self._counted, self._shard.totals()
        self._runtime.meter.count(
            self._counted.duplicates - before.duplicates, self._counted.steals - before.steals
        )

    # -- the specification of an epoch for workers ----------------------------------------------------------

    def _order(self) -> EpochSpec:
        return EpochSpec(
            epoch=self._progress.epoch,
            base_seed=int(self._base_seed),
            shared_seed=self._shared_seed,
            stream=None,
            generation=self._generation,
            resumes=self._resumes,
        )
