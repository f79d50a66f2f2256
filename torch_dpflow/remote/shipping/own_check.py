"""Comparison of the user's modules in a worker with those of the script; members that differ are set as there."""

from __future__ import annotations

import functools
import io
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.content_parts import is_ignored
from torch_dpflow.remote.shipping.canonical import Walk
from torch_dpflow.remote.shipping.content_pack import ScriptPickler
from torch_dpflow.remote.shipping.own_members import (
    Codes,
    ModuleMember,
    ModuleMembers,
    Replaced,
    inner_functions,
    members_of,
    set_attribute,
)
from torch_dpflow.remote.shipping.own_source import COMPUTED, OwnSource, parsed
from torch_dpflow.remote.shipping.own_state import (
    SAME,
    SPECIAL,
    NotSent,
    OwnState,
    imported,
    members_not_as_file,
    origins,
)
from torch_dpflow.remote.shipping.part_tree import whole
from torch_dpflow.remote.shipping.reducers import set_script_variables
from torch_dpflow.remote.shipping.values import Bulk, is_mutable
from torch_dpflow.workers.script_settings import ScriptSettings


class Beginning:
    """First part of a pickle, which prepares a worker for the parts that need own modules.

    Unpickling it applies the script's settings, which modules can read at their import. Then it sets the members that
    differ from the script's: in loaded modules at once, and in others after their import. Unpickling and these imports
    raise UsageError if a module has a different value that was not sent, or that was not compared between jobs.
    """

    def __init__(self, settings: ScriptSettings | None, state: OwnState) -> None:
        self.settings = settings
        self.state = state

    def __reduce__(self) -> Any:
        return _begin, (self.settings, self.state)


def _begin(settings: ScriptSettings | None, state: OwnState) -> Beginning:
    if settings is not None:
        settings.apply()
    finder = _Checked(state)
    finder.check([name for name in (*state.others, *state.members) if name in sys.modules])
    sys.meta_path[:] = [finder, *(one for one in sys.meta_path if not isinstance(one, _Checked))]
    return Beginning(settings, state)


def guard_script(state: OwnState) -> None:
    """Make reading an unsent variable of the script, as an attribute of its module or by `eval`, raise UsageError."""
    set_script_variables(state.script)
    script = sys.modules["__main__"]
    if type(script) in (types.ModuleType, ScriptModule):
        vars(script)["__unsent__"] = state.script
        script.__class__ = ScriptModule


class ScriptModule(types.ModuleType):
    """The script's module in a worker, with only the variables that were sent.

    Reading a variable that was not sent, or listing all variables, raises UsageError.
    """

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            return _ScriptVariables(super().__getattribute__(name))
        return super().__getattribute__(name)

    def __dir__(self) -> list[str]:
        raise _unsent("all variables")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and name in super().__getattribute__("__unsent__"):
            raise _unsent(name)
        raise AttributeError(f"the script's module has no attribute {name!r}")


