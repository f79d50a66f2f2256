"""Helpers that describe how pickle and cloudpickle reduce classes, functions and objects."""

from __future__ import annotations

import copyreg
import functools
import sys
import types
import typing
from typing import Any

from cloudpickle import cloudpickle

from torch_dpflow.ipc.serialization import SCRIPT
from torch_dpflow.remote.shipping.modules import module_of

#: Members of a class that do not affect what it does, or that are added when it is used: `copyreg` adds
#: `__slotnames__`. pydantic derives its three from the rest of the class.
NO_MEMBERS = frozenset(
    [
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "__qualname__",
        "__firstlineno__",
        "__static_attributes__",
        "__slotnames__",
        "__annotations_cache__",
        "__pydantic_core_schema__",
        "__pydantic_validator__",
        "__pydantic_serializer__",
        "__classcell__",
        "__annotate_func__",
    ]
)
#: Last name in the path of the entries of a container that is pickled by its name.
ENTRIES = "(entries)"
#: By cloudpickle's function that makes a class, the names of its arguments.
CLASS_ARGUMENTS = {
    "_make_skeleton_class": ("type_constructor", "name", "bases", "type_kwargs"),
    "_make_skeleton_enum": ("bases", "name", "qualname", "members"),
}


def is_split(obj: Any, state: Any) -> bool:
    """Return whether `state` is a pair (attributes, slots), which pickle sets without calling `__setstate__`."""
    if hasattr(type(obj), "__setstate__"):
        return False
    return type(state) is tuple and len(state) == 2 and all(type(one) in (dict, types.NoneType) for one in state)


def is_its_dict(value: Any) -> bool:
    """Return whether an object is pickled only as its `__dict__`, which is not empty."""
    try:
        _, arguments, *state = value.__reduce_ex__(4)[:3]
        return bool(vars(value)) and len(arguments) == 1 and state == [vars(value)] and not isinstance(value, type)
    except Exception:
        return False


def reduces_itself(kind: type) -> bool:
    """Return whether a class defines how its objects are pickled."""
    methods: Any = kind
    return methods.__reduce_ex__ is not object.__reduce_ex__ or methods.__reduce__ is not object.__reduce__


def is_found(obj: Any, module: str, name: str) -> bool:
    """Return whether this dotted name in a module refers to `obj`."""
    holder: Any = sys.modules.get(module)
    for one in name.split("."):
        holder = getattr(holder, one, None)
    return holder is obj


def slots_of(obj: Any) -> dict[str, Any]:
    names: list[str] = copyreg._slotnames(type(obj))  # type: ignore[attr-defined]
    return {name: getattr(obj, name) for name in names if hasattr(obj, name)}


def attributes_of_named(obj: Any, module: str, name: str) -> dict[str, Any] | None:
    """Return the attributes of an object that pickle sends as just this name in the module; None for other objects.

    Functions decorated by cachetools are such objects. A dict, list or set also gets the attribute `ENTRIES`.
    """
    kind = type(obj)
    if not reduces_itself(kind) or not isinstance(kind.__reduce__, types.FunctionType):
        return None
    try:
        if obj.__reduce_ex__(5) != name or cloudpickle._whichmodule(obj, name) != module:
            return None
    except Exception:  # code of the object's own runs
        return None
    found = dict(getattr(obj, "__dict__", {})) | slots_of(obj)
    for plain in (dict, list, set):
        if isinstance(obj, plain):
            found[ENTRIES] = plain(obj)
    return found


def is_derived(kind: type, name: str, value: Any) -> bool:
    """Return whether a member is the inherited `__init__` that `typing.Protocol` sets when a class is first used."""
    if name != "__init__" or typing.Protocol not in kind.__mro__:
        return False
    inits = [vars(base)[name] for base in kind.__mro__[1:] if name in vars(base)]
    return value is next((one for one in inits if module_of(one) != typing.__name__), object.__init__)


def cached_properties(kind: type) -> set[str]:
    return {
        name
        for base in kind.__mro__
        for name, value in vars(base).items()
        if isinstance(value, functools.cached_property)
    }


def content_of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return types.CellType


def root_of(obj: Any) -> str | None:
    """Return MODULE.NAME of a class, or of a function that its module has by that name; None for others."""
    module = module_of(obj)
    if not module:
        return None
    holder: Any = sys.modules.get(module)
    for name in obj.__qualname__.split("."):
        holder = getattr(holder, "__dict__", {}).get(name)
    if holder is not obj and not isinstance(obj, type):  # a class inside a function has its name too
        return None
    return f"{SCRIPT[0] if module in SCRIPT else module}.{obj.__qualname__}"
