"""`dpflow dataset` from the outside: what it prints, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.datasets.formats.tars import write_shards
from torch_dpflow import __version__
from torch_dpflow.cli.main import root
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers.folders import ImageFolderImporter

Dataset = Callable[..., Result]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Runs `dpflow dataset` on a store."""

    def run(*arguments: str) -> Result:
        environment = {"DPFLOW_STORE": str(tmp_path / "store"), "COLUMNS": "200"}
        return CliRunner().invoke(root, ["dataset", *arguments], env=environment)

    return run


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for variant, count in (("train", 5), ("val", 2)):
        for label in ("cat", "dog"):
            folder = tmp_path / "tree" / variant / label
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number}.jpg").write_bytes(b"x" * number)
    return tmp_path / "tree"


def _import(dataset: Dataset, tree: Path) -> Result:
    return dataset(
        *("import", "imagefolder", "core/pets:v1", f"train={tree}/train", f"val={tree}/val"),
        *("--shard-size", "4", "--checksum", "crc32", "--description", "Pets."),
    )


def test_import_and_list(dataset: Dataset, tree: Path) -> None:
    result = _import(dataset, tree)
    assert result.exit_code == 0, result.output
    assert "core/pets:v1:train: 10 samples\ncore/pets:v1:val: 4 samples\n" in result.stdout
    rows = [line.split() for line in dataset("list").stdout.splitlines()]
    assert [row[:3] + row[-1:] for row in rows[1:]] == [
        ["core/pets", "v1", "train", "10"],
        ["core/pets", "v1", "val", "4"],
    ]
    listed = [json.loads(line) for line in dataset("list", "--json").stdout.splitlines()]
    assert [version["id"] for version in listed] == ["core/pets"]


def test_shards_are_imported_in_place(dataset: Dataset, tmp_path: Path) -> None:
    samples = write_shards(tmp_path / "data", 2, 5)
    result = dataset("import", "webdataset", "core/shards:v1", f"train={tmp_path}/data/train-{{000..001}}.tar")
    assert "core/shards:v1:train: 10 samples\n" in result.stdout
    shown = json.loads(dataset("show", "core/shards:v1:train", "--sample", "7", "--json").stdout)
    assert (shown["path"], shown["meta"]["__key__"]) == ("train-001.tar", samples[7]["__key__"])


def test_show(dataset: Dataset, tree: Path) -> None:
    _import(dataset, tree)
    shown = dataset("show", "core/pets:v1:train", "--sample", "7").stdout
    for part in ("core/pets:v1 ", "Pets.", "train: 10 samples", "3 of 4 samples", '"classes":["cat","dog"]'):
        assert part in shown
    assert '"path": "dog/2.jpg"' in shown
    assert "val: " not in shown
    assert json.loads(dataset("show", "core/pets", "--json").stdout)["version"] == "v1"
    needs_one = dataset("show", "core/pets", "--sample", "7")
    assert (needs_one.exit_code, "['train', 'val']; name one" in needs_one.output) == (1, True)


def test_show_says_whether_samples_have_checksums(dataset: Dataset, tree: Path, tmp_path: Path) -> None:
    dataset("import", "imagefolder", "core/pets:v1", f"train={tree}/train", "--shard-size", "6")
    assert "checks  no checksums; `import --checksum`" in dataset("show", "core/pets:v1:train").stdout
    dataset("append", "imagefolder", "core/pets:v1", f"train={tree}/val", "--checksum", "sha256")
    assert "checks  checksums of 4 of 14 checked samples" in dataset("show", "core/pets:v2:train").stdout
    dataset("import", "imagefolder", "core/pets:v5", f"train={tree}/val", "--checksum", "crc32")
    assert "checks  crc32 of every sample" in dataset("show", "core/pets:v5").stdout
    iterable = "tests.datasets.samples_source:numbers_for_import"
    dataset("import", "iterable", "core/packed:v1", f"train={iterable}")
    assert "checks  crc32 of every sample" in dataset("show", "core/packed").stdout
    (tmp_path / "store/core/packed/meta/v1/train/ms-0.json").unlink()
    assert "checks  not known: " in dataset("show", "core/packed").stdout


def test_show_of_a_sample_as_json(dataset: Dataset, tree: Path) -> None:
    _import(dataset, tree)
    shown = json.loads(dataset("show", "core/pets:v1:train", "--sample", "7", "--json").stdout)
    assert (shown["path"], shown["meta"]) == ("dog/2.jpg", {"class": "dog", "label": 1})


