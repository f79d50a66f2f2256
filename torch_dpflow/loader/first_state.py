"""Record of a dataset's attributes when its first workers started, so that replacement workers get equal copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

#: Maximum depth to which attributes are followed; maximum number of objects that are searched.
MAX_DEPTH, MAX_OBJECTS = 5, 2000
#: Length of the longest list or dict whose elements are kept.
MAX_ELEMENTS = 32

_ABSENT = object()


class FirstState:
    """The attributes of a dataset, of its parts and of their transforms, as they were when the first workers started.

    Values are kept by reference, so an array that is changed in place is not restored, nor an element of a long list.
    """

    def __init__(self, dataset: Any) -> None:
        self._kept = [(holder, holder.copy()) for holder in _holders(dataset)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the first values during the `with` block, in which a replacement worker copies the dataset.

        The present values return after the block. Values that did not change are not replaced, because another thread
        may read the dataset; but if the order of the attributes has changed, each is removed and added again. A value
        that the block itself replaces, such as a file that `__getstate__` closes, is kept.
        """
        changed = [(holder, first, holder.copy()) for holder, first in self._kept if not _are_same(holder, first)]
        try:
            for holder, first, latest in changed:
                _exchange(holder, latest, first)
            yield
        finally:
            for holder, first, latest in changed:
                _exchange(holder, first, latest)


def _holders(dataset: Any) -> Iterator[dict[Any, Any] | list[Any]]:
    """Return the attribute dicts, short lists and short dicts of a dataset and of the objects in it."""
    waiting, seen = deque([(dataset, 0)]), set[int]()
    while waiting and len(seen) < MAX_OBJECTS:
        value, depth = waiting.popleft()
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType):
            continue
        seen.add(id(value))
        parts: Any = ()
        if type(value) in (list, dict, tuple):
            parts = value if len(value) <= MAX_ELEMENTS else ()
        elif (attributes := _attributes(value)) is not None:
            value = parts = attributes
        if parts and type(value) is not tuple:
            yield value
        if depth < MAX_DEPTH:
            waiting += [(part, depth + 1) for part in (parts.values() if isinstance(parts, dict) else parts)]


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the object's own attributes; None without any. Runs no code of its class."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def _are_same(now: Any, first: Any) -> bool:
    if [*now] != [*first] if isinstance(now, dict) else len(now) != len(first):
        return False
    pairs = zip(now.values(), first.values(), strict=True) if isinstance(now, dict) else zip(now, first, strict=True)
    return all(one is other for one, other in pairs)


def _exchange(holder: Any, old: Any, new: Any) -> None:
    """Replace each value of `old` with the value of `new`, where the holder still has the old one."""
    if isinstance(holder, list):
        if _are_same(holder, old):
            holder[:] = new
        return
    for key in {**old, **new}:
        before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if before is after or holder.get(key, _ABSENT) is not before:
            continue
        if after is _ABSENT:
            del holder[key]
        else:
            holder[key] = after
    if holder.keys() == new.keys() and [*holder] != [*new]:  # a dataset may count on the order
        for key in new:
            holder[key] = holder.pop(key)
