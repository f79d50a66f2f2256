"""Search for modules without importing them: the user's own modules, and the modules that a pickle needs."""

from __future__ import annotations

import _compat_pickle
import io
import os
import pickle
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ModuleSpec, PathFinder
from typing import Any, NamedTuple

from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.serialization import SCRIPT

#: Directories that pip and distributions install into.
_INSTALLED = {"site-packages", "dist-packages"}
#: This package. A worker has imported its own when code arrives, so it is compared by version and never sent, from
#: wherever it was imported here: an editable install is an install.
_THIS = __name__.partition(".")[0]
#: Suffixes of importable files; bytecode comes from sources.
_SUFFIXES = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)
#: Statements that import, also inside functions. Finds some in texts too, which costs an unneeded file.
_IMPORTS = re.compile(
    rb"(?:^|[;:])[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n;#]*)|import[ \t]+([\w.,\\ \t]+))",
    re.MULTILINE,
)


class OwnModule(NamedTuple):
    """Package of the user, with everything below it; or module of the user, alone or in a namespace package."""

    name: str
    #: Directories of a package, in the order of its `__path__`; the file of a module.
    paths: tuple[str, ...]
    is_package: bool


def module_of(definition: Any) -> str:
    """Return the name of the module of a class or a function; empty if it has none, as after `exec` without a name."""
    return str(getattr(definition, "__module__", None) or "")


def is_definition(obj: Any) -> bool:
    """Return whether an object is a class or a Python function, and not a proxy with such a `__class__`."""
    return issubclass(type(obj), type | types.FunctionType)


def find_spec(name: str) -> ModuleSpec | None:
    """Return a module's spec; None if there is no such module. Unlike importlib's function, this imports no parent."""
    found, places = None, None
    for prefix in _prefixes(name):
        if found is not None and places is None:  # a module that is not a package
            return None
        loaded = sys.modules.get(prefix)
        found = getattr(loaded, "__spec__", None) or _search(prefix, places)
        if found is None:
            return None
        inside = getattr(loaded, "__path__", None) or found.submodule_search_locations
        places = None if inside is None else list(inside)
    return found


def own_module(name: str) -> OwnModule | None:
    """Return the user's own package or module that contains the module `name`; None if it is installed or not found.

    The user's own modules are next to the script, below PYTHONPATH, or where an editable install points; not in
    site-packages, and not in the standard library.
    """
    for prefix in _prefixes(name):
        spec = find_spec(prefix)
        if spec is None or prefix == _THIS:
            return None
        if spec.has_location and spec.origin is not None:
            inside = getattr(sys.modules.get(prefix), "__path__", None) or spec.submodule_search_locations
            places = tuple(place for place in inside or (spec.origin,) if is_own_path(place))
            return OwnModule(prefix, places, inside is not None) if is_own_path(spec.origin) else None
        if spec.submodule_search_locations is None:  # it is part of the interpreter
            return None
    return None


def is_namespace(name: str) -> bool:
    """Return whether `name` is a namespace package: folders without `__init__.py`."""
    spec = find_spec(name)
    return spec is not None and not spec.has_location and spec.submodule_search_locations is not None


def is_own_path(file: str) -> bool:
    """Return whether a file is the user's own: neither installed nor in the standard library."""
    if not _INSTALLED.isdisjoint(file.split(os.sep)):
        return False
    folder, name = os.path.split(file if os.path.isabs(file) else os.path.join(os.getcwd(), file))
    real = os.path.join(_resolved(folder), name)
    if os.path.islink(real):
        real = os.path.realpath(real)
    return _INSTALLED.isdisjoint(real.split(os.sep)) and not real.startswith(_standard_library())


@lru_cache(maxsize=4096)
def _resolved(folder: str) -> str:
    """Return the path of a folder without links. Links are followed once: each part of a path takes a system call."""
    return os.path.realpath(folder)


def is_own_class(kind: type) -> bool:
    """Return whether the script, or one of the user's own modules, defines a class."""
    module = module_of(kind)
    return module in SCRIPT or _is_own_file(sys.modules.get(module))


@lru_cache(maxsize=4096)
def can_be_imported(name: str, file: str) -> bool:
    """Return whether `name` is one of the user's own modules, and importing it by that name finds this file."""
    if not is_own_path(file) or name.partition(".")[0] == _THIS:
        return False
    spec, places = None, None
    for prefix in _prefixes(name):
        spec = _search(prefix, places)
        if spec is None:
            return False
        places = list(spec.submodule_search_locations or ())
    return spec is not None and spec.origin == file


def is_importable(file: str) -> bool:
    """Return whether a file's name is that of a source or extension module; False for bytecode."""
    return file.endswith(_SUFFIXES) and file.partition(".")[0].isidentifier()


def imports_of(source: bytes, package: str) -> Iterator[str]:
    """Yield the dotted names that a module's source may import, at its top or inside functions.

    package: dotted name of the module's package.
    """
    for start, names, modules in _IMPORTS.findall(source):
        for module in modules.replace(b"\\", b"").split(b","):
            yield from [word.decode(errors="replace") for word in module.split()[:1]]
        base = resolve(start.decode(errors="replace"), package)
        if base:
            yield base
            yield from (f"{base}.{one.decode(errors='replace')}" for one in re.findall(rb"\w+", names))


