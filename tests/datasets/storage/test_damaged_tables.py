"""Tables with damage: the outcome is a value, or a SourceError that names the file. The process stays alive."""

from __future__ import annotations

import struct
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.datasets.formats.test_lit_rows import chunk_around, write_chunks
from tests.new_process import run_interpreter
from torch_dpflow import open_dataset
from torch_dpflow.errors import SourceError

#: Rows of a block: more than are taken one by one.
ROWS = 18
WRONG = 9
#: Names of files of each kind. Files of "chunk" are in a dataset of LitData, files of "remote" on memory://.
KINDS = {
    "file": "a.arrow",
    "compressed": "a.feather",
    "stream": "a.arrow",
    "chunk": "chunk-0-0.bin",
    "remote": "a.arrow",
    "parquet": "a.parquet",
    "compressed_parquet": "a.parquet",
    "remote_parquet": "a.parquet",
}


def numbers(wrong: int, kind: Any = np.int32, *, count: int = ROWS + 1) -> pa.Buffer:
    """Offsets of values of 4 bytes or items, of which one is wrong."""
    found = 4 * np.arange(count, dtype=kind)
    found[WRONG] = wrong
    return pa.py_buffer(found)


def column(kind: pa.DataType, *buffers: pa.Buffer, children: tuple[pa.Array, ...] = ()) -> pa.Array:
    return pa.Array.from_buffers(kind, ROWS, [None, *buffers], children=children)


def damaged_columns(wrong: int) -> dict[str, pa.Array]:
    """A column of each layout that has offsets, sizes, views, indices or ends of runs, of which one is wrong."""
    of_32, of_64, of_each = numbers(wrong), numbers(wrong, np.int64), numbers(wrong, count=ROWS)
    data, items = pa.py_buffer(b"abcd" * ROWS), pa.array([1] * 4 * ROWS, pa.int8())
    right = pa.array(range(ROWS + 1), pa.int32())
    text, lists = column(pa.string(), of_32, data), column(pa.list_(pa.int8()), of_32, children=(items,))
    places = [wrong if row == WRONG else 4 * (row % 14) for row in range(ROWS)]
    views = pa.py_buffer(b"".join(struct.pack("<i4sii", 16, b"abcd", 0, place) for place in places))
    sizes, codes = pa.py_buffer(np.full(ROWS, 4, np.int32)), pa.py_buffer(bytes(ROWS))
    entries = pa.StructArray.from_arrays([items, items], ["key", "value"])
    ends = pa.array([wrong, *range(2, ROWS + 1)], pa.int32())
    indices = pa.Array.from_buffers(pa.int32(), ROWS, [None, of_each])
    words = pa.array([str(number) for number in range(4 * ROWS)])
    return {
        "binary": column(pa.binary(), of_32, data),
        "text": text,
        "large_binary": column(pa.large_binary(), of_64, data),
        "large_text": column(pa.large_string(), of_64, data),
        "list": lists,
        "large_list": column(pa.large_list(pa.int8()), of_64, children=(items,)),
        "list_of_lists": pa.ListArray.from_arrays(right, lists),
        "list_of_texts": pa.ListArray.from_arrays(right, text),
        "fixed_size_list": pa.FixedSizeListArray.from_arrays(text, 1),
        "map": column(pa.map_(pa.int8(), pa.int8()), of_32, children=(entries,)),
        "struct": pa.StructArray.from_arrays([text], ["path"]),
        "dictionary": pa.DictionaryArray.from_arrays(indices, words, safe=False),
        "dictionary_of_texts": pa.DictionaryArray.from_arrays(right[:ROWS], text),
        "text_view": column(pa.string_view(), views, data),
        "binary_view": column(pa.binary_view(), views, data),
        "list_view": column(pa.list_view(pa.int8()), of_each, sizes, children=(items,)),
        "run_ends": column(pa.run_end_encoded(pa.int32(), pa.int8()), children=(ends, items[:ROWS])),
        "union": column(pa.dense_union([pa.field("a", pa.int8())]), codes, of_each, children=(items,)),
    }


def written(kind: str, table: pa.Table) -> bytes:
    """A file of this kind, with blocks of `ROWS` rows."""
    sink, compression = pa.BufferOutputStream(), "zstd" if kind.startswith("compressed") else None
    if kind.endswith("parquet"):
        pq.write_table(table, sink, row_group_size=ROWS, compression=compression or "none")
    else:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(sink, table.schema, options=options) as file:
            file.write_table(table, max_chunksize=ROWS)
    content = sink.getvalue().to_pybytes()
    return chunk_around(content, table.num_rows) if kind == "chunk" else content


