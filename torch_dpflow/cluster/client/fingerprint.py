"""Digest of a flow's content, which is the same in every process that defines the same content.

A digest of the pickle would differ, as cloudpickle gives every class of a script a random number. So code is digested
by its bytecode, and everything else by its pickle.
"""

from __future__ import annotations

import dis
import hashlib
import io
import pickle
import types
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from torch_dpflow.ipc.serialization import SCRIPT

#: Members of a class that do not affect what it does, or differ from process to process.
_NO_CODE = {"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__"}
#: The types of a script's global variables that are digested with the functions that read them. Others, such as parsed
#: arguments, may differ between jobs that read the same data.
_CONSTANTS = (bool, int, float, complex, str, bytes)


def fingerprint(obj: Any) -> str:
    """Return a digest of `obj`, 16 hexadecimal digits.

    Classes and functions of imported modules are digested by name, those of a script by their code, with the functions,
    classes and constants of the script that they use. An object that cannot be pickled is digested by its type.
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
        if isinstance(obj, type | types.FunctionType) and not _is_importable(obj):
            return str, (self._tell(obj),)
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
        used = {name: function.__globals__.get(name) for name in _globals(function.__code__)}
        used = {name: value for name, value in used.items() if _counts(value)}
        cells = dict(zip(function.__code__.co_freevars, map(_cell, function.__closure__ or ()), strict=True))
        defaults = dict(enumerate(function.__defaults__ or ())), function.__kwdefaults__ or {}
        return _code(function.__code__), [self._each(one) for one in (*defaults, cells, used)]

    def _class(self, kind: type) -> tuple[Any, ...]:
        members = {name: _member(value) for name, value in vars(kind).items() if name not in _NO_CODE}
        return kind.__qualname__, kind.__bases__, self._each(members)


def _content(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's values; its pickle would contain a memory address."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()


def _member(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        return None
    return value


def _counts(value: Any) -> bool:
    """Return whether a variable of the script is digested with the functions that read it."""
    is_code = isinstance(value, type | types.FunctionType) and not _is_importable(value)
    return is_code or isinstance(value, _CONSTANTS)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None


def _code(code: types.CodeType) -> str:
    """Return a function's bytecode and constants, without line numbers."""
    constants = [_code(one) if isinstance(one, types.CodeType) else _constant(one) for one in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, constants))


def _globals(code: types.CodeType) -> set[str]:
    """Return the global names that the code, or a function inside it, looks up."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    found -= {"__name__", "__file__"}  # they depend on where the script runs
    return found.union(*(_globals(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _is_importable(obj: Any) -> bool:
    """Return whether another process can import it by name, so that its code is not sent."""
    return obj.__module__ not in SCRIPT and "<" not in obj.__qualname__
