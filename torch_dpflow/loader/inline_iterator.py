"""The iterator without workers: as torch's, with a position that can be saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, graph_settings

from torch_dpflow.epoch.own_state import copied, has_state
from torch_dpflow.epoch.plan import Plan, samples_in
from torch_dpflow.epoch.progress import OPENING_ALONE
from torch_dpflow.epoch.rng import capture_rng, loading_for, preserved_rng
from torch_dpflow.epoch.state import StreamState
from torch_dpflow.epoch.streams import Stream, at_rest, return_dataset
from torch_dpflow.loader.batch_planner import interrupted_draw
from torch_dpflow.loader.iteration_start import begin
from torch_dpflow.torch_private import BaseDataLoaderIter, DatasetKind, pin_memory


class SingleProcessIterator(BaseDataLoaderIter):
    """Loads each batch in `next()`, in the training process.

    Args:
        loader: the `DPFlowDataLoader`.
    """

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
        #: A batch's position and indices, until it is loaded: Control-C while it is loaded does not skip it.
        self._due: tuple[int, Any] | None = None
        self._is_interrupted = False
        try:
            self._fetcher = self._make_fetcher(loader)
        except BaseException as error:
            self._runtime.epoch, self._runtime.progress = epoch, progress
            self._runtime.pending = None if isinstance(error, Exception) else pending
            raise
        self._progress.dataset_state = self._asked()
        if self._dataset_kind == DatasetKind.Iterable or self._progress.dataset_state is not None:
            self._progress.streams = self._progress.streams or [StreamState()]
        self._runtime.meter.begin_epoch()

    def _next_data(self) -> Any:
        with self._runtime.meter.waiting():
            try:
                data, samples = self._load()
            except StopIteration:
                if self._is_interrupted:
                    raise interrupted_draw() from None
                self._progress.finish()
                raise
        self._runtime.meter.delivered(samples, 0)
        return data

    def _load(self) -> tuple[Any, int]:
        if self._due is None:
            self._due = self._draw()
        position, index = self._due
        samples = samples_in(index) if self._auto_collation else 1
        try:
            with loading_for(self._progress.epoch):
                data = self._fetcher.fetch(index)
        except StopIteration:
            raise
        except Exception:
            self._due = None
            self._progress.passed(position, samples)
            raise
        if self._pin_memory:
            data = pin_memory(data, self._pin_memory_device)
        self._due = None
        self._progress.passed(position, samples)
        if self._progress.streams:
            delivered = self._progress.streams[0].delivered + 1
            self._progress.streams = [StreamState(delivered=delivered)]
        return data, samples

    def _draw(self) -> tuple[int, Any]:
        if not self._drawn:
            self._drawn = True
            if not torch.equal(torch.default_generator.get_state(), self._rng_at_start):
                self._progress.draw_rng = capture_rng()
        try:
            position, index = self._plan.draw()
            while self._progress.was_delivered(position):
                position, index = self._plan.draw()
        except KeyboardInterrupt:
            self._is_interrupted = True
            raise
        self._is_interrupted = False
        return position, index

    def _make_fetcher(self, loader: Any) -> Any:
        def torchs() -> Any:
            return DatasetKind.create_fetcher(
                self._dataset_kind, self._dataset, self._auto_collation, self._collate_fn, self._drop_last
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
        with preserved_rng():
            return Stream(
                self._dataset, torchs, state=stream.dataset, skip=stream.delivered, batch_size=batch_size
            )

    def _asked(self) -> Callable[[], Any] | None:
        """A function that returns the dataset's own state, if it has one."""
        dataset = self._dataset
        if self._dataset_kind != DatasetKind.Iterable:
            return (lambda: copied(dataset, at_rest(dataset))) if has_state(dataset) else None
        stream: Stream = self._fetcher
        return (lambda: copied(dataset, stream.state())) if stream.keeps_state else None
