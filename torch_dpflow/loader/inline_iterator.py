"""The iterator without workers: torch's iterator, with a position that can be saved."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, graph_settings

from torch_dpflow._core.stage_clock import StageClock
from torch_dpflow._core.torch_private import DatasetKind, pin_memory
from torch_dpflow.epoch.own_state import Stream, at_rest, copied, has_state, return_dataset
from torch_dpflow.epoch.plan import TAKEN, Plan, PlannedBatch, samples_in
from torch_dpflow.epoch.progress import OPENING_ALONE
from torch_dpflow.epoch.rng import EPOCH_HERE, capture_rng, preserved_rng, preserved_rng_except, restore_rng
from torch_dpflow.epoch.state import StreamState
from torch_dpflow.errors import WorkerError
from torch_dpflow.loader.batch_planner import DeliveringIterator, interrupted_draw, next_undelivered
from torch_dpflow.loader.iteration_start import EpochAnnouncement, begin
from torch_dpflow.workers.batches import timed_fetch


class SingleProcessIterator(DeliveringIterator):
    """Iterator of a `DPFlowDataLoader` that loads each batch in `next()`, in the training process."""

    def __init__(self, loader: Any) -> None:
        if loader.timeout:  # torch's constructor accepts it, and its iterator raises this
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        self._runtime = loader._runtime
        epoch, pending, progress = self._runtime.epoch, self._runtime.pending, self._runtime.progress
        self._progress = begin(self, loader, OPENING_ALONE, super().__init__)
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            graph_settings.apply_sharding(self._dataset, self._world_size, self._rank)
        self._rng_at_start = copy.copy(torch.default_generator.get_state())
        self._plan: Plan = self._progress.plan
        self._drawn = self._progress.position > 0
        #: Until the order of the epoch was announced to its dataset, at the first batch, which fixes it.
        self._loader = loader
        #: The drawn batch until it is loaded, so that Control-C does not skip it.
        self._due: PlannedBatch | None = None
        #: Whether Control-C interrupted the reading of an iterable dataset.
        self._is_torn = False
        self._clock = StageClock()
        try:
            self._fetcher = self._make_fetcher(loader)
        except BaseException as error:
            self._runtime.epoch, self._runtime.progress = epoch, progress
            self._runtime.pending = None if isinstance(error, Exception) else pending
            raise
        dataset = None if self._dataset_kind == DatasetKind.Iterable else self._dataset
        self._timed_fetch = timed_fetch(self._clock, self._fetcher, dataset, batched=self._auto_collation)
        self._progress.dataset_state = self._dataset_state()
        if self._dataset_kind == DatasetKind.Iterable or self._progress.dataset_state is not None:
            self._progress.streams = self._progress.streams or [StreamState()]
        self._runtime.meter.begin_epoch()

    def _next_data(self) -> Any:
        self._progress.note_taken()
        if self._progress.head is None:
            with self._runtime.meter.waiting():
                try:
                    self._load()
                except StopIteration:
                    self._progress.finish()
                    raise
        self._meter_once(self._head.samples)
        return self._head.outcome

    def _load(self) -> None:
        if self._is_torn:
            raise WorkerError(
                "this iteration was interrupted while its iterable dataset was read, so a part of the batch is lost; "
                "begin another iteration"
            )
        if self._due is not None and self._due.outcome is TAKEN:
            self._progress.head, self._due = self._due, None
            self._progress.note_taken()
        due = self._due or self._draw()
        if self._runtime.may_be_held and self._progress.dataset_state is not None:
            self._progress.before_head = self._progress.dataset_state()
        try:
            due.outcome = self._fetch(due)
            self._head = self._progress.head = due
            self._due = None
        except KeyboardInterrupt:
            self._is_torn = self._dataset_kind == DatasetKind.Iterable and self._due is not None
            raise

    def _fetch(self, due: PlannedBatch) -> Any:
        due.samples = samples_in(due.index) if self._auto_collation else 1
        stream = None
        if self._progress.streams:
            last = self._progress.streams[0]
            stream = StreamState(delivered=last.delivered + 1, failed=last.failed)
            due.worker, due.stream = 0, stream
        before = EPOCH_HERE.get()
        try:
            EPOCH_HERE.set(self._progress.epoch)
            data = self._timed_fetch(due.index)
            if (times := self._clock.take()) is not None:
                meter = self._runtime.meter
                meter.times.add(times)
                if meter.trace is not None:
                    meter.trace.loaded(None, due.position, times, time.perf_counter())
            return pin_memory(data, self._pin_memory_device) if self._pin_memory else data
        except (StopIteration, KeyboardInterrupt):
            raise
        except Exception:
            if stream is not None:
                stream.failed += 1
            due.outcome = TAKEN
            self._progress.head, self._due = due, None
            raise
        except BaseException:
            # Skipped by the next `next`; a state that is saved now still has it, as after the SystemExit of a handler.
            due.outcome = TAKEN
            raise
        finally:
            EPOCH_HERE.set(before)

    def _draw(self) -> PlannedBatch:
        if not self._drawn:
            self._drawn = True
            if not torch.equal(torch.default_generator.get_state(), self._rng_at_start):
                self._progress.draw_rng = capture_rng()
        plan = self._plan
        if plan.is_torn:
            raise interrupted_draw()
        if self._loader is not None:
            loader, self._loader = self._loader, None
            EpochAnnouncement(loader, plan, 1)
        position, index = next_undelivered(plan, self._progress)
        batch = PlannedBatch(position, index)
        # No call before all of this is assigned: Control-C comes before it or after it.
        self._due, plan.drawn, plan.held = batch, position + 1, []
        return batch

    def _make_fetcher(self, loader: Any) -> Any:
        def torchs() -> Any:
            return DatasetKind.create_fetcher(
                self._dataset_kind,
                self._dataset,
                self._auto_collation,
                self._clock.collating(self._collate_fn),
                self._drop_last,
            )

        stream = self._progress.streams[0] if self._progress.streams else StreamState()
        if self._dataset_kind != DatasetKind.Iterable:
            if stream.dataset is not None:
                return_dataset(self._dataset, stream.dataset)
            return torchs()
        if stream.dataset is not None and stream.dataset["ended"] and not stream.delivered:
            return_dataset(self._dataset, stream.dataset)
            stream = StreamState()
        batch_size = loader.batch_size if self._auto_collation else None
        if not stream.delivered and stream.dataset is None:
            return Stream(self._dataset, torchs, state=None, skip=0, batch_size=batch_size)
        if stream.dataset is not None:
            with preserved_rng():
                return Stream(self._dataset, torchs, state=stream.dataset, skip=0, batch_size=batch_size)
        progress = self._progress
        assert progress.opened_rng is not None

        def begun() -> Any:
            fetcher = torchs()
            if progress.draw_rng is not None:
                restore_rng(progress.draw_rng)
            return fetcher

        with preserved_rng_except(progress.unchanged):
            # The dataset may shuffle when it is first read.
            restore_rng(progress.opened_rng)
            delivered, failed = stream.delivered, stream.failed
            return Stream(self._dataset, begun, state=None, skip=delivered, failed=failed, batch_size=batch_size)

    def _dataset_state(self) -> Callable[[], Any] | None:
        """Return a function that returns the dataset's own state; None if the dataset has no state."""
        dataset = self._dataset
        if self._dataset_kind != DatasetKind.Iterable:
            return (lambda: copied(dataset, at_rest(dataset))) if has_state(dataset) else None
        stream: Stream = self._fetcher
        return (lambda: copied(dataset, stream.state())) if stream.keeps_state else None
