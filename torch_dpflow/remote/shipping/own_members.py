"""Members of modules: variables, and the parts of functions and classes, with functions that set them.

Functions that equal their file's definition are settled: they need not be compared again until they change.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from torch_dpflow.remote.shipping.modules import module_of
from torch_dpflow.remote.shipping.own_source import COMPUTED, Annotation, OwnSource
from torch_dpflow.remote.shipping.pickled_parts import (
    ENTRIES,
    NO_MEMBERS,
    attributes_of_named,
    content_of_cell,
    is_derived,
    is_its_dict,
)
from torch_dpflow.remote.shipping.reducers import NO_VARIABLES, LruCache
from torch_dpflow.remote.shipping.values import ATOMS

#: Kind of a member that is not compared again.
SETTLED = "as its file defines it"
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, LruCache)


class Deleted:
    """Marker for a variable that the file defines and the process lacks."""


class Codes(NamedTuple):
    """Code of a member's functions that differs from the code in the file: set by the script or rewritten by pytest."""

    #: Kind of the functions, the first element of `ModuleMember.value`.
    kind: str
    codes: tuple[types.CodeType, ...]


class Replaced(NamedTuple):
    """Function by which the script has replaced a function of the file, as with `functools.wraps`."""

    function: Any


class ModuleMember(NamedTuple):
    """Member of a module. put: function that sets its value; None: it cannot be set.

    kind: empty for a variable. Otherwise the kind of `definition`, such as "class"; `value` has the parts to compare.
    """

    value: Any
    put: Callable[[Any], object] | None
    kind: str = ""
    definition: Any = None


#: Members of a module by their paths, such as `.Crops.resize`.
ModuleMembers: TypeAlias = Mapping[str, ModuleMember]
#: Stands for a function that is as its file defines it.
AS_FILE = ModuleMember(None, None, SETTLED)
_NONE: Mapping[str, types.FunctionType] = types.MappingProxyType({})


def members_of(
    name: str, module: Any, settled: Mapping[str, types.FunctionType] = _NONE
) -> Iterator[tuple[str, ModuleMember]]:
    """Yield (path, member) for a module's variables, and for the parts of its functions and classes.

    settled: functions known to equal the file's definitions, by path; for each, `AS_FILE` is yielded.
    """
    if not isinstance(module, types.ModuleType):  # an object in the place of the module
        yield "", ModuleMember(module, None, "object")
        return
    for variable, value in [*vars(module).items()]:
        if variable in NO_VARIABLES or value is sys.modules.get(f"{name}.{variable}", COMPUTED):
            continue
        path = f".{variable}"
        if settled.get(path, COMPUTED) is value:
            yield path, AS_FILE
        else:
            yield from _members(name, path, value, functools.partial(set_attribute, module, variable), settled)


def _members(
    module: str, path: str, value: Any, put: Callable[[Any], object], settled: Mapping[str, types.FunctionType]
) -> Iterator[tuple[str, ModuleMember]]:
    functions = functions_of(value)
    if issubclass(type(value), type) and module_of(value) in (module, "") and f".{value.__qualname__}" == path:
        yield path, ModuleMember((type(value), *value.__bases__), put, "class", value)
        for name, inner in [*vars(value).items()]:
            if type(inner) is value:  # a member of an enumeration is pickled by its name
                for attribute, inside in getattr(inner, "__dict__", {}).items():
                    if not (attribute.startswith("_") and attribute.endswith("_")):
                        put = functools.partial(setattr, inner, attribute)
                        yield f"{path}.{name}.{attribute}", ModuleMember(inside, put)
            if settled.get(f"{path}.{name}", COMPUTED) is inner:
                yield f"{path}.{name}", AS_FILE
            elif issubclass(type(inner), _SLOTS) or name in _DERIVED or name.startswith("_abc_"):
                continue
            elif not is_derived(value, name, inner):
                set_inner = functools.partial(set_attribute, value, name)
                yield from _members(module, f"{path}.{name}", inner, set_inner, settled)
    elif functions and all(_is_here(one, module, path) for one in functions):
        kind = "function" if isinstance(value, types.FunctionType) else type(value).__name__
        if isinstance(value, LruCache):
            kind = f"{kind} {value.cache_parameters()}"
        variables = vars(sys.modules.get(module, types.ModuleType("")))
        if any(one.__globals__ is not variables for one in functions):  # pickled by its name, so without them
            kind = f"{kind} with other variables"
        replace = functools.partial(_set_function, functions, put)
        yield path, ModuleMember((kind, *(one.__code__ for one in functions)), replace, "function", value)
        for inner, one in inner_functions(value):
            yield from _parts_of_function(path, f"{path}{inner}", one)
        if isinstance(value, LruCache | staticmethod | classmethod):
            for name, attribute in vars(value).items():
                if not name.startswith("__"):
                    yield f"{path}.{name}", ModuleMember(attribute, functools.partial(setattr, value, name))
    elif (attributes := attributes_of_named(value, module, path[1:])) is not None:
        yield path, ModuleMember(type(value), put, "named", value)
        for name, inside in attributes.items():
            put = functools.partial(_fill, value) if name == ENTRIES else functools.partial(setattr, value, name)
            yield f"{path}.{name}", ModuleMember(inside, put)
    else:
        yield path, ModuleMember(value, put)


