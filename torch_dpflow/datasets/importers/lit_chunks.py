"""Chunks of LitData that have more than samples one after the other: frames of zstd, and rows in Arrow's format."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from torch_dpflow.datasets.importers.columns import LIT_ROW
from torch_dpflow.datasets.importers.packed_bytes import decompressed
from torch_dpflow.datasets.importers.shards import ForwardReader
from torch_dpflow.errors import MissingExtraError, SourceError

_FRAMED = b"LDFZ01\0\0"
#: Magic, version, flags, samples, samples of a frame, frames.
_HEAD = struct.Struct("<8sHHIII")
#: By frame: its first sample, number of samples, offset and length in the file, and length of its samples.
_FRAME = np.dtype([("first", "<u4"), ("samples", "<u4"), ("start", "<u8"), ("length", "<u4"), ("size", "<u4")])
#: Bytes of the samples of a frame.
_MAX_FRAME = 1 << 30
#: After rows in Arrow's format: their length, then this.
_ROWS = b"LDARW01\0"


def has_frames(data: ForwardReader) -> bool:
    """Return whether a chunk has frames of zstd."""
    return data.at(0, len(_FRAMED)) == _FRAMED


def items_of_frames(data: ForwardReader, count: int, url: str) -> Iterator[bytes]:
    """Yield the samples of a chunk with frames, decompressed.

    Raises:
        SourceError: the chunk is damaged, or has another number of samples than `count`.
        MissingExtraError: pyarrow is not installed.
    """
    head = data.at(0, _HEAD.size)
    if len(head) < _HEAD.size:
        raise _damaged(url, "was cut short")
    _, version, flags, samples, _, number = _HEAD.unpack(head)
    if (version, flags) != (1, 0):
        raise SourceError(f"{url} has frames of version {version}, flags {flags}, which are not read")
    if samples != count:
        raise SourceError(f"{url} has {samples} samples, and the index says {count}; it was cut or replaced")
    table_at = _HEAD.size + 4 * (count + 1)
    first = table_at + number * _FRAME.itemsize
    if first > data.size:
        raise _damaged(url, "was cut short")
    offsets = np.frombuffer(data.at(_HEAD.size, 4 * (count + 1)), "<u4").astype(np.int64)
    frames = np.frombuffer(data.at(table_at, number * _FRAME.itemsize), _FRAME).astype(
        [(name, np.int64) for name in _FRAME.names or ()]
    )
    _check_frames(frames, offsets, first, data.size, url)
    for frame in frames.tolist():
        begin, samples, start, length, size = frame
        content = decompressed(data.at(start, length), "zstd", url, size)
        if len(content) != size:
            raise _damaged(url, f"has a frame at byte {start} that is not of {size} bytes")
        cuts = (offsets[begin : begin + samples + 1] - offsets[begin]).tolist()
        for one, other in itertools.pairwise(cuts):
            yield content[one:other]


def _check_frames(frames: Any, offsets: Any, first: int, size: int, url: str) -> None:
    """Raise SourceError unless the frames lie one after the other, and have all samples in order."""
    begins = np.append(frames["first"], len(offsets) - 1)
    starts = np.append(frames["start"], size)
    if not (
        begins[0] == 0
        and starts[0] == first
        and (begins[:-1] + frames["samples"] == begins[1:]).all()
        and (starts[:-1] + frames["length"] == starts[1:]).all()
        and offsets[0] == 0
        and (np.diff(offsets) >= 0).all()
        and (np.diff(offsets[begins]) == frames["size"]).all()
    ):
        raise _damaged(url, "has a table of frames that is not that of its bytes")
    if len(frames) and int(frames["size"].max()) > _MAX_FRAME:
        raise SourceError(f"{url} has frames of more than {_MAX_FRAME} bytes; write it with fewer samples in a frame")


def rows_of_tail(data: ForwardReader, start: int, count: int, url: str) -> Iterator[bytes]:
    """Return the rows in Arrow's format that fill a chunk from `start` on, each as `lit_sample` takes it.

    Raises:
        SourceError: what follows is something else, is damaged, or has another number of rows than `count`.
        MissingExtraError: pyarrow is not installed.
    """
    end = data.size - len(_ROWS) - 4
    tail = data.at(max(end, 0), len(_ROWS) + 4)
    if end < start or tail[4:] != _ROWS or struct.unpack("<I", tail[:4])[0] != end - start:
        raise _damaged(url, f"has offsets that are not those of {data.size} bytes")
    try:
        import pyarrow
        import pyarrow.ipc
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "rows of LitData need pyarrow; install it with: pip install 'torch_dpflow[datasets]'"
        ) from error
    try:
        content = data.at(start, end - start)
        is_file = content.startswith(b"ARROW1")
        table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(content).read_all()
        table.validate(full=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise _damaged(url, f"has rows that cannot be read: {error}") from error
    if table.num_rows != count:
        raise SourceError(
            f"{url} has {table.num_rows} rows, and the index says {count} samples; it was cut or replaced"
        )
    for field in table.schema:
        if not _is_plain(field.type):
            raise SourceError(f"{url} has a column {field.name!r} of {field.type}, which is not read")
    if len({*table.column_names}) != len(table.column_names):
        raise _damaged(url, "has two columns of one name")
    return (LIT_ROW + msgspec.msgpack.encode(row) for batch in table.to_batches() for row in batch.to_pylist())


def _is_plain(kind: Any) -> bool:
    """Return whether values are texts, bytes, numbers, flags, or lists and dicts of these."""
    from pyarrow import types

    if types.is_struct(kind):
        return all(_is_plain(kind.field(number).type) for number in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_plain(kind.value_type)
    checks = ("null", "boolean", "integer", "float32", "float64", "string", "large_string", "binary", "large_binary")
    return any(getattr(types, f"is_{check}")(kind) for check in checks)


def _damaged(url: str, what: str) -> SourceError:
    return SourceError(f"{url} {what}; it is damaged")
