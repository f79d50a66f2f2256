"""State of the user's own modules in memory, where it does not provably equal their files' definitions.

Workers import the files. A variable, a default or a function that the script has set, or that the file computes, is
sent by value, and compared between jobs. After an import a worker compares its values with the script's: a different
value is set, or raises UsageError if the script's value was not sent.
"""

from __future__ import annotations

import abc
import builtins
import inspect
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from torch_dpflow.ipc.serialization import SCRIPT
from torch_dpflow.remote.shipping.canonical import Walk
from torch_dpflow.remote.shipping.code_digest import code_digest
from torch_dpflow.remote.shipping.content_pack import can_pack
from torch_dpflow.remote.shipping.modules import is_own_path
from torch_dpflow.remote.shipping.own_members import (
    AS_FILE,
    SETTLED,
    Codes,
    Deleted,
    ModuleMember,
    ModuleMembers,
    Replaced,
    Settled,
    functions_of,
    members_of,
)
from torch_dpflow.remote.shipping.own_source import COMPUTED, OwnCode, OwnSource
from torch_dpflow.remote.shipping.part_tree import PartNode, digest_of, whole
from torch_dpflow.remote.shipping.reducers import NO_VARIABLES
from torch_dpflow.remote.shipping.values import is_harmless, is_mutable

#: Maximum bytes of a value that is sent.
_MAX_SENT = 4 << 20
#: Kinds of functions by their decorators, as `OwnSource.kinds`, that another function can replace.
_KINDS = frozenset(["function", "property", "staticmethod", "classmethod", "cached_property"])


class NotSent:
    """Marker for a value that is only compared, for example because it is too large to be sent."""


class SetMember(NamedTuple):
    """Member that workers compare by `digest`, if not empty, and set to `value` if it differs and is not `NotSent`."""

    digest: bytes
    value: Any


@dataclass(frozen=True)
class OwnState:
    """State of own modules that is sent to workers, in addition to their files."""

    #: Members to compare or to set, by module and path.
    members: Mapping[str, Mapping[str, SetMember]] = field(default_factory=dict)
    #: Own modules that were not compared, because no code that is sent imports them by name.
    others: frozenset[str] = frozenset()
    #: Names of the script's variables.
    script: frozenset[str] = frozenset()
    #: Patterns of parts that do not count; None for a private loader, which has none.
    ignore: Sequence[str] | None = ()
    #: By path of a member, the path of the first member that is the same object.
    shared: Mapping[str, str] = field(default_factory=dict)
    #: By a name under which the script has put an object into `sys.modules`, a description of the object.
    placed: Mapping[str, str] = field(default_factory=dict)

    def replaced(self) -> frozenset[int]:
        """Return the ids of functions that are sent by value although workers could import them by their names."""
        return _ids_of_replaced(one.value for of in self.members.values() for one in of.values())

    def unknown(self) -> list[str]:
        """Return the paths of members that cannot be compared; in workers they keep the values from the import."""
        return [f"{name}{path}" for name, of in self.members.items() for path, one in of.items() if not one.digest]


def set_members(
    walk: Walk, code: OwnCode, modules: Collection[str], settled: dict[str, Settled]
) -> dict[str, dict[str, tuple[PartNode, Any]]]:
    """Return {module: {path: (part, value to send)}} of members that do not provably equal the files' definitions.

    modules: names of own modules; only loaded ones are read. settled: the `Settled` of each module from an earlier
    call, with which unchanged functions are skipped; this call updates it.
    """
    found, members = {}, dict[str, ModuleMembers]()
    for name in sorted(modules & sys.modules.keys()):
        module, source, known = sys.modules[name], code.sources[name], settled.get(name)
        if known is None or not known.holds(module, source):
            known = None
        members[name] = dict(members_of(name, module, {} if known is None else known.functions))
        found[name] = members_not_as_file(walk, name, module, source, members[name])
        if known is None:
            settled[name] = Settled.of(module, source, members[name], found[name])
    for (name, path), first in shared_members(members).items():
        if not origins(path, code.sources[name]):
            found[name][f"{path}{SAME}"] = (PartNode(digest_of("".join(first).encode()), "".join(first)), NotSent)
    walk.run()
    return found


