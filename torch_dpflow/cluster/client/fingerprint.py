"""Digest of a flow's content, which is the same in every process that defines the same content.

A digest of the pickle would differ, as cloudpickle gives every class of a script a random number. So code is digested
by its bytecode, and everything else by its pickle.
"""

from __future__ import annotations

import dis
import hashlib
import io
import itertools
import logging
import pickle
import random
import sys
import types
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from torch_dpflow.ipc.serialization import SCRIPT
from torch_dpflow.remote.shipping.modules import is_own_path

#: Members of a class that do not affect what it does, differ from process to process, or are added when it is used:
#: `copyreg` adds `__slotnames__` when an object of the class is copied or pickled.
_NO_CODE = {"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__"}
_NO_CODE |= {"__slotnames__", "__annotations_cache__"}
#: Digested by type: random generators change with each number that is drawn, and loggers are named after modules.
_BY_TYPE = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator, logging.Logger)
#: Methods that change a container.
_CHANGING = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}
_THIS = __name__.partition(".")[0]
#: What code reads of a global variable: an attribute, an item, or None for all of it.
_Part: TypeAlias = "tuple[str, Any] | None"


def fingerprint(obj: Any) -> str:
    """Return a digest of `obj`, 16 hexadecimal digits.

    Classes and functions of installed modules are digested by name. In a script and the user's own modules, their code
    is digested, with the global variables that they read. If code reads single attributes or items of a variable, such
    as `args.size`, only these are digested: jobs that read the same data may differ in others. So may a variable
    in functions that change it, such as a cache. An object that cannot be pickled is digested by its type, and so are
    random generators and loggers.
    """
    return _digest(obj, {})


#: Functions and classes that have been digested, by id, with the digest of each.
_Memo: TypeAlias = dict[int, tuple[Any, str]]


def _digest(obj: Any, memo: _Memo) -> str:
    return hashlib.sha256(_digestible(obj, memo)).hexdigest()[:16]


def _digestible(obj: Any, memo: _Memo) -> bytes:
    out = io.BytesIO()
    try:
        _Digester(out, memo).dump(obj)
    except Exception:  # code of the object's own runs
        return f"{type(obj).__module__}.{type(obj).__qualname__}".encode()
    return out.getvalue()


