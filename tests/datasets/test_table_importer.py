"""Tables of samples: CSV and Parquet, and what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.samples_source import check_starts
from tests.later import Later
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers.importer_registry import make_importer
from torch_dpflow.datasets.importers.listing import ListingImporter
from torch_dpflow.errors import MissingExtraError, OptionError, SourceError

pa, csv, parquet = Later("pyarrow"), Later("pyarrow.csv"), Later("pyarrow.parquet")


def _rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "file": f"clips/{n}.bin",
            "label": n % 7,
            "score": n / 2,
            "name": f"a,{n}\n'x'",
            "start": 10 * n,
            "size": 10,
        }
        for n in range(count)
    ]


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=100)
    else:
        options = csv.WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
        csv.write_csv(table, path, options)


@pytest.mark.parametrize("name", ["list.csv", "list.tsv", "list.parquet"])
def test_tables_list_samples(tmp_path: Path, name: str) -> None:
    rows = _rows(30)
    if name != "list.parquet":
        for row in rows:
            row["name"] = row["name"].replace("\n", " ")
    _write_table(tmp_path / name, rows)
    importer = ListingImporter(
        str(tmp_path / name), path_column="file", offset_column="start", length_column="size"
    )
    found = check_starts(importer)
    assert importer.root == f"file://{tmp_path}"
    for item, row in zip(found, rows, strict=True):
        assert (item.path, item.offset, item.length) == (row["file"], row["start"], 10)
        assert item.meta == {"label": row["label"], "score": row["score"], "name": row["name"]}


def test_large_tables_are_read_in_batches(tmp_path: Path) -> None:
    path = tmp_path / "list.parquet"
    _write_table(path, [{"path": f"{n}.bin", "n": n} for n in range(10_000)])
    importer = ListingImporter(str(path))
    for start in (0, 1, 4095, 4096, 4097, 9999, 10_000):
        assert [item.meta["n"] for item in importer.items(start)] == list(range(start, 10_000))
    assert importer.total() == 10_000


def test_nulls_are_left_out(tmp_path: Path) -> None:
    _write_table(
        tmp_path / "list.parquet", [{"path": "a", "x": 1, "y": None}, {"path": "b", "x": None, "y": 2}]
    )
    found = list(ListingImporter(str(tmp_path / "list.parquet")).items())
    assert [item.meta for item in found] == [{"x": 1}, {"y": 2}]


@pytest.mark.parametrize(
    ("header", "row", "told"),
    [
        ("path,sum", "a,md5:00", "checksum='md5:00': give 'crc32:'"),
        ("path,sum", "a,12", "checksum='12'"),
        ("path,start,size", "a,-5,2", "offset=-5: give a whole number"),
        ("path,start,size", "a,five,2", "offset='five'"),
        ("path,start,size", "a,1.5,2", r"offset=1\.5"),
        ("path,start,size", "a,1,", "offset=1 without a length"),
    ],
)
def test_what_a_store_could_not_hold_is_refused_with_its_row(
    tmp_path: Path, local_store: DatasetStore, header: str, row: str, told: str
) -> None:
    path = tmp_path / "list.csv"
    path.write_text(f"{header}\n{row}\n")
    columns = {"sum": "checksum_column", "start": "offset_column", "size": "length_column"}
    settings = {columns[name]: name for name in header.split(",")[1:]}
    draft = Draft(local_store, "core/x", "v1")
    with pytest.raises(SourceError, match=rf"list\.csv, row 0: {told}.*\(columns: path='path', "):
        draft.add("train", make_importer("listing", str(path), settings))
    assert local_store.versions("core/x") == []


def test_checksums_may_be_upper_case_and_paths_digits(tmp_path: Path, local_store: DatasetStore) -> None:
    (tmp_path / "list.csv").write_text("path,sum\n001,crc32:ABCDEF01\n002,\n")
    draft = Draft(local_store, "core/x", "v1")
    draft.add("train", ListingImporter(str(tmp_path / "list.csv"), checksum_column="sum"))
    draft.publish()
    samples = list(local_store.open("core/x").samples())
    assert [(sample.path, sample.checksum) for sample in samples] == [
        ("001", "crc32:abcdef01"),
        ("002", None),
    ]


def test_what_is_wrong_with_a_table_is_told(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_text("path,x\na,1\n,2\n")
    with pytest.raises(SourceError, match=r"list\.csv has no column \['file'\]; it has \['path', 'x'\]"):
        list(ListingImporter(str(path), path_column="file").items())
    with pytest.raises(SourceError, match=r"list\.csv, row 1: path='': give a path"):
        list(ListingImporter(str(path)).items())
    path.write_text("path,x\na,1,2\n")
    with pytest.raises(SourceError, match=r"list\.csv cannot be read"):
        list(ListingImporter(str(path)).items())
    with pytest.raises(SourceError, match=r"there is no .*gone\.csv"):
        list(ListingImporter(str(tmp_path / "gone.csv")).items())
    with pytest.raises(OptionError, match=r"ends with \.xlsx; give a \.csv"):
        ListingImporter("list.xlsx")


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
    nested = pa.table({"path": ["a"], "inner": pa.array([[1]], pa.list_(pa.timestamp("ns")))})
    parquet.write_table(nested, tmp_path / "list.parquet")
    with pytest.raises(SourceError, match=r"list\.parquet, column 'inner' of type list.*store it as text"):
        list(ListingImporter(str(tmp_path / "list.parquet")).items())


def test_numbers_of_a_table_that_json_cannot_hold_are_named(
    tmp_path: Path, local_store: DatasetStore
) -> None:
    table = pa.table({"path": ["a", "b"], "score": pa.array([None, float("nan")])})
    parquet.write_table(table, tmp_path / "list.parquet")
    draft = Draft(local_store, "core/x", "v1")
    with pytest.raises(SourceError, match=r"annotations of b have score=nan"):
        draft.add("train", ListingImporter(str(tmp_path / "list.parquet")))


def test_damaged_pages_are_told(tmp_path: Path) -> None:
    path = tmp_path / "list.parquet"
    table = pa.table({"path": [f"{number}.bin" for number in range(5000)]})
    parquet.write_table(table, path, use_dictionary=False, compression="gzip")
    data = bytearray(path.read_bytes())
    data[100:4000] = b"\xa5" * 3900
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"list\.parquet cannot be read"):
        list(ListingImporter(str(path)).items())


def test_without_pyarrow_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torch_dpflow\[datasets\]'"):
        next(ListingImporter(str(tmp_path / "list.csv")).items())
