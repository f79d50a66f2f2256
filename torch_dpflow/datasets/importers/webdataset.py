"""Importer of WebDataset shards: uncompressed tar archives. Neighbouring members with the same key are a sample.

Nothing in an archive is guessed: an archive that cannot be read exactly is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch_dpflow.datasets.importers.base import Item, check_not_compressed
from torch_dpflow.datasets.importers.shards import ForwardReader, ShardImporter
from torch_dpflow.datasets.importers.sources import Source, SourceFile, SourceFiles
from torch_dpflow.errors import SourceError
from torch_dpflow.log import DATASETS

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
#: Bytes of a long name or of a PAX header.
_MAX_EXTENSION = 1 << 20
#: Bytes after the end of an archive that are compared with zeros at a time. `tar -b` fills the last record.
_PIECE = 1 << 20
_REFUSED = {
    b"S": "a sparse file, whose bytes are not where its offsets say",
    b"M": "the rest of a file that begins in another volume",
}
_PAX_RECORD = re.compile(rb"([1-9][0-9]{0,7}) ")
_OCTAL = re.compile(rb"[ \0]*([0-7]+)[ \0]*")


#: Links, devices, pipes and volume labels, which webdataset passes over: they have no bytes that could be a sample.
_WITHOUT_BYTES = frozenset((b"1", b"2", b"3", b"4", b"6", b"V"))


class TarMember(NamedTuple):
    """A regular file in an archive, or a member without bytes, such as a link."""

    name: str
    #: offset of its bytes in the archive
    start: int
    size: int
    is_file: bool = True


def is_tar(head: bytes) -> bool:
    """Return whether an object's first 512 bytes are the header of a tar archive, or the end of an empty one."""
    return len(head) >= _BLOCK and (head[:_BLOCK] == _ZEROS or _has_checksum(head[:_BLOCK]))


