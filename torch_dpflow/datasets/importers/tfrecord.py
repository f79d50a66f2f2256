"""Importer of TFRecord files, and the decoder of the `tf.train.Example` messages in them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.crc32c import crc32c, masked_crc32c
from torch_dpflow.datasets.importers.shards import ForwardReader, ShardImporter
from torch_dpflow.datasets.importers.sources import SourceFile
from torch_dpflow.errors import SourceError

#: Bytes of a length and its checksum, and of the checksum after the data.
_HEADER, _FOOTER = 12, 4
#: Bytes of a record that are in memory at a time.
_PIECE = 8 << 20


class TFRecordImporter(ShardImporter):
    """Reads the records of uncompressed TFRecord files in place. A sample's bytes are its record, without annotations.

    All data is read once: both checksums of each record are compared, and the sample gets a CRC-32.

    Args:
        source: a path, URL, pattern such as `train.tfrecord-*-of-00008`, directory, or a list of these.
        options: fsspec's options for `source`.
        split: the split to read of a directory that has several, such as "train".

    Raises:
        OptionError, OptionTypeError: the source is malformed, or has no such split.
        SourceError: there are no such files, or they are of several splits.
    """

    name = "tfrecord"
    names = re.compile(r".*\.(tfrecords?|tfrec)(-\d+-of-\d+)?(\.(gz|zz|zlib))?", re.IGNORECASE | re.DOTALL)
    local_block = 1 << 20

    @staticmethod
    def begins(head: bytes) -> bool:
        """Return whether the first bytes of an object are the header of a record."""
        return len(head) >= _HEADER and _checksum(head[8:_HEADER]) == masked_crc32c(head[:8])

    def scan(self, file: SourceFile, data: ForwardReader) -> Iterator[Item]:
        position = 0
        path = self.files.path_of(file)
        while position < data.size:
            header = data.at(position, _HEADER)
            _check_header(header, position, file.url)
            length = int.from_bytes(header[:8], "little")
            start, stop = position + _HEADER, position + _HEADER + length
            if stop + _FOOTER > data.size:
                raise SourceError(
                    f"{file.url} was cut short: it has {data.size} bytes, and the record at byte {position} ends at "
                    f"{stop + _FOOTER}; restore it, or wait until its writer has closed it"
                )
            checksum = self._checksum_of(data, start, length, position, file.url)
            yield Item(path=path, offset=start, length=length, checksum=f"crc32:{checksum:08x}", revision=file.state)
            position = stop + _FOOTER

    def _checksum_of(self, data: ForwardReader, start: int, length: int, position: int, name: str) -> int:
        """Compare a record with its own checksum, and return its CRC-32."""
        ours = 0
        if length <= _PIECE:
            content = data.at(start, length)
            ours, found = zlib.crc32(content), masked_crc32c(content)
        else:
            crc = 0
            for first in range(start, start + length, _PIECE):
                piece = data.at(first, min(_PIECE, start + length - first))
                ours, crc = zlib.crc32(piece, ours), crc32c(piece, crc)
            found = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
        if found != _checksum(data.at(start + length, _FOOTER)):
            raise SourceError(
                f"{name} is damaged: the record at byte {position} does not match its checksum; restore it"
            )
        return ours


def _checksum(field: bytes) -> int:
    return int.from_bytes(field, "little")


def _check_header(header: bytes, position: int, name: str) -> None:
    if len(header) == _HEADER and _checksum(header[8:]) == masked_crc32c(header[:8]):
        return
    if position:
        what = "was cut short" if len(header) < _HEADER else "is damaged"
        raise SourceError(f"{name} {what}: no record begins at byte {position}; restore it")
    if header.startswith(b"\x1f\x8b") or (header[:1] == b"\x78" and header[1:2] in b"\x01\x5e\x9c\xda"):
        kind, how = ("GZIP", ", or unpack it with gunzip") if header.startswith(b"\x1f") else ("ZLIB", "")
        raise SourceError(
            f"{name} is compressed with {kind}, and its records cannot be read one by one; write it without "
            f"compression{how}"
        )
    raise SourceError(f"{name} is no TFRecord file: it begins with {header!r}")


#: What a message has: the number and the wire type of a field, and its value: an integer, or bytes.
_Field = tuple[int, int, Any]
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT = 10


def parse_example(record: bytes) -> dict[str, Any]:
    """Decode a `tf.train.Example`.

    Returns:
        By name of the feature: a list of bytes, a float32 array of shape (values,), or an int64 array of shape
        (values,); an empty list for a feature without a kind.

    Raises:
        SourceError: it is no such message.
    """
    try:
        return dict(_features(memoryview(record)))
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise SourceError(
            f"the record is no tf.train.Example: {error}; read the records' bytes with DatasetReader(dataset.stored)"
        ) from error


def _features(record: memoryview) -> Iterator[tuple[str, Any]]:
    fields = list(_fields(record))
    if [(number, kind) for number, kind, _ in fields] not in ([], [(1, _BYTES)]):
        raise ValueError(f"it has the fields {[number for number, *_ in fields][:10]} instead of `features`")
    names = set()
    for _, _, features in fields:
        for entry in _only(features, {1}, "features"):
            name, value = _entry(entry)
            if name in names:
                raise ValueError(f"it has the feature {name!r} twice")
            names.add(name)
            yield name, value


def _entry(entry: memoryview) -> tuple[str, Any]:
    name, feature = "", memoryview(b"")
    for number, kind, value in _fields(entry):
        if kind != _BYTES or number not in (1, 2):
            raise ValueError(f"a feature has the field {number} of type {kind}")
        if number == 1:
            name = bytes(value).decode()
        else:
            feature = value
    lists = list(_fields(feature))
    if not lists:
        return name, []
    if len(lists) != 1 or lists[0][0] not in (1, 2, 3) or lists[0][1] != _BYTES:
        raise ValueError(f"the feature {name!r} is no list of bytes, floats or integers")
    number, _, values = lists[0]
    if number == 1:
        return name, [bytes(value) for value in _only(values, {1}, name)]
    return name, _numbers(list(_fields(values)), name, is_float=number == 2)


def _numbers(fields: list[_Field], name: str, *, is_float: bool) -> np.ndarray[Any, Any]:
    """Decode a list of numbers, packed or not."""
    parts = []
    for number, kind, value in fields:
        if number != 1 or kind not in (_BYTES, _FIXED32 if is_float else _VARINT):
            raise ValueError(f"the feature {name!r} has the field {number} of type {kind}")
        if is_float:
            parts.append(np.frombuffer(value, "<f4"))
        elif kind == _VARINT:
            parts.append(np.array([value], np.uint64).view(np.int64))
        else:
            parts.append(_varints(value))
    kind_of = np.float32 if is_float else np.int64
    return np.concatenate(parts).astype(kind_of) if parts else np.zeros(0, kind_of)


def _varints(packed: memoryview) -> np.ndarray[Any, Any]:
    """Decode packed integers."""
    octets = np.frombuffer(packed, np.uint8)
    last = np.flatnonzero(octets < 128)
    if len(octets) and (not len(last) or last[-1] != len(octets) - 1):
        raise ValueError("a packed integer is cut short")
    first = np.concatenate([[0], last[:-1] + 1]) if len(last) else last
    lengths = last - first + 1
    if len(last) and lengths.max() > _MAX_VARINT:
        raise ValueError("an integer has more than 64 bits")
    values = np.zeros(len(last), np.uint64)
    for place in range(int(lengths.max()) if len(last) else 0):
        has = lengths > place
        if place == _MAX_VARINT - 1 and (octets[first[has] + place] > 1).any():
            raise ValueError("an integer has more than 64 bits")
        values[has] |= (octets[first[has] + place] & 127).astype(np.uint64) << np.uint64(7 * place)
    return values.view(np.int64)


def _only(message: memoryview, numbers: set[int], name: str) -> list[memoryview]:
    """Return the values of a message whose fields are all bytes with one of these numbers."""
    found = []
    for number, kind, value in _fields(message):
        if number not in numbers or kind != _BYTES:
            raise ValueError(f"{name!r} has the field {number} of type {kind}")
        found.append(value)
    return found


def _fields(message: memoryview) -> Iterator[_Field]:
    """Yield the fields of a message. Raises ValueError if it is malformed."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, kind, value
            continue
        if kind == _BYTES:
            length, at = _varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field has the wire type {kind}")
        if at + length > len(message):
            raise ValueError("a field is cut short")
        yield number, kind, message[at : at + length]
        at += length


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_MAX_VARINT):
        octet = message[at + place]
        value |= (octet & 127) << (7 * place)
        if octet < 128:
            if value >= 1 << 64:
                break
            return value, at + place + 1
    raise ValueError("an integer has more than 64 bits")
