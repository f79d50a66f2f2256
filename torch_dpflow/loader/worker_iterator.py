"""Iterator of a loader with worker processes: it draws and submits batches ahead, and delivers them in order."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from torch_dpflow._core.torch_private import ExceptionWrapper
from torch_dpflow.epoch.index_order import is_drawn_at_start, settled_length
from torch_dpflow.epoch.plan import TAKEN, PlannedBatch, samples_in
from torch_dpflow.epoch.progress import OPENING_AGAIN, OPENING_WORKERS
from torch_dpflow.errors import LoaderTimeoutError, WorkerError, WorkerStartError
from torch_dpflow.ipc.memory.headroom import machine_total
from torch_dpflow.ipc.messages.headers import END, FAILURE
from torch_dpflow.loader.batch_planner import (
    BatchPlanner,
    DeliveringIterator,
    InFlight,
    InFlightLimit,
    Rotation,
    fit_streams,
    interrupted_draw,
)
from torch_dpflow.loader.iteration_start import EpochAnnouncement, Pin, begin
from torch_dpflow.loader.private_shard import WINDOW, PrivateShard
from torch_dpflow.loader.shard_events import (
    Arrived,
    Died,
    Event,
    Poisoned,
    RemoteWorkerLost,
    RowsArrived,
    ShardFailed,
    Started,
    WorkerIdle,
)
from torch_dpflow.loader.stream_shard import ItemPace, StreamShard
from torch_dpflow.loader.worker_processes import (
    Restarts,
    described,
    has_own_streams,
    load_spec,
    local_workers,
)
from torch_dpflow.options import LoaderOptions
from torch_dpflow.workers.batch_pieces import UNDIVIDED, generation_of, position_of, task_of
from torch_dpflow.workers.batches import SHARED_FRACTION, Begun, EpochSpec
from torch_dpflow.workers.local_platform import LocalHandle
from torch_dpflow.workers.platform import Handle
from torch_dpflow.workers.stream_items import MappedItems

#: Events after which the wait for a batch goes on.
_NO_BATCH = RowsArrived, WorkerIdle


class WorkerIterator(DeliveringIterator):
    """Iterator of a `DPFlowDataLoader` over the batches that a private shard's workers load.

    It belongs to the thread that calls `next()`. That thread plans, waits, and starts replacements for workers that
    died.
    """

    def __init__(self, loader: Any) -> None:
        self._runtime = loader._runtime
        self._options: LoaderOptions = loader.options or LoaderOptions()
        self._own_stream = has_own_streams(loader, self._options)
        self._in_order = loader.in_order
        self._usual = loader.prefetch_factor * loader.num_workers
        if self._usual <= 0:  # torch's constructor accepts 0, and its iterator raises this
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        #: Bytes of memory of the largest batch that has arrived.
        self._largest = 0
        budget = None if loader.platform is None else machine_total() // SHARED_FRACTION
        self._limit = InFlightLimit(self._usual, loader.num_workers, budget, self._options.prefetch_growth)
        self._generation = 0
        self._restarts = Restarts(self._options.restart_limit, loader.num_workers, self._runtime.meter)
        self._ended_workers: list[Any] = []
        #: The duplicates and steals that the meter has.
        self._counted = 0, 0
        self._shard: PrivateShard | None = None
        epoch, pending, progress = self._runtime.epoch, self._runtime.pending, self._runtime.progress
        self._progress = begin(self, loader, OPENING_WORKERS, self._start_as_torch)
        try:
            self._begin_epoch(loader, resumes=pending is not None)
            shard, workers = self._make_workers(loader)
            self._shard = shard(
                workers,
                epoch=self._epoch_spec(),
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
        """Return (the constructor of the shard, its workers, which are not started yet)."""
        spec = load_spec(self, loader, self._options, own_stream=self._own_stream)
        if loader.platform is not None:
            from torch_dpflow.loader.remote_workers import workers_of

            return workers_of(loader, self._options, spec)
        shard: Callable[..., PrivateShard] = PrivateShard
        if isinstance(loader.dataset, MappedItems):
            pace = ItemPace(self._num_workers, None if loader.dataset.reads_ahead else self._usual)
            shard = partial(StreamShard, pace=pace)
        return shard, local_workers(loader, spec, self._num_workers)

    @property
    def closed(self) -> bool:
        """Whether the iterator's workers have ended, or belong to another process."""
        return self._shard is None or not self._shard.is_own

    @property
    def _workers(self) -> list[Any]:
        # torch's name: other libraries look there for the processes.
        if self._shard is None:
            return self._ended_workers
        local = self._shard.processes.local
        handles = () if local is None else local.handles
        return [handle.process for handle in handles if isinstance(handle, LocalHandle)]

    # -- an epoch ----------------------------------------------------------------------------------------

    def _start_as_torch(self, loader: Any) -> None:
        super().__init__(loader)
        # torch calls the sampler and draws a data pipe's seed a second time, but its workers get the first seed.
        first = self._dataset, self._shared_seed
        super()._reset(loader, first_iter=True)
        self._dataset, self._shared_seed = first

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin another epoch with the running workers (torch's name and arguments)."""
        assert self._shard is not None
        epoch, pending, progress = self._runtime.epoch, self._runtime.pending, self._progress
        again = progress.streams_of_next()
        self._progress = begin(self, loader, OPENING_AGAIN, super()._reset)
        if self._own_stream and not self._progress.streams:
            self._progress.streams = again
        self._generation += 1
        self._begin_epoch(loader, resumes=pending is not None)
        self._shard.begin_epoch(self._epoch_spec(), self._progress.streams)
        self._start_loading(epoch, pending, progress)

    def _begin_epoch(self, loader: Any, *, resumes: bool) -> None:
        progress = self._progress
        self._resumes = resumes
        #: Workers that have not reported the beginning of their streams yet.
        self._unreported = set(range(self._num_workers)) if self._own_stream else set()
        #: The error of the first worker whose dataset did not restore its state.
        self._refusal: ExceptionWrapper | None = None
        if self._own_stream:
            # Weak: the workers end when the last reference to this iterator is dropped.
            progress.await_streams = weakref.WeakMethod(self._await_beginnings)
        fit_streams(progress, self._num_workers, own_stream=self._own_stream)
        self._in_flight = InFlight(in_order=self._in_order)
        #: Chooses the worker of each batch; None: any worker may load any.
        self._rotation: Rotation | None = None
        if self._own_stream:
            first, limit = progress.next_worker, self._usual
            self._rotation = Rotation(
                self._num_workers, self._in_flight, in_order=self._in_order, limit=limit, first=first
            )
        self._planner = BatchPlanner(progress, self._rotation)
        #: How many batches are planned once another one is in the place of the head.
        self._goal = 0
        self._has_idle_worker = False
        #: Whether more batches than torch's may be in flight.
        self._grows = self._in_order and not self._own_stream and is_drawn_at_start(loader._index_sampler)
        #: How many batches may be opened to all workers at the beginning, and from which position on at the end: where
        #: workers would wait for the others. In between each worker has batches, and rows that wait behind a slow one
        #: would delay more of them.
        self._opened: tuple[int, float] = WINDOW * self._num_workers, math.inf
        #: Batches before this position may be drawn earlier than in torch. To draw those after it may also draw from a
        #: generator that the training loop uses too.
        self._settled = settled_length(loader._index_sampler, progress.plan.end) if self._grows else math.inf
        if self._grows and self._settled:
            self._opened = self._opened[0], self._settled - self._num_workers
        # Before new workers copy the dataset.
        most = self._limit.most if self._grows else self._usual
        self._announcement = EpochAnnouncement(loader, progress.plan, most)
        self._runtime.meter.begin_epoch()

    def _start_loading(self, epoch: int, pending: Any, progress: Any) -> None:
        """Submit the first batches, and check that all workers' datasets have restored their states.

        Raises:
            StateError, or the error of a dataset: a dataset cannot restore its state. The loader is as before, but the
                pending state is dropped.
            The error of the sampler, or KeyboardInterrupt: the loader is as before, and the pending state stays.
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
        """Wait until every worker has reported the beginning of its stream."""
        while self._unreported and not self.closed and self._shard is not None:
            if (event := self._shard.wait(None)) is not None:
                self._handle(event)

    def _submit_ahead(self) -> None:
        for _ in range(max(self._limit.at_start(self._largest), len(self._progress.due))):
            if not self._plan_one():
                return

    def _plan_one(self) -> bool:
        """Draw the next batch and submit it; return False if there is none."""
        assert self._shard is not None
        batch = self._planner.draw()
        if batch is None:
            return False
        # Each may be repeated: if Control-C interrupts them, the batch is drawn again the next time.
        if self._announcement.accepted:
            self._announcement.drawn(batch.position, batch.index)
        self._in_flight.add(batch)
        first, last = self._opened
        part = 0 if self._own_stream or self._planner.planned < first or batch.position >= last else UNDIVIDED
        self._shard.submit(task_of(self._generation, batch.position, part), batch.index, pinned_to=batch.worker)
        self._planner.submitted()
        self._has_idle_worker = False
        return True

    # -- delivery ----------------------------------------------------------------------------------------

    def _next_data(self) -> Any:
        progress = self._progress
        if self._shard is None and not progress.finished:
            raise WorkerError("the workers of this iteration were shut down after an error; begin another one")
        with self._runtime.meter.waiting():
            if self._planner.drawn is not None:
                self._plan_one()
            while True:
                progress.note_taken()
                if progress.head is None:
                    due = self._due()
                    ahead = None if self._shard is None else self._shard.ahead(self._largest)
                    goal = self._planner.planned + self._limit.next(self._largest, len(self._in_flight), ahead)
                    # It stays the head until it is taken. Everything before that may be repeated.
                    self._head, self._goal, progress.head = due, goal, due
                head: PlannedBatch = self._head
                if head.outcome.__class__ is Arrived and head.outcome.kind == END:
                    self._end_stream(head)
                    continue
                return self._deliver(head)

    def _due(self) -> PlannedBatch:
        """Wait for the next batch to deliver. Raises StopIteration at the end of the epoch."""
        while self._shard is not None and (event := self._shard.poll()) is not None:
            self._handle(event)
        while True:
            batch = self._in_flight.due()
            if batch is not None:
                return batch
            if not len(self._in_flight):
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
        if self._meter_once(head.samples, outcome.size):
            self._count()
        return outcome.value

    def _refill(self, head: PlannedBatch) -> None:
        """Submit another batch in place of `head`, which is about to be delivered.

        If that fails, for example in the sampler, `head` stays the next batch.
        """
        self._in_flight.remove(head.position)
        while self._planner.planned < self._goal and self._may_draw() and self._plan_one():
            pass
        if self._rotation is not None:
            head.stream = getattr(head.outcome, "stream", None)
            head.workers_after = self._rotation.order()

    def _may_draw(self) -> bool:
        return self._progress.plan.drawn < self._settled or len(self._in_flight) < self._usual

    def _end_stream(self, head: PlannedBatch) -> None:
        """Drop the batches of a worker whose iterable dataset has ended."""
        assert self._shard is not None
        assert head.worker is not None
        assert self._rotation is not None
        self._rotation.end(head.worker)
        head.dropped = head.dropped or self._in_flight.waiting(head.worker)
        self._shard.cancel([task_of(self._generation, position) for position in head.dropped])
        for position in head.dropped:
            self._in_flight.remove(position)
        self._refill(head)
        head.outcome = TAKEN

    def _finish(self) -> None:
        self._progress.finish()
        if not self._persistent_workers:
            with self._runtime.meter.ending():
                self._shutdown_workers()

    def _shutdown_workers(self) -> None:
        """End the workers; torch's iterators have this method too."""
        if self._shard is not None:
            self._ended_workers = self._workers
            self._runtime.workload.end()
            self._count()
            # Not by the finalizer, which would do nothing the second time, after Control-C.
            self._shard.close()
            self._close.cancel()
            self._shard = None

    # -- events ------------------------------------------------------------------------------------------

    def _await_event(self) -> None:
        """Wait for an event, and handle it. Rows of an opened batch and idle workers do not restart the timeout."""
        until = time.monotonic() + self._timeout if self._timeout else math.inf
        while True:
            assert self._shard is not None
            more = len(self._in_flight) + 1
            if self._has_idle_worker and self._grows and self._may_draw() and self._limit.may_grow(more, self._largest):
                # A worker is idle because the due batch is late: load more batches meanwhile.
                self._plan_one()
            event = self._shard.wait(max(until - time.monotonic(), 0.0) if self._timeout else None)
            if event is None:
                waiting = self._in_flight.first_waiting()
                late = "" if waiting is None or waiting.index is None else f"; it waits for {described(waiting.index)}"
                raise LoaderTimeoutError(f"DataLoader timed out after {self._timeout} seconds{late}")
            self._handle(event)
            if event.__class__ not in _NO_BATCH:
                return

    def _handle(self, event: Event) -> None:
        match event:
            case Arrived(memory=memory):
                if memory > self._largest:
                    self._largest = memory
                self._note_times(event)
                self._arrive(event)
            case Poisoned():
                self._arrive(event)
            case RowsArrived():
                self._note_times(event)
            case Started(worker, begun):
                self._on_begun(worker, begun)
            case WorkerIdle():
                self._has_idle_worker = True
            case Died(worker, handle):
                self._replace(worker, handle)
            case RemoteWorkerLost(worker, how):
                if (trace := self._runtime.meter.trace) is not None:
                    trace.ended(worker, how)
                self._or_shut_down(self._restarts.note_lost, worker, how)
            case ShardFailed(error):
                self._shutdown_workers()
                raise error
        assert self._shard is not None
        self._shard.acknowledge()

    def _arrive(self, event: Arrived | Poisoned) -> None:
        self._restarts.results += 1
        if generation_of(event.task) == self._generation:
            self._in_flight.arrive(position_of(event.task), event)

    def _note_times(self, event: Arrived | RowsArrived) -> None:
        if event.times is not None:
            meter = self._runtime.meter
            meter.times.add(event.times)
            if meter.trace is not None:
                meter.trace.loaded(event.worker, position_of(event.task), event.times, event.at)

    def _on_begun(self, worker: int, begun: Begun) -> None:
        if begun.generation == self._generation and worker in self._unreported:
            self._progress.streams[worker] = begun.stream or self._progress.streams[worker]
            self._refusal = self._refusal or begun.failure
            self._unreported.discard(worker)

    def _replace(self, worker: int, dead: Handle) -> None:
        assert self._shard is not None
        assert self._shard.processes.local is not None
        if (trace := self._runtime.meter.trace) is not None:
            trace.ended(worker, f"pid {dead.pid}; another process replaces it")
        self._or_shut_down(self._restarts.replace, self._shard.processes.local, worker, dead)

    def _or_shut_down(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        except WorkerStartError:
            self._shutdown_workers()
            raise

    def _count(self) -> None:
        """Add to the meter what the shard's counters have grown by since the last call of this method."""
        assert self._shard is not None
        totals, before = self._shard.totals(), self._counted
        counts = totals.duplicates, totals.steals
        if counts != before:
            self._counted = counts
            self._runtime.meter.count(counts[0] - before[0], counts[1] - before[1])

    def _epoch_spec(self) -> EpochSpec:
        return EpochSpec(
            epoch=self._progress.epoch,
            base_seed=int(self._base_seed),
            shared_seed=self._shared_seed,
            stream=None,
            generation=self._generation,
            resumes=self._resumes,
        )
