"""Parquet files of samples: exact values, all files of a directory, and damage."""

from __future__ import annotations

import logging
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.samples_source import check_starts
from tests.later import Later
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers.listing import ListingImporter
from torch_dpflow.errors import MissingExtraError, SourceError, StorageError

pa, parquet = Later("pyarrow"), Later("pyarrow.parquet")


def test_nanoseconds_become_text(tmp_path: Path, local_store: DatasetStore) -> None:
    columns = {
        "path": pa.array(["a", "b"]),
        "at": pa.array([1, None], pa.timestamp("ns")),
        "zoned": pa.array([1, 2], pa.timestamp("ns", tz="UTC")),
        "whole": pa.array([2_000_000_000, None], pa.timestamp("ns")),
        "took": pa.array([-1_500_000_001, 1], pa.duration("ns")),
        "time": pa.array([1, 2], pa.time64("ns")),
    }
    parquet.write_table(pa.table(columns), tmp_path / "list.parquet")
    draft = Draft(local_store, "core/x", "v1")
    draft.add("train", ListingImporter(str(tmp_path / "list.parquet")))
    draft.publish()
    assert local_store.open("core/x").sample(0).fields() == {
        "at": "1970-01-01T00:00:00.000000001",
        "zoned": "1970-01-01T00:00:00.000000001Z",
        "whole": "1970-01-01T00:00:02",
        "took": "-PT1.500000001S",
        "time": "00:00:00.000000001",
    }


def test_nanoseconds_are_exact_within_every_nesting(tmp_path: Path) -> None:
    ns, text = pa.timestamp("ns"), "1970-01-01T00:00:00.000000001"
    columns = {
        "path": pa.array(["a"]),
        "list": pa.array([[1, None]], pa.list_(ns)),
        "large": pa.array([[1]], pa.large_list(ns)),
        "fixed": pa.array([[1]], pa.list_(ns, 1)),
        "map": pa.array([[("x", 1)]], pa.map_(pa.string(), ns)),
        "keys": pa.array([[(1, 1)]], pa.map_(ns, pa.int64())),
        "struct": pa.array([{"x": 1, "y": b"".decode()}], pa.struct([("x", ns), ("y", pa.string())])),
        "zoned": pa.array([[1]], pa.list_(pa.timestamp("ns", tz="Europe/Paris"))),
        "took": pa.array([[-1]], pa.list_(pa.duration("ns"))),
        "time": pa.array([[1]], pa.list_(pa.time64("ns"))),
        "both": pa.array([[[("x", [1])]]], pa.large_list(pa.map_(pa.string(), pa.list_(ns)))),
        "dictionary": pa.array([1], ns).dictionary_encode(),
        "none": pa.array([None], pa.list_(ns)),
    }
    parquet.write_table(pa.table(columns), tmp_path / "list.parquet")
    (item,) = ListingImporter(tmp_path / "list.parquet").items()
    assert item.meta == {
        "list": [text, None],
        "large": [text],
        "fixed": [text],
        "map": [("x", text)],
        "keys": [(text, 1)],
        "struct": {"x": text, "y": ""},
        "zoned": [f"{text}Z"],
        "took": ["-PT0.000000001S"],
        "time": ["00:00:00.000000001"],
        "both": [[("x", [text])]],
        "dictionary": text,
    }


