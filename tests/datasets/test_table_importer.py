"""Tables of samples: CSV and Parquet, and what is wrong with them."""

from __future__ import annotations

import gzip
import io
import logging
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.samples_source import check_starts
from tests.later import Later
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers import Item, make_importer
from torch_dpflow.datasets.importers.listing import ListingImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.storage.base import checksum_of
from torch_dpflow.errors import OptionError, SourceError

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
    importer = ListingImporter(str(tmp_path / name), path_column="file", offset_column="start", length_column="size")
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
    _write_table(tmp_path / "list.parquet", [{"path": "a", "x": 1, "y": None}, {"path": "b", "x": None, "y": 2}])
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


def _items(path: Path, content: str | bytes, **how: Any) -> list[Item]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(ListingImporter(path, **how).items())


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1", "", "-3"], [1, None, -3]),
        (["", "", ""], [None, None, None]),
        (["NA", "nan", "2"], [None, None, 2]),
        (["1", "None", "<NA>"], [1, None, None]),
        (["None", "1.5", "2"], [None, 1.5, 2.0]),
        (["\x1c1", "\x1f2", "3"], [1, 2, 3]),
        (["\x1c1.5", "\x1f2", "3"], [1.5, 2.0, 3.0]),
        ([" 1", " NaN", " "], [1, None, None]),
        (["True", " NA", " false"], [True, None, False]),
        (["NA", "NA", "NA"], ["NA", "NA", "NA"]),
        (["NA", "", "null"], ["NA", "", "null"]),
        (["12e4", "120000", "1200e2"], ["12e4", "120000", "1200e2"]),
        (["1e3", "NA", "2"], ["1e3", "NA", "2"]),
        (["1e3", "1e-3", "1E+3"], [1000.0, 0.001, 1000.0]),
        (["9007199254740993.0", "9007199254740992.0", "1.0"], ["9007199254740993.0", "9007199254740992.0", "1.0"]),
        (["9007199254740993.5", "1", "2"], ["9007199254740993.5", "1", "2"]),
        (["9007199254740994.0", "1e+23", "0.1"], [9007199254740994.0, 1e23, 0.1]),
        ([str(2**63), "7", str(2**64 - 1)], [2**63, 7, 2**64 - 1]),
        ([str(2**64), "7", "8"], [str(2**64), "7", "8"]),
        ([str(-(2**63)), "0", "1"], [-(2**63), 0, 1]),
        ([str(-(2**63) - 1), "0", "1"], [str(-(2**63) - 1), "0", "1"]),
        (["1", "2", "2.5"], [1.0, 2.0, 2.5]),
        (["1e3", ".5", "-2."], [1000.0, 0.5, -2.0]),
        ([str(2**53 + 1), "1.5", "2"], [str(2**53 + 1), "1.5", "2"]),
        (["007", "7", "8"], ["007", "7", "8"]),
        (["00000e1234567890", "1", "2"], ["00000e1234567890", "1", "2"]),
        (["12e345", "1", "2"], ["12e345", "1", "2"]),
        (["1_000", "1", "2"], ["1_000", "1", "2"]),
        (["\u0661", "1", "2"], ["\u0661", "1", "2"]),
        (["+49", "1", "2"], ["+49", "1", "2"]),
        ([" 1", "2 ", "3"], [1, 2, 3]),
        (["true", "False", ""], [True, False, None]),
        (["2024-01-31", "", "2024-01-31 10:00:00"], ["2024-01-31", None, "2024-01-31 10:00:00"]),
        (["a", "", "NA"], ["a", "", "NA"]),
        (["1", "", "a"], ["1", "", "a"]),
        (["a\u2028b", "c\x85d", "e\x0cf"], ["a\u2028b", "c\x85d", "e\x0cf"]),
        (['"a ""b"""', "'", 'c"d'], ['a "b"', "'", 'c"d']),
        (['"a\nb"', '"a\r\nb"', '"a,b"'], ["a\nb", "a\r\nb", "a,b"]),
    ],
)
def test_a_column_has_the_type_that_all_rows_allow(tmp_path: Path, cells: list[str], expected: list[Any]) -> None:
    content = "".join(f"{number},{cell}\n" for number, cell in enumerate(cells))
    for start in ("path,x\n", "\ufeffpath,x\n\n"):
        found = _items(tmp_path / "list.csv", start + content)
        assert [item.meta.get("x") for item in found] == expected
        assert [type(item.meta.get("x")) for item in found] == [type(value) for value in expected]
        assert [item.path for item in found] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("cell", "late", "expected"),
    [
        ('"a\nb, c"', "x", ("a\nb, c", "x")),
        ("", "7", (None, 7)),
        ("1", "2.5", (1.0, 2.5)),
        ("5", str(2**63), (5, 2**63)),
    ],
)
def test_types_are_those_of_all_rows_however_large_the_table(
    tmp_path: Path, cell: str, late: str, expected: tuple[Any, Any]
) -> None:
    rows, filler = 300, "y" * 5_000  # 1.5 MB: more than readers look at to infer a type
    content = "path,filler,x\n" + f"a,{filler},{cell}\n" * rows + f"b,,{late}\n"
    importer = ListingImporter(tmp_path / "list.csv")
    found = _items(tmp_path / "list.csv", content)
    assert [item.meta.get("x") for item in found] == [expected[0]] * rows + [expected[1]]
    assert next(importer.items(rows)).meta["x"] == expected[1]
    assert importer.total() == rows + 1


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "l.csv",
            "path,label\na,caf\u00e9\nb,x\n".encode("latin-1"),
            r"it is no UTF-8 text.*iconv .* -f LATIN1",
        ),
        ("l.csv", "path,\u00e9\na,x\n".encode("latin-1"), "it is no UTF-8 text"),
        ("l.csv", "path,label\na,x\n".encode("utf-16"), "it is no UTF-8 text.*iconv -f UTF-16"),
        ("l.csv", "path,label\na,x\n".encode("utf-16-le"), "its header has NUL characters.*iconv -f UTF-16"),
        ("l.tsv", "path\tlabel\na\tx\x80\n".encode("latin-1"), "it is no UTF-8 text"),
        ("l.csv", b"path,x,y,x\na,1,2,3\n", r"several columns of the name \['x'\]"),
        ("l.csv", b"path,,\na,1,2\n", r"several columns of the name \[''\]"),
        (
            "l.csv",
            b'path,text\na,"Hello\nb,x\nc,"y\n',
            "line 4 or after: .* expected after .*write each quote twice",
        ),
        ("l.csv", b'path,text\na,"Hello\nb,x\n', "unexpected end of data"),
        ("l.tsv", b'path\ttext\na\t"Hello" he said\n', "expected after"),
        ("l.csv", b"path,x\na,1\nb\n", "line 3 or after: it has 1 cells, and the header 2"),
        ("l.csv", gzip.compress(b"path,x\na,1\n", mtime=0), "l.csv is compressed with gzip.*unpack it with gunzip"),
        ("l.parquet", gzip.compress(b"PAR1", mtime=0), "l.parquet is compressed with gzip"),
        ("l.csv", b"", "it is empty"),
        ("l.csv", b"\n\n", "it is empty"),
    ],
)
def test_a_table_that_is_not_understood_is_refused(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    with pytest.raises(SourceError, match=told):
        _items(tmp_path / name, content)


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("l.csv", 'path,text\na/1.jpg,"Hello\nb/2.jpg,x\nb/3.jpg,12"\n', "b/2.jpg,x"),
        ("l.csv", 'path,text\n1.jpg,"Screen 5\r\n2.JPG,Screen 7"\r\n', "2.JPG,Screen 7"),
        ("l.csv", 'path,text\n000041,"Hello\n000042,x\n000043,y"\n', "000042,x"),
        ("l.csv", 'path,text\ncats/x,"Hello\ncats/y,x\ndogs/z,y"\n', "cats/y,x"),
        ("l.csv", 'text,path\n"Hello,1.jpg\nx,2.jpg\ny",3.jpg\n', "Hello,1.jpg"),
        ("l.csv", 'text,path,n\n"Hello,1.jpg,1\nx,2.jpg,2\ny",3.jpg,3\n', "Hello,1.jpg,1"),
        ("l.csv", 'path,text\n"1.jpg,Hello\n2.jpg",x\n', "1.jpg,Hello"),
        ("l.csv", 'path,text,n\n1.jpg,"Hello,1\n2.jpg,x,2\n3.jpg,12",3\n', "2.jpg,x,2"),
        ("l.tsv", 'path\ttext\n1.jpg\t"Hello\n2.jpg\tx\n3.jpg\ty"\n', "2.jpg.tx"),
    ],
)
def test_rows_that_a_quote_joins_are_refused(tmp_path: Path, name: str, content: str, row: str) -> None:
    told = rf"line \d or after: a cell in quotes contains what looks like a separate row: '{row}'.*write the table as"
    with pytest.raises(SourceError, match=told):
        _items(tmp_path / name, content)


