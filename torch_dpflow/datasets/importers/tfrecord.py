"""Importer of TFRecord files, and the decoder of the `tf.train.Example` messages in them."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from torch_dpflow._core.checks import MAX_DEPTH
from torch_dpflow._core.lazy import imported
from torch_dpflow.datasets.importers.base import Item, check_not_compressed
from torch_dpflow.datasets.importers.shards import ForwardReader, ShardImporter
from torch_dpflow.datasets.importers.sources import SourceFile, SourceFiles
from torch_dpflow.errors import MissingExtraError, SourceError

#: Bytes of a length and its checksum, and of the checksum after the data.
_HEADER, _FOOTER = 12, 4
#: Bytes of a record that are in memory at a time.
_PIECE = 8 << 20


class TFRecordImporter(ShardImporter):
    """Importer of uncompressed TFRecord files, read in place. A sample is a record, without annotations.

    All data is read once to compare both checksums of each record, which needs the package google-crc32c. Each sample
    gets a CRC-32. Arguments and errors are those of `ShardImporter`.
    """

    name = "tfrecord"
    names = re.compile(
        r".*\.(tfrecords?|tfrec)(-\d+-of-\d+)?(\.(gz|zz|zlib))?|[^.]+-\d+-of-\d+", re.IGNORECASE | re.DOTALL
    )
    local_block = 1 << 20

    @classmethod
    def finds(cls, files: SourceFiles) -> bool:
        """Return whether objects have an extension of this format. For names without an extension, `begins` decides."""
        return super().finds(files) and any("." in name for name in files.only(cls.names).names)

    @staticmethod
    def begins(head: bytes) -> bool:
        """Return whether the first bytes of an object are the header of a record; False without google-crc32c."""
        try:
            return len(head) >= _HEADER and _checksum(head[8:_HEADER]) == masked_crc32c(head[:8])
        except MissingExtraError:
            return False  # it may be in a different format; with format="tfrecord" the package is named

    def scan(self, file: SourceFile, data: ForwardReader) -> Iterator[Item]:
        position = 0
        path = self.files.path_of(file)
        while position < data.size:
            header = data.at(position, _HEADER)
            _check_header(header, position, file.printable)
            length = int.from_bytes(header[:8], "little")
            start, stop = position + _HEADER, position + _HEADER + length
            if stop + _FOOTER > data.size:
                raise SourceError(
                    f"{file.printable} was cut short: it has {data.size} bytes, and the record at byte {position} ends "
                    f"at {stop + _FOOTER}; restore it, or wait until its writer has closed it"
                )
            checksum = self._checksum_of(data, start, length, position, file.printable)
            yield Item(path=path, offset=start, length=length, checksum=f"crc32:{checksum:08x}", revision=file.state)
            position = stop + _FOOTER

    def _checksum_of(self, data: ForwardReader, start: int, length: int, position: int, name: str) -> int:
        """Compare a record with its own checksum, and return its CRC-32."""
        ours = theirs = 0
        for first in range(start, start + length, _PIECE):
            piece = data.at(first, min(_PIECE, start + length - first))
            ours, theirs = zlib.crc32(piece, ours), _extend()(theirs, piece)
        if _masked(theirs) != _checksum(data.at(start + length, _FOOTER)):
            raise SourceError(
                f"{name} is damaged: the record at byte {position} does not match its checksum; restore it"
            )
        return ours


@functools.lru_cache(maxsize=1)
def _extend() -> Callable[[int, bytes], int]:
    """Return the function that extends a CRC-32C by more bytes. Raises MissingExtraError."""
    found = imported("google_crc32c", "the checksums of TFRecord files need google-crc32c", "datasets")
    return found.extend  # type: ignore[no-any-return]


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data`, masked as in TFRecord. Raises MissingExtraError without google-crc32c."""
    return _masked(_extend()(0, data))


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _checksum(field: bytes) -> int:
    return int.from_bytes(field, "little")


def _check_header(header: bytes, position: int, name: str) -> None:
    if len(header) == _HEADER and _checksum(header[8:]) == masked_crc32c(header[:8]):
        return
    if position:
        what = "was cut short" if len(header) < _HEADER else "is damaged"
        raise SourceError(f"{name} {what}: no record begins at byte {position}; restore it")
    check_not_compressed(header, name)
    if header[:1] == b"\x78" and header[1:2] in b"\x01\x5e\x9c\xda":
        raise SourceError(
            f"{name} is compressed with ZLIB, and its records cannot be read one by one; write it without compression"
        )
    raise SourceError(f"{name} is no TFRecord file: it begins with {header!r}")


