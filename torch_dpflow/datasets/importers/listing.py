"""Importer of tables that list samples: CSV, TSV and Parquet."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from itertools import islice
from math import isfinite
from typing import IO, Any, Literal

from torch_dpflow._core.lazy import imported
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.base import BaseImporter, Item, check_not_compressed
from torch_dpflow.datasets.importers.delimited import DelimitedRows, check_names
from torch_dpflow.datasets.importers.folders import files_below
from torch_dpflow.datasets.importers.sources import state_of_objects
from torch_dpflow.datasets.importers.splits import check_no_log, check_no_log_above, files_of_split
from torch_dpflow.datasets.storage.urls import join_url, printable_url, split_name
from torch_dpflow.errors import DPFlowError, OptionError, SourceError, StorageError
from torch_dpflow.log import DATASETS

#: Rows of a Parquet file that are in memory at a time.
_BATCH_ROWS = 4096
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_PARQUET = ".parquet"
#: Extensions of Parquet files in a directory.
_PARQUET_ENDINGS = (_PARQUET, ".parq", ".pq")
#: Beginnings of names that are not data, as in pyarrow.dataset: hidden files, _SUCCESS, _metadata.
_NO_DATA = (".", "_")
#: Maximum names in a message.
_MAX_NAMES = 5


class ListingImporter(BaseImporter):
    """Importer of a table with a column of paths or of the samples' bytes. Other columns become annotations.

    Null values are left out. The table may be larger than memory. A CSV or TSV file is quoted as in RFC 4180, and read
    twice, because a column gets the type that all of its rows allow. A column of annotations stays text if it has an
    integer with leading zeros, or one above 64 bits.

    Args:
        listing: a path or URL that ends with .csv, .tsv or .parquet. Or a directory: all files below it that end with
            .parquet, .parq or .pq are read in the order of their paths, except names that begin with "." or "_".
        root: the directory that paths are relative to, or begin with; None: the listing's directory.
        path_column: the column of paths, or of URLs; "image.path" is a field of a column of structs.
        offset_column: the column of the samples' offsets in their objects, bytes; needs `length_column`.
        length_column: the column of the samples' sizes, bytes.
        checksum_column: the column of the samples' checksums, "crc32:…" or "sha256:…".
        data_column: the column of the samples' bytes, such as "image.bytes", for Parquet only. The bytes are copied
            into the store, and paths become annotations.
        split: the split to read of a directory that has several, such as "train".
        options: fsspec's options for the listing and `root`.

    Raises:
        OptionError: the listing has another extension; or `data_column` is given for CSV or TSV, or with a column of
            offsets or lengths.
    """

    def __init__(
        self,
        listing: str | os.PathLike[str],
        *,
        root: str | os.PathLike[str] | None = None,
        path_column: str = "path",
        offset_column: str | None = None,
        length_column: str | None = None,
        checksum_column: str | None = None,
        data_column: str | None = None,
        split: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        folder, self._name = split_name(str(listing))
        if str(listing).endswith("/") or "." not in self._name:
            folder, self._name, self._ending = str(listing), "", _PARQUET
        else:
            self._ending = "." + self._name.rpartition(".")[2].lower()
        if self._ending not in {*_SEPARATORS, _PARQUET}:
            raise OptionError(
                f"listing={printable_url(str(listing))!r} ends with {self._ending}; give a .csv, .tsv or .parquet "
                "file, or a directory of Parquet files, with a / at its end"
            )
        if data_column is not None and (self._ending != _PARQUET or offset_column or length_column):
            raise OptionError(
                f"data_column={data_column!r} is for Parquet files, and without offset_column and length_column: the "
                "bytes of a cell are a sample"
            )
        self._files = Files(folder, options)
        self._columns = {
            "path": path_column if data_column is None else None,
            "offset": offset_column,
            "length": length_column,
            "checksum": checksum_column,
            **({} if data_column is None else {"data": data_column}),
        }
        self._split = split
        self._total: int | None = None
        data = self._files if root is None else Files(root, options)
        self.root: str | None = data.url if data_column is None else None
        self.options = data.options

    @functools.cached_property
    def source(self) -> Mapping[str, Any]:
        """See `Importer.source`. The value of `state` changes with the size or state of any file of the listing."""
        return {
            "importer": "listing",
            "listing": self._url_of(self._name),
            "root": self.root,
            "columns": self._columns,
            **({} if self._split is None else {"split": self._split}),
            "state": state_of_objects(self._files, [self._name] if self._name else self._parquet_files()),
        }

    def items(self, start: int = 0) -> Iterator[Item]:
        rows = self._parquet_rows(start) if self._ending == _PARQUET else self._text_rows(start)
        used = self._used
        for number, row in enumerate(rows, start):
            yield self._item(row, used, number)

    def total(self) -> int | None:
        return self._total

    @property
    def _used(self) -> dict[str, str]:
        """Name of the column for each field of an `Item`, without fields that have no column."""
        return {field: column for field, column in self._columns.items() if column is not None}

    def _item(self, row: dict[str, Any], used: Mapping[str, str], number: int) -> Item:
        fields = {field: _taken(row, column) for field, column in used.items()}
        fields["checksum"] = fields.get("checksum") or None  # empty in a CSV file
        if "path" in fields:
            fields["path"] = fields["path"] or ""
        try:
            return Item(**fields, meta={name: value for name, value in row.items() if value is not None})
        except SourceError as error:
            columns = ", ".join(f"{field}={column!r}" for field, column in used.items())
            raise SourceError(f"{self._url_of(self._name)}, row {number}: {error} (columns: {columns})") from error

    def _text_rows(self, start: int) -> Iterator[dict[str, Any]]:
        name = self._url_of(self._name)
        with self._opened(self._name) as file:
            rows = DelimitedRows(file, _SEPARATORS[self._ending], name, self._columns["path"])
            header = rows.header
            self._check_columns({*header}, header, name)
            numbers = {field: header.index(column) for field, column in self._used.items()}
            texts = {number for field, number in numbers.items() if field in ("path", "checksum")}
            types = ColumnTypes(len(header), texts=texts, padded={*numbers.values()})
            self._total = types.observe(rows)
        converters = types.converters()
        with self._opened(self._name) as file:
            rows = DelimitedRows(file, _SEPARATORS[self._ending], name, self._columns["path"])
            for cells in islice(rows, start, None):
                try:
                    yield {
                        column: convert(cell) for column, convert, cell in zip(header, converters, cells, strict=True)
                    }
                except (ValueError, KeyError) as error:
                    raise SourceError(f"{name} has changed while it was read: {error}; import it again") from error

    def _parquet_rows(self, start: int) -> Iterator[dict[str, Any]]:
        parquet = imported("pyarrow.parquet", "Parquet needs pyarrow", "datasets")
        import pyarrow

        from torch_dpflow.datasets.importers.table_values import field_names, rows_of

        self._total, to_skip = None, start
        paths = self._parquet_files()
        for path in paths:
            name = self._url_of(path)
            try:
                with self._opened(path) as file:
                    table = parquet.ParquetFile(file, page_checksum_verification=True)
                    row = 0
                    check_names([*field_names(table.schema_arrow)], name)
                    self._check_columns({*field_names(table.schema_arrow)}, table.schema_arrow.names, name)
                    if len(paths) == 1:
                        self._total = table.metadata.num_rows
                    for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                        skipped = min(len(batch), to_skip)
                        to_skip -= skipped
                        yield from rows_of(batch.slice(skipped), name, self._columns.get("data"), row + skipped)
                        row += len(batch)
            except DPFlowError:
                raise
            except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError, LookupError) as error:
                # Arrow raises OSError for damaged pages, and Python the others for names and values.
                raise SourceError(f"{name} cannot be read: {error}") from error

    def _parquet_files(self) -> list[str]:
        """Return the listing's Parquet files. Raises SourceError if a directory has none, or is partitioned."""
        if self._name:
            return [self._name]
        url, paths = printable_url(self._files.url), sorted(file.name for file in files_below(self._files, ""))
        check_no_log(self._files, {part for path in paths for part in path.split("/")})
        check_no_log_above(self._files)
        paths = [path for path in paths if not any(part.startswith(_NO_DATA) for part in path.split("/"))]
        partition = next((part for path in paths for part in path.split("/")[:-1] if "=" in part), None)
        if partition is not None:
            raise SourceError(
                f"{url} has a column in the names of its directories, as in {partition!r}; write it "
                "into the files: pyarrow.parquet.write_table(pyarrow.dataset.dataset(folder, partitioning='hive')"
                ".to_table(), file)"
            )
        found = [path for path in paths if path.lower().endswith(_PARQUET_ENDINGS)]
        if not found:
            raise SourceError(f"{url} is no directory of Parquet files; give one, or a .csv, .tsv or .parquet file")
        others = sorted({*paths} - {*found})
        unnamed = [path for path in others if "." not in path.rpartition("/")[2]]
        if unnamed:
            raise SourceError(
                f"{url} has files without an ending, as {unnamed[0]!r}; name those that are Parquet *.parquet, and "
                "remove the others"
            )
        if others:
            DATASETS.warning("%s: left out %d files: %s", url, len(others), ", ".join(others[:_MAX_NAMES]))
        return files_of_split(found, self._split, url)

    def _check_columns(self, names: Collection[str], shown: Sequence[str], table: str) -> None:
        missing = {*self._used.values()} - {*names}
        if missing:
            raise SourceError(f"{table} has no column {sorted(missing)}; it has {[*shown]}")

    @contextmanager
    def _opened(self, path: str) -> Iterator[IO[bytes]]:
        name = self._url_of(path)
        try:
            with self._files.open(path) as file:
                yield file
        except (SourceError, ValueError):  # the latter of pyarrow
            head = b""
            # Opened again, because a stream cannot be read twice. If this fails, the first error is the one to report.
            with suppress(OSError, StorageError), self._files.open(path) as file:
                head = file.read(8)
            check_not_compressed(head, name)
            raise
        except FileNotFoundError as error:
            raise SourceError(f"there is no {name}; check the path, and write a / at the end of a directory") from error
        except StorageError:
            raise
        except OSError as error:
            raise SourceError(f"{name} cannot be read: {error}") from error

    def _url_of(self, path: str) -> str:
        return join_url(self._files.url, path) if path else self._files.url