@pytest.mark.parametrize(
    "text",
    [
        "one, two\nthree, four",
        "1, a cat\n2, a dog\n",
        "see b.jpg, and\nthe file c.jpg, too",
        "\n,\n",
        'a "b"\nc, "d"',
        "x\ny",
    ],
)
@pytest.mark.parametrize("path", ["1.jpg", "a/1.jpg", "12", "000041", "x"])
def test_texts_of_several_lines_are_taken(tmp_path: Path, text: str, path: str) -> None:
    quoted = '"' + text.replace('"', '""') + '"'
    (item,) = _items(tmp_path / "first.csv", f"path,text\n{path},{quoted}\n")
    assert (item.path, item.meta) == (path, {"text": text})
    (item,) = _items(tmp_path / "last.csv", f"text,path\n{quoted},{path}\n")
    assert (item.path, item.meta) == (path, {"text": text})


def test_offsets_and_lengths_may_have_leading_zeros(tmp_path: Path) -> None:
    how = {"offset_column": "start", "length_column": "size"}
    (item,) = _items(tmp_path / "list.csv", "path,start,size\n001,0010,08\n", **how)
    assert (item.path, item.offset, item.length) == ("001", 10, 8)


def test_a_parquet_file_is_refused_where_its_columns_have_one_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["path", "x", "x"])
    parquet.write_table(table, tmp_path / "list.parquet")
    with pytest.raises(SourceError, match=r"list\.parquet has several columns of the name \['x'\]"):
        list(ListingImporter(tmp_path / "list.parquet").items())


