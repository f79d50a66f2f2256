"""Patches of accelerate, Fabric, Lightning and Ray Train, by which they keep a loader's class, options and state.

- accelerate makes a new loader from the given one. It is patched to make one of our class with the same options.
- accelerate and Fabric set epochs that they count from 0. They are patched to count from the loaded state.
- Lightning sets the sampler's epoch after it has begun a resumed iteration. The patch sets the epoch before.
- Lightning, for data without a length, reads a batch ahead. A saved position does not count that batch.
- Ray Train reads a batch ahead. The patch makes it read each batch when it is needed.

`docs/howto/libraries.md` lists the ways for Ray Train and Ignite.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from torch_dpflow._core.checks import working
from torch_dpflow._core.ranks import named_ranks
from torch_dpflow.errors import OptionError
from torch_dpflow.loader.loaded_state import begin_saved_epoch

_ACCELERATE = "accelerate.data_loader"
_FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
_LIGHTNING = ("lightning.pytorch.loops.fetchers", "pytorch_lightning.loops.fetchers")
_FITTING = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")
_RAY = "ray.train.torch.train_loop_utils"
_FUNCTIONS = ("prepare_data_loader", "skip_first_batches")
#: The arguments that torch's loader does not have.
_OURS = ("options", "flow", "address", "job", "platform")
#: The loader of ours that accelerate prepares in this context.
_PREPARED: ContextVar[Any] = ContextVar("prepared", default=None)


def keep_class_when_prepared(ours: type[Any]) -> None:
    """Patch accelerate, Fabric, Lightning and Ray Train for loaders of class `ours`, now or once they are imported."""
    amend_by_module = {
        _ACCELERATE: _amend_accelerate,
        _RAY: _amend_ray,
        **dict.fromkeys(_FABRIC, _amend_fabric),
        **dict.fromkeys(_LIGHTNING, _amend_lightning),
        **dict.fromkeys(_FITTING, _amend_fitting),
    }
    for name, amend in amend_by_module.items():
        if name in sys.modules:
            amend(ours, sys.modules[name])
        else:
            sys.meta_path.insert(0, _WhenImported(name, functools.partial(amend, ours)))


def _amend_fabric(ours: type[Any], module: ModuleType) -> None:
    wrapper: Any = vars(module).get("_FabricDataLoader")
    if wrapper is None:
        return
    iterate = wrapper.__iter__

    @functools.wraps(iterate)
    def iterate_from_state(self: Any) -> Iterator[Any]:
        if isinstance(self._dataloader, ours) and (pending := self._dataloader._runtime.pending) is not None:
            self._num_iter_calls = pending.epoch
        yield from iterate(self)

    wrapper.__iter__ = iterate_from_state


def _amend_lightning(ours: type[Any], module: ModuleType) -> None:
    fetcher: Any = vars(module).get("_PrefetchDataFetcher")
    if fetcher is None:
        return
    iterate = fetcher.__iter__

    @functools.wraps(iterate)
    def iterate_and_note(self: Any) -> Any:
        found, latest = iterate(self), weakref.ref(self)
        for loader in self.combined_loader.flattened:
            if isinstance(loader, ours):
                loader._runtime.held = lambda: 0 if (alive := latest()) is None else len(alive.batches)
        return found

    fetcher.__iter__ = iterate_and_note


def _amend_fitting(ours: type[Any], module: ModuleType) -> None:
    loop: Any = vars(module).get("_FitLoop")
    load = getattr(loop, "_load_combined_loader_states", None)
    if load is None:
        return

    @functools.wraps(load)
    def load_and_begin(self: Any) -> None:
        load(self)
        for loader in [] if self._combined_loader is None else self._combined_loader.flattened:
            if isinstance(loader, ours):
                begin_saved_epoch(loader, is_over=self.restarting and self.epoch_loop.batch_progress.is_last_batch)

    loop._load_combined_loader_states = load_and_begin


def _amend_ray(ours: type[Any], module: ModuleType) -> None:
    wrapper: Any = vars(module).get("_WrappedDataLoader")
    if wrapper is None:
        return
    iterate = wrapper.__iter__

    @functools.wraps(iterate)
    def iterate_in_step(self: Any) -> Iterator[Any]:
        def moved(batch: Any) -> Any:
            batch = self._move_to_device(batch)
            self._wait_for_batch(batch)
            return batch

        # Ray's own iterator reads one batch ahead, which a saved position would count as read.
        return map(moved, self._dataloader) if isinstance(self._dataloader, ours) else iterate(self)

    wrapper.__iter__ = iterate_in_step


def _amend_accelerate(ours: type[Any], module: ModuleType) -> None:
    names = vars(module)
    if not {*_FUNCTIONS, "DataLoader", "DataLoaderAdapter", "DataLoaderDispatcher"} <= names.keys():
        return
    torchs, begin = names["DataLoader"], names["DataLoaderAdapter"].__init__
    fetch = names["DataLoaderDispatcher"]._fetch_batches

    def make_loader(*args: Any, **kwargs: Any) -> Any:
        source = _PREPARED.get()
        if source is None:
            return torchs(*args, **kwargs)
        return ours(*args, **kwargs, **{name: getattr(source, name) for name in _OURS})

    @functools.wraps(begin)
    def begin_with_ours(
        self: Any, dataset: Any, use_stateful_dataloader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        if _PREPARED.get() is not None and type(self).__name__ == "DataLoaderDispatcher":
            _check_read_in_one_process(dataset)
        # Ours has a state itself: it is not replaced by torchdata's.
        begin(self, dataset, use_stateful_dataloader and _PREPARED.get() is None, *args, **kwargs)
        self.use_stateful_dataloader = use_stateful_dataloader

    def load_and_count(self: Any, state_dict: Any) -> None:
        self.base_dataloader.load_state_dict(state_dict)
        if isinstance(self.base_dataloader, ours):
            self.iteration = self.base_dataloader._runtime.pending.epoch

    @functools.wraps(fetch)
    def fetch_and_note(self: Any, iterator: Any) -> Any:
        # The batches of all ranks that it fetches are those after the next ones that the loop gets.
        state = self.base_dataloader.state_dict() if isinstance(self.base_dataloader, ours) else None
        fetched = fetch(self, iterator)
        if state is not None:
            self.dl_state_dict = state
        return fetched

    names["DataLoader"], names["DataLoaderAdapter"].__init__ = make_loader, begin_with_ours
    names["DataLoaderDispatcher"]._fetch_batches = fetch_and_note
    names["DataLoaderAdapter"].load_state_dict = load_and_count
    for name in _FUNCTIONS:
        before = names[name]
        noted = _noting(ours, before)
        for other in list(sys.modules.values()):  # modules that have imported it by name
            if working(other, "__dict__", {}).get(name) is before:
                setattr(other, name, noted)


def _check_read_in_one_process(dataset: Any) -> None:
    ranks = named_ranks(dataset)
    if ranks is not None and ranks.num_replicas > 1:
        raise OptionError(
            f"accelerate reads this {type(dataset).__name__} in its main process alone, where it is rank {ranks.rank} "
            f"of {ranks.num_replicas}: the parts of the others would not be read. Make it with num_replicas=1 and "
            "rank=0, or do not pass the loader to prepare()"
        )


def _noting(ours: type[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        token = _PREPARED.set(dataloader if isinstance(dataloader, ours) else None)
        try:
            return function(dataloader, *args, **kwargs)
        finally:
            _PREPARED.reset(token)

    return noted


class _WhenImported(importlib.abc.MetaPathFinder):
    """Import hook that calls a function with each named module after its import."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a named module by the other finders, and make its loader call the function."""
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_then(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = execute_and_then  # type: ignore[method-assign]
        return spec
