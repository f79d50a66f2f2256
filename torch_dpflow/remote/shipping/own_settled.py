"""Functions of own modules that are as their files define them, and need not be compared again until they change."""

from __future__ import annotations

import operator
import types
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from torch_dpflow.remote.shipping.own_source import Annotation, OwnSource
from torch_dpflow.remote.shipping.values import ATOMS

#: Kind of a member that is not compared again.
SETTLED = "as its file defines it"
#: Parts of a function that are replaced, and never changed.
_FIXED = operator.attrgetter("__code__", "__defaults__", "__name__", "__qualname__", "__module__", "__doc__")
#: Parts of a function that are changed in place.
_HELD = operator.attrgetter("__kwdefaults__", "__annotations__", "__dict__")
_IMMUTABLE = ATOMS - {bytearray}


class Settled(NamedTuple):
    """Functions of one module that are as its file defines them, with everything that this was found from."""

    module: Any
    source: OwnSource
    #: By path.
    functions: Mapping[str, types.FunctionType]
    #: What the functions consist of.
    parts: list[Any]
    #: Annotations with their values: what they evaluate to depends on the module's variables.
    annotations: list[tuple[Annotation, Any]]

    @classmethod
    def of(cls, module: Any, source: OwnSource, members: Mapping[str, Any], others: Collection[str]) -> Settled:
        """Return the functions of a module that are settled.

        Args:
            source: what its file defines.
            members: of the module, as `own_state.members_of` has them.
            others: paths that are not provably as the file defines them.
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
        """Return whether all that this was found from is the same."""
        if module is not self.module or source is not self.source:
            return False
        parts = _parts_of(module, self.functions.values())
        return (
            len(parts) == len(self.parts)
            and all(map(operator.is_, parts, self.parts))
            and all(one.makes(value, vars(module), {}) for one, value in self.annotations)
        )


def _is_fixed(function: Any) -> bool:
    """Return whether a function consists of nothing that can change without being replaced."""
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
