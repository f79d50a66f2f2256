"""What a source names: literal paths, patterns, directories of tables, and directories that hold their own index."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.datasets.formats.tars import write_tar
from torch_dpflow.datasets import DatasetStore, Draft, open_dataset
from torch_dpflow.datasets.importers.webdataset import WebDatasetImporter
from torch_dpflow.errors import OptionError, SourceError


def write_table(path: Path, *values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"a": values}), path)


@pytest.mark.parametrize("name", ["s[1]", "s{1,2}", "s{0..1}", "s*", "s?", "[s]{1}#%20"])
def test_a_path_that_exists_is_no_pattern(tmp_path: Path, name: str) -> None:
    for folder in ("s1", "s2", "s0", "ss", name):
        (tmp_path / folder).mkdir()
        write_tar(tmp_path / folder / "t.tar", [("k.bin", folder.encode())])
        write_table(tmp_path / f"{folder}.parquet", folder)
    for source in (tmp_path / name, tmp_path / name / "t.tar"):
        for given in (source, str(source), f"file://{source}", [str(source)]):
            opened: Any = open_dataset(given)
            assert (len(opened), opened[0]["bin"]) == (1, name.encode())
    table = tmp_path / f"{name}.parquet"
    for of_table in (table, str(table), f"file://{table}", [str(table)]):
        assert open_dataset(of_table)[0] == {"a": name}


def test_a_path_object_is_no_pattern(tmp_path: Path) -> None:
    write_tar(tmp_path / "s1.tar", [("k.bin", b"1")])
    assert len(open_dataset(f"{tmp_path}/s*.tar")) == 1
    with pytest.raises(SourceError, match=r"there is no .*s\*\.tar"):
        open_dataset(tmp_path / "s*.tar")


def test_an_image_folder_with_the_name_of_a_pattern(tmp_path: Path) -> None:
    for folder in ("s[1]", "s1"):
        (tmp_path / folder / "cat[0]").mkdir(parents=True)
        (tmp_path / folder / "cat[0]" / "[a]*.png").write_bytes(folder.encode())
    expected = {"image": b"s[1]", "label": 0, "class": "cat[0]"}
    assert open_dataset(tmp_path / "s[1]")[0] == expected
    assert open_dataset(f"{tmp_path}/s[1]")[0] == expected


def test_backups_are_not_read_with_what_they_are_copies_of(tmp_path: Path) -> None:
    for name in ("t.tar", "t.tar~", "t.tar.crdownload", "#t.tar#", "_SUCCESS"):
        write_tar(tmp_path / name, [("k.bin", name.encode())])
    for source in (f"{tmp_path}/*", f"{tmp_path}/t.tar*", [tmp_path / "t.tar", tmp_path / "t.tar~"]):
        with pytest.raises(OptionError, match=r"names 't\.tar', and '.*' with another ending, as backups"):
            open_dataset(source)
    assert len(open_dataset(f"{tmp_path}/t.tar*", format="webdataset")) == 3
    dataset: Any = open_dataset(tmp_path)
    assert [sample["bin"] for sample in dataset.__getitems__([*range(len(dataset))])] == [b"t.tar"]


@pytest.mark.parametrize("inside", [".", "index", "cat/index"])
def test_an_index_among_the_images_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    folder = tmp_path / "pets"
    (folder / "cat").mkdir(parents=True)
    (folder / "cat" / "0.png").write_bytes(b"0")
    (tmp_path / "link").symlink_to(folder)
    before = sorted(folder.rglob("*"))
    for source, index in ((folder, folder / inside), (tmp_path / "link", folder / inside)):
        with pytest.raises(OptionError, match="is in the image folder"):
            open_dataset(source, index_dir=index)
    monkeypatch.setenv("DPFLOW_INDEX_DIR", str(folder / inside))
    with pytest.raises(OptionError, match="is in the image folder"):
        open_dataset(folder)
    assert sorted(folder.rglob("*")) == before
    assert len(open_dataset(folder, index_dir=tmp_path / "pets2")) == 1


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ("part-*.parquet", [0, 1, 2]),
        ("part-[01].parquet", [0, 1]),
        ("part-{2..0}.parquet", [2, 1, 0]),
        (["part-{0,2}.parquet"], [0, 2]),
        (["part-2.parquet", "part-[01].parquet"], [2, 0, 1]),
        (["part-1.parquet", "part-1.parquet"], [1, 1]),
        (".", [0, 1, 2]),
    ],
)
def test_patterns_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, values: list[int]) -> None:
    for number in range(3):
        write_table(tmp_path / f"part-{number}.parquet", number)
    monkeypatch.chdir(tmp_path)
    dataset: Any = open_dataset(source)
    assert [dataset[n]["a"] for n in range(len(dataset))] == values


def test_a_table_with_what_hubs_and_writers_lay_beside_it(tmp_path: Path) -> None:
    write_table(tmp_path / "train.parquet", 1, 2)
    for name in ("README.md", ".gitattributes", "dataset_info.json", "_SUCCESS", ".train.parquet.crc", "LICENSE"):
        (tmp_path / name).write_text("{}")
    assert len(open_dataset(tmp_path)) == 2
    (tmp_path / "0.jpg").touch()
    with pytest.raises(OptionError, match="has no format that is known"):
        open_dataset(tmp_path)


def test_a_directory_of_several_datasets_of_huggingface(tmp_path: Path) -> None:
    write_table(tmp_path / "train" / "a.parquet", 1)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    with pytest.raises(SourceError, match=r"has several datasets, \['train'\]; give one of them"):
        open_dataset(tmp_path)
    assert len(open_dataset(tmp_path / "train")) == 1
    shutil.rmtree(tmp_path / "train")
    with pytest.raises(SourceError, match="has no Parquet or Arrow files"):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    "name", ["a.parquet", "a.feather", "a.arrow", "a.parquet.gz", "a.tfrecord.zst", "a.csv.gz", "a-00000-of-00001"]
)
@pytest.mark.parametrize(("compression", "program"), [("gzip", "gunzip"), ("zstd", "unzstd")])
def test_a_compressed_file_is_named_as_such(tmp_path: Path, name: str, compression: str, program: str) -> None:
    content = pa.compress(bytes(range(256)) * 8, compression, asbytes=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=f"{name} is compressed with {compression}.*unpack it with {program}$"):
        open_dataset(tmp_path / name)


def test_names_that_are_no_utf8(tmp_path: Path, local_store: DatasetStore) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff\xe9"))
    folder.mkdir()
    for number, name in enumerate((b"\xe9.tar", b"\xea.tar")):
        write_tar(Path(os.fsdecode(os.fsencode(folder) + b"/" + name)), [("0.bin", b"%d" % number)])
    for source in (folder, f"{folder}/*.tar"):
        for _ in range(2):
            dataset = open_dataset(source)
            assert [sample["bin"] for sample in pickle.loads(pickle.dumps(dataset)).__getitems__([1, 0])] == [
                b"1",
                b"0",
            ]
    with pytest.raises(SourceError, match="names have to be UTF-8"):
        Draft(local_store, "core/x", "v1").add("all", WebDatasetImporter(folder))
    (folder / "t").mkdir()
    for ending in ("parquet", "arrow"):
        path = Path(os.fsdecode(os.fsencode(folder) + b"/t/\xe9." + ending.encode()))
        with path.open("wb") as file:
            if ending == "parquet":
                pq.write_table(pa.table({"a": [7]}), file)
            else:
                with pa.ipc.new_file(file, pa.schema([("a", pa.int64())])) as writer:
                    writer.write_table(pa.table({"a": [7]}))
        table: Any = open_dataset(path)
        assert table[0] == {"a": 7}
        table.close()


def test_a_place_that_the_system_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar").symlink_to("a.tar")
    for name, reason in (("a.tar", "Too many levels of symbolic links"), ("x" * 300, "File name too long")):
        with pytest.raises(SourceError, match=f"{name} cannot be read: {reason}"):
            open_dataset(tmp_path / name)
