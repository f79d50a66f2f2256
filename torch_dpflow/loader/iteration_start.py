"""Start of an iteration: a whole epoch as in torch, or from a loaded state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterDataPipe, graph_settings

from torch_dpflow._core.checks import working
from torch_dpflow._core.torch_private import DatasetKind, pin_memory
from torch_dpflow.epoch.index_order import settled_length
from torch_dpflow.epoch.own_state import return_dataset
from torch_dpflow.epoch.plan import (
    Plan,
    new_plan,
    open_order,
    repeat_draws,
    return_generators,
    return_sampler,
)
from torch_dpflow.epoch.progress import (
    OPENING_AGAIN,
    EpochProgress,
    LoaderShape,
    before_order,
    epoch_setter,
)
from torch_dpflow.epoch.rng import (
    fingerprints,
    preserved_rng_except,
    restore_generator,
    unchanged_generators,
)
from torch_dpflow.epoch.state import LoaderState, OpeningStep, StreamState
from torch_dpflow.lookahead import announce_order, takes_orders


class LoaderView:
    """View of a loader with an empty index sampler and a new generator, so that torch's iterator draws from neither."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._index_sampler = ()
        self.generator = torch.Generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def begin(iterator: Any, loader: Any, opening: Sequence[OpeningStep], start: Callable[[Any], None]) -> EpochProgress:
    """Begin an iteration from the loader's pending state, or a whole epoch without one; return its progress.

    Args:
        iterator: torch's base iterator, which is being constructed or reset; its index sampler and base seed are set.
        loader: the `DPFlowDataLoader`.
        opening: the random draws of `start` when it begins a whole epoch, in order.
        start: torch's own constructor or reset.

    Raises StateError: the pending state does not fit the loader. The state is dropped, so the next iteration reads a
    whole epoch.
    """
    runtime = loader._runtime
    epoch, pending = runtime.epoch, runtime.pending
    try:
        return _begin(iterator, loader, _with_shared_seeds(opening, loader), start)
    except BaseException as error:
        # After Control-C the state stays for the next iteration.
        runtime.epoch, runtime.pending = epoch, None if isinstance(error, Exception) else pending
        raise


def _begin(iterator: Any, loader: Any, opening: list[OpeningStep], start: Callable[[Any], None]) -> EpochProgress:
    runtime = loader._runtime
    state = runtime.take_pending()
    if state is not None and state.fresh:
        _return_to_rest(loader, state)
    if state is None or (state.fresh and state.base_seed is None):
        # Before samplers that count iterations.
        shape, at = LoaderShape(loader), before_order(loader)
        start(loader)
        at = replace(at, opening=opening, base_seed=iterator._base_seed)
        progress = _progress(loader, shape, at, iterator._sampler_iter)
    else:
        start(LoaderView(loader))
        iterator._index_sampler = loader._index_sampler
        if state.fresh:
            progress, shared_seed = _next_with_same_seed(loader, state)
        else:
            shared_seed = state.shared_seed
            progress = EpochProgress.resumed(
                state,
                index_sampler=loader._index_sampler,
                sampler=loader.sampler,
                generator=loader.generator,
                keeps_seed=loader.persistent_workers,
                shape=LoaderShape(loader),
            )
        if shared_seed is not None and isinstance(iterator._dataset, IterDataPipe):
            # A data pipe shuffles with this seed instead of the seed that torch drew.
            iterator._shared_seed, drawn = shared_seed, torch.Generator().manual_seed(shared_seed)
            iterator._dataset = graph_settings.apply_random_seed(iterator._dataset, drawn)
        iterator._base_seed = progress.base_seed
    if state is not None and state.fresh:
        kept = (state.dataset, *(stream.dataset for stream in state.streams))
        progress.is_restored = any(part["ended"] for part in kept if part is not None)
    progress.shared_seed = iterator._shared_seed
    runtime.epoch = progress.epoch + 1
    runtime.progress = progress
    return progress


def _return_to_rest(loader: Any, state: LoaderState) -> None:
    """Restore generators, sampler and dataset from a state that was saved between two epochs."""
    if state.plan_rng is not None and (names := unchanged_generators(state.plan_rng, state.began)):
        # The script was restarted with the same seed: the next epoch must not repeat the order of the first.
        counted, epoch = epoch_setter(loader._index_sampler, loader.sampler), None
        if counted is not None:
            epoch = counted.epoch
        with preserved_rng_except(names):
            repeat_draws(state, loader._index_sampler, loader.generator)
        if counted is not None and counted.epoch != epoch:  # it counts its iterations
            counted.set_epoch(epoch)
    if state.generator is not None and loader.generator is not None:
        restore_generator(loader.generator, state.generator)
    if state.sampler_generators:  # else a sampler may have made one since, as accelerate's do
        return_generators(state.sampler_generators, loader._index_sampler, loader.sampler, loader.generator)
    if state.sampler is not None:
        return_sampler(state, loader._index_sampler, loader.sampler)
    if state.dataset is not None:
        return_dataset(loader.dataset, state.dataset)


