"""Chunks of LitData that are compressed or have rows in Arrow's format; and merged MDS datasets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.datasets.formats.test_packed import (
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


def with_rows(count: int, samples: list[bytes]) -> bytes:
    """A chunk that ends with rows in Arrow's format, which repeat its samples."""
    table = pa.table({"a": [*range(count)]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=8)
    content: bytes = sink.getvalue().to_pybytes()
    return with_offsets(samples) + content + words(len(content)) + b"LDARW01\0"


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


@pytest.mark.parametrize("name", ["zstd", "zstd:7"])
def test_compressed_samples(tmp_path: Path, name: str) -> None:
    rewrite(
        tmp_path / "data",
        lambda first, count: with_offsets([zstd(sample(number)) for number in range(first, first + count)]),
        compression=name,
        compression_level="sample",
    )
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


def _repeated(first: int, count: int) -> bytes:
    return with_rows(count, [sample(number) for number in range(first, first + count)])


def test_samples_with_rows_that_repeat_them_are_read_in_place(tmp_path: Path) -> None:
    rewrite(tmp_path / "data", _repeated)
    assert_equal(open_dataset(tmp_path / "data")[33], lit_expected(33))


def test_frames_of_samples_are_refused(tmp_path: Path) -> None:
    rewrite(
        tmp_path / "data",
        lambda first, count: b"LDFZ01\0\0" + bytes(100),
        compression="zstd",
        compression_level="batch",
    )
    with pytest.raises(
        SourceError, match=r"chunk-0-\d\.bin has frames of zstd, whose samples cannot be read one by one"
    ):
        open_dataset(tmp_path / "data")


def test_damage_after_the_samples_is_refused(tmp_path: Path) -> None:
    whole = _repeated(0, SHARD)
    flips = [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        for at in (0, *(len(whole) - end for end in (1, 8, 9, 12)))
    ]
    for number, damaged in enumerate([whole[:-1], whole + b"\0", whole[:100], *flips]):
        folder = tmp_path / str(number)
        rewrite(folder, lambda first, count, damaged=damaged: damaged if first == 0 else _repeated(first, count))
        with pytest.raises(SourceError, match=r"chunk-0-0\.bin"):
            open_dataset(folder)


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
