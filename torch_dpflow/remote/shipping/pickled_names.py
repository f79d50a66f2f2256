"""Finds the modules that unpickling imports, without importing any of them."""

from __future__ import annotations

import _compat_pickle
import io
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.serialization import SCRIPT

#: From this protocol on pickles name the standard library's modules as Python 3 does.
_PYTHON_3 = 3


class PickledNames(NamedTuple):
    """What a pickle names."""

    #: Modules that unpickling imports, dotted, but not the script's own.
    modules: frozenset[str]
    #: Names in functions that travel as code, dotted: among them all modules that these import when they are called.
    used: frozenset[str]


def names_in(pickled: bytes) -> PickledNames:
    """What these pickles, one after the other, name. Runs nothing of them.

    They are loaded with stand-ins for whatever they name, which takes a fifth of the time of `pickletools.genops`: a
    dataset may hold millions of paths.

    Raises MessageError for what is no pickle.
    """
    names = _Names(pickled)
    try:
        names.read_all()
    except Exception as error:
        raise MessageError(f"no pickle: {type(error).__name__}: {error}") from error
    return PickledNames(frozenset(names.modules), frozenset(names.used))


class _Kind(type):
    """What a stand-in can do as an object, since it is one too."""

    def __setstate__(cls, state: Any) -> None: ...

    def __setitem__(cls, key: Any, value: Any) -> None: ...

    def append(cls, item: Any) -> None: ...

    def extend(cls, items: Any) -> None: ...

    def add(cls, item: Any) -> None: ...


class _StandIn(metaclass=_Kind):
    """Takes the place of every class, function and object that a pickle names or makes.

    A class whose objects are this class: what a call makes may be a class of which objects are made, as those of a
    script are.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return cls


class _Names(pickle.Unpickler):
    """Notes what is named; `cloudpickle` names modules and code by calls of its own functions."""

    def __init__(self, pickled: bytes) -> None:
        self._file = io.BytesIO(pickled)
        self._size = len(pickled)
        protocol = pickled[1] if pickled[:1] == pickle.PROTO and len(pickled) > 1 else 0
        self._is_old = protocol < _PYTHON_3
        super().__init__(self._file)
        self.modules: set[str] = set()
        self.used: set[str] = set()
        self._calls = {
            "subimport": self._import,
            "_builtin_type": self._builtin_type,
            "_make_function": self._note,
        }

    def read_all(self) -> None:
        while self._file.tell() < self._size:
            self.load()

    def find_class(self, module: str, name: str, /) -> Any:
        if self._is_old:
            module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
            module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        if module not in SCRIPT:
            self.modules.add(module)
        if module.startswith("cloudpickle") and name in self._calls:
            return self._calls[name]
        return _StandIn

    def _import(self, name: Any, *_: Any) -> Any:
        if isinstance(name, str):
            self.modules.add(name)
        return _StandIn

    def _builtin_type(self, name: Any, *_: Any) -> Any:
        return self._note if name == "CodeType" else _StandIn

    def _note(self, *arguments: Any) -> Any:
        """Note the names in the arguments of a code object, and the package that a function belongs to."""
        for argument in arguments:
            self.used.update(_identifiers(argument))
        return _StandIn


def _identifiers(argument: Any) -> Iterator[str]:
    if isinstance(argument, dict):
        argument = (argument.get("__package__"),)
    if isinstance(argument, tuple):
        for item in argument:
            if isinstance(item, str) and item.replace(".", "_").isidentifier():
                yield item
