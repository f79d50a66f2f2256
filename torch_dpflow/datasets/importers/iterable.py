"""Importer of any iterable."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any

from torch_dpflow.datasets.importers.base import BaseImporter, Item, local_url
from torch_dpflow.datasets.storage.urls import split_login
from torch_dpflow.errors import OptionError, OptionTypeError, SourceError

#: An element of an iterable: the bytes of a sample and its annotations, or an Item.
IterableItem = Item | tuple[bytes, Mapping[str, Any]]


class IterableImporter(BaseImporter):
    """Importer of `(bytes, annotations)` from any iterable, or any dataset with indices and a length.

    Bytes are packed into larger objects in the store. To continue after a kill, give an iterable that repeats the same
    items in the same order. An indexable source continues at once; any other iterable is read from the start again.

    Args:
        iterable: the samples to import.
        name: identifies the source: an unfinished import is continued only under the same name.
        root: the URL that paths of items are relative to, if there are any; None: all items have data.
        info: information for all samples.
        options: fsspec's options for `root`.

    Raises:
        OptionTypeError: `iterable` cannot be iterated or indexed.
    """

    def __init__(
        self,
        iterable: Iterable[IterableItem],
        *,
        name: str = "iterable",
        root: str | os.PathLike[str] | None = None,
        info: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not _is_iterable(iterable):
            raise OptionTypeError(
                f"iterable={iterable!r:.80} is of type {type(iterable).__name__}; give an iterable of (bytes, mapping "
                "of annotations) or of Items"
            )
        self._iterable = iterable
        self._info = dict(info or {})
        if isinstance(root, os.PathLike):
            root = local_url(root)
        root, login = (None, {}) if root is None else split_login(root)
        self.options = {**(options or {}), **login}
        self.root = root
        self.source = {"importer": "iterable", "name": name, "root": root}

    @classmethod
    def from_text(cls, source: str, **settings: Any) -> IterableImporter:
        """Make an importer of "package.module:name", the name of an iterable or of a function that returns an iterable.

        Raises:
            OptionError: there is no such module or name, calling it failed, or the result is not iterable.
        """
        module, _, name = source.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:  # importing a module may raise anything
            raise OptionError(
                f"{source!r} cannot be imported: {type(error).__name__}: {error}; give package.module:name"
            ) from error
        try:
            iterable = found() if callable(found) else found
        except Exception as error:
            raise OptionError(
                f"{source!r} cannot be called without arguments: {type(error).__name__}: {error}; give "
                "package.module:name of an iterable, or of a function without arguments that returns one"
            ) from error
        if not _is_iterable(iterable):
            raise OptionError(f"{source!r} is no iterable but {iterable!r:.80}; give package.module:name of one")
        return cls(iterable, **{"name": source, **settings})

    def items(self, start: int = 0) -> Iterator[Item]:
        for position, found in enumerate(self._from(start), start):
            yield found if isinstance(found, Item) else _item(found, position)

    def total(self) -> int | None:
        return len(self._iterable) if isinstance(self._iterable, Sized) else None

    def info(self) -> Mapping[str, Any]:
        return self._info

    def _from(self, start: int) -> Iterator[Any]:
        if isinstance(self._iterable, Sized) and hasattr(self._iterable, "__getitem__"):
            return (self._iterable[position] for position in range(start, len(self._iterable)))
        return islice(iter(self._iterable), start, None)


def _is_iterable(value: Any) -> bool:
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def _item(found: Any, position: int) -> Item:
    try:
        data, meta = found
    except (TypeError, ValueError):
        data = meta = None
    if not isinstance(data, bytes | bytearray | memoryview) or not isinstance(meta, Mapping):
        raise SourceError(f"item {position} is {found!s:.200}; give (bytes, mapping of annotations), or an Item")
    return Item(data=bytes(data), meta=meta)
