"""Where the bytes of a set come from."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec


class SetSource(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A stored dataset whose bytes a set has."""

    #: The directory of the dataset store, and fsspec's options for it.
    store: str
    options: dict[str, Any]
    #: The full name of the variant.
    ref: str
    #: fsspec's options for the data; None: those of the store.
    data_options: dict[str, Any] | None = None


class ArraySource(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An array whose rows are the records of a set: in a file of any storage, or pushed by clients.

    `pool.open_array` makes it.
    """

    #: Its name for people.
    ref: str
    #: numpy's name of the type of its elements, and its shape, records first.
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]]
    #: What changes with its content: size and tag or time of the file; a digest of what is pushed.
    stamp: str
    #: The file, and fsspec's options for it; "": it is pushed.
    url: str = ""
    options: dict[str, Any] = {}
    #: Where its first row begins, bytes; in an HDF5 file None, with the path of the dataset in it.
    start: int | None = None
    path: str = ""
    #: Of a further version that is pushed: the set of the older one, and how many stripes it shares with it.
    base: bytes = b""
    shared: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def is_pushed(self) -> bool:
        """Whether there is no storage to read it from."""
        return not self.url


AnySource: TypeAlias = SetSource | ArraySource
