"""Reductions of the script's objects that cloudpickle does not send, or sends without all that they need."""

from __future__ import annotations

import argparse
import builtins
import copyreg
import dis
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from cloudpickle import cloudpickle, list_registry_pickle_by_value

from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.serialization import SCRIPT
from torch_dpflow.remote.shipping.code_digest import names_in_code, names_in_texts
from torch_dpflow.remote.shipping.modules import can_be_imported, module_of
from torch_dpflow.remote.shipping.pickled_parts import is_derived, reduces_itself, slots_of

#: Variables of a module that differ from one process to another and that no code of the user's sets.
NO_VARIABLES = frozenset(
    [
        "__name__",
        "__package__",
        "__path__",
        "__file__",
        "__cached__",
        "__loader__",
        "__spec__",
        "__builtins__",
        "__doc__",
        "__annotations__",
    ]
)
#: Names by which code reads variables by texts, so that it does not have their names.
_ALL_VARIABLES = frozenset(["globals", "__globals__", "f_globals"])
#: What runs texts, by name.
_RUNNERS = {"eval": eval, "exec": exec}
LruCache: Any = type(functools.lru_cache(len))
#: What `functools.singledispatch` makes: its code, and the attributes that it sets.
_DISPATCHER = vars(functools.singledispatch(len))
_DISPATCHING = functools.singledispatch(len).__code__  # type: ignore[attr-defined]


def reduce_by_value(obj: Any, sent_arguments: Collection[str] | None, *, is_replaced: bool = False) -> Any:
    """Return the reduction of an object that needs a special one; NotImplemented for all others.

    is_replaced: whether the object replaces a function of its module. Objects with a special reduction:

    - `eval` and `exec`: as their `runner`
    - a `functools.lru_cache` of the script or inside a function, or one that replaces a function: empty
    - a `functools.cached_property`: without its lock
    - a `functools.singledispatch` of the script, or one that replaces a function: without its cache
    - a `weakref.WeakKeyDictionary` or `weakref.WeakValueDictionary`: made again from its entries
    - a `threading.local`: with the values of this thread
    - an `argparse.Namespace`: without attributes that are not in `sent_arguments`, if that is not None
    """
    kind = type(obj)
    if obj is eval or obj is exec:
        return runner, (obj.__name__,)
    if kind is LruCache and (is_replaced or obj.__module__ in SCRIPT or "<" in getattr(obj, "__qualname__", "<")):
        kept = vars(obj).keys() - {"__wrapped__", *functools.WRAPPER_ASSIGNMENTS}
        attributes = {name: vars(obj)[name] for name in sorted(kept)}
        return _lru_cache, (obj.__wrapped__, obj.cache_parameters(), attributes)
    if kind is functools.cached_property:
        return _cached_property, (obj.func, obj.attrname)
    if kind is types.FunctionType and obj.__code__ is _DISPATCHING and (is_replaced or module_of(obj) in SCRIPT):
        kept = {name: value for name, value in vars(obj).items() if name not in _DISPATCHER}
        return _single_dispatch, (obj.__name__,), ({**obj.registry}, kept), None, None, _set_single_dispatch
    if kind in (weakref.WeakKeyDictionary, weakref.WeakValueDictionary):
        return kind, (dict(obj),)
    if kind is threading.local:
        return threading.local, (), vars(obj)
    if is_arguments(obj) and sent_arguments is not None:
        unsent = sorted(vars(obj).keys() - {*sent_arguments})
        if unsent:
            sent = {name: value for name, value in vars(obj).items() if name not in unsent}
            return SentArguments, (sent, tuple(unsent))
    return NotImplemented


def with_class_bodies(function: types.FunctionType, reduced: Any) -> Any:
    """Return a function's reduction with the variables that cloudpickle leaves out.

    These are the variables that bodies of classes inside the function read, or that texts in its code name if it uses
    `eval` or `exec`, and all variables if `reads_all_variables`.
    """
    names = set(_names_in_class_bodies(function.__code__)) & function.__globals__.keys()
    variables, given = reduced[2][1]["__globals__"], function.__globals__
    runners = _RUNNERS.keys() & names_in_code(function.__code__)
    if runners:
        names |= names_in_texts(function.__code__) & given.keys()
    if reads_all_variables(function.__code__):
        sent = {name: value for name, value in given.items() if name not in NO_VARIABLES}
        variables.clear()
        variables.update(sent)
    else:
        variables.update((name, given[name]) for name in sorted(names - variables.keys()))
    variables.update((name, _RUNNERS[name]) for name in sorted(runners - given.keys()))
    return reduced


