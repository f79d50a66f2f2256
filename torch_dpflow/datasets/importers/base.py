"""What every importer must do: tell what is to be imported, sample by sample, from any position on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One sample as an importer finds it: `path`, where its bytes lie, or `data`, the bytes themselves."""

    #: Annotations. Whatever JSON can hold, numpy scalars and arrays too.
    meta: Mapping[str, Any] = field(default_factory=dict)
    #: Relative to the importer's root, or a URL.
    path: str | None = None
    data: bytes | None = None
    #: Where the sample begins inside the object; None: it is the whole object.
    offset: int | None = None
    #: Bytes; None: not known.
    length: int | None = None
    checksum: str | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.data is None):
            raise ValueError("an Item needs either `path` or `data`")


class Importer(Protocol):
    """Reads one source, in a fixed order, so that an import that was killed goes on where it stopped."""

    #: The URL of the directory that paths are relative to; None: all items bring their own bytes.
    root: str | None
    #: What fsspec needs to open `root`. Never written anywhere.
    options: dict[str, Any]

    @property
    def source(self) -> Mapping[str, Any]:
        """The source, described in JSON. An unfinished import goes on only with an equal description."""

    def extend(self, info: Mapping[str, Any]) -> None:
        """What is read will be put behind samples that have this `info`. Called before items are drawn."""

    def items(self, start: int = 0) -> Iterator[Item]:
        """The samples from number `start` on, with memory that does not grow with their number.

        Raises:
            SourceError: the source is not laid out as it should be.
        """

    def total(self) -> int | None:
        """How many samples there will be, if that is cheap to know; for a progress bar."""

    def info(self) -> Mapping[str, Any]:
        """What holds for all samples, such as the names of classes; complete once all items were drawn."""