def _with_shared_seeds(opening: Sequence[OpeningStep], loader: Any) -> list[OpeningStep]:
    """Return `opening` with the draws of a data pipe's shared seed: torch draws it first, and again at a reset."""
    if not isinstance(loader.dataset, IterDataPipe):
        return list(opening)
    first: list[OpeningStep] = ["seed"] if "seed" in opening else []
    last: list[OpeningStep] = ["seed"] if opening[-1] == "order" else []
    return [*first, *opening, *last]


def _next_with_same_seed(loader: Any, state: LoaderState) -> tuple[EpochProgress, int | None]:
    """Begin another epoch with persistent workers' base seed; return its progress and a data pipe's shared seed."""
    assert state.base_seed is not None
    shape, at = LoaderShape(loader), before_order(loader)
    batches = open_order(OPENING_AGAIN, loader._index_sampler, loader.generator)
    opening, shared_seed = _with_shared_seeds(OPENING_AGAIN, loader), None
    if isinstance(loader.dataset, IterDataPipe):
        shared_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
    at = replace(at, opening=opening, base_seed=state.base_seed)
    return _progress(loader, shape, at, batches, state.streams), shared_seed


def _progress(
    loader: Any,
    shape: LoaderShape,
    at: LoaderState,
    batches: Any,
    streams: Sequence[StreamState] = (),
) -> EpochProgress:
    runtime = loader._runtime
    runtime.began = runtime.began or fingerprints(at.plan_rng or {})
    at = replace(at, epoch=runtime.epoch, began=runtime.began)
    plan = new_plan(batches, loader._index_sampler, loader.sampler)
    return EpochProgress(
        shape, at, plan, generator=loader.generator, keeps_seed=loader.persistent_workers, streams=streams
    )


#: Samples in a batch, where their number is unknown.
_SAMPLES = 1024


class EpochAnnouncement:
    """Announcement of an epoch's remaining order to the loader's dataset, if the dataset accepts announcements.

    A fixed order is announced as a whole. Any other order is announced batch by batch, as batches are drawn. Announcing
    does not change the plan's batches.

    Args:
        batches: maximum number of batches in flight.
    """

    def __init__(self, loader: Any, plan: Plan, batches: int) -> None:
        self._dataset = loader.dataset
        samples = loader.batch_size or _batch_size(loader.batch_sampler)
        if samples is None:
            samples = _SAMPLES if loader._auto_collation else 1
        self._spread = batches * samples
        #: Batches before this one were announced at the beginning.
        self._settled = 0
        #: Whether the dataset accepts orders; else no call is needed.
        self.accepted = loader._dataset_kind == DatasetKind.Map and takes_orders(loader.dataset)
        if self.accepted:
            # Only then are lengths computed: a user's `__len__` may be slow, or raise.
            announce_order(loader.dataset, lambda: self._settle(loader, plan), self._spread)

    def drawn(self, position: int, index: Any) -> None:
        """Announce a drawn batch, unless it was announced at the beginning or its indices are no ints."""
        if position < self._settled:
            return
        # Other types may be iterators, or no numbers.
        keys = index if type(index) in (list, tuple) else [index]
        if all(type(key) is int for key in keys):
            announce_order(self._dataset, lambda: np.array(keys, dtype=np.int64), self._spread, extends=True)

    def _settle(self, loader: Any, plan: Plan) -> npt.NDArray[np.int64]:
        settled = plan.settle(settled_length(loader._index_sampler, plan.end))
        self._settled = plan.drawn + len(settled)
        return flat_keys(settled)


def flat_keys(batches: list[Any]) -> npt.NDArray[np.int64]:
    """Return the sample numbers of all batches as one array. With `batch_size=None` a batch is a single number."""
    is_flat = bool(batches) and not isinstance(batches[0], Iterable)
    return np.fromiter(batches if is_flat else chain.from_iterable(batches), dtype=np.int64)


def _batch_size(batch_sampler: Any) -> int | None:
    size = working(batch_sampler, "batch_size")
    return size if type(size) is int and size > 0 else None


class Pin:
    """Function that copies a batch into pinned memory. Construct it in the training thread; call it in one thread only.

    The first call limits torch to one CPU thread in the calling thread, as torch's pinning thread does.

    Args:
        device: the type of accelerator, from torch's iterator.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._index = torch.accelerator.current_device_index()
        self._ready = False

    def __call__(self, batch: Any) -> Any:
        if not self._ready:
            # As torch's pinning thread does first: a new thread has device 0 and uses every core.
            torch.set_num_threads(1)
            torch.accelerator.set_device_index(self._index)
            self._ready = True
        return pin_memory(batch, self._device)
