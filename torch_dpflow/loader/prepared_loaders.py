"""Lets accelerate prepare a loader as one of our class, with its options and its state.

accelerate makes a loader of torch's class with torch's arguments from the one that it is given, and has no hook. Its
two functions that do so are wrapped where it is imported. Fabric, Ray Train and Ignite have other ways, which
`docs/howto/libraries.md` lists.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from torch_dpflow._core.checks import working
from torch_dpflow._core.ranks import named_ranks
from torch_dpflow.errors import OptionError

_MODULE = "accelerate.data_loader"
_FUNCTIONS = ("prepare_data_loader", "skip_first_batches")
#: The arguments that torch's loader does not have.
_OURS = ("options", "flow", "address", "job", "platform")
#: The loader of ours that accelerate prepares in this context.
_PREPARED: ContextVar[Any] = ContextVar("prepared", default=None)


def keep_class_when_prepared(ours: type[Any]) -> None:
    """Let accelerate prepare loaders of class `ours` as such, now or once it is imported."""
    if _MODULE in sys.modules:
        _amend(ours, sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _WhenImported(functools.partial(_amend, ours)))


def _amend(ours: type[Any], module: ModuleType) -> None:
    names = vars(module)
    if not {*_FUNCTIONS, "DataLoader", "DataLoaderAdapter"} <= names.keys():
        return
    torchs, begin = names["DataLoader"], names["DataLoaderAdapter"].__init__

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

    names["DataLoader"], names["DataLoaderAdapter"].__init__ = make_loader, begin_with_ours
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
    """An import hook that calls a function with accelerate's module once it has been imported."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module by the other finders, and extend its loader."""
        if fullname != _MODULE or self._is_asking:
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
