"""Canonical form of the objects that a pickler sends: a tree of digests, equal for equal objects in any process.

By it, jobs compare the content that they send to workers. The digests are of the values to which the pickler reduces
objects (as `__reduce__` does), and not of a pickle: that would also differ by random numbers of classes, memory
addresses, line numbers and the order of sets. An object that cannot be reduced is unknown, and equal only to itself.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections import deque
from collections.abc import Callable, Generator
from pathlib import PurePath
from typing import Any, TypeAlias

from cloudpickle import cloudpickle

from torch_dpflow.ipc.messages.content_parts import RANDOM_STATE
from torch_dpflow.ipc.serialization import SCRIPT
from torch_dpflow.remote.shipping.code_digest import ADDRESS, code_digest
from torch_dpflow.remote.shipping.modules import is_definition, is_own_class, module_of
from torch_dpflow.remote.shipping.part_tree import (
    PartNode,
    digest_of,
    digests_of,
    entries,
    order_of,
    parts_of,
    text_of,
    unknown,
    with_aliases,
)
from torch_dpflow.remote.shipping.pickled_parts import (
    CLASS_ARGUMENTS,
    NO_MEMBERS,
    cached_properties,
    content_of_cell,
    is_found,
    is_split,
    root_of,
)
from torch_dpflow.remote.shipping.reducers import NO_VARIABLES, ModuleVariables, is_arguments, reads_all_variables
from torch_dpflow.remote.shipping.values import (
    ATOMS,
    GENERATORS,
    HIDING,
    PATHS,
    TORCH_GENERATOR,
    Bulk,
    Column,
    Columns,
    columns_of,
    is_harmless,
    memory_of,
    repeated,
    set_bytes,
)
from torch_dpflow.workers.script_settings import RelativePaths

#: Marks what counts by its type.
_BY_NAME = "harmless"
#: Maximum elements of a list, and of a mapping, whose differences are named one by one.
_MAX_ITEMS, _MAX_KEYS = 16, 64
Steps: TypeAlias = "Generator[Any, PartNode, PartNode]"


class Walk:
    """Traversal of the objects that are sent, which computes their digests: `add` objects, then `run`.

    Args:
        pickler: decides how objects are reduced.
        sent_arguments: returns whether an attribute of `argparse.Namespace` is sent, by its name; None: all are.
        bulk: cache of the digests of large values, which another walk over the same objects can share.
    """

    def __init__(self, pickler: Any, *, sent_arguments: Callable[[str], bool] | None = None, bulk: Bulk) -> None:
        self._pickler = pickler
        self._sent_arguments = sent_arguments
        self._bulk = bulk
        #: Digests by path: of functions, classes and variables of the script, and of added objects.
        self.roots: dict[str, PartNode] = {}
        self._waiting: deque[tuple[str, Any]] = deque()
        self._queued: dict[str, Any] = {}
        #: The variables of the script, by its name: a spawned process has them twice.
        self._script: dict[str, Any] | None = None
        #: Finished objects by id, with the objects, so that no id is used again, and whether they can be compared.
        self._known: dict[int, tuple[Any, PartNode, bool]] = {}
        self._known_from = {"": self._known}
        #: Modules to which the sent objects refer; names and texts in their code.
        self.modules: set[str] = set()
        self.names: set[str] = set()
        #: Whether an `argparse.Namespace` was found.
        self.has_arguments = False
        #: Whether an object of an installed class, whose code is not inspected, has an `argparse.Namespace`.
        self.lends_arguments = False
        self._addresses: set[str] = set()
        #: Folder of the module whose members are digested; empty: none. Paths in it are digested relative to it.
        self.folder = ""
        #: Whether all that was digested last can be compared.
        self._is_known = True
        self.paths = RelativePaths()

    def add(self, path: str, obj: Any) -> bool:
        """Add an object to be compared under this path; return False if another object has the path."""
        if path not in self._queued:
            self._queued[path] = obj
            self._waiting.append((path, obj))
        return self._queued[path] is obj

    def read_from(self, folder: str) -> None:
        """Set the folder of the module to which the next objects belong; empty: the dataset or the script."""
        self.folder = folder
        self._known = self._known_from.setdefault(folder, {})

    def run(self) -> None:
        """Digest all added objects, and the objects to which they refer, into `roots`."""
        while self._waiting:
            path, obj = self._waiting.popleft()
            self.roots[path] = self._digest(obj, path)
        with_aliases(self.roots, dict(sorted(self._queued.items(), key=lambda one: one[0])))

    def digest_apart(self, obj: Any) -> PartNode:
        """Digest one object at once. Objects to which it refers may be added to the walk; call `run` to digest them."""
        part = self._digest(obj, "")
        part.is_known = self._is_known
        return part

    def is_same(self, one: Any, other: Any) -> bool:
        """Return whether two objects have the same type and value; 1 is not 1.0."""
        if type(one) is not type(other):
            return False
        if type(one) in ATOMS and (one is other or not self.folder or type(one) is not str):
            return repr(one) == repr(other)
        return self.digest_apart(one).digest == self.digest_apart(other).digest

    def _digest(self, obj: Any, path: str) -> PartNode:
        """Digest one object, without recursion.

        Tarjan's algorithm for strongly connected components. A reference back to an object whose component is not
        finished is digested as the distance between the two objects. An object is kept for other references only once
        its component is finished. So a digest does not depend on the objects that were digested before.
        """
        open_: dict[int, int] = {}
        members: list[Any] = []
        frames: list[list[Any]] = []
        self._is_known = True
        if type(obj) in ATOMS:
            return self._atom(obj)
        found: Any = self._start(obj, path, open_, members, frames)
        while frames:
            frame = frames[-1]
            steps, current, position = frame[0], frame[1], frame[2]
            try:
                child = steps.send(found)
            except StopIteration as finished:
                found = finished.value
            except Exception:  # code of the object's own runs
                found, frame[4] = unknown(current), False
            else:
                known = self._atom_or_known(child)
                if known is not None:
                    found = known[0]
                    frame[4] &= known[1]
                elif (at := open_.get(id(child))) is not None:
                    frame[3] = min(frame[3], at)
                    found = PartNode(digest_of(b"again", str(position - at).encode()), "itself")
                else:
                    found = self._start(child, "", open_, members, frames)
                continue
            frames.pop()
            if not frames:  # a root is known by its name
                self._is_known = frame[4]
                break
            frames[-1][4] &= frame[4]
            if frame[3] == position:
                for member in members[position:]:
                    del open_[id(member)]
                del members[position:]
                self._known[id(current)] = (current, found, frame[4])
            else:
                frames[-1][3] = min(frames[-1][3], frame[3])
        result: PartNode = found
        return result

    def _start(self, obj: Any, path: str, open_: dict[int, int], members: list[Any], frames: list[list[Any]]) -> Any:
        """Add an object to `open_` and `members`, and its steps to `frames`; return None, which starts the steps."""
        position = len(members)
        open_[id(obj)] = position
        members.append(obj)
        frames.append([self._steps(obj, path), obj, position, position, True])
        return None

    def _atom_or_known(self, obj: Any) -> tuple[PartNode, bool] | None:
        if type(obj) in ATOMS:
            return self._atom(obj), True
        known = self._known.get(id(obj))
        return None if known is None else known[1:]

    def _atom(self, obj: Any) -> PartNode:
        if type(obj) is str and self._addresses and ADDRESS.search(obj):
            obj = self._without_addresses(obj)
        if self.folder and type(obj) is str and obj.startswith(self.folder):
            obj = f"\0own{obj[len(self.folder) :]}"
        if type(obj) is str and not self.folder:
            self.paths.look(obj)
        return PartNode(digest_of(b"plain", pickle.dumps(obj, 4)), text_of(obj))

    def _without_addresses(self, name: str) -> str:
        return ADDRESS.sub(lambda found: "#" if found[0] in self._addresses else found[0], name)

    def _steps(self, obj: Any, path: str) -> Steps:
        kind = type(obj)
        if not self.folder:
            self.paths.look_in(obj)
        if kind is list or kind is tuple:
            return self._sequence(obj, 0)
        if kind is Column:
            return self._sequence(obj.values, obj.level)
        if kind is dict:
            return self._mapping(obj)
        if kind is set or kind is frozenset:
            return self._set(obj)
        if kind is Columns:
            return self._columns(obj)
        if issubclass(kind, types.ModuleType):
            return self._module(obj)
        if kind in PATHS or (self.folder and issubclass(kind, PurePath)):
            return self._path(obj)
        if issubclass(kind, GENERATORS) or (module_of(kind), kind.__qualname__) == TORCH_GENERATOR:
            return self._generator(obj)
        if is_arguments(obj):
            return self._arguments(obj)
        if is_harmless(kind):  # type: ignore[arg-type]
            library = obj._name if module_of(kind) == "ctypes" else ""
            return self._other((_BY_NAME, f"{kind.__qualname__} {library}".rstrip()), path)
        if kind in HIDING:
            return self._content(obj)
        return self._other(obj, path)

    # ---- containers

    def _plain(self, obj: Any) -> bytes | None:
        """Return the digest of a container of plain values; None for a module's small one: it may contain paths."""
        return None if self.folder and len(obj) <= _MAX_KEYS else self._bulk.of(obj)

    def _sequence(self, obj: Any, level: int) -> Steps:
        kind, text = type(obj).__name__, text_of(obj)
        if (plain := self._plain(obj)) is not None:
            return PartNode(digest_of(kind.encode(), plain), text)
        again = repr(repeated(obj)).encode()
        if (columns := columns_of(obj, level)) is not None:
            column = yield columns
            return PartNode(digest_of(kind.encode(), b"columns", again, column.digest), text)
        found: list[PartNode] = []
        for one in obj:
            part = yield one
            found.append(part)
        own = digest_of(kind.encode(), str(len(found)).encode())
        if len(found) <= _MAX_ITEMS:
            parts = {f"[{number}]": part for number, part in enumerate(found)}
            return PartNode(own, text, with_aliases(parts, dict(zip(parts, obj, strict=True))))
        return PartNode(digest_of(own, again, *(part.digest for part in found)), text)

    def _columns(self, obj: Columns) -> Steps:
        kind = b"" if obj.kind is None else (yield obj.kind).digest
        return PartNode(digest_of(b"columns", obj.label, kind, *(yield from digests_of(obj.columns))))

    def _mapping(self, obj: dict[Any, Any]) -> Steps:
        text = text_of(obj)
        if len(obj) > _MAX_KEYS or not all(type(key) is str for key in obj):
            if (plain := self._plain(obj)) is not None:
                return PartNode(digest_of(b"dict", plain), text)
            keys = yield list(obj)
            values = yield list(obj.values())
            return PartNode(digest_of(b"dict", keys.digest, values.digest), text)
        parts = {}
        for key, value in obj.items():
            parts[f"[{key!r}]"] = yield value
        # The order counts: code may follow it.
        own = digest_of(b"dict", *(key.encode(errors="replace") for key in parts))
        return PartNode(own, text, with_aliases(parts, dict(zip(parts, obj.values(), strict=True))))

    def _set(self, obj: Any) -> Steps:
        kind = type(obj).__name__.encode()
        plain = None if self.folder and len(obj) <= _MAX_KEYS else set_bytes(obj)
        if plain is not None:
            return PartNode(digest_of(kind, b"sorted", plain), text_of(obj))
        return PartNode(digest_of(kind, *sorted((yield from digests_of(obj)))), text_of(obj))

    def _arguments(self, obj: Any) -> Steps:
        self.has_arguments = True
        sent = self._sent_arguments
        named = {f".{name}": value for name, value in vars(obj).items() if sent is None or sent(name)}
        parts = yield from parts_of(named)
        if len(parts) == len(vars(obj)):  # else they cannot be listed in workers
            parts |= order_of(vars(obj))
        return PartNode(digest_of(b"argparse.Namespace"), "arguments", parts)

    def _path(self, obj: PurePath) -> Steps:
        return PartNode(digest_of(b"path", type(obj).__qualname__.encode(), (yield str(obj)).digest), f"{obj}")

    def _content(self, obj: Any) -> Steps:
        """Digest the content of an object that pickle refuses."""
        found = yield HIDING[type(obj)](obj)
        return PartNode(digest_of(type(obj).__qualname__.encode(), found.digest), type(obj).__qualname__)

    def _generator(self, obj: Any) -> Steps:
        return PartNode((yield from self._other(obj, "")).digest, RANDOM_STATE)

    # ---- what pickle names

    def _module(self, obj: types.ModuleType) -> Steps:
        reduced = self._pickler.dispatch_table[types.ModuleType](obj)
        if reduced[0] is cloudpickle.subimport:
            return self._named(obj.__name__, "")
        variables = {f".{name}": value for name, value in reduced[1][1].items() if name not in NO_VARIABLES}
        parts = yield from parts_of(variables)
        parts |= order_of(variables)
        return PartNode(digest_of(b"module", obj.__name__.encode()), "module", parts)

    def _named(self, module: str, name: str) -> PartNode:
        module = SCRIPT[0] if module in SCRIPT else module
        self.modules.add(module)
        return PartNode(digest_of(b"name", module.encode(), name.encode()), f"{module}.{name}".strip("."))

    # ---- everything else, as the pickler reduces it

    def _other(self, obj: Any, path: str) -> Steps:
        if type(obj) is tuple:
            return PartNode(digest_of(*map(str.encode, obj)), obj[1])
        if (content := memory_of(obj)) is not None:
            label, values, text = content
            return PartNode(
                digest_of(b"memory", label, values if isinstance(values, bytes) else (yield values).digest), text
            )
        reduced = self._pickler.reducer_override(obj)
        if reduced is NotImplemented:
            if is_definition(obj):
                return self._named(str(cloudpickle._whichmodule(obj, obj.__qualname__)), obj.__qualname__)
            reduce = self._pickler.dispatch_table.get(type(obj))
            reduced = obj.__reduce_ex__(5) if reduce is None else reduce(obj)
        if isinstance(reduced, str):
            module = cloudpickle._whichmodule(obj, reduced) or ""
            if module in SCRIPT or not is_found(obj, module, reduced):
                raise pickle.PicklingError(f"{reduced} of {module}")  # workers have no variables of the script
            return self._named(module, reduced)
        function = reduced[0]
        if getattr(function, "__module__", "") == cloudpickle.__name__ and is_definition(obj):
            if (root := root_of(obj)) is not None and root != path and self.add(root, obj):
                return PartNode(digest_of(b"root", root.encode()), root)
            if isinstance(obj, types.FunctionType):
                return (yield from self._function(obj, reduced))
            if len(reduced) > 2:
                return (yield from self._class(obj, reduced, path))
        elif isinstance(obj, types.CodeType):
            return PartNode(code_digest(obj, self.names, self._without_addresses), "code")
        elif isinstance(obj, property):
            reduced = (function, reduced[1][:3])  # without its docstring
        elif function is cloudpickle._make_typevar:
            reduced = (function, reduced[1][:-1])  # without a random number
        return (yield from self._reduced(obj, reduced))

    def _reduced(self, obj: Any, reduced: tuple[Any, ...]) -> Steps:
        function, arguments, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
        if len(reduced) == 2 and type(function) is type and function in ATOMS:  # it is sent as a plain value
            return (yield function(*arguments))
        if isinstance(obj, set | frozenset):  # in any order
            arguments = [set(one) if type(one) is list else one for one in arguments]
        pairs = None if pairs is None else [*pairs]
        held = [[*(items or ())], *([one[at] for one in pairs or ()] for at in (0, 1))]
        own = yield from digests_of((function, *arguments, *held, setter))
        parts: dict[str, PartNode] = {}
        named: dict[str, Any] = {}
        derived = cached_properties(type(obj)) | {"__module__", "__doc__"}  # two by `functools.update_wrapper`
        for number, each in enumerate(state if is_split(obj, state) else (state,)):
            if type(each) is dict and all(type(name) is str for name in each):
                for name, value in sorted(each.items()):
                    if name in ("__module__", "__doc__"):
                        continue
                    self.lends_arguments |= is_arguments(value) and not is_own_class(type(obj))
                    part = yield value
                    if name in derived:
                        part = PartNode(part.digest, part.text, optional=True)
                    if f".{name}" in parts:  # both count
                        own.append(digest_of(b"again", name.encode(errors="replace"), part.digest))
                    else:
                        parts[f".{name}"] = part
                        named |= {} if name in derived else {f".{name}": value}
                parts |= {} if number else order_of(name for name in each if name not in derived)
            elif each is not None:
                own.append(digest_of(b"state", str(number).encode(), (yield each).digest))
        text = f"{obj}" if isinstance(obj, PurePath) else type(obj).__qualname__
        if items is not None or pairs is not None:
            text = entries(len(held[0]) + len(held[1]))
        return PartNode(digest_of(b"object", *own), text, with_aliases(parts, named))

    def _function(self, obj: types.FunctionType, reduced: tuple[Any, ...]) -> Steps:
        attributes, slots = reduced[2]
        if isinstance(reduced[1][1], ModuleVariables):
            self.modules.add(reduced[1][1].module.__name__)
        code, parts, module = obj.__code__, dict[str, PartNode](), str(obj.__globals__.get("__name__"))
        self.names.add(str(obj.__globals__.get("__package__")))
        cells = dict(zip(code.co_freevars, obj.__closure__ or (), strict=True))
        variables: dict[str, Any] = dict(slots["__globals__"])
        defaults = obj.__defaults__ or ()
        given = dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
        given |= obj.__kwdefaults__ or {}
        self._addresses |= {str(id(value)) for value in (*given.values(), *variables.values())}
        inner = {f"({self._without_addresses(name)})": value for name, value in given.items()}
        inner |= {f"[{name}]": content_of_cell(cell) for name, cell in cells.items()}
        inner |= {f".{name}": value for name, value in attributes.items()}
        parts |= yield from parts_of(inner)
        parts |= order_of(attributes)
        if slots["__annotations__"]:
            parts[".__annotations__"] = yield dict(slots["__annotations__"])
        is_shared = vars(sys.modules.get(module, object)) is obj.__globals__
        if module in SCRIPT:
            module, self._script = SCRIPT[0], self._script or obj.__globals__
            is_shared = self._script is obj.__globals__
        for name, value in sorted(variables.items()):
            if name == "__name__":
                continue
            if not is_shared or not self.add(f"{module}.{name}", value):
                parts[f"({name})"] = yield value
        of = SCRIPT[0] if obj.__module__ in SCRIPT else module_of(obj)
        own = [code_digest(code, self.names, self._without_addresses)]
        own += [one.encode() for one in (obj.__name__, obj.__qualname__, of, module)]
        names = map(self._without_addresses, variables if reads_all_variables(code) else sorted(variables))
        own += [digest_of(name.encode()) for name in names]
        yield from digests_of(slots["_cloudpickle_submodules"])  # not counted: code can load them itself
        return PartNode(digest_of(b"function", *own), "code", parts)

    def _class(self, obj: type, reduced: tuple[Any, ...], path: str) -> Steps:
        self._addresses.add(str(id(obj)))
        arguments = dict(zip(CLASS_ARGUMENTS[reduced[0].__name__], reduced[1], strict=False))
        own = [obj.__qualname__.encode()]
        given = {name: value for name, value in arguments.get("type_kwargs", {}).items() if name != "__module__"}
        made_of = [arguments[name] for name in ("type_constructor", "bases", "members") if name in arguments]
        own += yield from digests_of((*made_of, dict(sorted(given.items()))))
        named: dict[str, Any] = {}
        parts = order_of(name for name in reduced[2][0] if name not in (*NO_MEMBERS, "__annotations__", "_abc_impl"))
        for name, value in sorted(reduced[2][0].items()):
            if name in NO_MEMBERS or (name in ("__annotations__", "_abc_impl") and not value):
                continue
            part = yield set(value) if name == "_abc_impl" else value
            if part.text != f"{path}.{name}" or not path:  # else it is a root by itself
                parts[f".{name}"], named[f".{name}"] = part, value
        return PartNode(digest_of(b"class", *own), "class", with_aliases(parts, named))
