"""The formats of an export: tar shards as webdataset reads them, and Parquet files.

The columns of Parquet have types that all samples have in common.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from torch_dpflow._core.lazy import imported
from torch_dpflow.datasets.importers.webdataset import KEY
from torch_dpflow.errors import SourceError

#: Pattern of the argument `main` of `export`, an extension or a column.
ENDING = r"[a-z0-9][a-z0-9._-]{0,63}"
#: Extensions of paths that are kept; longer ones are parts of names.
_OF_PATHS = re.compile(r"[a-z0-9]{1,5}")
#: Members as webdataset finds them: no line breaks, and no dot in the last part of the key.
_MEMBER = re.compile(r"((?:.*/|)[^./\n\0]+)[.]([^/\n\0]+)")
_HIDDEN = re.compile(r"__[^/]*__($|/)")
_ANNOTATIONS = "json"
_SIGNATURES = (
    (re.compile(rb"\xff\xd8\xff"), "jpg"),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "png"),
    (re.compile(rb"GIF8[79]a"), "gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "webp"),
    (re.compile(rb"II\*\0|MM\0\*"), "tif"),
    (re.compile(rb"RIFF....WAVE", re.DOTALL), "wav"),
    (re.compile(rb"fLaC"), "flac"),
    (re.compile(rb"\x93NUMPY"), "npy"),
)
IMAGES = frozenset({"jpg", "png", "gif", "webp", "tif"})


class ExportSample(NamedTuple):
    number: int
    #: Members by extension, the main member first. A sample that did not come from WebDataset has one member: its
    #: bytes, under the extension of its path, or under "".
    members: dict[str, bytes]
    #: The key in WebDataset; None if the sample did not come from WebDataset.
    key: str | None
    #: The annotations as a JSON object; empty for samples from WebDataset, whose annotations are members.
    annotations: bytes
    path: str

    @property
    def data(self) -> bytes:
        """The sample's bytes: its first member."""
        return next(iter(self.members.values()))


def ending_of(data: bytes) -> str | None:
    """Return the extension of files that begin like these bytes; None if it is unknown."""
    return next((ending for pattern, ending in _SIGNATURES if pattern.match(data)), None)


def main_ending(sample: ExportSample) -> str:
    """Return the extension of the sample's path or main member, else one that fits its first bytes, else "bin"."""
    ending = next(iter(sample.members))
    if sample.key is None and not _OF_PATHS.fullmatch(ending):
        return ending_of(sample.data) or "bin"
    return ending


class FileFormat:
    """Encoder of an export's files in one format."""

    def observe(self, number: int, fields: Mapping[str, Any]) -> None:
        """Take the fields of sample `number` into account. Called for each sample before its file is encoded.

        Args:
            fields: the annotations. For a sample from WebDataset: the key and all members except the main member. A
                member is given as text, or as empty bytes if it is not text.

        Raises SourceError, which names the sample, if the format cannot hold the fields.
        """

    def begin(self, first: ExportSample) -> None:
        """Determine the layout of all files from the observed fields and the first sample. Called before `content`.

        Raises SourceError if the format cannot hold the annotations, or if one has the name of the column of bytes.
        """

    def difference(self) -> str:
        """Return a text on a field whose values, with those observed after `begin`, do not fit the layout; else ""."""
        return ""

    def name(self, variant: str, number: int, count: int) -> str:
        """Return the name of file `number` (from 0) of the `count` files of a variant."""
        raise NotImplementedError

    def content(self, samples: Iterator[ExportSample]) -> bytes:
        """Return the bytes of a file with these samples. Raises SourceError if a sample does not fit the format."""
        raise NotImplementedError


class TarFiles(FileFormat):
    """Encoder of tar shards. Headers have no time and no owner, so that shards of every run are equal."""

    def __init__(self, main: str | None) -> None:
        self._main = main

    def name(self, variant: str, number: int, count: int) -> str:
        return f"{variant}-{number:06d}.tar"

    def content(self, samples: Iterator[ExportSample]) -> bytes:
        shard = bytearray()
        for sample in samples:
            key = f"{sample.number:09d}" if sample.key is None else sample.key
            for ending, data in self._members(sample).items():
                _check_name(sample, key, ending)
                header = tarfile.TarInfo(f"{key}.{ending}")  # mode 0644, time 0
                header.size = len(data)
                shard += header.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
                shard += data
                shard += bytes(-len(data) % tarfile.BLOCKSIZE)
        shard += bytes(2 * tarfile.BLOCKSIZE)
        shard += bytes(-len(shard) % tarfile.RECORDSIZE)
        return bytes(shard)

    def _members(self, sample: ExportSample) -> dict[str, bytes]:
        ending = self._main or main_ending(sample)
        _, *rest = sample.members.items()
        if sample.key is None:
            rest = [(_ANNOTATIONS, sample.annotations)]
        members = {ending: sample.data, **dict(rest)}
        if len(members) <= len(rest):
            raise SourceError(
                f"sample {sample.number} ({sample.path}) has two members {ending!r}; name the one with its bytes: "
                "main='bin' (--main bin)"
            )
        return members