#: Ends the path of an entry that records that a member is the same object as another member.
SAME = "(is)"


def shared_members(modules: Mapping[str, ModuleMembers]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return {(module, path) of a member: (module, path) of the first member that is the same mutable object}."""
    first: dict[int, tuple[str, str]] = {}
    found = {}
    for name, members in modules.items():
        for path, member in members.items():
            if not member.kind and is_mutable(member.value):
                before = first.setdefault(id(member.value), (name, path))
                if before != (name, path):
                    found[name, path] = before
    return found


def own_state(
    members: Mapping[str, Mapping[str, tuple[PartNode, Any]]],
    own: Collection[str],
    others: frozenset[str],
    ignore: Sequence[str] | None,
) -> OwnState:
    """Return the state to send. members: from `set_members`. own: all own modules. others, ignore: as in `OwnState`."""
    sent = {}
    replaced = _ids_of_replaced(value for of in members.values() for _, value in of.values())
    for name, of in members.items():
        sent[name] = {
            path: _set_member(part, value if can_pack(value, _MAX_SENT, replaced) else NotSent)
            for path, (part, value) in of.items()
        }
    script = frozenset(name for name in vars(sys.modules["__main__"]) if not name.startswith("__"))
    present = {name: dict(members_of(name, sys.modules[name])) for name in sorted(members)}
    shared = {"".join(one): "".join(first) for one, first in shared_members(present).items()}
    return OwnState(sent, others, script, ignore, shared, dict(placed_modules(own)))


def _set_member(part: PartNode, value: Any) -> SetMember:
    # The script can have set what looks like the value of a cached property, so it is sent if that is possible.
    digest = part.digest if value is NotSent else whole(part)
    return SetMember(digest if part.is_known else b"", value)


def _ids_of_replaced(values: Iterable[Any]) -> frozenset[int]:
    replaced = [value.function for value in values if type(value) is Replaced]
    return frozenset(id(one) for function in replaced for one in (function, *functions_of(function)))


def members_not_as_file(
    walk: Walk, name: str, module: types.ModuleType, source: OwnSource, members: ModuleMembers
) -> dict[str, tuple[PartNode, Any]]:
    """Return {path: (part, value to send)} of what does not provably equal the file's definitions, or is missing."""
    found = {}
    walk.read_from(_folder_of(name, module))
    for path, member in members.items():
        if member.kind != SETTLED and not _is_as_file(walk, path, member, module, source):
            value, sent = member.value, member.value
            if member.kind == "function" and _is_replaced(path, member.definition, module, source):
                value = value[0], *map(_unnamed, functions_of(member.definition))
                sent = Replaced(member.definition)
            elif member.kind == "function":
                sent = Codes(value[0], value[1:])
            elif member.kind or is_harmless(type(value)):  # type: ignore[arg-type]
                sent = NotSent
            found[path] = (walk.digest_apart(value), sent)
    for path in chain(source.literals, source.imported, source.kinds, source.bases):
        if path in members:
            continue
        function, _, default = path.partition("(")
        outer = function if default else path.rpartition(".")[0]
        holder = members.get(outer, AS_FILE)
        if not outer or holder.kind == "class" or (holder.kind == "function" and default and outer not in found):
            found[path] = (PartNode(digest_of(b"deleted"), "deleted"), Deleted)
    for path, value in _labels_not_as_file(module, members, source):
        found[path] = (walk.digest_apart(value), value)
    walk.read_from("")
    return found


def _is_replaced(path: str, definition: Any, module: types.ModuleType, source: OwnSource) -> bool:
    """Return whether a function has replaced a function that the file defines without other decorators."""
    kind = source.kinds.get(path)
    if kind not in _KINDS or path in source.literals or path in source.imported:
        return False
    return type(definition).__name__ != kind or any(
        "__wrapped__" in vars(one) or one.__globals__ is not vars(module) or {*one.__code__.co_freevars} - {"__class__"}
        for one in functions_of(definition)
    )


def _unnamed(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of a function with the same code and variables that cannot be found by its name."""
    code, variables, name = function.__code__, function.__globals__, function.__name__
    return types.FunctionType(code, variables, name, function.__defaults__, function.__closure__)


def placed_modules(own: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, description) of objects that the script has put into `sys.modules` under a different name.

    own: own modules, whose files workers have.
    """
    for name, module in [*sys.modules.items()]:
        top, spec = name.partition(".")[0], getattr(module, "__spec__", None)
        if getattr(spec, "name", None) == name or name in SCRIPT or top in sys.stdlib_module_names:
            continue
        if name in own and getattr(module, "__name__", name) == name:  # it has put an object into its own place
            continue
        files = [getattr(one, "__file__", None) for one in (module, sys.modules.get(top))]
        if not any(isinstance(file, str) and not is_own_path(file) for file in files):
            yield name, f"{getattr(module, '__name__', type(module).__qualname__)}"


def _folder_of(name: str, module: types.ModuleType) -> str:
    """Return the folder from which a module is imported, which differs in workers."""
    folder = os.path.dirname(getattr(module, "__file__", None) or "")
    depth = name.count(".") + hasattr(module, "__path__")
    for _ in range(depth):
        folder = os.path.dirname(folder)
    return folder


# ---- whether it is what the file defines


def _is_as_file(walk: Walk, path: str, member: ModuleMember, module: types.ModuleType, source: OwnSource) -> bool:
    value = member.value
    if member.kind == "function":
        kind, *codes = value
        digests = [code_digest(one, set()) for one in codes]
        defined = source.codes.get(path, [])
        return source.kinds.get(path) == kind and digests == (defined if kind == "property" else defined[-1:])
    if member.kind == "class":
        names = source.bases.get(path)
        bases = [_resolved(module, one) for one in names or ()] or [object]
        return names is not None and [*value[1:]] == bases and any(value[0] is type(one) for one in (int, *bases))
    if (literal := source.literals.get(path, COMPUTED)) is not COMPUTED:
        return walk.is_same(literal, value)
    return any(imported(outer, name) is value for outer, name in origins(path, source))


def origins(path: str, source: OwnSource) -> list[tuple[str, str]]:
    """Return (module, name) pairs from which a variable may be imported; none if the file also defines it."""
    if path in source.literals or path in source.kinds or path in source.bases:
        return []
    if path in source.imported:
        return [source.imported[path]]
    return [(outer, path[1:]) for outer in source.stars] if path.count(".") == 1 else []


def imported(module: str, name: str) -> Any:
    """Return the value of a loaded module's variable `name`, or else its loaded submodule of this name.

    If there is neither, return `COMPUTED`. For an empty name, return the module; None if it is not loaded.
    """
    loaded = sys.modules.get(module)
    if not name:
        return loaded
    return vars(loaded).get(name, sys.modules.get(f"{module}.{name}", COMPUTED)) if loaded is not None else COMPUTED


def _resolved(module: types.ModuleType, dotted: str | None) -> Any:
    first, *rest = (dotted or "?").split(".")
    found = vars(module).get(first, getattr(builtins, first, None))
    for name in rest:
        found = getattr(found, name, None)
    return found


# ---- docstrings, names, annotations, registered classes and orders

#: Ends of paths: classes that were registered with an abstract class, and the order of attributes.
_REGISTERED, _ORDER = "(registered)", "(order)"


def _labels_not_as_file(module: Any, members: ModuleMembers, source: OwnSource) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of docstrings, names, annotations and orders that differ from the file's definitions.

    members: members of the module, from `members_of`.
    """
    if not isinstance(module, types.ModuleType):
        return
    yield from _texts("", vars(module), vars(module), source)
    for path, member in members.items():
        definition = member.definition
        if member.kind == "class" and path in source.bases:
            variables = {**vars(definition), "__annotations__": _annotations_of(definition)}
            if "__dataclass_fields__" in variables and path not in source.docs:
                del variables["__doc__"]  # generated: defaults as they print here, with an address or in a set's order
            yield from _name(path, definition)
            yield from _texts(path, variables, vars(module), source)
            if "_abc_impl" in variables and (registered := abc._get_dump(definition)[0]):  # type: ignore[attr-defined]
                yield f"{path}.{_REGISTERED}", {one() for one in registered}
            yield from _order(path, [*vars(definition)], source)
        elif type(definition) is types.FunctionType and path in source.kinds:
            yield from _name(path, definition)
            labels = {"__doc__": definition.__doc__, "__annotations__": definition.__annotations__}
            yield from _texts(path, labels, vars(module), source)
            yield from _order(path, [*vars(definition)], source)
    names = [name for name in vars(module) if f"{module.__name__}.{name}" not in sys.modules]
    yield from _order("", [name for name in names if name not in NO_VARIABLES], source)


def _annotations_of(kind: type) -> Any:
    try:  # since Python 3.14 they are evaluated when they are read
        return kind.__annotations__ if "__annotate_func__" in vars(kind) else vars(kind).get("__annotations__")
    except NameError:
        return None


def _name(path: str, definition: Any) -> Iterator[tuple[str, Any]]:
    names = path.rpartition(".")[2], getattr(getattr(definition, "__code__", None), "co_name", None)
    if definition.__name__ not in names:
        yield f"{path}.__name__", definition.__name__


def _texts(
    path: str, labels: Mapping[str, Any], variables: Mapping[str, Any], source: OwnSource
) -> Iterator[tuple[str, Any]]:
    doc, defined = labels.get("__doc__"), source.docs.get(path)
    if doc != defined and _cleaned(doc) != _cleaned(defined):
        yield f"{path}.__doc__", doc
    given, annotations = labels.get("__annotations__") or {}, source.annotations.get(path, {})
    inner = labels if path in source.bases else {}
    if given.keys() != annotations.keys() or not all(
        annotations[name].makes(value, variables, inner) for name, value in given.items()
    ):
        yield f"{path}.__annotations__", dict(given)


def _cleaned(doc: Any) -> Any:
    """Return a docstring as the compiler stores it since Python 3.13: without indentation."""
    return inspect.cleandoc(doc) if sys.version_info >= (3, 13) and isinstance(doc, str) else doc


def _order(path: str, names: list[str], source: OwnSource) -> Iterator[tuple[str, Any]]:
    present = [name for name in names if not (name.startswith("_") and name.endswith("_"))]
    defined = dict.fromkeys(source.order.get(path, ()))
    others = [name for name in present if name not in defined]
    here = {*present}
    is_in_order = [name for name in present if name in defined] == [name for name in defined if name in here]
    if not is_in_order or len(others) > 1 or (others and present[-1:] != others):
        yield f"{path}.{_ORDER}", tuple(present)


def _put_in_order(holder: Any, names: tuple[str, ...]) -> None:
    """Bring attributes into this order. Raises ValueError if an attribute is missing."""
    if tuple(name for name in vars(holder) if name in names) == names:
        return
    values = [(name, vars(holder)[name]) for name in names if name in vars(holder)]
    if len(values) < len(names):
        raise ValueError(f"attributes of {holder!r} are missing")
    for name, value in values:
        delattr(holder, name)
        setattr(holder, name, value)


def _register(holder: Any, classes: set[type]) -> None:
    """Register classes with an abstract class."""
    for one in classes:
        holder.register(one)


#: By the end of a path, the function that sets such members; called with the class or module and the value.
SPECIAL: Mapping[str, Callable[[Any, Any], object]] = {_ORDER: _put_in_order, _REGISTERED: _register}
