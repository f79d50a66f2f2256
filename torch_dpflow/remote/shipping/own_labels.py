"""Docstrings, names, annotations, registered classes and orders that are not as the files of own modules have them."""

from __future__ import annotations

import abc
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch_dpflow.remote.shipping.own_source import OwnSource
from torch_dpflow.remote.shipping.reducers import NO_VARIABLES

#: Ends of paths: classes that were registered with an abstract class, and the order of attributes.
REGISTERED, ORDER = "(registered)", "(order)"


def labels_not_as_file(module: Any, members: Mapping[str, Any], source: OwnSource) -> Iterator[tuple[str, Any]]:
    """Yield what a module, its functions and its classes have that their file does not define so, by path.

    members: of the module, as `own_state.members_of` has them.
    """
    if not isinstance(module, types.ModuleType):
        return
    yield from _texts("", vars(module), vars(module), source)
    for path, member in members.items():
        definition = member.definition
        if member.kind == "class" and path in source.bases:
            variables = {**vars(definition), "__annotations__": _annotations_of(definition)}
            yield from _name(path, definition)
            yield from _texts(path, variables, vars(module), source)
            if "_abc_impl" in variables and (registered := abc._get_dump(definition)[0]):  # type: ignore[attr-defined]
                yield f"{path}.{REGISTERED}", {one() for one in registered}
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
    """Return a docstring as compilers since Python 3.13 leave it."""
    return inspect.cleandoc(doc) if sys.version_info >= (3, 13) and isinstance(doc, str) else doc


def _order(path: str, names: list[str], source: OwnSource) -> Iterator[tuple[str, Any]]:
    present = [name for name in names if not (name.startswith("_") and name.endswith("_"))]
    defined = dict.fromkeys(source.order.get(path, ()))
    others = [name for name in present if name not in defined]
    here = {*present}
    is_in_order = [name for name in present if name in defined] == [name for name in defined if name in here]
    if not is_in_order or len(others) > 1 or (others and present[-1:] != others):
        yield f"{path}.{ORDER}", tuple(present)


def put_in_order(holder: Any, names: tuple[str, ...]) -> None:
    """Bring attributes into this order. Raises ValueError if it has others."""
    if tuple(name for name in vars(holder) if name in names) == names:
        return
    values = [(name, vars(holder)[name]) for name in names if name in vars(holder)]
    if len(values) < len(names):
        raise ValueError(f"attributes of {holder!r} are missing")
    for name, value in values:
        delattr(holder, name)
        setattr(holder, name, value)


def register(holder: Any, classes: set[type]) -> None:
    """Register classes with an abstract class."""
    for one in classes:
        holder.register(one)