def _check_name(sample: ExportSample, key: str, ending: str) -> None:
    """Raise SourceError for a member that webdataset would leave out, or give to another sample."""
    name = f"{key}.{ending}"
    match = _MEMBER.fullmatch(name)
    if match is None or match.groups() != (key, ending) or _HIDDEN.match(name):
        raise SourceError(
            f"sample {sample.number} ({sample.path}) has the member {name!r}, which webdataset cannot read; a key has "
            "no line break, and no dot in its last part"
        )


_JSON_COLUMN = "annotations"
#: Bytes of one value, as Arrow counts them in 32 bits.
_MAX_VALUE = 2**31 - 1
#: Maximum number of different fields in the annotations of all samples, counting nested fields.
MAX_FIELDS = 10_000
#: The largest integer up to which every one is equal to a float.
_EXACT = 2**53
_INT64, _UINT64 = range(-(2**63), 2**63), range(2**64)
_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a text", list: "a list", dict: "an object"}
_INTEGER, _NUMBER, _TEXT, _LIST, _OBJECT = (_KINDS[kind] for kind in (int, float, str, list, dict))
_BYTES = "bytes"
_ADVICE = "annotations='json' (--annotations json) writes one column of JSON texts"


class FieldType:
    """Type that all observed values of a field have in common. Observing further values widens it."""

    __slots__ = ("fields", "first", "high", "inner", "kind", "low")

    def __init__(self) -> None:
        #: one of `_KINDS`, or `_BYTES`; None: all values are null
        self.kind: str | None = None
        #: number of the first sample with a value
        self.first = 0
        self.low = self.high = 0
        self.inner: FieldType | None = None
        self.fields: dict[str, FieldType] = {}

    def observe(self, value: Any, name: str, number: int) -> None:
        """Widen the type so that it holds a value of the field `name` of sample `number`.

        Raises SourceError if the values have no common type.
        """
        if value is None:
            return
        self._widen(_BYTES if isinstance(value, bytes) else _KINDS[type(value)], name, number)
        if type(value) is int:
            self.low, self.high = min(self.low, value), max(self.high, value)
        elif isinstance(value, list):
            self.inner = self.inner or FieldType()
            for one in value:
                self.inner.observe(one, f"{name}[]", number)
        elif isinstance(value, dict):
            for key, one in value.items():
                self.fields.setdefault(key, FieldType()).observe(one, f"{name}.{key}", number)
        limit = range(-_EXACT, _EXACT + 1) if self.kind == _NUMBER else _INT64 if self.low < 0 else _UINT64
        if self.kind in (_INTEGER, _NUMBER) and not (self.low in limit and self.high in limit):
            raise SourceError(
                f"sample {number}: {name} has no type of 64 bits for all values, which are from {self.low} to "
                f"{self.high}{' and fractions' if self.kind == _NUMBER else ''}; {_ADVICE}"
            )

    def _widen(self, kind: str, name: str, number: int) -> None:
        if self.kind is None:
            self.kind, self.first = kind, number
        elif {kind, self.kind} == {_INTEGER, _NUMBER}:
            self.kind = _NUMBER
        elif {kind, self.kind} == {_TEXT, _BYTES}:
            self.kind = _BYTES
        elif kind != self.kind:
            raise SourceError(
                f"sample {number}: {name} is {kind}, and {self.kind} in sample {self.first}; a column has one type: "
                f"{_ADVICE}"
            )

    def count(self) -> int:
        """Return the number of fields in this field, including itself."""
        inner = 0 if self.inner is None else self.inner.count()
        return 1 + inner + sum(field.count() for field in self.fields.values())

    def arrow(self, name: str) -> Any:
        """Return pyarrow's type of the field `name`. Raises SourceError if it holds objects without fields."""
        import pyarrow as pa

        if self.kind == _LIST:
            assert self.inner is not None
            return pa.list_(self.inner.arrow(f"{name}[]"))
        if self.kind == _OBJECT:
            if not self.fields:
                raise SourceError(
                    f"sample {self.first}: {name} is an object without fields, as in all samples, which Parquet cannot "
                    f"hold; {_ADVICE}"
                )
            return pa.struct([(key, field.arrow(f"{name}.{key}")) for key, field in self.fields.items()])
        if self.kind == _INTEGER:
            return pa.int64() if self.high in _INT64 else pa.uint64()
        plain = {None: pa.null(), "a boolean": pa.bool_(), _NUMBER: pa.float64(), _TEXT: pa.string()}
        return plain.get(self.kind, pa.binary())


