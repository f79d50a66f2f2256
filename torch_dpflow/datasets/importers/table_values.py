"""Cells of an Arrow table as Python values, without pandas."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow

from torch_dpflow.datasets.annotations import iso_duration
from torch_dpflow.errors import SourceError

_BINARY = (
    pyarrow.types.is_binary,
    pyarrow.types.is_large_binary,
    pyarrow.types.is_fixed_size_binary,
)
#: Years that Python's times, and most readers of ISO 8601, have.
_YEAR = re.compile(r"(?!0000)[0-9]{4}-")


def field_names(schema: pyarrow.Schema) -> Iterator[str]:
    """Yield the names of all columns, and of the fields of their structs, as in "image.path" and "boxes[].x"."""
    pending = [(field.name, field.type) for field in schema]
    while pending:
        name, kind = pending.pop()
        yield name
        while hasattr(kind, "value_field"):
            name, kind = f"{name}[]", kind.value_type
        if pyarrow.types.is_struct(kind):
            pending += [(f"{name}.{field.name}", field.type) for field in kind]


def rows_of(
    batch: pyarrow.RecordBatch, name: str, data_column: str | None = None, first: int = 0
) -> list[dict[str, Any]]:
    """Return the rows of a batch as dicts. A column whose times Python cannot represent exactly gets ISO 8601 text.

    Args:
        batch: some rows of a table.
        name: names the table in errors.
        data_column: the only column, or field of a struct as in "image.bytes", that may contain bytes; None: no column.
        first: the number of the batch's first row in its table, for errors.

    Raises:
        SourceError: a column has a value that Python cannot represent, or one other than `data_column` has bytes.
    """
    names = batch.schema.names
    for column, title in zip(batch.columns, names):
        found = next((one for one in _bytes_in(column, title) if one != data_column), None)
        if found is not None:
            raise SourceError(
                f"{name}, column {found!r} has bytes, which annotations cannot hold; data_column={found!r} imports "
                "them as the samples; else write the table without it"
            )
    columns = [_values(column, f"{name}, column {title!r}", first) for column, title in zip(batch.columns, names)]
    return [dict(zip(names, cells)) for cells in zip(*columns)]


def _bytes_in(column: pyarrow.Array, name: str) -> Iterator[str]:
    """Yield the name of a column if it contains bytes, and of each field of its structs that contains bytes."""
    kind = column.type
    if any(is_binary(kind) for is_binary in _BINARY):
        if column.null_count < len(column):
            yield name
    elif pyarrow.types.is_struct(kind):
        for field, inner in zip(kind, column.flatten()):
            yield from _bytes_in(inner, f"{name}.{field.name}")
    elif pyarrow.types.is_dictionary(kind):
        yield from _bytes_in(column.dictionary, name)
    elif pyarrow.types.is_map(kind):
        yield from _bytes_in(column.keys, name)
        yield from _bytes_in(column.items, name)
    elif hasattr(column, "flatten") and hasattr(kind, "value_type"):
        yield from _bytes_in(column.flatten(), name)


def _values(column: pyarrow.Array, name: str, first: int) -> list[Any]:
    try:
        found: list[Any] = _in_microseconds(column).to_pylist()
        return found
    except (ValueError, OverflowError):
        pass
    exact = []
    for row, scalar in enumerate(column, first):
        try:
            exact.append(_exact(scalar))
        except (ValueError, OverflowError) as error:
            raise SourceError(
                f"{name} of type {column.type}, row {row}: {error}; store it as text or as integers"
            ) from error
    return exact


def _exact(scalar: pyarrow.Scalar) -> Any:
    """Return the Python value of a scalar with times in nanoseconds, at any depth; such times become text.

    Raises ValueError or OverflowError for a value that Python cannot represent.
    """
    kind, types = scalar.type, pyarrow.types
    if not scalar.is_valid:
        return None
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _exact(scalar.value if types.is_dictionary(kind) else scalar.as_py())
    if types.is_map(kind):
        keys, items = scalar.values.flatten()
        return [(_exact(key), _exact(item)) for key, item in zip(keys, items)]
    if types.is_struct(kind):
        return {field.name: _exact(scalar[number]) for number, field in enumerate(kind)}
    if hasattr(kind, "value_type"):  # the kinds of lists
        return [_exact(one) for one in scalar.values]
    if types.is_timestamp(kind):
        return _timestamp(scalar)
    if types.is_time(kind):
        return scalar.cast(pyarrow.string()).as_py()
    if kind == pyarrow.duration("ns"):
        return iso_duration(scalar.value)
    return scalar.as_py()


def _timestamp(scalar: pyarrow.Scalar) -> str:
    in_utc = np.datetime64(scalar.value, scalar.type.unit)
    text = str(in_utc)
    if not _YEAR.match(text):
        raise ValueError(f"the time {text} is not of a year from 1 to 9999")
    return text if scalar.type.tz is None else f"{text}Z"


def _in_microseconds(column: pyarrow.Array) -> pyarrow.Array:
    """Convert nanoseconds to microseconds: Arrow would convert nanoseconds to values of pandas if it is installed.

    Raises ValueError if a value is not a multiple of a microsecond.
    """
    wanted = _coarser(column.type)
    return column if wanted == column.type else column.cast(wanted)


def _coarser(kind: pyarrow.DataType) -> pyarrow.DataType:
    types = pyarrow.types
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pyarrow.timestamp("us", kind.tz)
    if kind == pyarrow.duration("ns"):
        return pyarrow.duration("us")
    if kind == pyarrow.time64("ns"):
        return pyarrow.time64("us")
    if types.is_dictionary(kind) and _coarser(kind.value_type) != kind.value_type:
        return _coarser(kind.value_type)
    return _with_inner(kind, _coarser)


def check_offsets(table: pyarrow.Table) -> None:
    """Raise ArrowInvalid if offsets, sizes or indices lead out of a table's buffers: Arrow follows them unchecked.

    Texts are checked as bytes: a text that is not UTF-8 fails only when it becomes a value.
    """
    table.validate()
    for column in table.columns:
        kind = _without_text(column.type)
        for chunk in column.chunks:
            (chunk if kind == chunk.type else chunk.view(kind)).validate(full=True)


def _without_text(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return a type that has the same buffers as `kind`, and bytes in the place of texts."""
    types = pyarrow.types
    if types.is_string(kind):
        return pyarrow.binary()
    if types.is_large_string(kind):
        return pyarrow.large_binary()
    if types.is_dictionary(kind):
        return pyarrow.dictionary(kind.index_type, _without_text(kind.value_type), kind.ordered)
    return _with_inner(kind, _without_text)


def _with_inner(kind: pyarrow.DataType, change: Callable[[pyarrow.DataType], pyarrow.DataType]) -> pyarrow.DataType:
    """Return a type whose inner types are changed, if it is a list, a map or a struct; else the type itself."""
    types = pyarrow.types
    if types.is_list(kind):
        return pyarrow.list_(change(kind.value_type))
    if types.is_large_list(kind):
        return pyarrow.large_list(change(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(change(kind.value_type), kind.list_size)
    if types.is_map(kind):
        return pyarrow.map_(change(kind.key_type), change(kind.item_type))
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(change(field.type)) for field in kind])
    return kind