#: Members of classes that follow from others, and annotations, which count as the files have them.
_DERIVED = NO_MEMBERS | {"__abstractmethods__", "__annotations__", "__parameters__"}
_SLOTS = types.MemberDescriptorType | types.GetSetDescriptorType


def functions_of(value: Any) -> list[Any]:
    """Return the functions in a function, a method's wrapper or a property; an empty list for other objects."""
    if type(value) is types.FunctionType:
        # A function of `torch.compile` computes what the original one does, and has parts that differ by process.
        return [getattr(value, "_torchdynamo_orig_callable", value)]
    kind = type(value)  # an object can raise when it is asked for its `__class__`
    inside: list[Any] = [getattr(value, "__wrapped__", value) if issubclass(kind, _WRAPPERS) else value]
    if issubclass(kind, property):
        inside = [one for one in (value.fget, value.fset, value.fdel) if one is not None]
    elif issubclass(kind, functools.cached_property):
        inside = [value.func]
    return inside if all(type(one) is types.FunctionType for one in inside) else []


def inner_functions(value: Any) -> list[tuple[str, types.FunctionType]]:
    """Return (suffix in the paths of its attributes, such as ".fget"; function) for each of `functions_of(value)`."""
    functions = functions_of(value)
    if isinstance(value, property):
        return [(f".{name}", one) for name in ("fget", "fset", "fdel") if (one := getattr(value, name)) is not None]
    return [("" if type(value) is types.FunctionType else ".__wrapped__", one) for one in functions]


def _is_here(function: types.FunctionType, module: str, path: str) -> bool:
    if module_of(function) not in (module, ""):
        return False
    if f".{function.__qualname__}" == path:
        return True
    outer, _, name = path.rpartition(".")
    own = function.__qualname__.rpartition(".")
    return (f".{own[0]}" if own[0] else "", own[2]) in (
        (outer, name),
        (outer, name.removeprefix(f"_{outer.rpartition('.')[2].lstrip('_')}")),
    )


def _parts_of_function(path: str, inner: str, function: types.FunctionType) -> Iterator[tuple[str, ModuleMember]]:
    """Yield a function's defaults, closure variables and attributes. inner: the function's path in its wrapper."""
    if inner.endswith((".fset", ".fdel")):
        path = inner
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for number, (name, value) in enumerate(zip(names, defaults, strict=True)):
        yield f"{path}({name})", ModuleMember(value, functools.partial(_set_default, function, number))
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"{path}({name})", ModuleMember(value, functools.partial(_set_keyword_default, function, name))
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield (
                f"{path}[{name}]",
                ModuleMember(content_of_cell(cell), functools.partial(setattr, cell, "cell_contents")),
            )
    for name, value in vars(function).items():
        yield f"{inner}.{name}", ModuleMember(value, functools.partial(setattr, function, name))