#: What a message has: the number and the wire type of a field, and its value: an integer, or bytes.
_Field = tuple[int, int, Any]
_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)
_MAX_VARINT = 10
#: The fields of a `Feature`, of which it has one.
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


def parse_example(record: bytes) -> dict[str, Any]:
    """Decode a `tf.train.Example`, as protobuf does: unknown fields are skipped, and repeated messages are merged.

    Returns:
        The features by name. Each is a list of bytes, or a float32 or int64 array of shape (values,). A feature
        without a type is an empty list.

    Raises:
        SourceError: the record is no `Example`, or it is a `SequenceExample`.
    """
    try:
        features: dict[str, Any] = {}
        fields = list(_fields(memoryview(record)))
        if fields and not any((number, kind) == (1, _BYTES) for number, kind, _ in fields):
            raise ValueError(f"it has the fields {[number for number, *_ in fields][:10]} and no `features`")
        for number, kind, value in fields:
            if (number, kind) == (2, _BYTES):
                raise ValueError("it has the field 2, as a SequenceExample")
            if (number, kind) == (1, _BYTES):
                features.update(_entry(entry) for entry in _values(value, 1, _BYTES))
        return features
    except (ValueError, IndexError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(
            f"the record is no tf.train.Example: {error}; read the records' bytes with DatasetReader(dataset.stored)"
        ) from error


def _entry(entry: memoryview) -> tuple[str, Any]:
    name, kind = "", 0
    lists: list[memoryview] = []
    for number, wire, value in _fields(entry):
        if (number, wire) == (1, _BYTES):
            name = bytes(value).decode()
        elif (number, wire) == (2, _BYTES):
            for one, inner, values in _fields(value):
                if inner == _BYTES and one in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
                    lists = [*lists, values] if one == kind else [values]
                    kind = one
    if kind in (0, _BYTES_LIST):
        return name, [bytes(value) for values in lists for value in _values(values, 1, _BYTES)]
    return name, _numbers([field for values in lists for field in _fields(values)], is_float=kind == _FLOAT_LIST)


def _numbers(fields: list[_Field], *, is_float: bool) -> np.ndarray[Any, Any]:
    """Decode a list of numbers, packed or not."""
    parts = []
    for number, kind, value in fields:
        if number != 1 or kind not in (_BYTES, _FIXED32 if is_float else _VARINT):
            continue
        if is_float:
            parts.append(np.frombuffer(value, "<f4"))
        elif kind == _VARINT:
            parts.append(np.array([value], np.uint64).view(np.int64))
        else:
            parts.append(_varints(value))
    kind_of = np.float32 if is_float else np.int64
    return np.concatenate(parts).astype(kind_of) if parts else np.zeros(0, kind_of)


def _varints(packed: memoryview) -> np.ndarray[Any, Any]:
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


def _values(message: memoryview, number: int, kind: int) -> list[memoryview]:
    """Return the values of the fields with this number and wire type."""
    return [value for found, wire, value in _fields(message) if (found, wire) == (number, kind)]


def _fields(message: memoryview) -> Iterator[_Field]:
    """Yield the fields of a message. Raises ValueError if it is malformed."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise ValueError("a field has the number 0")
        value, at = _value(message, at, number, kind)
        yield number, kind, value


def _value(message: memoryview, at: int, number: int, kind: int, depth: int = 0) -> tuple[Any, int]:
    """Return the value of a field, None for a group, which is skipped, and the offset of the next field."""
    if kind == _VARINT:
        return _varint(message, at)
    if kind == _GROUP:
        while True:
            tag, at = _varint(message, at)
            if tag & 7 == _END_GROUP:
                if tag >> 3 != number or depth > MAX_DEPTH:
                    raise ValueError("a group ends as another one")
                return None, at
            _, at = _value(message, at, tag >> 3, tag & 7, depth + 1)
    if kind == _BYTES:
        length, at = _varint(message, at)
    elif kind in (_FIXED32, _FIXED64):
        length = 4 if kind == _FIXED32 else 8
    else:
        raise ValueError(f"a field has the wire type {kind}")
    if at + length > len(message):
        raise ValueError("a field is cut short")
    return message[at : at + length], at + length


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