class ParquetFiles(FileFormat):
    """Encoder of Parquet files, with checksums of pages.

    Args:
        main: the column of the samples' bytes; None: "image" if the first sample is one, else "data".
        row_group_size: maximum bytes of samples in a row group, unless one sample is larger.
        as_json: whether annotations are one column of JSON texts.
        name: the dataset, for errors.

    Raises MissingExtraError if pyarrow is not installed.
    """

    def __init__(self, main: str | None, row_group_size: int, *, as_json: bool, name: str) -> None:
        imported("pyarrow.parquet", "Parquet needs pyarrow", "datasets")
        self._main = main
        self._row_group_size = row_group_size
        self._as_json = as_json
        self._name = name
        self._columns: dict[str, FieldType] = {}
        self._schema: Any = None

    def observe(self, number: int, fields: Mapping[str, Any]) -> None:
        if self._as_json:
            return
        for name, value in fields.items():
            self._columns.setdefault(name, FieldType()).observe(value, name, number)
        if number % 1000 == 0:
            self._check_count(number)

    def _check_count(self, number: int) -> None:
        count = sum(column.count() for column in self._columns.values())
        if count > MAX_FIELDS:
            raise SourceError(
                f"{self._name} has {count} fields in the annotations of the samples up to {number}; a file has at most "
                f"{MAX_FIELDS} columns: {_ADVICE}"
            )

    def begin(self, first: ExportSample) -> None:
        import pyarrow as pa

        self._check_count(first.number)
        is_image = ending_of(first.data) in IMAGES
        self._main = self._main or ("image" if is_image else "data")
        columns = [(name, column.arrow(name)) for name, column in self._columns.items()]
        if self._as_json:
            columns = [(_JSON_COLUMN, pa.string())]
        if self._main in dict(columns):
            raise SourceError(
                f"{self._name} has the annotation {self._main!r}, the name of the column of bytes; give another one: "
                "main='bytes' (--main bytes)"
            )
        content = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        features = {"info": {"features": {self._main: {"_type": "Image"}}}}
        metadata = {"huggingface": json.dumps(features)} if is_image else None
        self._schema = pa.schema([(self._main, content), *columns], metadata=metadata)

    def difference(self) -> str:
        first = {field.name: field.type for field in self._schema}
        for name, column in self._columns.items():
            if name not in first:
                return f"the annotation {name!r}, which the first file lacks"
            if first[name] != (kind := column.arrow(name)):
                return f"the annotation {name!r} of type {kind}, which is {first[name]} in the first file"
        return ""

    def name(self, variant: str, number: int, count: int) -> str:
        return f"{variant}-{number:05d}-of-{count:05d}.parquet"

    def content(self, samples: Iterator[ExportSample]) -> bytes:
        import pyarrow as pa
        from pyarrow import parquet

        file = io.BytesIO()
        with parquet.ParquetWriter(file, self._schema, write_page_checksum=True) as writer:
            for group in self._row_groups(samples):
                try:
                    table = pa.Table.from_pylist([self._row(sample) for sample in group], self._schema)
                except (pa.ArrowException, ValueError, OverflowError) as error:
                    raise SourceError(
                        f"samples {group[0].number} to {group[-1].number} of {self._name} cannot be written: {error}"
                    ) from error
                writer.write_table(table, row_group_size=len(group))
        return file.getvalue()

    def _row_groups(self, samples: Iterator[ExportSample]) -> Iterator[list[ExportSample]]:
        group: list[ExportSample] = []
        size = 0
        for sample in samples:
            own = sum(map(len, sample.members.values())) + len(sample.annotations)
            if own > _MAX_VALUE:
                raise SourceError(
                    f"sample {sample.number} ({sample.path}) has {own} bytes; a cell has at most {_MAX_VALUE}"
                )
            if group and size + own > self._row_group_size:
                yield group
                group, size = [], 0
            group.append(sample)
            size += own
        yield group

    def _row(self, sample: ExportSample) -> dict[str, Any]:
        assert self._main is not None
        ending, data = next(iter(sample.members.items()))
        if sample.key is not None:
            path = f"{sample.key}.{ending}"
            _, *rest = sample.members.items()
            return {self._main: {"bytes": data, "path": path}, KEY: sample.key, **dict(rest)}
        is_own = ending != "" and "://" not in sample.path  # not a part of an object, as packs of a store have
        path = sample.path if is_own else f"{sample.number:09d}.{main_ending(sample)}"
        row = {self._main: {"bytes": data, "path": path}}
        if self._as_json:
            return {**row, _JSON_COLUMN: sample.annotations.decode()}
        return {**row, **msgspec.json.decode(sample.annotations)}