def test_integers_of_a_parquet_file_stay_exact(tmp_path: Path, local_store: DatasetStore) -> None:
    values = [2**64 - 1, 2**63, 7]
    table = pa.table({"path": ["a", "b", "c"], "id": pa.array(values, pa.uint64())})
    parquet.write_table(table, tmp_path / "list.parquet")
    draft = Draft(local_store, "core/x", "v1")
    draft.add("train", ListingImporter(tmp_path / "list.parquet"))
    draft.publish()
    assert [sample.fields()["id"] for sample in local_store.open("core/x").samples()] == values


def _images(count: int) -> list[dict[str, Any]]:
    """As datasets' Image feature writes them."""
    return [{"bytes": b"%d" % number, "path": f"{number}.jpg"} for number in range(count)]


@pytest.mark.parametrize(
    ("column", "values", "named"),
    [
        ("image", _images(2), "image.bytes"),
        ("image", [b"\xff", None], "image"),
        ("images", [[b"\xff"], []], "images"),
        ("pages", [_images(2), []], "pages.bytes"),
    ],
)
def test_bytes_in_a_table_are_no_annotations(tmp_path: Path, column: str, values: list[Any], named: str) -> None:
    parquet.write_table(pa.table({"path": ["a", "b"], column: values}), tmp_path / "list.parquet")
    with pytest.raises(SourceError, match=rf"column '{named}' has bytes.*data_column='{named}' imports them"):
        list(ListingImporter(tmp_path / "list.parquet").items())


def test_values_that_have_a_text_are_no_bytes(tmp_path: Path, local_store: DatasetStore) -> None:
    number = uuid.UUID(int=7)
    columns = {
        "path": pa.array(["a"]),
        "id": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([number.bytes], pa.binary(16))),
        "none": pa.array([None], pa.binary()),
        "price": pa.array([Decimal("1.10")]),
    }
    parquet.write_table(pa.table(columns), tmp_path / "list.parquet")
    draft = Draft(local_store, "core/x", "v1")
    draft.add("train", ListingImporter(tmp_path / "list.parquet"))
    draft.publish()
    assert local_store.open("core/x").sample(0).fields() == {"id": str(number), "price": "1.10"}


@pytest.mark.parametrize("is_struct", [True, False])
def test_bytes_of_a_parquet_file_are_imported(tmp_path: Path, local_store: DatasetStore, is_struct: bool) -> None:
    images = _images(9)
    table: dict[str, Any] = {"image": images} if is_struct else {key: [one[key] for one in images] for key in images[0]}
    sums = [checksum_of(one["bytes"], "sha256") for one in images]
    parquet.write_table(pa.table({**table, "label": range(9), "sum": sums}), tmp_path / "list.parquet")
    settings = {"data_column": "image.bytes" if is_struct else "bytes", "checksum_column": "sum"}
    importer = make_importer("listing", str(tmp_path / "list.parquet"), settings)
    check_starts(importer)
    draft = Draft(local_store, "core/x", "v1")
    draft.add("train", importer, shard_size=4)
    draft.publish()
    place = {"image": {"path": "3.jpg"}} if is_struct else {"path": "3.jpg"}
    assert DatasetReader(local_store.open("core/x"))[3] == (b"3", {**place, "label": 3})
    sums[5] = sums[4]
    parquet.write_table(pa.table({**table, "sum": sums}), tmp_path / "list.parquet")
    with pytest.raises(SourceError, match=r"row 5: checksum='sha256:.*' is not that of the data"):
        list(importer.items())


