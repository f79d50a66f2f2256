"""Directories that hold more than one dataset: a split is chosen by name, and nothing is read with what it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.datasets.formats.tars import write_tar
from tests.datasets.formats.test_tfrecord import example, record
from tests.later import Later
from torch_dpflow.datasets import DatasetStore, Draft, open_dataset
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.listing import ListingImporter
from torch_dpflow.datasets.importers.splits import files_of_split, folder_of_split, splits_among
from torch_dpflow.datasets.tables import TableDataset
from torch_dpflow.errors import OptionError, SourceError

PIL = Later("PIL.Image")

Write = Callable[[Path, int], Any]


def parquet(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"value": [value]}), path)


def arrow(path: Path, value: int) -> None:
    table = pa.table({"value": [value]})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


def tar(path: Path, value: int) -> None:
    write_tar(path, [("0.value", b"%d" % value)])


def records(path: Path, value: int) -> None:
    path.write_bytes(record(example({"value": [value]})))


def values(dataset: Any) -> list[int]:
    return [int(np.asarray(dataset[number]["value"]).item()) for number in range(len(dataset))]


#: By directory: how its files are written, and the value of each. A value of 1x is of training.
DIRECTORIES: dict[str, tuple[Write, dict[str, int]]] = {
    "a clone of a hub": (
        parquet,
        {"test-00000-of-00001.parquet": 20, "train-00000-of-00002.parquet": 10, "train-00001-of-00002.parquet": 11},
    ),
    "HuggingFace's cache": (
        arrow,
        {
            "beans-train-00000-of-00002.arrow": 10,
            "beans-train-00001-of-00002.arrow": 11,
            "beans-test.arrow": 20,
            "cache-0123456789abcdef.arrow": 30,
            "cache-fedcba9876543210_00000_of_00001.arrow": 31,
        },
    ),
    "by words": (parquet, {"TRAINING_a.parquet": 10, "training_b.parquet": 11, "my.val.parquet": 20}),
    "shards": (
        tar,
        {"imagenet1k-train-0000.tar": 10, "imagenet1k-train-0001.tar": 11, "imagenet1k-validation-00.tar": 2},
    ),
    "records": (
        records,
        {"train.tfrecord-00000-of-00002": 10, "train.tfrecord-00001-of-00002": 11, "eval.tfrecord-00000-of-00001": 2},
    ),
    "in camel case": (parquet, {"TrainSplit-0.parquet": 10, "TrainSplit-1.parquet": 11, "TestSplit-0.parquet": 20}),
    "in one word": (parquet, {"trainset-0.parquet": 10, "trainset-1.parquet": 11, "testset-0.parquet": 20}),
    "shortened": (parquet, {"trn-0.parquet": 10, "trn-1.parquet": 11, "tst-0.parquet": 20}),
    "with files of no split": (parquet, {"train-0.parquet": 10, "train-1.parquet": 11, "extra.parquet": 30}),
}


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_directory_of_several_splits_needs_one(tmp_path: Path, kind: str) -> None:
    write, files = DIRECTORIES[kind]
    for name, value in files.items():
        write(tmp_path / name, value)
    with pytest.raises(SourceError, match=r"has the splits '.*tr(ai)?n.*give split="):
        open_dataset(tmp_path)
    assert values(open_dataset(tmp_path, split="train")) == [10, 11]
    with pytest.raises(OptionError, match=r"split='holdout' names 0 splits .* has the splits"):
        open_dataset(tmp_path, split="holdout")
    named = [tmp_path / name for name, value in files.items()]
    assert values(open_dataset(named)) == [*files.values()]  # as given
    with pytest.raises(OptionError, match="split='train' chooses files of"):
        open_dataset(named, split="train")


@pytest.mark.parametrize(
    "labels",
    [
        ("dev", "valid"),
        ("eval", "test"),
        ("val", "validation"),
        ("train", "training"),
        ("test", "TestSet"),
        ("trn", "train"),
    ],
)
def test_synonyms_are_two_splits(labels: tuple[str, str]) -> None:
    files = [f"{label}-{number}.parquet" for label in labels for number in range(2)]
    with pytest.raises(SourceError, match=r"x has the splits '(.*)' \(2 files\), '(.*)' \(2 files\); give split="):
        files_of_split(files, None, "x")
    for label in labels:
        assert files_of_split(files, label, "x") == [file for file in files if file.startswith(f"{label}-")]
        assert folder_of_split(labels, label) == label
        assert folder_of_split([one for one in labels if one != label], label, files) is None


def test_a_split_that_is_a_directory_and_files_is_refused(tmp_path: Path) -> None:
    for name in ("train/0.parquet", "train-1.parquet", "test-0.parquet"):
        parquet(tmp_path / name, 10)
    (tmp_path / "train.csv").touch()
    with pytest.raises(OptionError, match=r"split='train' may be the directory 'train', or 'train-1\.parquet'"):
        open_dataset(tmp_path, split="train")
    (tmp_path / "train-1.parquet").unlink()
    assert values(open_dataset(tmp_path, split="train")) == [10]


def test_a_synonym_of_one_split() -> None:
    files = ["dev-0.parquet", "valid-0.parquet", "eval-0.parquet"]
    assert files_of_split(files, "test", "x") == ["eval-0.parquet"]
    with pytest.raises(OptionError, match="split='val' names 2 splits of x, which has the splits 'dev'"):
        files_of_split(files, "val", "x")
    for folders, names in ((["dev", "valid"], []), (["valid"], ["dev-0.parquet"])):
        with pytest.raises(OptionError, match=r"split='validation' may be '(dev|valid)' or '(dev|valid)'; give"):
            folder_of_split(folders, "validation", names)


@pytest.mark.parametrize(
    "split", ["train[:80%]", "train[80%:]", "my_ds-train[:10]", "train-clean-360", "train2", "train_test", "val[0]"]
)
def test_a_name_that_only_contains_a_split_is_no_synonym(tmp_path: Path, split: str) -> None:
    """A slice of TensorFlow Datasets or HuggingFace, or the name of another split, would be all samples of this one."""
    for name in ("my_ds-train.tfrecord-00000-of-00001", "my_ds-val.tfrecord-00000-of-00001"):
        records(tmp_path / name, 10)
    with pytest.raises(OptionError, match=r"names 0 splits of .* 'my_ds-train' \(1 files\), 'my_ds-val' \(1 files\)"):
        open_dataset(tmp_path, split=split)
    parquet(tmp_path / "folders" / "train-clean-100" / "0.parquet", 10)
    parquet(tmp_path / "folders" / "val" / "0.parquet", 10)
    with pytest.raises(OptionError, match=r"\(no files, but the directory '(train-clean-100|val)'\)"):
        open_dataset(tmp_path / "folders", split=split)
    assert values(open_dataset(tmp_path / "folders", split="training")) == [10]


def test_splits_that_are_no_words(tmp_path: Path) -> None:
    for name, value in (("small-00000-of-00001.parquet", 1), ("large-00000-of-00001.parquet", 2)):
        parquet(tmp_path / name, value)
    with pytest.raises(SourceError, match=r"the splits 'large' \(1 files\), 'small' \(1 files\)"):
        TableDataset(tmp_path)
    assert values(TableDataset(tmp_path, split="small")) == [1]


@pytest.mark.parametrize(
    "names",
    [
        ["part-00000-0a1b-c000.snappy.parquet", "part-00001-0a1b-c000.snappy.parquet"],
        ["0000.parquet", "0001.parquet"],
        ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"],
        ["data_1_of_2.tar", "data_2_of_2.tar"],
        ["latest.parquet", "contest.parquet", "devices.parquet"],
        ["train/00.parquet", "train/01.parquet"],
        ["a/train-00000-of-00001.parquet", "b/train-00000-of-00001.parquet"],
    ],
)
def test_files_of_one_split_are_all_read(names: list[str]) -> None:
    assert files_of_split(names, None, "x") == names


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "train-00000-of-00003.parquet"],
        ["train-00000-of-00001-0a1b.parquet", "train-00000-of-00001-2c3d.parquet"],
    ],
)
def test_a_split_that_was_written_twice_is_refused(names: list[str]) -> None:
    for split in (None, "train"):
        with pytest.raises(SourceError, match="two writes of 'train'"):
            files_of_split(names, split, "x")


@pytest.mark.parametrize("ending", [".parquet", "-0a1b.arrow", ".tar", ""])
def test_a_split_of_which_a_file_is_missing_is_refused(ending: str) -> None:
    names = [f"train-{number:05}-of-00003{ending}" for number in range(3)]
    for missing in names:
        with pytest.raises(
            SourceError, match=r"x has 2 of the 3 files of 'train'.*copy the missing ones, or give a list"
        ):
            files_of_split([name for name in names if name != missing], None, "x")


@pytest.mark.parametrize("log", ["_delta_log", ".hoodie", ".hoodie_partition_metadata", "_spark_metadata"])
def test_tables_with_a_log_of_their_files_are_refused(tmp_path: Path, log: str, local_store: DatasetStore) -> None:
    for number in range(2):
        parquet(tmp_path / "t" / f"part-{number}.parquet", number)
    (tmp_path / "t" / log).mkdir()
    (tmp_path / "t" / log / "0.json").touch()
    for source in (tmp_path / "t", f"{tmp_path}/t/*.parquet", f"{tmp_path}/t/part-[01].parquet"):
        with pytest.raises(SourceError, match="may be of other versions"):
            open_dataset(source, format="table")
    with pytest.raises(SourceError, match="may be of other versions"):
        Draft(local_store, "core/x", "v1").add("all", ListingImporter(f"{tmp_path}/t/", path_column="value"))
    # What a reader of the log has named is read.
    assert values(open_dataset([tmp_path / "t" / "part-1.parquet"])) == [1]


@pytest.mark.parametrize(
    ("log", "folder", "kind"),
    [
        ("_delta_log/0.json", "day=1", "Delta"),
        ("_delta_log/0.json", "year=1/day=1", "Delta"),
        (".hoodie/hoodie.properties", "2026/11", "Hudi"),
        ("_spark_metadata/0", "day=1", "table of a Spark stream"),
        ("metadata/v1.metadata.json", "data", "Iceberg"),
        ("metadata/00001-0a1b.metadata.json", "data/day=1", "Iceberg"),
    ],
)
@pytest.mark.parametrize("is_local", [True, False])
def test_parts_of_tables_with_a_log_are_refused(
    tmp_path: Path, log: str, folder: str, kind: str, is_local: bool, local_store: DatasetStore
) -> None:
    root = f"{tmp_path}/t" if is_local else f"memory://{tmp_path.name}/t"
    files = Files(root)
    parquet(tmp_path / "part.parquet", 1)
    files.write(f"{folder}/part.parquet", (tmp_path / "part.parquet").read_bytes())
    files.write(log, b"{}")
    first, slash, rest = folder.partition("/")
    sources = [root, f"{root}/{folder}", f"{root}/{first[:-1]}*{slash}{rest}/*.parquet", f"{root}/{folder}/*.parquet"]
    if is_local:
        (tmp_path / "link").symlink_to(tmp_path / "t" / folder)
        sources.insert(0, f"{tmp_path}/link")
    for source in sources:
        with pytest.raises(SourceError, match=rf"/t is an? {kind}.*may be of other versions"):
            open_dataset(source)
    for source in sources[:2]:
        with pytest.raises(SourceError, match="may be of other versions"):
            TableDataset(source)
        with pytest.raises(SourceError, match="may be of other versions"):
            Draft(local_store, "core/x", "v1").add("all", ListingImporter(source, path_column="value"))
    assert values(open_dataset([f"{root}/{folder}/part.parquet"])) == [1]
    files.write("images/part.parquet", (tmp_path / "part.parquet").read_bytes())
    if kind == "Iceberg":
        assert values(open_dataset(f"{root}/images")) == [1]  # not of the table
    files.remove(log.partition("/")[0])
    assert values(open_dataset(f"{root}/{folder}")) == [1]


def test_a_listing_in_several_splits(tmp_path: Path, local_store: DatasetStore) -> None:
    for name in ("data/train-00000-of-00001", "data/test-00000-of-00001"):
        path = tmp_path / "hub" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"data": [name.encode()]}), path)
    draft = Draft(local_store, "core/x", "v1")
    with pytest.raises(SourceError, match=r"the splits 'test' \(1 files\), 'train'"):
        draft.add("all", ListingImporter(f"{tmp_path}/hub/", data_column="data"))
    assert draft.add("test", ListingImporter(f"{tmp_path}/hub/", data_column="data", split="test")).samples == 1


def test_directories_of_splits(tmp_path: Path) -> None:
    for split, value in (("train", 10), ("val", 20)):
        (tmp_path / split).mkdir()
        tar(tmp_path / split / "0.tar", value)
    assert values(open_dataset(tmp_path, split="train")) == [10]
    assert values(open_dataset(tmp_path, split="validation")) == [20]
    parquet(tmp_path / "t" / "train" / "a.parquet", 11)
    (tmp_path / "t" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    for dataset in (open_dataset(tmp_path / "t", split="train"), TableDataset(tmp_path / "t", split="train")):
        assert values(dataset) == [11]


@pytest.mark.parametrize("format", [None, "table"])
def test_directories_of_splits_need_one(tmp_path: Path, format: str | None) -> None:
    parquet(tmp_path / "train" / "a.parquet", 10)
    parquet(tmp_path / "test" / "a.parquet", 20)
    with pytest.raises(SourceError, match=r"has the splits 'test', 'train', which are directories; give split="):
        open_dataset(tmp_path, format=format)
    assert values(open_dataset(tmp_path, format=format, split="train")) == [10]


def test_directories_next_to_shards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tar(tmp_path / "0.tar", 10)
    (tmp_path / "more").mkdir()
    assert values(open_dataset(tmp_path)) == [10]
    assert "its directories, such as 'more', are not read" in caplog.text
    for folder in ("train", "val"):
        (tmp_path / folder).mkdir()
    with pytest.raises(SourceError, match="has the splits 'train', 'val', which are directories"):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        (["train2017", "val2017"], ["train2017", "val2017"]),
        (["images_train", "images_test"], ["images_test", "images_train"]),
        (["TrainImages", "TestImages", "extra"], ["TestImages", "TrainImages"]),
        (["train", "val", "unlabelled"], ["train", "val"]),
        (["dev", "valid"], ["dev", "valid"]),
        (["trainval", "testset"], ["testset", "trainval"]),
        (["train", "bus"], []),
        (["test", "cat", "dog"], []),
        (["bullet_train", "test_tube", "contest"], []),
    ],
)
def test_which_classes_are_splits(folders: list[str], splits: list[str]) -> None:
    assert splits_among(folders) == splits


def test_splits_are_no_classes(tmp_path: Path) -> None:
    for folder in ("test/cat", "train/cat"):
        (tmp_path / "data" / folder).mkdir(parents=True)
        PIL.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "data" / folder / "0.png")
    (tmp_path / "data" / "docs").mkdir()
    with pytest.raises(SourceError, match=r"has the directories \['test', 'train'\], which are splits"):
        open_dataset(tmp_path / "data", format="imagefolder")
    (tmp_path / "data" / "docs").rmdir()
    dataset = open_dataset(tmp_path / "data", format="imagefolder", split="train")
    assert [(sample["label"], sample["class"]) for sample in (dataset[0],)] == [(0, "cat")]
    named = open_dataset(tmp_path / "data", format="imagefolder", settings={"classes": ["test", "train"]})
    assert named[1]["class"] == "train"
    with pytest.raises(OptionError, match=r"has no directory of that name; it has \['cat'\]"):
        open_dataset(tmp_path / "data" / "train", split="val")
