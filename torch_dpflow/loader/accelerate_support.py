"""Makes accelerate rebuild our loaders as ours, with our options.

Libraries rebuild a loader from its attributes. Lightning calls our class, which needs no support. accelerate calls
torch's class, or torchdata's, by its name in `accelerate.data_loader` and passes torch's arguments only, so its users
would silently lose our workers. It has no hook; but the loader that it rebuilds is the argument `dataloader` of the
calling function.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

_ACCELERATE = "accelerate.data_loader"
#: The arguments that torch's loader does not have.
_OURS = ("options", "flow", "address", "job", "platform")


def keep_class_under_accelerate(ours: type[Any]) -> None:
    """Have accelerate rebuild loaders of class `ours` as such, whether it has been imported or will be."""
    module = sys.modules.get(_ACCELERATE)
    if module is None:
        sys.meta_path.insert(0, _WhenImported(_ACCELERATE, functools.partial(_amend, ours)))
    else:
        _amend(ours, module)


def _amend(ours: type[Any], module: ModuleType) -> None:
    names = vars(module)
    if not {"DataLoader", "DataLoaderAdapter"} <= set(names):  # another version of accelerate
        return
    torchs, adapter = names["DataLoader"], names["DataLoaderAdapter"]
    begin = adapter.__init__

    class Rebuilding(type(torchs)):  # type: ignore[misc]
        """Metaclass of a stand-in for torch's class, which makes loaders of class `ours` if accelerate rebuilds one."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not rebuilding:
                return super().__call__(*args, **kwargs)
            source = _source(names, ours)
            if source is None:
                return torchs(*args, **kwargs)
            return ours(*args, **kwargs, **{name: getattr(source, name) for name in _OURS})

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, torchs) if cls is rebuilding else super().__instancecheck__(instance)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, torchs) if cls is rebuilding else super().__subclasscheck__(other)

    rebuilding = Rebuilding(torchs.__name__, (torchs,), {"__doc__": torchs.__doc__})

    @functools.wraps(begin)
    def begin_with_ours(
        self: Any, dataset: Any, use_stateful_dataloader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        # Ours is stateful itself: do not replace it by torchdata's.
        begin(self, dataset, use_stateful_dataloader and _source(names, ours) is None, *args, **kwargs)
        self.use_stateful_dataloader = use_stateful_dataloader

    names["DataLoader"] = rebuilding
    adapter.__init__ = begin_with_ours


def _source(names: dict[str, Any], ours: type[Any]) -> Any:
    """The loader that the innermost function of accelerate's module is rebuilding, if it is one of ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is names and "dataloader" in frame.f_code.co_varnames:
            loader = frame.f_locals.get("dataloader")
            return loader if isinstance(loader, ours) else None
        frame = frame.f_back
    return None


class _WhenImported(importlib.abc.MetaPathFinder):
    """An import hook that calls a function with a module once it has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then
        self._asks_others = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module by the other finders, and extend its loader."""
        if fullname != self._name or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks_others = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_then(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = execute_and_then  # type: ignore[method-assign]
        return spec
