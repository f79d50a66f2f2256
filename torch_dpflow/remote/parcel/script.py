"""What a script, or a notebook, defines itself travels to a flow's workers, and samples made of it travel back.

cloudpickle takes the code of such classes along. But a sample is pickled with the names of its classes, and pickle
wants to find them under these names where it writes as well as where it reads. So in a worker they are put where the
script has them: into `__main__`. A job finds its own there, as it is by then: a cell may have been run again.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import cloudpickle

from torch_dpflow.remote.parcel.fingerprint import SCRIPT


def pack(obj: Any) -> bytes:
    """`obj` as bytes, with the code of what the script defines of it. Raises what pickling it raises."""
    out = io.BytesIO()
    pickler = _Pickler(out)
    with _by_value():
        pickler.dump(obj)
        pickler.dump(pickler.own)
    return out.getvalue()


def unpack(packed: IO[bytes]) -> Any:
    """What was packed, from a file. What the script defines of it is in this process's `__main__` from now on."""
    unpickler = pickle.Unpickler(packed)
    obj, own = unpickler.load(), unpickler.load()
    for name, value in sorted(own.items()):
        value.__qualname__ = name  # cloudpickle forgets what a class is inside of
        if "<" not in name:
            _put(value, name)
    return obj


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Notes the classes and functions of the script that it comes by, by the names that they have there.

    What pickles its parts by itself, with their code, would hide them: its class says how they are seen, in a
    `__reduce_by_value__` that is to pickle's `__reduce__` what this pickler is to pickle's.
    """

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=5)
        self.own: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        by_value = getattr(type(obj), "__reduce_by_value__", None)
        if by_value is not None:
            return by_value(obj)
        if isinstance(obj, type | types.FunctionType) and obj.__module__ in SCRIPT:
            name = obj.__qualname__
            # Of two with one name the one that the script has now: a cell was run again.
            if name not in self.own or vars(sys.modules[obj.__module__]).get(name) is obj:
                self.own[name] = obj
        return super().reducer_override(obj)


@contextmanager
def _by_value() -> Iterator[None]:
    """In a process that the script has spawned, its module has a name of its own, by which no worker finds it."""
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
