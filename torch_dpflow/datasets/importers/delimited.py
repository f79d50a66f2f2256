"""The rows of a CSV or TSV file."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import IO

from torch_dpflow.errors import SourceError

#: Maximum characters of a cell. Python's own limit, 128 KiB, is too small for outlines and transcripts.
_MAX_CELL = 2**24
#: What to do with a file in another encoding, or a binary one.
_CONVERT = "convert it from its encoding, which the command `file` prints, as in iconv -f UTF-16 -t UTF-8 or -f LATIN1"
#: A line end as Python's file objects have it.
_LINE_END = re.compile(r"\r\n|\r|\n")
_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,7}$")
_DIGIT = re.compile(r"[0-9]")
#: Fewest characters of a path that is recognised by the positions of its digits: shorter numbers begin lines of texts.
_MIN_NUMBERED = 4


class DelimitedRows:
    """Iterable of the rows of a CSV or TSV file, as lists of cells. `header` contains the names of the columns.

    Cells are quoted as in RFC 4180. The encoding is UTF-8, with or without a byte-order mark.

    Args:
        file: the file, at its start.
        delimiter: separator of cells.
        name: name of the file in errors.
        path_column: the column of paths, by which rows inside a quoted cell are detected; None: they are not detected.

    Raises:
        SourceError: the header is missing or names a column twice, or the file is not UTF-8. Also while rows are read:
            text that is not UTF-8, too few or too many cells, wrong quotes, a quoted cell that contains a row.
    """

    def __init__(self, file: IO[bytes], delimiter: str, name: str, path_column: str | None = None) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL))
        self._name = name
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        self._reader = csv.reader(text, delimiter=delimiter, strict=True)
        header = next(self._cells(), None)
        if header is None:
            raise SourceError(f"{name} cannot be read: it is empty; give a header with the names of the columns")
        if any("\0" in cell for cell in header):  # valid in UTF-8, and half of the bytes of a text in UTF-16
            raise self._unreadable(f"its header has NUL characters; {_CONVERT}")
        check_names(header, name)
        self.header = header
        self._delimiter = delimiter
        self._path = header.index(path_column) if path_column in header else None

    def __iter__(self) -> Iterator[list[str]]:
        for cells in self._cells():
            if len(cells) != len(self.header):
                raise self._unreadable(f"it has {len(cells)} cells, and the header {len(self.header)}")
            if self._path is not None and (row := self._row_inside(cells, self._path)) is not None:
                raise self._unreadable(
                    f"a cell in quotes contains what looks like a separate row: {row!r:.80}. If a text begins with a "
                    'quote, double that and quote the cell, as in """so"" he said"; if the lines are one text, write '
                    "the table as Parquet"
                )
            yield cells

    def _row_inside(self, cells: Sequence[str], path: int) -> str | None:
        """Return a line inside a cell that is itself a row: the same number of cells, and a similar path; else None.

        If a cell begins with a quote that is not meant as a quotation mark of RFC 4180, all rows up to the next quote
        before a delimiter or line end become one cell.
        """
        for number, cell in enumerate(cells):
            if "\n" not in cell and "\r" not in cell:
                continue
            first, *inner, last = [line.split(self._delimiter) for line in _LINE_END.split(cell)]
            before, after = number, len(cells) - number - 1
            # A line and how many cells of the row are before and after it, on the same line of the file.
            for line, ahead, behind in [(first, before, 0), *((one, 0, 0) for one in inner), (last, 0, after)]:
                is_row = ahead + len(line) + behind == len(cells)
                if is_row and 0 <= path - ahead < len(line) and _are_alike(line[path - ahead], cells[path]):
                    return self._delimiter.join(line)
        return None

    def _cells(self) -> Iterator[list[str]]:
        """Yield the cells of each row that is not empty."""
        while True:
            try:
                cells = next(self._reader, None)
            except UnicodeDecodeError as error:
                raise self._unreadable(
                    f"it is no UTF-8 text ({error.reason}: {error.object[error.start : error.start + 4]!r}); {_CONVERT}"
                ) from error
            except csv.Error as error:
                raise self._unreadable(
                    f"{error}; inside quotes write each quote twice, and quote a cell that begins with one, as in "
                    '"""so"" he said"; or write the table as Parquet'
                ) from error
            if cells is None:
                return
            if cells:
                yield cells

    def _unreadable(self, how: str) -> SourceError:
        return SourceError(f"{self._name} cannot be read, line {self._reader.line_num or 1} or after: {how}")


def _are_alike(one: str, path: str) -> bool:
    """Return whether a text is a path with the folder or extension of `path`, or with digits at the same positions."""
    if not one or len(one.split()) > len(path.split()):
        return False
    folder, suffix = path.rpartition("/")[0], _SUFFIX.search(path)
    if folder and one.startswith(f"{folder}/"):
        return True
    if suffix:
        return one.lower().endswith(suffix[0].lower())
    is_numbered = len(path) >= _MIN_NUMBERED and _DIGIT.search(path) is not None
    return is_numbered and _DIGIT.sub("0", one) == _DIGIT.sub("0", path)


def check_names(names: Collection[str], table: str) -> None:
    """Raise SourceError for a column name that occurs twice in a table. table: name of the table in errors."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise SourceError(f"{table} has several columns of the name {twice}; give each a different name")