def outcome_of(folder: str, kind: str, content: bytes, rows: list[int] | None = None) -> str:
    """Return the text of the SourceError that reading these rows raises, or nothing; raise any other error."""
    name = KINDS[kind]
    if kind.startswith("remote"):
        MemoryFileSystem().pipe_file(f"/damaged/{name}", content)
        url = f"memory://damaged/{name}"
    elif kind == "chunk":
        write_chunks(Path(folder), [(content, 2 * ROWS if rows is None else ROWS)])
        url = folder
    else:
        (Path(folder) / name).write_bytes(content)
        url = f"{folder}/{name}"
    try:
        dataset: Any = open_dataset(url)
        wanted = rows or ([*range(len(dataset))] if len(dataset) < 1000 else [0, len(dataset) // 2, -1])
        found = dataset.__getitems__(wanted)
        dataset.close()
    except SourceError as error:
        if name not in str(error):
            raise
        return str(error)
    assert [type(row) for row in found] == [dict] * len(wanted)
    return ""


def read_damaged_columns(folder: str) -> None:
    for wrong in (10**9, -5):
        for name, damaged in damaged_columns(wrong).items():
            table = pa.table({"value": damaged})
            for kind in ("file", "stream", "chunk", "remote"):
                print(wrong, name, kind, end=": ", flush=True)
                print(outcome_of(folder, kind, written(kind, table), [WRONG - 1, WRONG]), flush=True)


def read_flipped(folder: str, step: str, flip: str = "0xff") -> None:
    """Change one byte after another of a file of each kind."""
    table = pa.table(
        {
            "text": [f"\xe9{number}" for number in range(2 * ROWS)],
            "data": [b"%d" % number for number in range(2 * ROWS)],
            "number": [number if number % 5 else None for number in range(2 * ROWS)],
            "time": [datetime(2020, 1, 1, number % 24, tzinfo=timezone.utc) for number in range(2 * ROWS)],
            "texts": [[str(number)] * (number % 3) for number in range(2 * ROWS)],
            "word": pa.array([str(number % 3) for number in range(2 * ROWS)]).dictionary_encode(),
        }
    )
    for kind in KINDS:
        place = Path(folder) / kind
        place.mkdir()
        whole = written(kind, table)
        print(f"{kind} as written: {outcome_of(str(place), kind, whole)}")
        for at in range(0, len(whole), int(step)):
            print(f"{kind}, byte {at}", file=sys.stderr, flush=True)
            changed = bytearray(whole)
            changed[at] ^= int(flip, 16)
            try:
                outcome_of(str(place), kind, bytes(changed))
            except Exception as error:
                print(f"{kind}, byte {at}: {error!r}")


def read_wrong_histograms(folder: str) -> None:
    """Change bytes of a footer for which Arrow's reader reports a histogram of the wrong size."""
    whole = written("parquet", pa.table({"number": [*range(2 * ROWS)]}))
    for at in range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole) - 8):
        changed = bytearray(whole)
        changed[at] ^= 1
        try:
            pq.ParquetFile(pa.BufferReader(changed)).read(use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            if "histogram size mismatch" in str(error):
                print(f"byte {at}", end=": ", flush=True)
                print(outcome_of(folder, "parquet", bytes(changed)), flush=True)


def run_here(function: str, *arguments: str) -> list[str]:
    """Run a function of this module in another process, and return the lines that it prints."""
    program = (
        f"import sys; from tests.datasets.storage.test_damaged_tables import {function} as run; run(*sys.argv[1:])"
    )
    process = run_interpreter(program, *arguments)
    lines = process.stdout.splitlines()
    assert process.returncode == 0, (lines[-1:], process.stderr[-2000:])
    return lines


def test_offsets_and_indices_that_lead_out_of_a_block(tmp_path: Path) -> None:
    lines = run_here("read_damaged_columns", str(tmp_path))
    assert len(lines) == 2 * len(damaged_columns(0)) * 4
    assert [line for line in lines if "cannot be read: " not in line] == []


def test_footers_for_which_pyarrow_ends_the_process(tmp_path: Path) -> None:
    """`RowGroupMetaData.column` catches no exception of C++ (pyarrow 19 to 26)."""
    pytest.importorskip("pyarrow", "19")
    lines = run_here("read_wrong_histograms", str(tmp_path))
    assert lines
    assert [line for line in lines if "a.parquet cannot be read: " not in line] == []


@pytest.mark.parametrize("step", ["61", pytest.param("1", marks=pytest.mark.slow)])
def test_a_changed_byte_gives_a_value_or_an_error_with_the_name(tmp_path: Path, step: str) -> None:
    """Of each kind, in one process: it takes longer to import Arrow than to read."""
    assert run_here("read_flipped", str(tmp_path), step) == [f"{kind} as written: " for kind in KINDS]