def in_place_of_name(obj: Any, dispatch_table: Mapping[type, Any]) -> Any:
    """Return the result of an object's `__reduce_ex__`, or a reduction by attributes if that is a name in the script.

    Functions decorated by cachetools, and NewType of `typing`, reduce to such names, which workers lack. Returns
    NotImplemented if the object's class does not define how to pickle it, or is in `dispatch_table`.
    """
    kind = type(obj)
    if not reduces_itself(kind) or kind in dispatch_table:
        return NotImplemented
    reduced = obj.__reduce_ex__(5)
    if isinstance(reduced, str) and cloudpickle._whichmodule(obj, reduced) in SCRIPT:
        return _in_place_of_method(obj)
    return reduced


def _in_place_of_method(obj: Any) -> Any:
    """Return the reduction that an object would have if its class defined no method for it."""
    kind = type(obj)
    copies: Any = copyreg
    slots, state = slots_of(obj), getattr(obj, "__dict__", None) or None
    if getattr(kind, "__getstate__", None) is not getattr(object, "__getstate__", None):
        state = obj.__getstate__()
    elif slots:
        state = (state, slots)
    if isinstance(obj, list | dict):
        items = (iter(obj), None) if isinstance(obj, list) else (None, iter(obj.items()))
        return copies.__newobj__, (kind,), state, *items
    if next(base for base in kind.__mro__ if not base.__flags__ & copies._HEAPTYPE) is object:
        return copies._reconstructor, (kind, object, None), state
    # The value of a class in C, such as a set or an int, is an argument.
    return (*copies._reduce_ex(obj, 0)[:2], state)


class ModuleVariables:
    """Reference to the variables of an own module that workers can import, sent instead of a copy."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module

    def __reduce__(self) -> Any:
        return vars, (self.module,)


def in_its_module(function: types.FunctionType, reduced: Any) -> Any:
    """Return a function's reduction that refers to its module's variables; None if the variables must be sent."""
    name = str(function.__globals__.get("__name__"))
    module = sys.modules.get(name)
    if name in SCRIPT or not isinstance(module, types.ModuleType) or vars(module) is not function.__globals__:
        return None
    if not can_be_imported(name, str(getattr(module, "__file__", None))) or name in list_registry_pickle_by_value():
        return None
    make, (code, _, *arguments), (attributes, slots), *others = reduced
    return make, (code, ModuleVariables(module), *arguments), (attributes, {**slots, "__globals__": {}}), *others


def in_order(kind: type, reduced: Any) -> Any:
    """Return a class's reduction with its qualified name and slots, and its attributes in the order of definition."""
    attributes, *rest = reduced[2]
    # Without slots, its objects would have a `__dict__`. Subclasses of tuples have none, and NamedTuple refuses them.
    if "__slots__" in vars(kind) and reduced[0] is cloudpickle._make_skeleton_class and not issubclass(kind, tuple):
        reduced[1][3]["__slots__"] = attributes["__slots__"]
    attributes = {name: value for name, value in attributes.items() if not is_derived(kind, name, value)}
    attributes = {"__qualname__": kind.__qualname__, **attributes}
    ordered = {name: attributes[name] for name in vars(kind) if name in attributes}
    return (*reduced[:2], ({**ordered, **attributes}, *rest), *reduced[3:])


def reads_all_variables(code: types.CodeType) -> bool:
    """Return whether code can read any variable of its module: it names `globals`, `__globals__` or `f_globals`."""
    names = names_in_code(code)
    found = names if _RUNNERS.keys().isdisjoint(names) else names | names_in_texts(code)
    return not _ALL_VARIABLES.isdisjoint(found)


def _names_in_class_bodies(code: types.CodeType) -> Iterator[str]:
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if not inner.co_flags & inspect.CO_OPTIMIZED:
                yield from (name for name in inner.co_names if not name.startswith("__"))
            yield from _names_in_class_bodies(inner)


def is_arguments(obj: Any) -> bool:
    """Return whether an object is an `argparse.Namespace`, and not of a subclass."""
    return type(obj) is argparse.Namespace


