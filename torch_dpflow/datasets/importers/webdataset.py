"""Importer of WebDataset shards: tar archives whose neighbouring members with one key are a sample."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.shards import ForwardReader, ShardImporter
from torch_dpflow.datasets.importers.sources import Source, SourceFile, SourceFiles
from torch_dpflow.datasets.importers.tar import TarMember, is_tar, tar_members
from torch_dpflow.errors import SourceError
from torch_dpflow.log import DATASETS

#: Annotations of a sample: its key, the ending of the member whose bytes the sample is, and the places of members that
#: are no annotations.
KEY, MAIN, PARTS = "__key__", "__main__", "__parts__"
#: Bytes up to which a member that is UTF-8 text becomes an annotation. A million samples with longer ones would not
#: fit the memory that readers keep metadata in; and they are read with the sample, as they are next to it.
_MAX_TEXT = 256
#: Endings of members that are mostly annotations.
_TEXTS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id", "txt", "text", "transcript", "json", "jsn"})
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_HIDDEN = re.compile(r"__[^/]*__($|/)")


class _Member(NamedTuple):
    """A member of a sample."""

    ending: str
    #: offset of its bytes in the shard
    start: int
    #: bytes
    size: int
    #: its text, if it is small and UTF-8
    text: str | None


class WebDatasetImporter(ShardImporter):
    """Reads tar shards of WebDataset in place. Members `a/0001.jpg`, `a/0001.cls` are the sample `a/0001`.

    The sample's bytes are its main member. Other members of up to 256 bytes of UTF-8 text are annotations under their
    ending, as text. Of all others `__parts__` has offset and length in the shard. `__key__` is the sample's key,
    `__main__` the ending of its main member. As in webdataset, endings are lower case, and members without one and
    those whose name begins with `__…__` belong to no sample. Nor do hidden members, such as the `._0001.jpg` of macOS,
    of which webdataset makes samples in directories, and links and devices, whose bytes are not in the archive. A
    warning counts these and members without an ending.

    Args:
        source: a path, URL, pattern such as `train-{000..146}.tar`, directory, or a list of these.
        main: the ending of the main member, such as "jpg"; None: the first one that is no text such as cls, txt and
            json, else the first of all.
        options: fsspec's options for `source`.
        split: the split to read of a directory that has several, such as "train".

    Raises:
        OptionError, OptionTypeError: the source is malformed, or has no such split.
        SourceError: there are no such files, or they are of several splits.
    """

    name = "webdataset"
    names = re.compile(r".*\.(tar|tgz|tbz2?|txz|tar\.(gz|bz2|xz|zstd?|lz4|br|z))", re.IGNORECASE | re.DOTALL)

    def __init__(
        self,
        source: Source | SourceFiles,
        *,
        main: str | None = None,
        options: Mapping[str, Any] | None = None,
        split: str | None = None,
    ) -> None:
        super().__init__(source, options=options, split=split)
        self._main = None if main is None else main.lower().lstrip(".")

    def settings(self) -> Mapping[str, Any]:
        return {"main": self._main}

    @staticmethod
    def begins(head: bytes) -> bool:
        """Return whether the first bytes of an object are those of a tar archive."""
        return is_tar(head)

    def ranges(self, item: Item) -> list[tuple[int, int]]:
        return [*super().ranges(item), *(tuple(place) for place in item.meta.get(PARTS, {}).values())]

    def scan(self, file: SourceFile, data: ForwardReader) -> Iterator[Item]:
        keys: set[str] = set()
        without: list[str] = []
        path = self.files.path_of(file)
        for key, members in _groups(data, file.printable, without):
            if key in keys:
                raise SourceError(
                    f"{file.printable}: members of {key} are not next to each other; pack them together, as in tar "
                    "--sort=name"
                )
            keys.add(key)
            yield self._item(file, path, key, members)
        if without:
            DATASETS.warning(
                "%s: %d members, such as %s, are links, hidden or without an ending, and belong to no sample",
                file.printable,
                len(without),
                without[0],
            )

    def _item(self, file: SourceFile, path: str, key: str, members: list[_Member]) -> Item:
        places: dict[str, _Member] = {}
        for member in members:
            if member.ending == KEY:
                raise SourceError(
                    f"{file.printable}: sample {key} has a member {KEY!r}, as its key is called; rename it"
                )
            if member.ending in places:
                raise SourceError(f"{file.printable}: sample {key} has two members {member.ending!r}; remove one")
            places[member.ending] = member
        main = self._main_of(file, key, list(places))
        meta: dict[str, Any] = {KEY: key, MAIN: main}
        parts = {}
        for ending, member in places.items():
            if ending != main and member.text is not None:
                meta[ending] = member.text
            elif ending != main:
                parts[ending] = [member.start, member.size]
        if parts:
            meta[PARTS] = parts
        _check_text(file, key)
        _check_text(file, main)
        return Item(
            path=path,
            offset=places[main].start,
            length=places[main].size,
            revision=file.state,
            meta=meta,
        )

    def _main_of(self, file: SourceFile, key: str, endings: list[str]) -> str:
        if self._main is None:
            return next((ending for ending in endings if ending.rpartition(".")[2] not in _TEXTS), endings[0])
        if self._main not in endings:
            raise SourceError(f"{file.printable}: sample {key} has no member {self._main!r}; it has {endings}")
        return self._main


def _groups(data: ForwardReader, name: str, without: list[str]) -> Iterator[tuple[str, list[_Member]]]:
    """Yield each key with its members. Names of members that belong to no sample go to `without`."""
    key: str | None = None
    group: list[_Member] = []
    for member in tar_members(data, name):
        if _HIDDEN.match(member.name):
            continue
        match = _NAME.fullmatch(member.name)
        if match is None or not member.is_file or member.name.rpartition("/")[2].startswith("."):
            without.append(member.name)
            continue
        if match[1] != key:
            if key is not None:
                yield key, group
            key, group = match[1], []
        ending = match[2].lower()
        # Read here and not later, as reading goes forward.
        text = None if ending.startswith("__") else _text(data, member)
        group.append(_Member(ending, member.start, member.size, text))
    if key is not None:
        yield key, group


def _text(data: ForwardReader, member: TarMember) -> str | None:
    """Return a small member's text; None if it is large, or no text in UTF-8."""
    if member.size > _MAX_TEXT:
        return None
    try:
        return data.at(member.start, member.size).decode()
    except UnicodeDecodeError:
        return None


def _check_text(file: SourceFile, key: str) -> None:
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise SourceError(f"{file.printable}: the name {key!r} is no UTF-8; rename the member") from error
