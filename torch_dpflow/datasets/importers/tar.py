"""Members of an uncompressed tar archive: names, places and sizes. Nothing is guessed, and nothing is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch_dpflow.datasets.importers.shards import ForwardReader
from torch_dpflow.errors import SourceError

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
#: Bytes of a long name or of a PAX header.
_MAX_EXTENSION = 1 << 20
#: Bytes after the end of an archive that are compared with zeros at a time. `tar -b` fills the last record.
_PIECE = 1 << 20
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4"),
}
_REGULAR = frozenset(b"0\x007")
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
    #: bytes
    size: int
    is_file: bool = True


def is_tar(head: bytes) -> bool:
    """Return whether the first 512 bytes of an object are the header of a tar archive, or the end of an empty one."""
    return len(head) >= _BLOCK and (head[:_BLOCK] == _ZEROS or _has_checksum(head[:_BLOCK]))


def compression_of(head: bytes) -> tuple[str, str] | None:
    """Return the name of the compression that an object's first bytes show, and the program that undoes it."""
    return next((found for magic, found in _COMPRESSED.items() if head.startswith(magic)), None)


def tar_members(data: ForwardReader, name: str) -> Iterator[TarMember]:
    """Yield the members of an archive in order. Directories are passed over.

    Formats: ustar, GNU (long names, sizes above 8 GiB in base 256) and PAX (`path`, `size`).

    Args:
        data: the archive.
        name: names it in errors.

    Raises:
        SourceError: it is compressed, no tar, damaged, cut short, without its end-of-archive block, followed by
            another archive, or has members whose bytes cannot be read in place, such as sparse files.
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
        name = _text(header[:100])
        prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
        name = f"{prefix}/{name}" if prefix else name
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
    """Return what a long name (GNU) or a PAX header says of the next member."""
    if kind == b"L":
        return {"path": _text(body)}
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
    compression = compression_of(header)
    if compression is not None:
        raise SourceError(
            f"{name} is compressed with {compression[0]}, and members of a compressed archive cannot be read one by "
            f"one; unpack it with {compression[1]}: images and audio in it are compressed already"
        )
    raise SourceError(f"{name} is no tar archive: it begins with {header[:16]!r}")


def _check_whole(data: ForwardReader, stop: int, name: str) -> None:
    if stop > data.size:
        raise SourceError(
            f"{name}: the archive was cut short: it has {data.size} bytes, and this member ends at {stop}; write the "
            "archive again, or wait until its writer has closed it"
        )


def _check_rest(data: ForwardReader, position: int, name: str) -> None:
    """Check that nothing but zeros follows the end: readers stop there, and would lose what follows."""
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


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _damaged(name: str, position: int, what: str) -> SourceError:
    return SourceError(f"{name} is damaged: it has {what}, at byte {position}; write it again, or restore it")
