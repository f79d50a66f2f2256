"""Chunks of LitData with frames of zstd, compressed samples, or rows in Arrow's format; and merged MDS datasets."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.datasets.formats.test_packed import (
    _LEAF,
    COUNT,
    SHARD,
    assert_equal,
    lit_expected,
    lit_values,
    mds_expected,
    with_offsets,
    words,
    write_litdata,
    write_mds,
)
from torch_dpflow.datasets import open_dataset
from torch_dpflow.errors import SourceError


def sample(number: int) -> bytes:
    values = [data for _, data, _ in lit_values(number)]
    return words(*map(len, values)) + b"".join(values)


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def framed(samples: list[bytes], rows: int = 7) -> bytes:
    """A chunk as `compression="zstd"` writes it: magic, counts, offsets, a table of frames, frames."""
    groups = [samples[start : start + rows] for start in range(0, len(samples), rows)]
    packed = [zstd(b"".join(group)) for group in groups]
    offsets = [0]
    for one in samples:
        offsets.append(offsets[-1] + len(one))
    at = 24 + 4 * len(offsets) + 24 * len(groups)
    table = b""
    for number, (group, frame) in enumerate(zip(groups, packed, strict=True)):
        table += struct.pack("<IIQII", number * rows, len(group), at, len(frame), len(b"".join(group)))
        at += len(frame)
    head = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, len(samples), rows, len(groups))
    return head + words(*offsets) + table + b"".join(packed)


def with_rows(rows: list[dict[str, Any]], samples: list[bytes] | None = None, stream: bool = False) -> bytes:
    """A chunk that ends with rows in Arrow's format; its samples are empty, or repeat them."""
    table = pa.Table.from_pylist(rows)
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=8)
    content: bytes = sink.getvalue().to_pybytes()
    return with_offsets(samples or [b""] * len(rows)) + content + words(len(content)) + b"LDARW01\0"


def rewrite(folder: Path, chunk: Callable[[int, int], bytes], **changes: Any) -> None:
    """Replace the chunks of a LitData dataset."""
    write_litdata(folder, **changes)
    index = json.loads((folder / "index.json").read_text())
    first = 0
    for entry in index["chunks"]:
        content = chunk(first, entry["chunk_size"])
        (folder / entry["filename"]).write_bytes(content)
        entry["chunk_bytes"], first = len(content), first + entry["chunk_size"]
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("level", ["batch", "sample"])
@pytest.mark.parametrize("name", ["zstd", "zstd:7"])
def test_compressed_samples(tmp_path: Path, level: str, name: str) -> None:
    def chunk(first: int, count: int) -> bytes:
        samples = [sample(number) for number in range(first, first + count)]
        return framed(samples) if level == "batch" else with_offsets([zstd(one) for one in samples])

    rewrite(tmp_path / "data", chunk, compression=name, compression_level=level)
    dataset = open_dataset(tmp_path / "data")
    assert len(dataset) == COUNT
    for number in (49, 0, 6, 7, 21):
        assert_equal(dataset[number], lit_expected(number))


def test_a_whole_compressed_chunk(tmp_path: Path) -> None:
    samples = [[sample(number) for number in range(first, min(first + SHARD, COUNT))] for first in (0, 20, 40)]
    write_litdata(tmp_path / "data", compression="zstd:4")
    for number, of_chunk in enumerate(samples):
        (tmp_path / "data" / f"chunk-0-{number}.bin").write_bytes(zstd(with_offsets(of_chunk)))
    assert_equal(open_dataset(tmp_path / "data")[33], lit_expected(33))


def row(number: int) -> dict[str, Any]:
    return {
        "z": f"é{number}",
        "a": number - 2**62,
        "raw": bytes([number]) * number,
        "none": None if number % 2 else number / 3,
        "list": [{"x": str(n), "y": [n]} for n in range(number % 3)],
        "flag": number % 2 == 0,
    }


def _of_rows() -> dict[str, Any]:
    names = ["z", "a", "raw", "none", "list", "flag"]
    spec = {"type": "builtins.dict", "context": json.dumps(names), "children_spec": [_LEAF] * 6}
    return {"data_format": ["str", "int", "bytes", "float", "json", "bool"], "data_spec": json.dumps([1, spec])}


@pytest.mark.parametrize("stream", [False, True])
def test_rows_in_the_format_of_arrow(tmp_path: Path, stream: bool) -> None:
    def chunk(first: int, count: int) -> bytes:
        return with_rows([row(number) for number in range(first, first + count)], None, stream)

    rewrite(tmp_path / "data", chunk, **_of_rows())
    dataset = open_dataset(tmp_path / "data")
    assert [dataset[number] for number in range(COUNT)] == [row(number) for number in range(COUNT)]
    assert list(dataset[3]) == list(row(3))


