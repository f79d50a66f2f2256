"""`dpflow dataset` from the outside: what it prints, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.new_process import run_interpreter
from torch_dpflow import __version__
from torch_dpflow.cli.main import COMMANDS, root
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers.image_folder import ImageFolderImporter

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


def test_append(dataset: Dataset, tree: Path) -> None:
    _import(dataset, tree)
    result = dataset("append", "imagefolder", "core/pets:v1", f"train={tree}/val")
    assert "core/pets:v2:train: 14 samples" in result.stdout
    result = dataset("append", "imagefolder", "core/pets:v2", f"more={tree}/val", "--as", "v7")
    assert "core/pets:v7:more: 4 samples" in result.stdout
    assert "continues v2" in dataset("show", "core/pets").stdout


def test_verify(dataset: Dataset, tree: Path) -> None:
    _import(dataset, tree)
    result = dataset("verify", "core/pets", "--data")
    assert result.exit_code == 0, result.output
    (tree / "train/cat/3.jpg").write_bytes(b"yyy")
    result = dataset("verify", "core/pets:v1", "--data")
    assert result.exit_code == 1
    assert "train, sample 3: " in result.stdout
    assert "1 samples cannot be read as they should be" in result.output


def test_a_draft_is_listed_and_restarted(dataset: Dataset, tree: Path, tmp_path: Path) -> None:
    store = DatasetStore.create(str(tmp_path / "store"))
    Draft(store, "core/pets", "v1").add("train", ImageFolderImporter(str(tree / "val")))
    assert "unfinished import" in dataset("list").stdout
    result = _import(dataset, tree)
    assert result.exit_code == 1
    assert "an unfinished import is in the way" in result.output
    arguments = ("import", "imagefolder", "core/pets:v1", f"train={tree}/train", "--restart")
    assert "core/pets:v1:train: 10 samples" in dataset(*arguments).stdout


def test_settings_name_the_variant(dataset: Dataset, tmp_path: Path) -> None:
    for variant in ("a", "b"):
        (tmp_path / f"{variant}.json").write_text('{"images": [{"id": 1, "file_name": "x.jpg"}]}')
    sources = [f"{variant}={tmp_path}/{variant}.json" for variant in ("a", "b")]
    result = dataset(
        "import", "coco", "core/coco:v1", *sources, "-s", f"images={tmp_path}/{{variant}}/images"
    )
    assert result.exit_code == 0, result.output
    assert f"file://{tmp_path}/b/images" in dataset("show", "core/coco:v1:b").stdout


def test_iterables_are_found_from_where_one_stands(tmp_path: Path) -> None:
    (tmp_path / "squares_here.py").write_text(
        "def samples():\n    return [(b'%d' % n, {'n': n}) for n in range(5)]"
    )
    program = """
import os, sys
os.chdir(sys.argv.pop(1))
sys.path.remove("")
from torch_dpflow.cli import main
main()
"""
    arguments = ["import", "iterable", "core/squares:v1", "train=squares_here:samples"]
    run = run_interpreter(program, str(tmp_path), "dataset", *arguments, "--store", str(tmp_path / "store"))
    assert run.returncode == 0, run.stderr
    stored = DatasetStore(str(tmp_path / "store")).open("core/squares:v1:train")
    assert stored.sample(4).fields() == {"n": 4}


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["import", "imagefolder", "core/x", "train=/x"], 1, "should name a version, such as core/x:v1"),
        (["import", "imagefolder", "core/x:v1:train", "train=/x"], 1, "variants go before sources"),
        (["import", "imagefolder", "x:v1", "train=/x"], 1, "is no name of a dataset"),
        (["import", "imagefolder", "core/x:v1", "/x"], 2, "not of the form NAME=VALUE"),
        (["import", "imagefolder", "core/x:v1", "a=/x", "a=/y"], 2, "given twice"),
        (["import", "imagefolder", "core/x:v1"], 2, "Missing argument"),
        (["import", "imagefolder", "core/x:v1", "train=/no/such/directory"], 1, "has no directories"),
        (["import", "floppy", "core/x:v1", "train=/x"], 2, "floppy"),
        (["show", "core/x"], 1, "there is no dataset store at"),
        (["append", "speech", "core/x:v1", "train=/x"], 1, "there is no dataset store at"),
    ],
)
def test_mistakes_are_one_line(dataset: Dataset, arguments: list[str], status: int, told: str) -> None:
    result = dataset(*arguments)
    assert (result.exit_code, told in result.output) == (status, True), result.output
    assert "Traceback" not in result.output


def test_the_command_line_in_a_process_of_its_own() -> None:
    program = "import sys; sys.argv = ['dpflow', *sys.argv[1:]]; from torch_dpflow.cli import main; main()"
    shown = run_interpreter(program, "--help")
    assert shown.returncode == 0, shown.stderr
    for name, (_, _, what) in COMMANDS.items():
        assert name in shown.stdout
        assert what.split()[0] in shown.stdout


def test_the_root_by_itself() -> None:
    assert __version__ in CliRunner().invoke(root, ["--version"]).output
    wrong = CliRunner().invoke(root, ["no-such-command"])
    assert (wrong.exit_code, "No such command" in wrong.output) == (2, True)


def test_help_of_every_command_needs_no_store() -> None:
    for arguments in (
        ["dataset"],
        *(["dataset", name] for name in ("import", "list", "show", "verify", "append")),
    ):
        result = CliRunner().invoke(root, [*arguments, "--help"])
        assert result.exit_code == 0
        assert "Usage:" in result.output