class SentArguments(argparse.Namespace):
    """Arguments of the script in workers: only attributes whose names appear in the code of the dataset.

    Reading an attribute that was not sent, `vars()` and pickling raise UsageError, because unsent attributes were not
    compared between jobs.
    """

    __slots__ = ("_unsent",)

    def __init__(self, sent: Mapping[str, Any], unsent: tuple[str, ...]) -> None:
        object.__setattr__(self, "_unsent", unsent)
        object.__getattribute__(self, "__dict__").update(sent)

    def __getattribute__(self, name: str) -> Any:
        unsent = object.__getattribute__(self, "_unsent")
        if name in unsent or name == "__dict__":
            raise _unsent_error("all arguments are" if name == "__dict__" else f"the argument {name!r} is", unsent)
        return object.__getattribute__(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _unsent_error("all arguments are", object.__getattribute__(self, "_unsent"))


def _unsent_error(what: str, unsent: tuple[str, ...]) -> UsageError:
    return UsageError(
        f"{what} read in a worker of a flow, which is sent only the arguments whose names the dataset's code has, "
        f"without {', '.join(unsent):.300}: other jobs of the flow may have other values of these. Read them where the "
        "dataset is made, or give JobOptions(ignore=[]), by which all are sent and compared"
    )


def _lru_cache(function: Any, parameters: dict[str, Any], attributes: dict[str, Any]) -> Any:
    made = functools.lru_cache(**parameters)(function)
    vars(made).update(attributes)
    return made


def _single_dispatch(name: str) -> Any:
    def unset(obj: Any) -> None: ...

    unset.__name__ = name
    return functools.singledispatch(unset)


def _set_single_dispatch(made: Any, state: tuple[dict[type, Any], dict[str, Any]]) -> None:
    registered, attributes = state
    for kind, function in registered.items():
        made.register(kind, function)
    functools.update_wrapper(made, registered[object])
    vars(made).update(attributes)


def _cached_property(function: types.FunctionType, name: str | None) -> Any:
    made: Any = functools.cached_property(function)
    if name is not None:
        made.__set_name__(None, name)
    return made


# ---- `eval` and `exec` in workers, which have only the variables that code reads by name

#: Variables of the script; set in workers.
_script: set[str] = set()


def set_script_variables(names: Collection[str]) -> None:
    """Set the names of the script's variables in a worker, so that a `runner` raises UsageError for unsent ones."""
    _script.clear()
    _script.update(names)


def runner(name: str) -> Callable[..., Any]:
    """Return the replacement of `eval` or `exec`, given by `name`, for functions of the script in workers."""
    return functools.partial(_run, getattr(builtins, name))


def _run(run: Callable[..., Any], source: Any, /, *scopes: Any, **options: Any) -> Any:
    frame = sys._getframe(1)
    given, inner = (*scopes, options.pop("globals", None), options.pop("locals", None))[:2]
    variables = frame.f_globals if given is None else given
    if inner is None:
        inner = variables
        if given is None:
            inner = frame.f_locals if type(frame.f_locals) is dict else dict(frame.f_locals)
    if given is None and not isinstance(source, types.CodeType):
        source = _compiled(source, run.__name__, frame.f_code.co_flags & _FUTURES)
    unsent = _script - variables.keys() - vars(builtins).keys() if given is None else ()
    if unsent:
        missing = [name for name in _read_in(source) if (name in unsent and name not in inner) or name == "globals"]
        if missing:
            raise UsageError(
                f"a text that is evaluated in a worker reads {missing[0]!r} of the script, which was not sent: workers "
                "have only the variables whose names are in the dataset's code. Name it there, or put it into the "
                "dataset"
            )
    return run(source, variables, inner, **options)


def _compiled(source: Any, mode: str, flags: int) -> Any:
    if type(source) is str:
        return _compiled_text(source.lstrip(" \t") if mode == "eval" else source, mode, flags)
    return compile(source, "<string>", mode, flags, dont_inherit=True)


@functools.lru_cache(maxsize=1 << 10)
def _compiled_text(source: str, mode: str, flags: int) -> Any:
    return compile(source, "<string>", mode, flags, dont_inherit=True)


#: Flags of `from __future__` statements.
_FUTURES = 0x1FF0000


@functools.lru_cache(maxsize=1 << 10)
def _read_in(code: types.CodeType) -> frozenset[str]:
    """Return the global variables that code reads and does not set."""
    found = {kind: set[str]() for kind in ("LOAD", "STORE")}
    for one in dis.get_instructions(code):
        kind, _, rest = one.opname.partition("_")
        if kind in found and rest in ("NAME", "GLOBAL"):
            found[kind].add(one.argval)
    inner = [_read_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(found["LOAD"].union(*inner) - found["STORE"])