@pytest.mark.parametrize(
    "column",
    [
        lambda value: pa.array([0, value], pa.timestamp("s")),
        lambda value: pa.array([[0], [value]], pa.list_(pa.timestamp("s"))),
        lambda value: pa.array([0, -value], pa.timestamp("s", tz="UTC")),
        lambda value: pa.array([0, value // 1000], pa.date32()),
    ],
)
def test_times_of_years_that_python_has_not_are_refused_with_their_row(tmp_path: Path, column: Any) -> None:
    table = pa.table({"path": ["a", "b"], "t": column(10**12)})
    parquet.write_table(pa.concat_tables([table.slice(0, 1)] * 9 + [table.slice(1)]), tmp_path / "list.parquet")
    importer = ListingImporter(tmp_path / "list.parquet")
    for start in (0, 9):
        with pytest.raises(SourceError, match=r"list\.parquet, column 't' of type .*, row 9: .*; store it as text"):
            list(importer.items(start))


def test_whole_microseconds_are_read_within_every_nesting(tmp_path: Path) -> None:
    ns = pa.timestamp("ns")
    moment = datetime(1970, 1, 1, microsecond=5)
    columns = {
        "path": pa.array(["a"]),
        "list": pa.array([[5000]], pa.list_(ns)),
        "large": pa.array([[5000]], pa.large_list(ns)),
        "fixed": pa.array([[5000]], pa.list_(ns, 1)),
        "map": pa.array([[("x", 5000)]], pa.map_(pa.string(), ns)),
        "keys": pa.array([[(5000, 1)]], pa.map_(ns, pa.int64())),
        "struct": pa.array([{"x": 5000}], pa.struct([("x", ns)])),
        "both": pa.array([[[("x", [5000])]]], pa.large_list(pa.map_(pa.string(), pa.list_(ns)))),
        "dictionary": pa.array([5000], ns).dictionary_encode(),
    }
    parquet.write_table(pa.table(columns), tmp_path / "list.parquet")
    (item,) = ListingImporter(tmp_path / "list.parquet").items()
    assert item.meta == {
        "list": [moment],
        "large": [moment],
        "fixed": [moment],
        "map": [("x", moment)],
        "keys": [(moment, 1)],
        "struct": {"x": moment},
        "both": [[("x", [moment])]],
        "dictionary": moment,
    }
    assert {type(value) for value in (*item.meta["large"], item.meta["dictionary"])} == {datetime}


def test_a_page_that_differs_from_its_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.parquet"
    table = pa.table({"path": ["00500.jpg"] * 50})
    how = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    parquet.write_table(table, path, write_page_checksum=True, **how)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"00500.jpg", b"90500.jpg", 1))
    assert path.read_bytes() != data
    with pytest.raises(SourceError, match=r"list\.parquet cannot be read: .*checksum"):
        list(ListingImporter(path).items())


def test_all_parquet_files_below_a_directory_are_read_or_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["p-0.parquet", "more/deep/p-1.parquet", "p-2.pq", "p-3.PARQ"]
    for name in [*names, "_temporary/p.parquet", ".hidden/p.parquet", "more/_p.parquet", "_metadata"]:
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({"path": [name]}), tmp_path / "d" / name)
    importer = ListingImporter(f"{tmp_path}/d/")
    assert [item.path for item in check_starts(importer)] == sorted(names)
    (tmp_path / "d/README.md").touch()
    with caplog.at_level(logging.WARNING):
        assert len(list(importer.items())) == len(names)
    assert "left out 1 files: README.md" in caplog.text
    parquet.write_table(pa.table({"path": ["x"]}), tmp_path / "d/part-4")
    with pytest.raises(SourceError, match="has files without an ending, as 'part-4'"):
        list(importer.items())
    (tmp_path / "d/_delta_log").mkdir()
    (tmp_path / "d/_delta_log/0.json").touch()
    with pytest.raises(SourceError, match="is a Delta table"):
        list(importer.items())
    (tmp_path / "d").rename(tmp_path / "d.parquet")
    with pytest.raises(StorageError, match=r"d\.parquet is a directory; give a file, or write a / at the end"):
        list(ListingImporter(tmp_path / "d.parquet").items())


def test_damaged_pages_are_told(tmp_path: Path) -> None:
    path = tmp_path / "list.parquet"
    table = pa.table({"path": [f"{number}.bin" for number in range(5000)]})
    parquet.write_table(table, path, use_dictionary=False, compression="gzip")
    data = bytearray(path.read_bytes())
    data[100:4000] = b"\xa5" * 3900
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"list\.parquet cannot be read"):
        list(ListingImporter(str(path)).items())


def test_each_damaged_byte_of_a_footer_gives_items_or_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "list.parquet"
    parquet.write_table(pa.table({"path": ["a.bin", "b.bin"], "label": [1, 2]}), path, store_schema=False)
    data = path.read_bytes()
    messages: list[str] = []
    length = int.from_bytes(data[-8:-4], "little")
    for at in range(len(data) - 8 - length, len(data) - 8):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            list(ListingImporter(str(path)).items())
        except SourceError as error:
            messages.append(str(error))
    assert len(messages) > length / 2
    assert all("list.parquet" in message for message in messages)


def test_without_pyarrow_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torch_dpflow\[datasets\]'"):
        next(ListingImporter(str(tmp_path / "list.parquet")).items())