def _taken(row: dict[str, Any], column: str) -> Any:
    """Remove a value from a row, and return it. column: a column, or a field of a struct such as "image.path"."""
    if column in row:
        return row.pop(column)
    outer, _, inner = column.partition(".")
    struct = row.get(outer)
    if not isinstance(struct, dict):
        return None
    value = _taken(struct, inner)
    if all(other is None for other in struct.values()):
        del row[outer]
    return value


#: Rows whose distinct cells are matched at a time.
_ROWS = 4096
#: Spellings of a missing value, those of pandas and Arrow. In a column of texts they are texts.
_MISSING = frozenset(["", "NULL", "null", "NA", "#NA", "N/A", "n/a", "#N/A", "#N/A N/A", "None", "NaN", "nan"]).union(
    ["-NaN", "-nan", "<NA>", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"]
)
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
#: Integers that JSON readers can hold. Longer ones are mostly identifiers, and stay texts.
_INTEGERS = range(-(2**63), 2**64)
#: The largest integer up to which every one is equal to a float.
_EXACT = 2**53
# Leading zeros and a plus have a meaning: "007" is a name, "+49123" a telephone.
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,19})", re.ASCII)
_PADDED_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
#: Perhaps an identifier in hexadecimal digits.
_EXPONENT = re.compile(r"-?[0-9]+[eE][0-9]+", re.ASCII)
_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_INFINITY = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?"
    r"|[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?",
    re.ASCII,
)

