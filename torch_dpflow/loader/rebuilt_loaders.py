"""Lets libraries that rebuild or wrap a loader keep our class, options and state.

Lightning rebuilds a loader by the loader's own class, which needs no support. Other libraries call torch's class, by
its name in their module, with torch's arguments only, so their users would silently lose our workers. These libraries
have no hook. But the original loader is a local variable of the calling function. So the name is bound to a class that
looks for it there.

Wrappers copy a loader's attributes, but not its methods: they get ours if they wrap a loader of ours.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any

from torch_dpflow.errors import StateError

#: By module, the variable with the rebuilt loader; empty: the module makes loaders from its user's arguments, which may
#: be ours.
_REBUILDING = {
    "accelerate.data_loader": "dataloader",
    "ray.train.torch.train_loop_utils": "loader",
    "ignite.distributed.auto": "",
}
#: By module, the class that wraps a loader, its `_dataloader`.
_WRAPPING = {
    "ray.train.torch.train_loop_utils": "_WrappedDataLoader",
    "lightning.fabric.wrappers": "_FabricDataLoader",
    "lightning_fabric.wrappers": "_FabricDataLoader",
}
#: The arguments that torch's loader does not have, and the methods.
_OURS = ("options", "flow", "address", "job", "platform")
_METHODS = ("state_dict", "load_state_dict", "stats", "explain")


def keep_class_when_rebuilt(ours: type[Any]) -> None:
    """Let these libraries rebuild and wrap loaders of class `ours` as such, once they are imported."""
    names = _REBUILDING.keys() | _WRAPPING.keys()
    amend = functools.partial(_amend, ours)
    for name in names & sys.modules.keys():
        amend(sys.modules[name])
    if later := names - sys.modules.keys():
        sys.meta_path.insert(0, _WhenImported(dict.fromkeys(later, amend)))


def _amend(ours: type[Any], module: ModuleType) -> None:
    names, name = vars(module), module.__name__
    if name in _REBUILDING and isinstance(names.get("DataLoader"), type):
        _replace_class(ours, names, _REBUILDING[name])
    if name == "accelerate.data_loader" and "DataLoaderAdapter" in names:
        _amend_wrapper(ours, names)
    wrapper = names.get(_WRAPPING.get(name, ""))
    if isinstance(wrapper, type):
        _lend_methods(ours, wrapper)


def _replace_class(ours: type[Any], names: dict[str, Any], variable: str) -> None:
    torchs = names["DataLoader"]

    class Rebuilding(type(torchs)):  # type: ignore[misc]
        """Metaclass of a stand-in for torch's class, which makes loaders of class `ours` if one is rebuilt."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not rebuilding:
                return super().__call__(*args, **kwargs)
            source = _source(names, variable, ours)
            if source is not None:
                return ours(*args, **kwargs, **{name: getattr(source, name) for name in _OURS})
            return (torchs if kwargs.keys().isdisjoint(_OURS) else ours)(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, torchs) if cls is rebuilding else super().__instancecheck__(instance)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, torchs) if cls is rebuilding else super().__subclasscheck__(other)

    rebuilding = Rebuilding(torchs.__name__, (torchs,), {"__doc__": torchs.__doc__})
    names["DataLoader"] = rebuilding


def _amend_wrapper(ours: type[Any], names: dict[str, Any]) -> None:
    wrapper = names["DataLoaderAdapter"]
    begin = wrapper.__init__

    @functools.wraps(begin)
    def begin_with_ours(
        self: Any, dataset: Any, use_stateful_dataloader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        # Ours is stateful itself: do not replace it by torchdata's.
        source = _source(names, _REBUILDING["accelerate.data_loader"], ours)
        begin(self, dataset, use_stateful_dataloader and source is None, *args, **kwargs)
        self.use_stateful_dataloader = use_stateful_dataloader

    wrapper.__init__ = begin_with_ours


def _source(names: dict[str, Any], variable: str, ours: type[Any]) -> Any:
    """Return the loader that the innermost function of a module is rebuilding, if it is one of ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and variable:
        if frame.f_globals is names and variable in frame.f_code.co_varnames + frame.f_code.co_cellvars:
            loader = frame.f_locals.get(variable)
            return loader if isinstance(loader, ours) else None
        frame = frame.f_back
    return None


def _lend_methods(ours: type[Any], wrapper: type[Any]) -> None:
    """Make wrappers of our loaders return those of our methods that they lack."""
    if hasattr(wrapper, "__getattr__"):
        return

    def find(self: Any, name: str) -> Any:
        own = vars(self)
        loader = own.get("_dataloader") if name in _METHODS else None
        if not isinstance(loader, ours):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        before = own.get("_dpflow_state")
        if name == "state_dict" and before is not None and own.get("next_batch") is not None:
            return lambda: before
        return getattr(loader, name)

    wrapper.__getattr__ = find
    read_ahead = vars(wrapper).get("_prefetch_next_batch")
    if read_ahead is None:
        return

    @functools.wraps(read_ahead)
    def keep_state_and_read_ahead(self: Any) -> None:
        # Ray's wrapper has read one batch more than it has returned: the present state would skip that batch.
        loader = vars(self).get("_dataloader")
        self._dpflow_state = None
        if isinstance(loader, ours):
            with suppress(StateError):  # raised where a state is requested
                self._dpflow_state = loader.state_dict()
        read_ahead(self)

    wrapper._prefetch_next_batch = keep_state_and_read_ahead


class _WhenImported(importlib.abc.MetaPathFinder):
    """An import hook that calls a function with a module once it has been imported.

    Args:
        then: the functions, by the modules' names.
    """

    def __init__(self, then: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._then = then
        self._asked: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module by the other finders, and extend its loader."""
        then = self._then.get(fullname)
        if then is None or fullname in self._asked:
            return None
        self._asked.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asked.discard(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_then(module: ModuleType) -> None:
                execute(module)
                then(module)

            spec.loader.exec_module = execute_and_then  # type: ignore[method-assign]
        return spec