def own_names(names: Iterable[str]) -> set[str]:
    """Return the names, among names found in code, that may be the user's own modules."""
    tops = _own_tops()
    return {name for name in names if name.partition(".")[0] in tops}


def resolve(name: str, package: str) -> str:
    """Resolve a relative name, with leading dots, inside a package; empty if it leads outside."""
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    outer = package.split(".")
    within = outer[: len(outer) - level + 1]
    return ".".join([*within, name[level:]]).rstrip(".") if all(within) else ""


def _own_tops() -> set[str]:
    """Return the top-level modules in the directories of the user's own code, and the user's loaded modules."""
    found = {name for name, module in list(sys.modules.items()) if "." not in name and _is_own_file(module)}
    for folder in sys.path:
        folder = folder or os.getcwd()
        if is_own_path(os.path.join(folder, "_")) and os.path.isdir(folder):
            found.update(_modules_in(folder))
    return found - {_THIS}


def _modules_in(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_importable(entry.name):
                yield entry.name.partition(".")[0]
            elif entry.name.isidentifier() and os.path.exists(os.path.join(entry.path, "__init__.py")):
                yield entry.name


def _is_own_file(module: object) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_own_path(file)


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _search(name: str, places: list[str] | None) -> ModuleSpec | None:
    if places is not None:
        # By its last part: for the whole name of a namespace Python looks at its parents, which are not imported.
        return PathFinder.find_spec(name.rpartition(".")[2], places)
    for finder in sys.meta_path:
        search = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if search is None else search(name, None)
        if spec is not None:
            return spec
    return None


@lru_cache(maxsize=1)
def _standard_library() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({os.path.realpath(paths[name]) + os.sep for name in ("stdlib", "platstdlib")})


#: From this protocol on pickles name the standard library's modules as Python 3 does.
_PYTHON_3 = 3


def modules_in(pickled: bytes) -> frozenset[str]:
    """Return the dotted names of the modules that a pickle names, without the script. Runs no code of the pickle.

    Raises MessageError for invalid pickles.
    """
    return frozenset(_named_in(pickled))


def installed_modules_in(pickled: bytes) -> list[str]:
    """Return the installed modules that unpickling imports, directly or through own modules, roughly in that order.

    Own modules count as importing the modules that are their variables, or that define their variables. Modules that
    are not loaded are left out. Raises MessageError for invalid pickles.
    """
    found: dict[str, None] = {}
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen or name not in sys.modules or name.partition(".")[0] in (*SCRIPT, _THIS):
            return
        seen.add(name)
        if _is_own_file(sys.modules[name]):
            for value in [*vars(sys.modules[name]).values()]:
                if isinstance(value, types.ModuleType) or is_definition(value):
                    visit(value.__name__ if isinstance(value, types.ModuleType) else module_of(value))
        elif name.partition(".")[0] not in sys.stdlib_module_names and own_module(name) is None:
            found[name] = None

    for name in _named_in(pickled):
        visit(name)
    return [*found]


def _named_in(pickled: bytes) -> dict[str, None]:
    """Return the modules that a pickle names, in the order of the pickle."""
    names = _Names(pickled)
    try:
        names.read_all()
    except Exception as error:
        raise MessageError(f"no pickle: {type(error).__name__}: {error}") from error
    return names.modules


class _Kind(type):
    """Metaclass with the methods that the stand-in needs when it is used as an object."""

    def __setstate__(cls, state: Any) -> None: ...

    def __setitem__(cls, key: Any, value: Any) -> None: ...

    def append(cls, item: Any) -> None: ...

    def extend(cls, items: Any) -> None: ...

    def add(cls, item: Any) -> None: ...


class _StandIn(metaclass=_Kind):
    """Stand-in for every class, function and object that a pickle names or makes.

    Calling this class returns the class itself, because a call in a pickle may create a class, such as a script's
    class.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return cls


# It takes a fifth of the time of `pickletools.genops`, which matters for a dataset with millions of paths.
class _Names(pickle.Unpickler):
    """Unpickler that records the modules a pickle names, some of them by calls of cloudpickle's `subimport`."""

    def __init__(self, pickled: bytes) -> None:
        self._file = io.BytesIO(pickled)
        self._size = len(pickled)
        protocol = pickled[1] if pickled[:1] == pickle.PROTO and len(pickled) > 1 else 0
        self._is_old = protocol < _PYTHON_3
        super().__init__(self._file)
        self.modules: dict[str, None] = {}

    def read_all(self) -> None:
        while self._file.tell() < self._size:
            self.load()

    def find_class(self, module: str, name: str, /) -> Any:
        if self._is_old:
            module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
            module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        if module not in SCRIPT:
            self.modules[module] = None
        return self._import if module.startswith("cloudpickle") and name == "subimport" else _StandIn

    def _import(self, name: Any, *_: Any) -> Any:
        if isinstance(name, str):
            self.modules[name] = None
        return _StandIn