class _ScriptVariables(dict[str, Any]):
    """Copy of the variables of a script's module, in which variables that were not sent raise UsageError."""

    def __missing__(self, name: str) -> Any:
        if name in dict.get(self, "__unsent__", ()):
            raise _unsent(name)
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def setdefault(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else super().setdefault(name, default)

    def __contains__(self, name: object) -> bool:
        return self.get(name, self) is not self  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[str]:
        raise _unsent("all variables")

    keys = values = items = copy = __iter__  # type: ignore[assignment]


def _unsent(name: str) -> UsageError:
    return UsageError(
        f"{name!r} of the script was read from its module in a worker, which has only what the dataset's code reads by "
        "name, as V and not as sys.modules['__main__'].V: read it by its name, or put it into the dataset"
    )


class _Checked(MetaPathFinder):
    """Finder of own modules, which checks each module after its import."""

    def __init__(self, state: OwnState) -> None:
        self._state = state
        self._depth = 0
        self._imported: list[str] = []
        self._has_other_imports = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an own module, with a loader that checks it; None for all other modules."""
        if fullname in self._state.placed:
            raise UsageError(
                f"the module {fullname!r} cannot be imported in a worker: the script has put another one, "
                f"{self._state.placed[fullname]!r}, into sys.modules by that name. Import that by its own name, or "
                f"write a file of the name {fullname!r}"
            )
        if fullname not in self._state.members and fullname not in self._state.others:
            return None
        finders = [one.find_spec for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        spec = next((spec for find in finders if (spec := find(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None and fullname not in sys.modules:
            run: Any = spec.loader.exec_module
            vars(spec.loader)["exec_module"] = functools.partial(self._run, run)
        return spec

    def _run(self, run: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
        """Execute a module. All are checked after the outermost import, because modules can import each other."""
        self._depth += 1
        try:
            run(module)
            self._imported.append(module.__name__)
        finally:
            self._depth -= 1
        if not self._depth:
            imported, self._imported = self._imported, []
            self.check(imported)

    def check(self, names: Sequence[str]) -> None:
        """Compare loaded modules with the script's process, and set members that differ."""
        self._has_other_imports = False
        replaced = {name: self._set(name) for name in names}
        loaded = [name for name in self._state.members if name in sys.modules]
        if self._has_other_imports or any(replaced.values()):
            self._set_again(loaded, replaced)
        self._share(loaded)

    def _set_again(self, loaded: Sequence[str], replaced: dict[str, list[str]]) -> None:
        """Update imported names in loaded modules to the members that were set, then set members that still differ."""
        for _ in loaded:  # a module can import from one that imports
            if not [name for name in loaded if self._import_again(name)]:
                break
        for name in loaded:
            self._set(name, replaced.setdefault(name, []))

    def _share(self, names: Sequence[str]) -> None:
        """Make members of loaded modules share an object exactly where they share one in the script."""
        shared = self._state.shared
        objects: dict[str, Any] = {}
        owners: dict[int, str] = {}
        found = [(name, *one) for name in names for one in members_of(name, sys.modules[name])]
        found.sort(key=lambda one: one[1] in self._state.members[one[0]])  # first what was not sent, and stays
        for name, path, member in found:
            value = member.value
            if member.kind or member.put is None or not is_mutable(value):
                continue
            first = shared.get(f"{name}{path}", f"{name}{path}")
            if first not in objects and owners.get(id(value), first) != first:
                sent = self._state.members[name].get(path)
                if sent is None or sent.value is NotSent or id(sent.value) in owners:
                    raise _other(f"{name}{path}", self._state)
                value = sent.value
            value = objects.setdefault(first, value)
            owners[id(value)] = first
            if value is not member.value:
                _replacing(member.put)(value)

    def _import_again(self, name: str) -> bool:
        """Update a module's imported names to the present members of their modules; return whether any has changed."""
        module: Any = sys.modules[name]
        changed = False
        if not isinstance(module, types.ModuleType):
            return False
        source = _source_of(module)
        for variable, value in [*vars(module).items()]:
            path = f".{variable}"
            skipped = variable.startswith("__") or path in self._state.members[name]
            places = [] if skipped else origins(path, source)
            found = [one for one in (imported(*place) for place in places) if one is not COMPUTED]
            if found and not any(one is value for one in found):
                setattr(module, variable, found[-1])
                changed = True
        return changed

    def _set(self, name: str, done: Sequence[str] | None = None) -> list[str]:
        """Set a module's differing members; return their paths. done: paths set before; None: skip imported names."""
        state = self._state
        if name in state.others:
            if not is_ignored(name, state.ignore or ()):
                raise UsageError(
                    f"the module {name!r} was imported in a worker of a flow, and no code that was sent imports it by "
                    "its name: its variables were not compared between jobs. Import it in the module of the dataset, "
                    f"or give JobOptions(ignore=[{name!r}])"
                )
            return []
        module, sent = sys.modules[name], state.members[name]
        walk, source = Walk(ScriptPickler(io.BytesIO()), bulk=Bulk()), _source_of(module)
        members = dict(members_of(name, module))
        here = members_not_as_file(walk, name, module, source, members)
        replaced = [*(done or ())]
        for path in dict.fromkeys((*sent, *here)):  # attributes are added in the order of the script
            wanted = sent.get(path)
            if path.endswith(SAME):
                continue
            part = here[path][0] if path in here else None
            is_same = wanted is not None and part is not None and wanted.digest in (part.digest, whole(part))
            if wanted is not None and (not wanted.digest or (is_same and not isinstance(wanted.value, Replaced))):
                continue
            if any(path == one or (path.startswith(one) and path[len(one)] in ".([") for one in replaced):
                continue
            if wanted is None and done is None and path in members and origins(path, source):
                self._has_other_imports = True  # of what has been set, or is about to be
                continue
            put: Any = members[path].put if path in members else _putter(members, module, path)
            if origins(path, source):  # which others have too
                put = _replacing(put)
            if (
                wanted is not None
                and isinstance(wanted.value, Codes)
                and not _has_codes(members.get(path), wanted.value)
            ):
                put = None
            if wanted is None or wanted.value is NotSent or put is None:
                if not is_ignored(f"{name}{path}", state.ignore or ()):
                    raise _other(f"{name}{path}", self._state)
                continue
            try:
                put(wanted.value)
            except ValueError as error:  # code with other variables of outer functions
                raise _other(f"{name}{path}", self._state) from error
            if not isinstance(wanted.value, Codes):  # defaults, variables of outer functions and attributes count alone
                replaced.append(path)
        return replaced


def _has_codes(member: ModuleMember | None, sent: Codes) -> bool:
    """Return whether a member consists of functions of the same kind as the sent code."""
    return member is not None and member.kind == "function" and member.value[0] == sent.kind


def _putter(members: ModuleMembers, module: types.ModuleType, path: str) -> Callable[[Any], object] | None:
    """Return a function that sets a member which the module lacks; None if it cannot be set."""
    outer, _, name = path.rpartition(".")
    if "(" in outer or "[" in path:
        return None
    holder: Any = module
    if outer in members:
        holder = members[outer].definition
        if holder is None:
            holder = module
            for one in outer.split(".")[1:]:
                holder = vars(holder)[one]
    elif outer:
        above, _, inner = outer.rpartition(".")
        definition = members[above].definition if above in members else None
        holder = dict(inner_functions(definition)).get(f".{inner}")
        if holder is None:
            return None
    if name in SPECIAL:
        return functools.partial(SPECIAL[name], holder)
    if "(" in name:
        return None
    return functools.partial(set_attribute, holder, name)


def _replacing(put: Any) -> Any:
    """Return a variant of the setter `put` that replaces the present object, instead of filling it in place."""
    return functools.partial(setattr, *put.args) if getattr(put, "func", None) is set_attribute else put


def _other(name: str, state: OwnState) -> UsageError:
    hint = "" if state.ignore is None else f", or give JobOptions(ignore=[{name!r}]) if it does not affect samples"
    return UsageError(
        f"{name} has another value in the script than after an import in a worker, and cannot be sent: the script has "
        "set it, its file has changed since the script imported it, or it depends on the process. Put it into the "
        f"dataset, or restart the script{hint}"
    )


def _source_of(module: types.ModuleType) -> OwnSource:
    file = module.__file__ or ""
    if not file.endswith(".py"):
        return OwnSource()
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    with open(file, "rb") as source:
        return parsed(source.read(), package)