def tar_members(data: ForwardReader, name: str) -> Iterator[TarMember]:
    """Yield the members of an archive in order, without directories.

    Formats: ustar, GNU (long names, sizes above 8 GiB in base 256) and PAX (`path`, `size`).

    Args:
        data: the archive.
        name: name of the archive in errors.

    Raises:
        SourceError: the archive is compressed, not a tar archive, damaged, cut short, without its end-of-archive block,
            or followed by another archive; or bytes of a member, such as a sparse file, cannot be read in place.
    """
    if data.size == 0:
        raise SourceError(f"{name} is empty; a tar archive ends with at least 1024 zero bytes, so it was cut short")
    position = 0
    extended: dict[str, str] = {}
    while True:
        header = data.at(position, _BLOCK)
        if header == _ZEROS:
            _check_rest(data, position + _BLOCK, name)
            return
        _check_header(header, position, name)
        kind = header[156:157]
        size = _number(header[124:136], "size", position, name)
        start = position + _BLOCK
        if kind in b"xLKg":
            _check_whole(data, start + min(size, _MAX_EXTENSION + 1), name)
            if size > _MAX_EXTENSION:
                raise _damaged(name, position, f"a long name or PAX header of {size} bytes; at most {_MAX_EXTENSION}")
            extended |= _extension(kind, data.at(start, size), position, name)
        else:
            member, extended = _member(header, kind, start, size, extended, name), {}
            size = member.size
            _check_whole(data, start + size, f"{name}, in {member.name}")
            if kind != b"5" and not (kind == b"\x00" and member.name.endswith("/")):
                yield member
        position = start + -(-size // _BLOCK) * _BLOCK


def _member(header: bytes, kind: bytes, start: int, size: int, extended: Mapping[str, str], archive: str) -> TarMember:
    name = extended.get("path")
    if name is None:
        name = _field(header[:100])
        prefix = _field(header[345:500]) if header[257:263] == b"ustar\0" else ""
        name = f"{prefix}/{name}" if prefix else name
    if not name:
        raise _damaged(archive, start - _BLOCK, "a member without a name")
    if any(key.startswith("GNU.sparse.") for key in extended):
        kind = b"S"
    if kind in _REFUSED:
        raise SourceError(f"{archive}: {name} is {_REFUSED[kind]}; pack the files again without such members")
    if kind in _WITHOUT_BYTES:
        return TarMember(name, start, 0, is_file=False)
    if kind not in (b"0", b"\x00", b"7", b"5"):
        raise SourceError(f"{archive}: {name} is a member of type {kind!r}; only regular files are samples")
    if "size" in extended and kind != b"5":
        if not re.fullmatch(r"[0-9]{1,18}", extended["size"], re.ASCII):
            raise SourceError(f"{archive}: {name} has the size {extended['size']!r:.40} in its PAX header")
        size = int(extended["size"])
    return TarMember(name, start, 0 if kind == b"5" else size)


def _extension(kind: bytes, body: bytes, position: int, name: str) -> dict[str, str]:
    """Return the fields of the next member that a long name (GNU) or a PAX header contains."""
    if kind == b"L":
        return {"path": _field(body)}
    if kind == b"K":
        return {}
    found = _pax(body, position, name)
    if kind == b"g":
        wrong = [key for key in found if key in ("path", "size") or key.startswith("GNU.sparse.")]
        if wrong:
            raise _damaged(name, position, f"a PAX header with {wrong} for all members")
        return {}
    return found


def _pax(body: bytes, position: int, name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    at = 0
    while at < len(body) and body[at]:
        match = _PAX_RECORD.match(body, at)
        stop = at + int(match[1]) if match else 0
        key, equals, value = body[match.end() : stop - 1].partition(b"=") if match else (b"", b"", b"")
        if not equals or stop > len(body) or body[stop - 1 : stop] != b"\n":
            raise _damaged(name, position, "a PAX header that is malformed")
        found[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        at = stop
    if body[at:].count(0) != len(body) - at or (body and not found):  # zeros may follow the records
        raise _damaged(name, position, "a PAX header that is malformed")
    return found


def _check_header(header: bytes, position: int, name: str) -> None:
    if len(header) < _BLOCK and (position or len(header) == 0):
        raise SourceError(
            f"{name} has no end-of-archive block after byte {position}; it was cut short or is still being written: "
            "write it again, or wait until its writer has closed it"
        )
    if len(header) == _BLOCK and _has_checksum(header):
        return
    if position:
        raise _damaged(name, position, "no header where a member should begin")
    check_not_compressed(header, name)
    raise SourceError(f"{name} is no tar archive: it begins with {header[:16]!r}")


def _check_whole(data: ForwardReader, stop: int, name: str) -> None:
    if stop > data.size:
        raise SourceError(
            f"{name}: the archive was cut short: it has {data.size} bytes, and this member ends at {stop}; write the "
            "archive again, or wait until its writer has closed it"
        )


def _check_rest(data: ForwardReader, position: int, name: str) -> None:
    """Raise SourceError unless only zeros follow the end: readers stop there, and would lose later members."""
    for start in range(position, data.size, _PIECE):
        piece = data.at(start, _PIECE)
        if piece.count(0) != len(piece):
            raise SourceError(
                f"{name} goes on after its end-of-archive block, at byte {position}, as archives do that were joined "
                "with cat; readers would lose the rest: keep the archives apart, or join them with tar --concatenate"
            )


def _has_checksum(header: bytes) -> bool:
    match = _OCTAL.fullmatch(header[148:156])
    if match is None:
        return False
    found = int(match[1], 8)
    others = header[:148] + b" " * 8 + header[156:]
    if found == sum(others):
        return True
    return found == sum(others) - 256 * sum(byte > 127 for byte in others)  # some old writers had signed bytes


def _number(field: bytes, what: str, position: int, name: str) -> int:
    if field[0] == 0x80:  # GNU: base 256
        return int.from_bytes(field[1:], "big")
    match = _OCTAL.fullmatch(field)
    if match is None and field.strip(b" \0"):
        raise _damaged(name, position, f"the {what} {field!r}")
    return int(match[1], 8) if match else 0


def _field(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _damaged(name: str, position: int, what: str) -> SourceError:
    return SourceError(f"{name} is damaged: it has {what}, at byte {position}; write it again, or restore it")


#: Names of annotations of a sample: its key; the extension of its main member, whose bytes are the sample's; and offset
#: and length of members that are neither main member nor annotations.
KEY, MAIN, PARTS = "__key__", "__main__", "__parts__"
#: Bytes up to which a member that is UTF-8 text becomes an annotation. A million samples with longer ones would not
#: fit the memory that readers keep metadata in; and they are read with the sample, as they are next to it.
_MAX_TEXT = 256
#: Extensions of members that are mostly annotations.
_TEXTS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id", "txt", "text", "transcript", "json", "jsn"})
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_HIDDEN = re.compile(r"__[^/]*__($|/)")


class _Member(NamedTuple):
    ending: str
    #: offset of its bytes in the shard
    start: int
    size: int
    #: its text, if it is small and UTF-8
    text: str | None


class WebDatasetImporter(ShardImporter):
    """Importer of WebDataset's tar shards, read in place. Members `a/0001.jpg`, `a/0001.cls` are one sample.

    The sample's bytes are its main member. Other members of up to 256 bytes of UTF-8 text are annotations under their
    extension, as text. `__parts__` has offset and length in the shard of every other member. `__key__` is the sample's
    key, `__main__` the extension of its main member. As in webdataset, extensions become lower case.

    Members whose path begins with a part `__…__` are left out. Links, devices, members without an extension and hidden
    members, such as the `._0001.jpg` of macOS, are left out with a warning that counts them. (webdataset makes samples
    of hidden members below a directory.)

    Args:
        main: the extension of the main member, such as "jpg"; None: that of the first member whose extension is not one
            of texts, such as cls, txt and json. If there is no such member, the first member is the main member.
        source, options, split: see `ShardImporter`, also for errors.
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
    """Return a small member's text; None if the member is large, or not text in UTF-8."""
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
