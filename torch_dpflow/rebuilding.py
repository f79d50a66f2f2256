"""Libraries that rebuild a loader from its attributes: how our options come along, and our class stays.

Lightning calls our class with our attributes; that needs nothing. accelerate calls torch's class by its name in
`accelerate.data_loader` and passes torch's arguments only, so that its users would silently lose our workers. It has
no hook. But `num_workers` is an argument that every rebuild passes on, and `_is_accelerate_prepared` an attribute that
accelerate asks for just before it rebuilds.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch_dpflow.options import LoaderOptions


class WorkerCount(int):
    """A loader's number of workers, which also carries its options to a loader built from its attributes."""

    options: LoaderOptions | None

    @classmethod
    def carrying(cls, count: Any, options: LoaderOptions | None) -> Any:
        """`count` with the options; anything but an int is left to torch."""
        if not isinstance(count, int):
            return count
        carried = cls(count)
        carried.options = options
        return carried

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerCount.carrying, (int(self), self.options)


class AskedByAccelerate:
    """`_is_accelerate_prepared` of our class: False, and from now on accelerate builds ours from ours.

    accelerate sets the attribute on the loaders that it has prepared, and that one is found first.
    """

    def __get__(self, loader: Any, owner: type[Any]) -> bool:
        module = sys.modules.get("accelerate.data_loader")
        build = getattr(module, "DataLoader", None)
        if module is not None and build is not None and not isinstance(build, _Build):
            vars(module)["DataLoader"] = _Build(build, owner)
        return False


class _Build:
    """Stands in for torch's class where accelerate builds a loader, and builds ours where it was one of ours."""

    def __init__(self, torchs: Any, ours: type[Any]) -> None:
        functools.update_wrapper(self, torchs, updated=())
        self._torchs = torchs
        self._ours = next(base for base in ours.__mro__ if base.__module__ == "torch_dpflow.loader")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        count = kwargs.get("num_workers")
        if isinstance(count, WorkerCount):
            return self._ours(*args, options=count.options, **kwargs)
        return self._torchs(*args, **kwargs)