#: Kinds of cells. Integers that are not small may not be equal to any float. A missing one is spelled as in _MISSING.
_Kind = Literal["small integer", "integer", "exponent", "number", "boolean", "time", "missing", "text"]


class ColumnTypes:
    """Detection of the types of a CSV or TSV file's columns: integers, numbers, booleans, times or texts.

    All rows of a column must allow its type. Times keep their spelling. Missing values become None, except in columns
    of texts and in columns that contain only words such as "NA". A column of integers is text if a cell is written like
    "12e4".

    Args:
        columns: number of columns.
        texts: numbers of columns that are texts whatever they contain.
        padded: numbers of columns in which leading zeros have no meaning.
    """

    def __init__(self, columns: int, *, texts: Collection[int] = (), padded: Collection[int] = ()) -> None:
        self._kinds: list[set[_Kind]] = [{"text"} if number in texts else set() for number in range(columns)]
        self._padded = padded

    def observe(self, rows: Iterable[list[str]]) -> int:
        """Read all rows to determine the types, and return the number of rows."""
        count, rows = 0, iter(rows)
        while block := list(islice(rows, _ROWS)):
            count += len(block)
            for number, (kinds, cells) in enumerate(zip(self._kinds, zip(*block))):
                if "text" not in kinds:
                    kinds |= {_kind_of(cell, number in self._padded) for cell in {*cells} - {""}}
        return count

    def converters(self) -> list[Callable[[str], Any]]:
        """Return a converter of cells for each column. It can raise ValueError or KeyError for unobserved cells."""
        return [_converter(frozenset(kinds)) for kinds in self._kinds]


def _kind_of(cell: str, may_be_padded: bool) -> _Kind:
    stripped = cell.strip()
    if stripped in _MISSING:
        return "missing"
    if (_PADDED_INTEGER if may_be_padded else _INTEGER).fullmatch(stripped):
        value = int(stripped)
        return "small integer" if abs(value) <= _EXACT else "integer" if value in _INTEGERS else "text"
    if _INFINITY.fullmatch(stripped):
        return "number"
    if _NUMBER.fullmatch(stripped) and isfinite(float(stripped)):
        if _EXPONENT.fullmatch(stripped):
            return "exponent"
        return "number" if _keeps_value(stripped) else "text"
    return "boolean" if stripped in _BOOLEANS else "time" if _TIME.fullmatch(stripped) else "text"


def _keeps_value(cell: str) -> bool:
    """Return whether a float preserves the digits before the point of a number, which may be an identifier."""
    return abs(float(cell)) < _EXACT or "e" in cell.lower() or Decimal(cell) == Decimal(float(cell))


def _converter(found: frozenset[_Kind]) -> Callable[[str], Any]:
    kinds = found - {"missing"}
    if not kinds and found:
        return str
    if kinds <= {"small integer", "integer"}:
        return lambda cell: None if (text := cell.strip()) in _MISSING else int(text)
    if "number" in kinds and kinds <= {"small integer", "number", "exponent"}:
        return lambda cell: None if (text := cell.strip()) in _MISSING else float(text)
    if kinds == {"boolean"}:
        return lambda cell: None if (text := cell.strip()) in _MISSING else _BOOLEANS[text]
    if kinds == {"time"}:
        return lambda cell: None if cell.strip() in _MISSING else cell
    return str
