"""What the pickler's reductions of classes, functions and objects consist of."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from torch_dpflow.ipc.serialization import SCRIPT
from torch_dpflow.remote.shipping.values import module_of

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
#: Names of the arguments by which cloudpickle makes a class.
CLASS_ARGUMENTS = {
    "_make_skeleton_class": ("type_constructor", "name", "bases", "type_kwargs"),
    "_make_skeleton_enum": ("bases", "name", "qualname", "members"),
}


def is_split(obj: Any, state: Any) -> bool:
    """Return whether this is the state of an object with slots, which pickle sets by itself."""
    if hasattr(type(obj), "__setstate__"):
        return False
    return type(state) is tuple and len(state) == 2 and all(type(one) in (dict, types.NoneType) for one in state)


def is_its_dict(value: Any) -> bool:
    """Return whether an object is pickled as its `__dict__`, and nothing else."""
    try:
        _, arguments, *state = value.__reduce_ex__(4)[:3]
        return bool(vars(value)) and len(arguments) == 1 and state == [vars(value)] and not isinstance(value, type)
    except Exception:
        return False


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
    """Return the name of a class, or by which the script's module, or another that was loaded, has a function."""
    module = module_of(obj)
    if not module:
        return None
    holder: Any = sys.modules.get(module)
    for name in obj.__qualname__.split("."):
        holder = getattr(holder, "__dict__", {}).get(name)
    if holder is not obj and not isinstance(obj, type):  # a class inside a function has its name too
        return None
    return f"{SCRIPT[0] if module in SCRIPT else module}.{obj.__qualname__}"