def test_a_list_that_is_read_by_a_program_is_not_cut(tmp_path: Path, tree: Path) -> None:
    store = DatasetStore.create(str(tmp_path / "store"))
    draft = Draft(store, "core/" + "pets" * 20, "v1")
    draft.add("train", ImageFolderImporter(str(tree / "val")))
    published = draft.publish()
    environment = {"DPFLOW_STORE": str(tmp_path / "store"), "COLUMNS": "80"}
    listed = CliRunner().invoke(root, ["dataset", "list"], env=environment).stdout.splitlines()[1]
    assert listed.split() == [published.id, "v1", "train", published.created, "4"]


def test_append(dataset: Dataset, tree: Path) -> None:
    _import(dataset, tree)
    result = dataset("append", "imagefolder", "core/pets:v1", f"train={tree}/val")
    assert "core/pets:v2:train: 14 samples" in result.stdout
    result = dataset("append", "imagefolder", "core/pets:v2", f"more={tree}/val", "--as", "v7")
    assert "core/pets:v7:more: 4 samples" in result.stdout
    assert "continues v2" in dataset("show", "core/pets").stdout


def test_verify(dataset: Dataset, tree: Path) -> None:
    _import(dataset, tree)
    result = dataset("verify", "core/pets:v1:val")
    assert result.exit_code == 0, result.output
    assert result.stdout == "core/pets:v1:val: metadata of 4 samples checked; --data also checks their data\n"
    result = dataset("verify", "core/pets", "--data")
    assert result.exit_code == 0, result.output
    assert "core/pets:v1:train: 10 samples checked with their data: 10 match their checksums" in (result.stdout)
    (tree / "train/cat/3.jpg").write_bytes(b"yyy")
    result = dataset("verify", "core/pets:v1", "--data")
    assert result.exit_code == 1
    assert "train, sample 3: " in result.stdout
    assert "1 of 14 samples are damaged or missing" in result.output


def test_a_version_that_cannot_be_read_does_not_hide_the_others(dataset: Dataset, tree: Path, tmp_path: Path) -> None:
    _import(dataset, tree)
    dataset("append", "imagefolder", "core/pets:v1", f"train={tree}/val")
    (tmp_path / "store/core/pets/versions/v1.json").write_text("{")
    result = dataset("list")
    assert result.exit_code == 1
    assert [line.split()[1] for line in result.stdout.splitlines()[1:]] == ["v2", "v2"]
    assert "versions/v1.json is no dataset file" in result.stderr


def test_a_draft_is_listed_and_restarted(dataset: Dataset, tree: Path, tmp_path: Path) -> None:
    store = DatasetStore.create(str(tmp_path / "store"))
    Draft(store, "core/pets", "v1").add("train", ImageFolderImporter(str(tree / "val")))
    assert "unfinished import" in dataset("list").stdout
    result = _import(dataset, tree)
    assert result.exit_code == 1
    assert "an unfinished import is in the way" in result.output
    arguments = ("import", "imagefolder", "core/pets:v1", f"train={tree}/train", "--restart")
    assert "core/pets:v1:train: 10 samples" in dataset(*arguments).stdout


def test_a_draft_is_discarded(dataset: Dataset, tree: Path, tmp_path: Path) -> None:
    store = DatasetStore.create(tmp_path / "store")
    Draft(store, "core/pets", "v1").add("train", ImageFolderImporter(str(tree / "val")))
    assert dataset("discard", "core/pets:v1").stdout == "core/pets:v1: discarded\n"
    assert "unfinished import" not in dataset("list").stdout
    assert _import(dataset, tree).exit_code == 0
    for version in ("v1", "v2"):  # published; never begun
        result = dataset("discard", f"core/pets:{version}")
        assert result.exit_code == 1
        assert f"core/pets:{version} is no unfinished import of" in result.output
    assert dataset("verify", "core/pets:v1").exit_code == 0


def test_versions_and_datasets_are_deleted(dataset: Dataset, tree: Path, tmp_path: Path) -> None:
    _import(dataset, tree)
    dataset("append", "imagefolder", "core/pets:v1", f"train={tree}/val")
    Draft(DatasetStore(tmp_path / "store"), "core/pets", "v3").add("train", ImageFolderImporter(tree / "val"))
    for target, what in (
        ("core/pets:v1", "core/pets:v1"),
        ("core/pets", "core/pets:v1, core/pets:v2, the unfinished import core/pets:v3"),
    ):
        result = dataset("delete", target)
        assert result.exit_code == 1
        assert f"nothing was removed; with --yes this removes {what} from file://" in result.output
    assert dataset("delete", "core/pets:v1", "--yes").stdout == "core/pets:v1: deleted\n"
    assert dataset("verify", "core/pets:v2", "--data").exit_code == 0
    assert (
        dataset("delete", "core/pets", "--yes").stdout
        == "core/pets:v2: deleted\nthe unfinished import core/pets:v3: deleted\n"
    )
    assert dataset("list", "--json").stdout == ""


