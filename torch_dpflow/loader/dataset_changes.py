"""Notices that the training process has changed a dataset since its workers started: a replacement would differ."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

#: Values that are compared; of other objects the public attributes are, and of long lists only the length.
PLAIN = (type(None), bool, int, float, complex, str, bytes)
#: How deep attributes are followed, and how many objects are looked at.
MAX_DEPTH, MAX_OBJECTS = 5, 2000
#: Longest list or tuple whose elements are compared.
MAX_ELEMENTS = 32

_ABSENT = object()


class PlainState:
    """The plain values in the attributes of a dataset, of its parts and of their transforms, as they are now.

    Only public attributes are compared, and neither arrays nor the elements of long lists.
    """

    def __init__(self, dataset: Any) -> None:
        self._values = dict(_plain_values(dataset))

    def changed(self, dataset: Any) -> str:
        """Return the first attribute that has another value by now, with both values; empty if there is none.

        An attribute that was added or removed is no change: datasets open files and fill caches when first used.
        """
        for name, now in _plain_values(dataset):
            before = self._values.get(name, _ABSENT)
            if before is not _ABSENT and (type(now) is not type(before) or repr(now) != repr(before)):
                return f"{name} is {now!r:.60} and was {before!r:.60}"
        return ""


def _plain_values(dataset: Any) -> Iterator[tuple[str, Any]]:
    waiting, seen = deque([("dataset", dataset, 0)]), set[int]()
    for _ in range(MAX_OBJECTS):
        if not waiting:
            return
        name, value, depth = waiting.popleft()
        if isinstance(value, PLAIN):
            yield name, value
        elif id(value) not in seen and depth < MAX_DEPTH and not isinstance(value, type | ModuleType | FunctionType):
            seen.add(id(value))
            waiting += [(f"{name}{step}", part, depth + 1) for step, part in _parts_of(value)]


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        elements = [(f"[{at}]", one) for at, one in enumerate(value)] if len(value) <= MAX_ELEMENTS else []
        return [("'s length", len(value)), *elements]
    # Of the object itself: a property could run code of the user. Private ones are counters, caches and connections.
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is not dict:
        return []
    inherited = [vars(one) for one in reversed(type(value).__mro__)]
    defaults = {name: part for one in inherited for name, part in one.items() if isinstance(part, PLAIN)}
    return [(f".{name}", part) for name, part in {**defaults, **attributes}.items() if not name.startswith("_")]