def test_paths_may_be_fields_of_structs(tmp_path: Path) -> None:
    images = [{"bytes": None, "path": f"{number}.jpg"} for number in range(3)]
    path = tmp_path / "list.parquet"
    parquet.write_table(pa.table({"image": images, "label": [0, 1, 2]}), path)
    found = list(ListingImporter(path, path_column="image.path").items())
    assert [(item.path, item.meta) for item in found] == [(f"{n}.jpg", {"label": n}) for n in range(3)]
    with pytest.raises(SourceError, match=r"has no column \['image.file'\]; it has \['image', 'label'\]"):
        list(ListingImporter(path, path_column="image.file").items())
    parquet.write_table(pa.table({"image.path": ["a"], "image": [1]}), path)
    (item,) = ListingImporter(path, path_column="image.path").items()
    assert (item.path, item.meta) == ("a", {"image": 1})


def test_a_directory_of_parquet_files_is_one_table(tmp_path: Path) -> None:
    for part, count in (("b", 2), ("a", 3), ("c", 4)):
        (tmp_path / "parts").mkdir(exist_ok=True)
        rows = [{"path": f"{part}{n}.jpg", "n": n} for n in range(count)]
        _write_table(tmp_path / f"parts/{part}.parquet", rows)
    (tmp_path / "parts/_SUCCESS").touch()
    expected = [f"{part}{n}.jpg" for part, count in (("a", 3), ("b", 2), ("c", 4)) for n in range(count)]
    for listing in (str(tmp_path / "parts"), f"{tmp_path}/parts/", tmp_path / "parts"):
        importer = ListingImporter(listing)
        assert [item.path for item in check_starts(importer)] == expected
        assert importer.root == f"file://{tmp_path}/parts"
    (tmp_path / "parts/year=2024").mkdir()
    (tmp_path / "parts/a.parquet").rename(tmp_path / "parts/year=2024/a.parquet")
    with pytest.raises(SourceError, match=r"has a column in the names of its directories, as in 'year=2024'"):
        list(ListingImporter(tmp_path / "parts").items())
    with pytest.raises(SourceError, match=r"is no directory of Parquet files; give one"):
        list(ListingImporter(tmp_path / "gone").items())


@pytest.mark.parametrize("root", ["/", None])
def test_absolute_paths_are_taken_below_their_root(tmp_path: Path, local_store: DatasetStore, root: str | None) -> None:
    (tmp_path / "a.bin").write_bytes(b"a")
    (tmp_path / "list.csv").write_text(f"path\n{tmp_path}/a.bin\n")
    draft = Draft(local_store, "core/x", "v1")
    draft.add("train", ListingImporter(tmp_path / "list.csv", root=root or tmp_path))
    draft.publish()
    assert DatasetReader(local_store.open("core/x"))[0] == (b"a", {})


@pytest.mark.parametrize(("content", "is_told"), [(None, True), (b"", False), (b"ab", False)])
def test_a_listing_whose_objects_are_missing_is_told(
    tmp_path: Path,
    local_store: DatasetStore,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
    is_told: bool,
) -> None:
    if content is not None:
        (tmp_path / "a.jpg").write_bytes(content)
    (tmp_path / "list.csv").write_text("path\na.jpg\nb.jpg\n")
    with caplog.at_level(logging.WARNING, "torch_dpflow.datasets"):
        draft = Draft(local_store, "core/x", "v1")
        draft.add("train", ListingImporter(tmp_path / "list.csv"))
    told = [record.getMessage() for record in caplog.records]
    assert [f"file://{tmp_path}/a.jpg, the first object" in text for text in told] == [True] * is_told


def test_data_columns_are_for_parquet_alone() -> None:
    with pytest.raises(OptionError, match="data_column='x' is for Parquet files, and without offset_column"):
        ListingImporter("list.csv", data_column="x")
    with pytest.raises(OptionError, match="data_column='x' is for Parquet files"):
        ListingImporter("list.parquet", data_column="x", offset_column="y", length_column="z")


def test_numbers_of_a_table_that_json_cannot_hold_are_named(tmp_path: Path, local_store: DatasetStore) -> None:
    table = pa.table({"path": ["a", "b"], "score": pa.array([None, float("nan")])})
    parquet.write_table(table, tmp_path / "list.parquet")
    draft = Draft(local_store, "core/x", "v1")
    with pytest.raises(SourceError, match=r"annotations of b have score=nan"):
        draft.add("train", ListingImporter(str(tmp_path / "list.parquet")))


class Forward(io.BytesIO):
    """Content that can be read only once, as that of a web server which does not report its length."""

    def seek(self, *given: Any) -> int:
        raise ValueError("Cannot seek streaming HTTP file")


def test_a_listing_that_is_a_stream_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "l.csv").write_bytes(b"path,x\na,1\nb,2\n")
    importer = ListingImporter(str(tmp_path / "l.csv"))
    opened = importer._files.filesystem.open
    monkeypatch.setattr(importer._files.filesystem, "open", lambda *given: Forward(opened(*given).read()))
    assert [item.meta["x"] for item in importer.items()] == [1, 2]
