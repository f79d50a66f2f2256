"""Reads CSV and TSV strictly: rows of text, and columns whose types hold for the whole file."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from math import isfinite
from typing import IO, Any, Literal

from torch_dpflow.errors import SourceError

#: Most characters of a cell. Python's own limit, 128 KiB, is too small for outlines and transcripts.
_MAX_CELL = 2**24
#: Rows whose distinct cells are matched at a time.
_ROWS = 4096
#: Spellings of a missing value, those of pandas and Arrow. In a column of texts they are texts.
_MISSING = frozenset(["", "NULL", "null", "NA", "#NA", "N/A", "n/a", "#N/A", "#N/A N/A", "NaN", "nan"]).union(
    ["-NaN", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"]
)
_TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
#: Integers that JSON's readers hold; longer ones are mostly identifiers, and stay texts.
_INTEGERS = range(-(2**63), 2**64)
#: The largest integer up to which every one is equal to a float.
_EXACT = 2**53
# Leading zeros and a plus have a meaning: "007" is a name, "+49123" a telephone.
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,19})", re.ASCII)
_PADDED_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_INFINITY = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?"
    r"|[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?",
    re.ASCII,
)

#: What a cell may be. Integers that are not small may not be equal to any float.
_Kind = Literal["small integer", "integer", "number", "truth", "time", "text"]


class DelimitedRows:
    """The rows of a CSV or TSV file, quoted as RFC 4180 says, in UTF-8 with or without a byte-order mark.

    Args:
        file: the file, at its start.
        delimiter: between cells.
        name: names the file in errors.

    Raises SourceError, also while rows are read: the file is no UTF-8, has no header, has a column name twice, a row of
    another number of cells, or a quote that is not doubled inside quotes.
    """

    def __init__(self, file: IO[bytes], delimiter: str, name: str) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL))
        self._name = name
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        self._reader = csv.reader(text, delimiter=delimiter, strict=True)
        header = next(self._cells(), None)
        if header is None:
            raise SourceError(
                f"{name} cannot be read: it is empty; give a header with the names of the columns"
            )
        check_names(header, name)
        self.header = header

    def __iter__(self) -> Iterator[list[str]]:
        for cells in self._cells():
            if len(cells) != len(self.header):
                raise self._unreadable(f"it has {len(cells)} cells, and the header {len(self.header)}")
            yield cells

    def _cells(self) -> Iterator[list[str]]:
        """The cells of each row that is not empty."""
        while True:
            try:
                cells = next(self._reader, None)
            except UnicodeDecodeError as error:
                raise self._unreadable(
                    f"it is no UTF-8 text ({error.reason}: {error.object[error.start : error.start + 4]!r}); convert "
                    "the file, as in iconv -f LATIN1 -t UTF-8"
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


class ColumnTypes:
    """The types of the columns of a file, as all of its rows allow: integers, numbers, truths, times or texts.

    Times keep their spelling. Missing values are None in every column but those of texts.

    Args:
        columns: how many there are.
        texts: numbers of columns that are texts, whatever they hold.
        padded: numbers of columns in which leading zeros have no meaning.
    """

    def __init__(self, columns: int, *, texts: Collection[int] = (), padded: Collection[int] = ()) -> None:
        self._kinds: list[set[_Kind]] = [{"text"} if number in texts else set() for number in range(columns)]
        self._padded = padded

    def observe(self, rows: Iterable[list[str]]) -> int:
        """Take all rows into account; returns their number."""
        count, rows = 0, iter(rows)
        while block := list(islice(rows, _ROWS)):
            count += len(block)
            for number, (kinds, cells) in enumerate(zip(self._kinds, zip(*block))):
                if "text" not in kinds:
                    kinds |= {_kind_of(cell, number in self._padded) for cell in {*cells} - _MISSING}
        return count

    def converters(self) -> list[Callable[[str], Any]]:
        """A function of a cell for each column. It raises ValueError or KeyError for cells that were not observed."""
        return [_converter(frozenset(kinds)) for kinds in self._kinds]


def _kind_of(cell: str, may_be_padded: bool) -> _Kind:
    stripped = cell.strip()
    if (_PADDED_INTEGER if may_be_padded else _INTEGER).fullmatch(stripped):
        value = int(stripped)
        return "small integer" if abs(value) <= _EXACT else "integer" if value in _INTEGERS else "text"
    if _INFINITY.fullmatch(stripped) or (_NUMBER.fullmatch(stripped) and isfinite(float(stripped))):
        return "number"
    return "truth" if stripped in _TRUTHS else "time" if _TIME.fullmatch(stripped) else "text"


def _converter(kinds: frozenset[_Kind]) -> Callable[[str], Any]:
    if kinds <= {"small integer", "integer"}:
        return lambda cell: None if cell in _MISSING else int(cell)
    if kinds <= {"small integer", "number"}:
        return lambda cell: None if cell in _MISSING else float(cell)
    if kinds == {"truth"}:
        return lambda cell: None if cell in _MISSING else _TRUTHS[cell.strip()]
    if kinds == {"time"}:
        return lambda cell: None if cell in _MISSING else cell
    return str


def check_names(names: Collection[str], table: str) -> None:
    """Raise SourceError for a column name that comes twice in a table, which errors call `table`."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise SourceError(f"{table} has several columns of the name {twice}; give each a name of its own")
