"""A digest of what a flow's workers load that is the same in every process that makes the same thing.

The pickle that travels does not serve: cloudpickle gives every class of a script a random number. Here code is
taken by what it does, and everything else by its pickle.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import types
from typing import Any

import torch

#: Members of a class that say nothing of what it does, or differ from process to process.
_NO_CODE = {"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__"}


def fingerprint(obj: Any) -> str:
    """A digest of `obj`, 16 hexadecimal digits.

    Classes and functions of an imported module count by name, those of a script by their code. What cannot be
    pickled counts by its type alone.
    """
    return hashlib.sha256(_digestible(obj)).hexdigest()[:16]


def _digestible(obj: Any) -> bytes:
    out = io.BytesIO()
    try:
        _Digester(out, protocol=5).dump(obj)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return f"{type(obj).__module__}.{type(obj).__qualname__}".encode()
    return out.getvalue()


class _Digester(pickle.Pickler):
    """Writes what is never read again."""

    def persistent_id(self, obj: Any) -> Any:
        # Of sets alone: their order differs from process to process.
        return sorted(map(fingerprint, obj)) if isinstance(obj, set | frozenset) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            return str, (type(obj).__qualname__, obj.dtype, tuple(obj.shape), _content(obj), vars(obj))
        if isinstance(obj, types.FunctionType) and not _is_importable(obj):
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            return str, (_code(obj.__code__), obj.__defaults__, cells)
        if isinstance(obj, type) and not _is_importable(obj):
            members = {name: value for name, value in sorted(vars(obj).items()) if name not in _NO_CODE}
            told = {name: _member(value) for name, value in members.items()}
            return str, (obj.__qualname__, obj.__bases__, told)
        return NotImplemented


def _content(tensor: torch.Tensor) -> str:
    """A digest of a tensor's values; its pickle holds an address of its memory."""
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


def _code(code: types.CodeType) -> str:
    """What a function does, without where it stands."""
    constants = [_code(one) if isinstance(one, types.CodeType) else _constant(one) for one in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, constants))


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _is_importable(obj: Any) -> bool:
    """Whether another process finds it by its name, so that its code does not travel."""
    return obj.__module__ != "__main__" and "<" not in obj.__qualname__
