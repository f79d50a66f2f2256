"""Sends classes and functions of a script, or a notebook, to a flow's workers, so that samples can be made of them.

cloudpickle includes the code of such classes. But a sample is pickled with the names of its classes, and pickle looks
them up by these names where it writes as well as where it reads. So a worker puts them where the script has them, into
`__main__`. A job finds its own there, in its present form: a cell may have been run again.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Protocol

import cloudpickle

from torch_dpflow.ipc.serialization import SCRIPT


def pack(obj: Any) -> bytes:
    """Pickle `obj`, with the code of the script's classes and functions in it. Raises what pickling raises."""
    out = io.BytesIO()
    ScriptPickler(out).pack(obj)
    return out.getvalue()


def unpack(packed: IO[bytes]) -> Any:
    """Unpickle from a file, and put the script's classes and functions into this process's `__main__`."""
    for name in SCRIPT:  # whichever of the two names the script had where this was pickled
        sys.modules.setdefault(name, sys.modules["__main__"])
    unpickler = pickle.Unpickler(packed)
    obj, own = unpickler.load(), unpickler.load()
    for name, value in sorted(own.items()):
        value.__qualname__ = name  # cloudpickle forgets what a class is inside of
        if "<" not in name:
            _put(value, name)
    return obj


class Output(Protocol):
    """What a pickle is written to."""

    def write(self, chunk: Any, /) -> object:
        """Take a part of it."""


class ScriptPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by `pack` alone. Collects the classes and functions of the script that it pickles, by their names there.

    An object that pickles its own parts with cloudpickle would hide them from this pickler; its class has a
    `__reduce_by_value__` for it, in place of `__reduce__`.
    """

    def __init__(self, out: Output) -> None:
        super().__init__(out, protocol=5)
        self.own: dict[str, Any] = {}

    def pack(self, obj: Any) -> None:
        """Write `obj` for `unpack`."""
        with _by_value():
            self.dump(obj)
            self.dump(self.own)

    def reducer_override(self, obj: Any) -> Any:
        by_value = getattr(type(obj), "__reduce_by_value__", None)
        if by_value is not None:
            return by_value(obj)
        if isinstance(obj, type | types.FunctionType) and obj.__module__ in SCRIPT:
            name = obj.__qualname__
            # Of two with one name, the present one: a cell was run again.
            if name not in self.own or vars(sys.modules[obj.__module__]).get(name) is obj:
                self.own[name] = obj
        return super().reducer_override(obj)


@contextmanager
def _by_value() -> Iterator[None]:
    """Pickle the script's module by value in a process that it spawned, where the module has another name."""
    main = sys.modules["__main__"]
    if main.__name__ in ("__main__", *cloudpickle.list_registry_pickle_by_value()):
        yield
        return
    cloudpickle.register_pickle_by_value(main)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(main)


def _put(value: Any, name: str) -> None:
    holder: Any = sys.modules[value.__module__]
    *outer, last = name.split(".")
    for part in outer:
        if not hasattr(holder, part):
            setattr(holder, part, types.SimpleNamespace())
        holder = getattr(holder, part)
    setattr(holder, last, value)