class _Digester(pickle.Pickler):
    """Pickler whose output is only digested; it cannot be unpickled."""

    def __init__(self, out: io.BytesIO, memo: _Memo) -> None:
        super().__init__(out, protocol=5)
        self._memo = memo

    def persistent_id(self, obj: Any) -> Any:
        # For sets only, whose order differs from process to process.
        if isinstance(obj, set | frozenset):
            return sorted(_digest(one, dict(self._memo)) for one in obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            return str, (type(obj).__qualname__, obj.dtype, tuple(obj.shape), _content(obj), vars(obj))
        if isinstance(obj, type | types.FunctionType) and not _is_installed(obj):
            return str, (self._tell(obj),)
        if isinstance(obj, _BY_TYPE):
            return str, (type(obj).__qualname__,)
        if _is_wrapper(obj):
            return str, (type(obj), {name: value for name, value in vars(obj).items() if name not in _NO_CODE})
        return NotImplemented

    def _tell(self, obj: Any) -> str:
        """Return the digest of a function or class of the script."""
        if id(obj) not in self._memo:
            self._memo[id(obj)] = obj, obj.__qualname__  # stands for it where it refers to itself
            parts = self._class(obj) if isinstance(obj, type) else self._function(obj)
            self._memo[id(obj)] = obj, _digest(parts, self._memo)
        return self._memo[id(obj)][1]

    def _each(self, named: Mapping[Any, Any]) -> dict[Any, str]:
        """Return a digest of each value separately, so that one that cannot be pickled does not affect the others."""
        return {name: _digest(value, self._memo) for name, value in sorted(named.items())}

    def _function(self, function: types.FunctionType) -> tuple[Any, ...]:
        variables, (read, changed) = function.__globals__, _uses(function.__code__)
        used: dict[tuple[str, str], Any] = {}
        if _is_own(str(variables.get("__name__"))):  # a library's variables follow from its version
            for name in read.keys() & variables.keys() - changed:  # what it changes differs from process to process
                used |= {(name, str(part)): value for part, value in _parts(variables[name], read[name]).items()}
        cells = dict(zip(function.__code__.co_freevars, map(_cell, function.__closure__ or ()), strict=True))
        defaults = dict(enumerate(function.__defaults__ or ())), function.__kwdefaults__ or {}
        return _code(function.__code__), [self._each(one) for one in (*defaults, cells, used)]

    def _class(self, kind: type) -> tuple[Any, ...]:
        members = {name: _member(value) for name, value in vars(kind).items() if name not in _NO_CODE}
        if not members.get("__annotations__", True):
            del members["__annotations__"]  # reading the annotations of a class without any adds an empty dict
        return kind.__qualname__, kind.__bases__, self._each(members)


def _content(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's values; its pickle would contain a memory address."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()


def _member(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, cached_property):
        return value.func
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        return None
    return value


def _parts(value: Any, parts: set[_Part]) -> dict[_Part, Any]:
    """Return these parts of a global variable; all of it if that is a part, or if a method of it is called."""
    if isinstance(value, types.ModuleType) and not _is_own(value.__name__):
        return {}
    found: dict[_Part, Any] = {}
    for part in parts:
        kind, name = part or ("", "")
        try:
            found[part] = _attribute(value, name) if kind == "attribute" else value[name] if kind else value
        except Exception:  # the code would fail, or finds something else in a worker
            return {None: value}
        if kind and getattr(found[part], "__self__", None) is value:
            return {None: value}
    return found


def _attribute(value: Any, path: Iterable[str]) -> Any:
    """Return the first attribute on this path that is no module."""
    for name in path:
        value = getattr(value, name)
        if not isinstance(value, types.ModuleType):
            break
    return value


def _is_wrapper(value: Any) -> bool:
    """Return whether a decorator, such as `functools.lru_cache`, has made it of a function of the script.

    It has that function in its attributes. Pickle would record a name, which differs in spawned processes.
    """
    own = getattr(value, "__dict__", None)
    return isinstance(own, dict) and not isinstance(value, type | types.FunctionType) and _is_own(own.get("__module__"))


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None


def _code(code: types.CodeType) -> str:
    """Return a function's bytecode and constants, without line numbers."""
    constants = [_code(one) if isinstance(one, types.CodeType) else _constant(one) for one in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, constants))


class _Uses(NamedTuple):
    """What code does with global variables, by name: what it reads of each, and which it assigns or changes."""

    read: Mapping[str, set[_Part]]
    changed: set[str]


@lru_cache(maxsize=4096)
def _uses(code: types.CodeType) -> _Uses:
    """Return what the code, and functions inside it, do with global variables."""
    read, changed = defaultdict[str, set[_Part]](set), set[str]()
    steps = [*dis.get_instructions(code)]
    for at, (step, following, after) in enumerate(zip(steps, steps[1:], [*steps[2:], steps[-1]])):
        name, is_attribute = step.argval, following.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if step.opname == "STORE_GLOBAL":
            changed.add(name)
        elif step.opname != "LOAD_GLOBAL":
            continue
        elif is_attribute:
            path = itertools.takewhile(lambda one: one.opname in ("LOAD_ATTR", "LOAD_METHOD"), steps[at + 1 :])
            read[name].add(("attribute", tuple(one.argval for one in path)))
            if following.argval in _CHANGING:
                changed.add(name)
        elif following.opname == "STORE_ATTR" or after.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            changed.add(name)
        elif following.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and (
            after.opname == "BINARY_SUBSCR" or after.argrepr == "[]"
        ):
            read[name].add(("item", following.argval))
        else:
            read[name].add(None)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            inside = _uses(one)
            changed |= inside.changed
            for name, parts in inside.read.items():
                read[name] |= parts
    for name in ("__name__", "__file__"):  # they depend on where the script runs
        read.pop(name, None)
    return _Uses(read, changed)


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _is_installed(obj: Any) -> bool:
    """Return whether a class or function belongs to a library, whose name and version say what it does."""
    return not _is_own(obj.__module__) and "<" not in obj.__qualname__


@lru_cache(maxsize=4096)
def _is_own(module: str | None) -> bool:
    """Return whether this is the script, or a module of the user's own."""
    if module in SCRIPT:
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return isinstance(file, str) and (module or "").partition(".")[0] != _THIS and is_own_path(file)
