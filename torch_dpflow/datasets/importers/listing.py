"""Imports tables that list samples: CSV, TSV and Parquet."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.storage.urls import join_url, split_name, without_login
from torch_dpflow.errors import MissingExtraError, OptionError, SourceError, StorageError

#: Rows that are in memory at a time (of a CSV file: as many as fit into a block of bytes).
_BATCH_ROWS = 4096
_CSV_BLOCK = 2**20
_SEPARATORS = {".csv": ",", ".tsv": "\t"}


class ListingImporter:
    """Reads a table with a column of paths; its other columns become annotations, null ones are left out.

    The types of a CSV's columns are inferred from its first megabyte. The table may be larger than memory.

    Args:
        listing: a path or URL that ends with .csv, .tsv or .parquet.
        root: the directory that paths are relative to; None: the listing's directory.
        path_column: the column of paths, or of URLs.
        offset_column: the samples' offsets in their objects, bytes; needs `length_column`.
        length_column: the samples' sizes, bytes.
        checksum_column: "crc32:…" or "sha256:…".
        options: fsspec's options for the listing and `root`.

    Raises:
        OptionError: the listing has another ending.
        MissingExtraError: pyarrow is not installed.
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
        options: Mapping[str, Any] | None = None,
    ) -> None:
        folder, self._name = split_name(str(listing))
        self._ending = "." + self._name.rpartition(".")[2].lower()
        if self._ending not in {*_SEPARATORS, ".parquet"}:
            raise OptionError(
                f"listing={without_login(str(listing))!r} ends with {self._ending}; give a .csv, .tsv or .parquet file"
            )
        self._files = Files(folder, options)
        self._columns = {
            "path": path_column,
            "offset": offset_column,
            "length": length_column,
            "checksum": checksum_column,
        }
        self._total: int | None = None
        data = self._files if root is None else Files(root, options)
        self.root: str | None = data.url
        self.options = data.options
        self.source = {
            "importer": "listing",
            "listing": join_url(self._files.url, self._name),
            "root": self.root,
            "columns": self._columns,
        }

    def extend(self, info: Mapping[str, Any]) -> None:
        """Samples of this kind do not depend on those before them."""

    def items(self, start: int = 0) -> Iterator[Item]:
        used = {field: column for field, column in self._columns.items() if column is not None}
        name = str(self.source["listing"])
        position = 0
        for rows in self._batches():
            missing = set(used.values()) - set(rows.schema.names)
            if missing:
                raise SourceError(
                    f"{self.source['listing']} has no column {sorted(missing)}; it has {rows.schema.names}"
                )
            skipped = min(len(rows), max(0, start - position))
            position += len(rows)
            first = position - len(rows) + skipped
            for number, row in enumerate(_rows_of(rows.slice(skipped), name), first):
                yield self._item(row, used, number)

    def total(self) -> int | None:
        return self._total

    def info(self) -> Mapping[str, Any]:
        return {}

    def _item(self, row: dict[str, Any], used: Mapping[str, str], number: int) -> Item:
        fields = {field: row.pop(column) for field, column in used.items()}
        fields["checksum"] = fields.get("checksum") or None  # null in a CSV file
        fields["path"] = fields["path"] or ""
        try:
            return Item(**fields, meta={name: value for name, value in row.items() if value is not None})
        except SourceError as error:
            columns = ", ".join(f"{field}={column!r}" for field, column in used.items())
            raise SourceError(
                f"{self.source['listing']}, row {number}: {error} (columns: {columns})"
            ) from error

    def _batches(self) -> Iterator[Any]:
        try:
            import pyarrow
            from pyarrow import csv, parquet
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                "listings need pyarrow; install it with: pip install 'torch_dpflow[datasets]'"
            ) from error
        try:
            with self._files.open(self._name) as file:
                if self._ending == ".parquet":
                    table = parquet.ParquetFile(file)
                    self._total = table.metadata.num_rows
                    yield from table.iter_batches(batch_size=_BATCH_ROWS)
                else:
                    parse = csv.ParseOptions(delimiter=_SEPARATORS[self._ending])
                    read = csv.ReadOptions(block_size=_CSV_BLOCK)
                    # By default it converts paths and checksums of digits to numbers.
                    texts = (self._columns["path"], self._columns["checksum"])
                    convert = csv.ConvertOptions(
                        column_types={column: pyarrow.string() for column in texts if column is not None}
                    )
                    yield from csv.open_csv(
                        file, read_options=read, parse_options=parse, convert_options=convert
                    )
        except FileNotFoundError as error:
            raise SourceError(f"there is no {self.source['listing']}") from error
        except StorageError:
            raise
        except (pyarrow.ArrowException, OSError) as error:  # Arrow raises OSError for damaged pages
            raise SourceError(f"{self.source['listing']} cannot be read: {error}") from error


def _rows_of(batch: Any, name: str) -> list[dict[str, Any]]:
    from torch_dpflow.datasets.importers.table_values import rows_of  # here, because pyarrow is an extra

    return rows_of(batch, name)