def set_attribute(holder: Any, name: str, value: Any) -> None:
    """Set an attribute, or delete it if the value is `Deleted`.

    If both values are dicts, lists, sets or plain objects of one type, the present one is filled with the new content,
    because other objects may refer to it.
    """
    present = vars(holder).get(name)
    if value is Deleted:
        delattr(holder, name)
    elif type(present) is type(value) and type(value) in (dict, set):
        present.clear()
        present.update(value)
    elif type(present) is type(value) is list:
        present[:] = value
    elif type(present) is type(value) and module_of(type(value)) != "builtins" and is_its_dict(value):
        vars(present).clear()
        vars(present).update(vars(value))
    else:
        setattr(holder, name, value)


def _fill(container: Any, entries: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(entries)


def _set_function(functions: Sequence[types.FunctionType], put: Callable[[Any], object], value: Any) -> None:
    if not isinstance(value, Codes):
        put(value.function if isinstance(value, Replaced) else value)
        return
    for function, code in zip(functions, value.codes, strict=True):
        function.__code__ = code


def _set_default(function: types.FunctionType, number: int, value: Any) -> None:
    defaults = [*(function.__defaults__ or ())]
    defaults[number] = value
    function.__defaults__ = tuple(defaults)


def _set_keyword_default(function: types.FunctionType, name: str, value: Any) -> None:
    function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), name: value}


# ---- settled functions

#: Parts of a function that are replaced, and never changed.
_FIXED = operator.attrgetter("__code__", "__defaults__", "__name__", "__qualname__", "__module__", "__doc__")
#: Parts of a function that are changed in place.
_HELD = operator.attrgetter("__kwdefaults__", "__annotations__", "__dict__")
_IMMUTABLE = ATOMS - {bytearray}


class Settled(NamedTuple):
    """Record that functions of a module equal its file's definitions, with the inputs of that comparison."""

    module: Any
    source: OwnSource
    #: The functions, by path.
    functions: Mapping[str, types.FunctionType]
    #: Objects of which the functions consist; a function has changed if one was replaced.
    parts: list[Any]
    #: Annotations with their values: what they evaluate to depends on the module's variables.
    annotations: list[tuple[Annotation, Any]]

    @classmethod
    def of(cls, module: Any, source: OwnSource, members: ModuleMembers, others: Collection[str]) -> Settled:
        """Return the record for the functions of a module that equal its file's definitions.

        Args:
            source: definitions in the module's file.
            members: members of the module, from `members_of`.
            others: paths of members that do not provably equal the file's definitions.
        """
        # A default or a docstring that differs counts as a part of its function.
        differ = {path[:at] for path in others for at in range(1, len(path) + 1) if path[at : at + 1] in ".(["}
        functions = {
            path: member.definition
            for path, member in members.items()
            if member.kind == "function" and path not in differ and _is_fixed(member.definition)
        }
        annotations = {
            (one.text, id(function.__annotations__[name])): (one, function.__annotations__[name])
            for path, function in functions.items()
            for name, one in source.annotations.get(path, {}).items()
        }
        return cls(module, source, functions, _parts_of(module, functions.values()), [*annotations.values()])

    def holds(self, module: Any, source: OwnSource) -> bool:
        """Return whether the functions still equal their definitions: no input of the comparison has changed."""
        if module is not self.module or source is not self.source:
            return False
        parts = _parts_of(module, self.functions.values())
        return (
            len(parts) == len(self.parts)
            and all(map(operator.is_, parts, self.parts))
            and all(one.makes(value, vars(module), {}) for one, value in self.annotations)
        )


def _is_fixed(function: Any) -> bool:
    """Return whether no part of a function can change in place."""
    if type(function) is not types.FunctionType or vars(function) or {*function.__code__.co_freevars} - {"__class__"}:
        return False
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    return _IMMUTABLE.issuperset(map(type, defaults))


def _parts_of(module: Any, functions: Iterable[types.FunctionType]) -> list[Any]:
    functions = [*functions]
    held = [*filter(None, chain.from_iterable(map(_HELD, functions)))]
    lengths = map(len, held)
    values = chain.from_iterable(map(dict.values, held))
    file = getattr(module, "__file__", None)
    return [file, *chain.from_iterable(map(_FIXED, functions)), *held, *lengths, *chain.from_iterable(held), *values]