def test_prune(dataset: Dataset, tree: Path, tmp_path: Path) -> None:
    _import(dataset, tree)
    Draft(DatasetStore(tmp_path / "store"), "core/pets", "v2").add("train", ImageFolderImporter(tree / "val"))
    for arguments, where in (([], "all datasets"), (["core/pets"], "core/pets")):
        result = dataset("prune", *arguments)
        assert result.exit_code == 1
        assert f"the files of {where} in file://" in result.output
        assert "that no published version refers to, and the unfinished imports core/pets:v2" in result.output
    assert dataset("prune", "--yes").stdout == "core/pets: 1 files removed\n"
    assert "unfinished import" not in dataset("list").stdout
    assert dataset("verify", "core/pets", "--data").exit_code == 0


def test_copy(dataset: Dataset, tree: Path, tmp_path: Path) -> None:
    _import(dataset, tree)
    other = str(tmp_path / "other")
    result = dataset("copy", "core/pets", "--to", other)
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        f"core/pets:v1:train: 10 samples copied to file://{other}; data stays at file://{tree}/train\n"
        f"core/pets:v1:val: 4 samples copied to file://{other}; data stays at file://{tree}/val\n"
    )
    assert dataset("delete", "core/pets", "--yes").exit_code == 0
    assert "10 match their checksums" in dataset("verify", "core/pets", "--data", "--store", other).stdout


def test_export(dataset: Dataset, tree: Path, tmp_path: Path) -> None:
    _import(dataset, tree)
    command = ("export", "core/pets:v1:train", str(tmp_path / "out"), "--format", "webdataset", "--main", "jpg")
    result = dataset(*command, "--samples-per-file", "6")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"core/pets:v1:train: 10 samples in 2 files of file://{tmp_path}/out\n"
    files = ["train-000000.tar", "train-000001.tar"]
    again = json.loads(dataset(*command, "--samples-per-file", "6", "--json").stdout)
    url = f"file://{tmp_path}/out"
    assert again == {"exported": "core/pets:v1:train", "url": url, "files": files, "kept": 2, "samples": 10}
    for arguments, told in ((command, "has another export"), (("export", "core/pets", "out", *command[3:]), "variant")):
        refused = dataset(*arguments)
        assert refused.exit_code != 0
        assert told in refused.output


def test_every_command_prints_json_for_programs(dataset: Dataset, tree: Path, tmp_path: Path) -> None:
    def records(*arguments: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in dataset(*arguments, "--json").stdout.splitlines()]

    (imported,) = records("import", "imagefolder", "core/pets:v1", f"train={tree}/train", "--checksum", "crc32")
    assert (imported["version"], imported["variants"]["train"]["samples"]) == ("v1", 10)
    (appended,) = records("append", "imagefolder", "core/pets:v1", f"train={tree}/val")
    assert (appended["version"], appended["variants"]["train"]["samples"]) == ("v2", 14)
    (tree / "train/cat/3.jpg").write_bytes(b"yyy")
    problem, checked = records("verify", "core/pets:v1", "--data")
    assert [problem[name] for name in ("variant", "sample", "samples")] == ["train", 3, 1]
    compared = {"checksums": 9, "sizes": 0, "presence": 0}
    assert checked == {"checked": "core/pets:v1:train", "samples": 10, "compared": compared}
    assert records("verify", "core/pets:v2") == [{"checked": "core/pets:v2:train", "samples": 14}]
    (tree / "train/cat/3.jpg").write_bytes(b"xxx")
    (copied,) = records("copy", "core/pets:v1", "--to", str(tmp_path / "other"))
    assert copied == {
        "copied": "core/pets:v1",
        "to": f"file://{tmp_path}/other",
        "compared": {"checksums": 0, "sizes": 0, "presence": 0},  # data outside the store stays where it is
    }
    Draft(DatasetStore(tmp_path / "store"), "core/pets", "v3").add("train", ImageFolderImporter(tree / "val"))
    assert records("discard", "core/pets:v3") == [{"discarded": "core/pets:v3"}]
    assert records("delete", "core/pets:v1", "--yes") == [{"deleted": ["core/pets:v1"], "discarded": []}]
    assert records("prune", "--yes") == [{"dataset": "core/pets", "files_removed": 0}]


