"""LitData's chunks of rows in Arrow's format: every row as LitData gives it, and damage refused by name."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from tests.datasets.formats.test_packed import words
from torch_dpflow import DPFlowDataLoader, open_dataset
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers.packed import LitDataImporter
from torch_dpflow.errors import ChecksumError, OptionError, SourceError
from torch_dpflow.samplers import BlockShuffleSampler

LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


def row(number: int) -> dict[str, Any]:
    return {"image": b"\xff" * (number % 7), "label": number if number % 5 else None, "meta": {"a": [number] * 2}}


#: 1,013 rows in chunks of odd and even numbers of rows; LitData's batches have 256.
CHUNKS = [range(600), range(600, 601), range(601, 1013)]
ROWS = [row(number) for number in range(1013)]


def chunk_of(rows: Sequence[dict[str, Any]], compression: str | None = None) -> bytes:
    """A chunk as LitData 0.2.76 writes it: count, offsets of empty samples, an Arrow file, its length, a mark."""
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for start in range(0, len(rows), 256):
            writer.write_table(table.slice(start, 256))
    return chunk_around(sink.getvalue().to_pybytes(), len(rows))


def chunk_around(content: bytes, count: int) -> bytes:
    """A chunk with an Arrow file of so many rows."""
    return words(count, *[4 * (count + 2)] * (count + 1)) + content + words(len(content)) + b"LDARW01\0"


def write_rows(
    folder: Path, chunks: Sequence[Sequence[dict[str, Any]]] | None = None, compression: str | None = None
) -> None:
    listed = chunks or [[row(n) for n in numbers] for numbers in CHUNKS]
    write_chunks(folder, [(chunk_of(rows, compression), len(rows)) for rows in listed])


def write_chunks(folder: Path, chunks: Sequence[tuple[bytes, int]]) -> None:
    """Write chunks, each with its number of rows, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for number, (content, count) in enumerate(chunks):
        name = f"chunk-0-{number}.bin"
        (folder / name).write_bytes(content)
        listed.append({"filename": name, "chunk_bytes": len(content), "chunk_size": count, "dim": None})
    spec = {"type": "builtins.dict", "context": '["image", "label", "meta"]', "children_spec": [LEAF] * 3}
    config = {"data_format": ["bytes", "int", "json"], "data_spec": json.dumps([1, spec]), "compression": None}
    (folder / "index.json").write_text(json.dumps({"chunks": listed, "config": config}))


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("is_remote", [False, True])
def test_every_row_is_read_in_any_order(tmp_path: Path, is_remote: bool, compression: str | None) -> None:
    write_rows(tmp_path / "data", compression=compression)
    url = f"memory:/{tmp_path}/data" if is_remote else str(tmp_path / "data")
    if is_remote:
        MemoryFileSystem().put(str(tmp_path / "data"), f"{tmp_path}/data", recursive=True)
    dataset = pickle.loads(pickle.dumps(open_dataset(url)))
    order = random.Random(0).sample(range(len(ROWS)), len(ROWS))
    assert dataset.__getitems__(order) == [ROWS[number] for number in order]
    assert dataset[-1] == ROWS[-1]
    assert dataset.blocks.tolist() == [256, 256, 88, 1, 256, 156]
    if is_remote:
        MemoryFileSystem().rm(str(tmp_path), recursive=True)


def test_what_litdata_itself_has_written(tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    from litdata.streaming.cache import Cache

    rows = [{**row(number), **({"later": str(number)} if number > 20 else {})} for number in range(50)]
    cache = Cache(str(tmp_path / "data"), chunk_size=11)
    for number, one in enumerate(rows):
        cache[number] = one
    cache.done()
    cache.merge()
    dataset = open_dataset(tmp_path / "data")
    assert [*dataset] == [one if n < 11 or n > 21 else {**one, "later": one.get("later")} for n, one in enumerate(rows)]


def test_columns_that_later_chunks_add_and_other_types(tmp_path: Path) -> None:
    chunks: list[list[dict[str, Any]]] = [
        [{"v": 1}],
        [{"v": 2, "w": [3]}],
        [{"v": 0.5, "w": None}, {"v": 1.0, "w": None}],
    ]
    write_rows(tmp_path / "data", chunks)
    found = [*open_dataset(tmp_path / "data")]
    assert found == [one for chunk in chunks for one in chunk]
    assert [type(one["v"]) for one in found] == [int, int, float, float]


def test_a_loader_shuffles_and_resumes(tmp_path: Path) -> None:
    write_rows(tmp_path / "data")
    dataset = open_dataset(tmp_path / "data", decode=lambda sample: sample["meta"]["a"][0])

    def loader(**how: Any) -> Any:
        torch.manual_seed(0)
        return DPFlowDataLoader(dataset, batch_size=100, **how)

    whole = [batch.tolist() for batch in loader(shuffle=True)]
    numbers = [number for batch in whole for number in batch]
    assert sorted(numbers) == [*range(len(ROWS))] != numbers
    broken, resumed = loader(shuffle=True), loader(shuffle=True)
    batches = iter(broken)
    first = [next(batches).tolist() for _ in range(4)]
    resumed.load_state_dict(broken.state_dict())
    assert first + [batch.tolist() for batch in resumed] == whole
    in_blocks = loader(sampler=BlockShuffleSampler(dataset, window=2))
    assert sorted(number for batch in in_blocks for number in batch.tolist()) == [*range(len(ROWS))]


def test_options_are_those_of_a_table(tmp_path: Path) -> None:
    write_rows(tmp_path / "data")
    assert open_dataset(tmp_path / "data", settings={"columns": ["label"], "memory": "1B"})[7] == {"label": 7}
    for given, says in (({"checksum": "crc32"}, "not for tables"), ({"on_error": "skip"}, r"no \['on_error'\]")):
        with pytest.raises(OptionError, match=says):
            open_dataset(tmp_path / "data", **given)


def test_damaged_missing_and_replaced_chunks_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    index, path = folder / "index.json", folder / "chunk-0-2.bin"
    write_rows(folder)
    whole = path.read_bytes()

    def assert_refused(says: str) -> None:
        with pytest.raises(SourceError, match=says):
            open_dataset(folder)

    path.unlink()
    assert_refused(r"lists chunk-0-2\.bin, which is not there")
    path.write_bytes(whole[:-1])
    assert_refused(r"chunk-0-2\.bin has .* and the index says")
    for at in (-1, -9, -10):  # the mark, and the length
        changed = bytearray(whole)
        changed[at] ^= 1
        path.write_bytes(changed)
        assert_refused(r"chunk-0-2\.bin")
    path.write_bytes(whole)
    listed = index.read_text()
    index.write_text(listed.replace('"chunk_size": 412', '"chunk_size": 413'))
    assert_refused(r"chunk-0-2\.bin has 412 rows, and the index says 413")
    index.write_text(listed)
    dataset = open_dataset(folder)
    (tmp_path / "other").write_bytes(whole)
    (tmp_path / "other").replace(path)
    with pytest.raises(ChecksumError, match=r"chunk-0-2\.bin was written again"):
        dataset[-1]
    first = folder / "chunk-0-0.bin"
    first.write_bytes(first.read_bytes()[:-1] + b"\1")
    assert_refused(r"chunk-0-0\.bin")


def test_a_store_refuses_rows_by_name(tmp_path: Path, local_store: DatasetStore) -> None:
    write_rows(tmp_path / "data")
    with pytest.raises(SourceError, match=r"chunk-0-0\.bin has rows in Arrow's format.*open_dataset"):
        Draft(local_store, "core/rows", "v1").add("train", LitDataImporter(tmp_path / "data"))