def test_samples_with_rows_that_repeat_them_are_read_in_place(tmp_path: Path) -> None:
    def chunk(first: int, count: int) -> bytes:
        rows = [row(number) for number in range(first, first + count)]
        return with_rows(rows, [sample(number) for number in range(first, first + count)])

    rewrite(tmp_path / "data", chunk)
    assert_equal(open_dataset(tmp_path / "data")[33], lit_expected(33))


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("kind", ["framed", "rows", "repeated"])
def test_damage_is_refused(tmp_path: Path, kind: str) -> None:
    """Of each number in the head and the tables of frames, and of the mark and the length at the end."""

    def chunk(first: int, count: int) -> bytes:
        samples = [sample(number) for number in range(first, first + count)]
        rows = [row(number) for number in range(first, first + count)]
        return {"framed": lambda: framed(samples), "rows": lambda: with_rows(rows)}.get(
            kind, lambda: with_rows(rows, samples)
        )()

    changes: dict[str, Any] = {"compression": "zstd", "compression_level": "batch"} if kind == "framed" else {}
    if kind == "rows":
        changes = _of_rows()
    whole = chunk(0, SHARD)
    damages = [whole[:-1], whole + b"\0", whole[:100], _flipped(whole, 0)]
    if kind == "framed":
        damages += [_flipped(whole, at) for at in (8, 10, 12, *range(20, 24 + 84 + 3 * 24, 4))]
        # What remains: the sizes of samples in a frame, which are checked as samples are read.
        damages = [damaged for number, damaged in enumerate(damages) if not _is_inner_offset(number - 8)]
    else:
        damages += [_flipped(whole, len(whole) - end) for end in (1, 8, 9, 12)]
    if kind == "rows":
        fewer = with_rows([row(number) for number in range(SHARD - 1)])
        damages.append(whole[: 4 * (SHARD + 2)] + fewer[4 * (SHARD + 1) :])
    for number, damaged in enumerate(damages):
        folder = tmp_path / str(number)
        rewrite(folder, chunk, **changes)
        (folder / "chunk-0-0.bin").write_bytes(damaged)
        index = json.loads((folder / "index.json").read_text())
        index["chunks"][0]["chunk_bytes"] = len(damaged)
        (folder / "index.json").write_text(json.dumps(index))
        with pytest.raises(SourceError, match=r"chunk-0-0\.bin"):
            open_dataset(folder)
    rewrite(tmp_path / "whole", chunk, **changes)
    assert len(open_dataset(tmp_path / "whole")) == COUNT


def _is_inner_offset(number: int) -> bool:
    return 0 <= number <= SHARD and number % 7 != 0 and number != SHARD


def test_columns_of_other_types_are_refused(tmp_path: Path) -> None:
    from datetime import datetime

    rewrite(tmp_path / "data", lambda first, count: with_rows([{"when": datetime(2020, 1, 1)}] * count), **_of_rows())
    with pytest.raises(SourceError, match=r"a column 'when' of timestamp.*, which is not read"):
        open_dataset(tmp_path / "data")


def _merged(folder: Path, names: list[str]) -> None:
    """Write MDS datasets, and one index of them all."""
    shards = []
    for name in names:
        write_mds(folder / name)
        for shard in json.loads((folder / name / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{name}/{shard['raw_data']['basename']}"
            shards.append(shard)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


@pytest.mark.parametrize("names", [["0", "1"], ["a/b", "a/c[1]"]])
def test_merged_datasets_of_mosaicml(tmp_path: Path, names: list[str]) -> None:
    _merged(tmp_path, names)
    dataset = open_dataset(tmp_path, format=None if names[0] == "0" else "mds")
    assert len(dataset) == 2 * COUNT
    for number in (0, 49, 50, 99):
        assert_equal(dataset[number], mds_expected(number % COUNT))
    missing = tmp_path / names[1] / "shard.00001.mds"
    missing.unlink()
    with pytest.raises(SourceError, match=r"lists .*shard\.00001\.mds, which is not there"):
        open_dataset(tmp_path, format="mds")


@pytest.mark.parametrize("name", ["../other", "0/../../other", "/other", "0/", "./0", "s3://bucket", "none"])
def test_no_index_leads_out_of_its_directory(tmp_path: Path, name: str) -> None:
    _merged(tmp_path / "data", ["0"])
    write_mds(tmp_path / "other")
    index = tmp_path / "data" / "index.json"
    index.write_text(index.read_text().replace('"0/shard', f'"{name}/shard'))
    with pytest.raises(SourceError, match=r"below the directory|which is not there"):
        open_dataset(tmp_path / "data")