def test_a_variant_that_is_not_named_is_in_the_way(dataset: Dataset, tree: Path, tmp_path: Path) -> None:
    store = DatasetStore.create(str(tmp_path / "store"))
    Draft(store, "core/pets", "v1").add("trian", ImageFolderImporter(str(tree / "val")))
    result = _import(dataset, tree)
    assert (result.exit_code, "['trian']; name all" in result.output) == (1, True), result.output
    assert store.versions("core/pets") == []
    restarted = dataset("import", "imagefolder", "core/pets:v1", f"train={tree}/train", "--restart")
    assert restarted.exit_code == 0, restarted.output
    assert list(store.load("core/pets").variants) == ["train"]


def test_settings_name_the_variant(dataset: Dataset, tmp_path: Path) -> None:
    for variant in ("a", "b"):
        (tmp_path / variant / "images").mkdir(parents=True)
        (tmp_path / f"{variant}.json").write_text('{"images": [{"id": 1, "file_name": "x.jpg"}]}')
    sources = [f"{variant}={tmp_path}/{variant}.json" for variant in ("a", "b")]
    result = dataset("import", "coco", "core/coco:v1", *sources, "-s", f"images={tmp_path}/{{variant}}/images")
    assert result.exit_code == 0, result.output
    assert f"file://{tmp_path}/b/images" in dataset("show", "core/coco:v1:b").stdout


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["import", "imagefolder", "core/x", "train=/x"], 1, "should name a version, such as core/x:v1"),
        (["import", "imagefolder", "core/x:v1:train", "train=/x"], 1, "variants go before sources"),
        (["import", "imagefolder", "x:v1", "train=/x"], 1, "is no name of a dataset"),
        (["import", "imagefolder", "core/x:v1", "/x"], 2, "'/x' is not of the form NAME=VALUE"),
        (["import", "imagefolder", "core/x:v1", "a=/x", "a=/y"], 2, "given twice"),
        (["import", "imagefolder", "core/x:v1"], 2, "Missing argument"),
        (["import", "imagefolder", "core/x:v1", "train=/no/such"], 1, "there is no folder file:///no/such;"),
        (["import", "speech", "core/x:v1", "train=/no/such"], 1, "there is no folder file:///no/such;"),
        (
            ["import", "coco", "core/x:v1", "train=/no/such.json", "-s", "images=/"],
            1,
            "there is no file:///no",
        ),
        (["import", "coco", "core/x:v1", "train=/no/such.json"], 1, "coco needs the setting ['images']"),
        (["import", "listing", "core/x:v1", "train=/no/such.csv"], 1, "there is no file:///no/such.csv"),
        (["import", "listing", "core/x:v1", "train=/no/such"], 1, "or a .csv, .tsv or .parquet file"),
        (["import", "iterable", "core/x:v1", "train=no.such"], 1, "give package.module:name"),
        (["import", "iterable", "core/x:v1", "train=math:nothing"], 1, "give package.module:name"),
        (["import", "imagefolder", "core/x:v1", "train=/x", "-s", "sizes=3"], 1, "has no setting ['sizes']"),
        (["import", "imagefolder", "core/x:v1", "train=/x", "--shard-size", "0"], 2, "0 is not in the range"),
        (
            ["import", "imagefolder", "core/x:v1", "train=/x", "--shard-size", "9" * 27],
            2,
            "range 1<=x<=9007199254740992",
        ),
        (["import", "imagefolder", "core/x:v1", "train=/x", "--checksum", "md5"], 2, "'md5' is not one of"),
        (["import", "imagefolder", "core/x:v1", "a/b=/x"], 1, "is no name of a dataset"),
        (["import", "imagefolder", "core/x:v1", "train=nothing://x"], 1, "cannot be opened"),
        (
            ["import", "train=/no/such"],
            2,
            "'train=/no/such' is no kind of source; give one of coco, imagefolder",
        ),
        (["import", "imagefolder", "train=/x"], 2, "'train=/x' stands where the dataset's name belongs"),
        (["import", "floppy", "core/x:v1", "train=/x"], 2, "'floppy' is no kind of source"),
        (["show", "core/x"], 1, "there is no dataset store at"),
        (["show", "train=/x"], 1, "there is no dataset store at"),
        (["list"], 1, "there is no dataset store at"),
        (["list", "--storage-option", "url=x"], 2, "['url'] is no option of a storage"),
        (["list", "--store", "s3://b/ds", "--storage-option", "colour=red"], 1, "has no option ['colour']"),
        (["verify", "core/x"], 1, "there is no dataset store at"),
        (["verify"], 2, "Missing argument"),
        (["append", "speech", "core/x:v1", "train=/x"], 1, "there is no dataset store at"),
        (["delete", "core/x", "--yes"], 1, "there is no dataset store at"),
        (
            ["delete", "core/x:v1:train", "--yes"],
            1,
            "names a variant; versions are removed and copied as a whole",
        ),
        (["delete"], 2, "Missing argument"),
        (["prune", "core/x:v1"], 1, "names a version; give a dataset, such as core/x, or none"),
        (["prune"], 1, "there is no dataset store at"),
        (["copy", "core/x"], 2, "Missing option '--to'"),
        (["copy", "core/x", "--to", "/x", "--to-option", "url=x"], 2, "['url'] is no option of a storage"),
    ],
)
def test_mistakes_are_one_line(dataset: Dataset, arguments: list[str], status: int, told: str) -> None:
    result = dataset(*arguments)
    assert (result.exit_code, told in result.output) == (status, True), result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "--storage-option", "hidden"],
        ["list", "--storage-option", "=hidden=="],
        ["list", "--storage-option", "hidden=="],
        ["list", "--storage-option", "hid/hidden=b"],
        ["list", "--storage-option", "secret=hidden", "--storage-option", "secret=hidden"],
        ["import", "imagefolder", "core/x:v1", "a=ftp://me:hidden@h/x", "a=ftp://me:hidden@h/y"],
        ["import", "imagefolder", "core/x:v1", "ftp://me:hidden@h/x"],
        ["import", "imagefolder", "train=ftp://me:hidden@h/x"],
        ["import", "train=ftp://me:hidden@h/x"],
    ],
)
def test_mistakes_show_no_secret(dataset: Dataset, arguments: list[str]) -> None:
    result = dataset(*arguments)
    assert (result.exit_code, "hidden" in result.output) == (2, False), result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["show", "core/none"], "there is no dataset core/none"),
        (["show", "core/pets:v9"], "core/pets has versions ['v1']"),
        (["show", "core/pets:v1:test"], "there is no variant 'test'"),
        (["show", "core/pets:v1:val", "--sample", "4"], "--sample=4: core/pets:v1:val has 4 samples, from 0"),
        (["show", "train=/x"], "is no name of a dataset"),
        (["verify", "/data/pets"], "is no name of a dataset"),
        (["verify", "core/pets:v1:test"], "there is no variant 'test'"),
        (["append", "imagefolder", "core/pets:v9", "train=/x"], "core/pets has versions ['v1']"),
        (["append", "imagefolder", "core/pets:v1", "train=/no/such"], "there is no folder file:///no/such;"),
        (["append", "imagefolder", "core/pets:v1", "train=/x", "--as", "v1"], "is published in"),
        (["append", "imagefolder", "core/pets:v1", "train=/x", "--as", "v/2"], "is no name of a dataset"),
        (["import", "imagefolder", "core/pets:v1", "train=/x"], "is published in"),
        (["delete", "core/pets:v9", "--yes"], "core/pets has versions ['v1']"),
        (["delete", "core/none"], "there is no dataset core/none"),
        (["copy", "core/pets:v9", "--to", "/no/such"], "core/pets has versions ['v1']"),
    ],
)
def test_mistakes_with_a_store_are_one_line(dataset: Dataset, tree: Path, arguments: list[str], told: str) -> None:
    _import(dataset, tree)
    result = dataset(*arguments)
    assert (result.exit_code, told in result.output) == (1, True), result.output
    assert isinstance(result.exception, SystemExit)
    assert [line[:7] for line in result.stderr.splitlines() if " samples 0:" not in line] == ["Error: "]


def test_the_root_by_itself() -> None:
    assert __version__ in CliRunner().invoke(root, ["--version"]).output
    wrong = CliRunner().invoke(root, ["no-such-command"])
    assert (wrong.exit_code, "No such command" in wrong.output) == (2, True)


def test_help_of_every_command_needs_no_store() -> None:
    for arguments in (
        ["dataset"],
        *(["dataset", name] for name in ("import", "list", "show", "verify", "append")),
        *(["dataset", name] for name in ("discard", "delete", "prune", "copy")),
    ):
        result = CliRunner().invoke(root, [*arguments, "--help"])
        assert result.exit_code == 0
        assert "Usage:" in result.output
