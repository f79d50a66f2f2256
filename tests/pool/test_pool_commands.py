"""Commands of the pool: arrays beside stored datasets, and pools that are not there."""

from __future__ import annotations

import json
import mmap
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from tests.datasets.samples_source import Numbered, publish
from tests.new_process import Interpreter
from tests.pool.pool_servers import inner_server, server
from torch_dpflow.cli.main import root
from torch_dpflow.datasets import DatasetStore
from torch_dpflow.errors import OptionError
from torch_dpflow.pool import DataClient, open_array
from torch_dpflow.pool.array_files import array_identity
from torch_dpflow.pool.sources import verify_pool

ROWS = np.arange(5000 * 30, dtype=np.float32).reshape(5000, 5, 6)


def run(address: Path | str, *words: str, code: int = 0) -> str:
    """What a command prints."""
    # Wide enough for the table's names.
    result = CliRunner().invoke(
        root, ["pool", *words, "--address", str(address)], env={"COLUMNS": "250", "DPFLOW_STORE": None}
    )
    assert result.exit_code == code, result.output
    assert code == 0 or result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `rows.npy` is, the current directory."""
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", ROWS)
    return tmp_path


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`rows.npy` in a file system in memory, the current directory: there `damage` leaves no trace."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        monkeypatch.chdir(directory)
        np.save("rows.npy", ROWS)
        yield Path(directory, "rows.npy")


def damage(path: Path, *places: int) -> None:
    """Change bytes as a damaged disk does: the file's times stay. They stay only for a page that was read before."""
    before = path.stat()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        assert content.read()
        for place in places:
            content[place] ^= 1
    assert (path.stat().st_mtime_ns, path.stat().st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)


@pytest.mark.parametrize("named", ["rows.npy", "./plain", "/", "./12:30.npy"])
def test_commands_take_arrays_by_their_files(files: Path, client: DataClient, named: str) -> None:
    target = str(files / "plain") if named == "/" else named
    if named != "rows.npy":
        shutil.copy("rows.npy", target)
    address = files / "p"
    assert "5,000 of 5,000 samples" in run(address, "preload", target)
    assert f"{files / Path(target).name}" in run(address, "list")
    shown = run(address, "show", target)
    assert "samples: 5,000" in shown
    assert "until unloaded" in shown
    ref, number = shown.splitlines()[0], shown.splitlines()[1].removeprefix("id: ")
    assert ref == str(files / Path(target).name)
    assert "samples: 5,000" in run(address, "show", number)
    assert "5,000 samples are in memory as in storage, 0 in storage alone" in run(address, "verify", target)
    assert "unloaded" in run(address, "unload", target)
    assert client.cached_datasets() == []
    assert "is not in the pool" in run(address, "verify", target, code=1)
    for command in ("show", "unload"):
        assert "the pool caches nothing; load it by `dpflow pool preload`" in run(address, command, target, code=1)


def test_commands_print_json_for_programs(rows: Path, tmp_path: Path, client: DataClient) -> None:
    address = tmp_path / "p"

    def told(*words: str, code: int = 0) -> dict[str, Any]:
        lines = run(address, *words, "--json", code=code).splitlines()  # beside bars on stderr
        (found,) = [json.loads(line) for line in lines if line.startswith("{")]
        assert isinstance(found, dict)
        return found

    held = told("preload", "rows.npy")
    assert (held["samples"], held["in_memory"], held["stays"]) == (5000, 5000, True)
    listed = told("list")
    assert listed["datasets"] == [told("show", held["id"])] == [held]
    assert (len(listed["servers"]), listed["capacity"] - listed["free"] >= held["bytes"]) == (1, True)
    assert told("top", "--count", "1")["datasets"] == [held]
    assert told("verify", "rows.npy") == {
        "ref": held["ref"],
        "equal": 5000,
        "in_storage_alone": 0,
        "differ": [],
    }
    damage(rows, -1)
    (differs,) = told("verify", "rows.npy", code=1)["differ"]
    assert (differs["sample"], "byte 119 of 120" in differs["what"]) == (4999, True)
    assert told("unload", held["id"])["unloaded"]["ref"] == held["ref"]
    assert told("list")["datasets"] == []


def test_commands_take_arrays_of_hdf5_files_and_of_storages(files: Path, client: DataClient) -> None:
    h5py = pytest.importorskip("h5py", reason="the extra hdf5 is not installed")
    with h5py.File("rows.h5", "w") as file:
        file["train/x"], file["train/y"] = ROWS, np.arange(10)
    address = files / "p"
    for name, count in (("x", "5,000"), ("y", "10")):
        assert f"{count} of {count} samples" in run(address, "preload", f"rows.h5:train/{name}")
        assert f"{count} samples are in memory" in run(address, "verify", f"rows.h5:train/{name}")
    assert "names 2 of the cached datasets" in run(address, "show", "rows.h5", code=1)
    run(address, "unload", "rows.h5:train/y")
    assert "train/x" in run(address, "show", "rows.h5")
    for wrong in ("rows.h5", "rows.h5:train"):
        assert "one of ['train/x', 'train/y']" in run(address, "preload", wrong, code=1)
    with fsspec.open("memory://arrays/rows.npy", "wb") as stream:
        np.save(stream, ROWS)
    try:
        run(address, "preload", "memory://arrays/rows.npy")
        assert "5,000 samples are in memory" in run(address, "verify", "memory://arrays/rows.npy")
    finally:
        fsspec.filesystem("memory").rm("/arrays/rows.npy")


def test_verifying_tells_each_row_that_differs(rows: Path, tmp_path: Path, client: DataClient) -> None:
    address = tmp_path / "p"
    source = open_array(rows)
    client.preload(source)
    damage(rows, *(128 + row * 120 + 7 for row in (0, 2222, 4999)))
    told = run(address, "verify", "rows.npy", code=1)
    for row in (0, 2222, 4999):
        assert f"{rows}, sample {row}: byte 7 of 120 is" in told
    assert "4,997 samples are in memory as in storage" in told
    assert "3 of 5,000 samples differ" in told
    rows.unlink()
    problems = [*verify_pool(source, address)]
    assert sum(one.samples for one in problems) == 5000
    assert "cannot be compared: ObjectMissingError" in problems[0].what
    pushed = client.push("lab/rows:v1", ROWS)
    with pytest.raises(OptionError, match="no storage to compare"):
        [*verify_pool(pushed, address)]


def test_a_server_has_as_many_descriptors_as_its_system_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        with server(tmp_path / "p") as process:
            own, _ = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert own == max(soft - 1, min(65536, hard))


def test_what_names_no_set_is_refused(files: Path, client: DataClient) -> None:
    address = files / "p"
    DatasetStore.create("datasets")
    for words, code, says in [
        (("core/numbers:v1",), 2, "Missing option '--store'"),
        (("core/numbers:v1", "--store", "nothing"), 1, "nothing"),
        (("other.npy",), 1, "other.npy"),
        (("rows.npy:x",), 1, "rows.npy is no HDF5 file; leave out path='x'"),
        (("rows.npy", "--storage-option", "path=x"), 1, "path is not a storage option"),
        (("rows", "--store", "datasets"), 1, "is no name of a dataset"),
    ]:
        assert says in run(address, "preload", *words, code=code)
    assert client.cached_datasets() == []


def test_names_that_others_have_given_are_printed_on_one_line(files: Path, client: DataClient) -> None:
    source = msgspec.structs.replace(open_array("rows.npy"), ref="rows\n\x1b[2J[red]")
    client.preload(source)
    number = array_identity(source).hex()[:8]
    printed = [run(files / "p", *words) for words in (("list",), ("show", number), ("top", "--count", "1"))]
    printed.append(run(files / "p", "show", "x", code=1))
    printed.append(run(files / "p", "unload", number))
    for text in printed:
        assert r"rows\n\x1b[2J[red]" in text
        assert "\x1b" not in text


def test_a_part_of_an_array_is_held_where_it_is_asked_for(files: Path) -> None:
    with inner_server(files / "p", 300_000):
        assert "the servers have room for 300,000" in run(files / "p", "preload", "rows.npy", code=1)
        run(files / "p", "preload", "rows.npy", "--part")
        told = run(files / "p", "verify", "rows.npy")
        held = int(told.rpartition(": ")[2].partition(" ")[0].replace(",", ""))
        assert 0 < held < 5000
        assert f"{5000 - held:,} in storage alone" in told


def test_datasets_are_named_as_before(files: Path, client: DataClient) -> None:
    publish(DatasetStore.create(str(files / "datasets")), Numbered(40))
    assert "40 of 40" in run(files / "p", "preload", "core/numbers:v1", "--store", "datasets")
    assert "samples: 40" in run(files / "p", "show", "core/numbers")
    assert "unloaded" in run(files / "p", "unload", client.cached_datasets()[0].identity.hex()[:8])
    assert "runs at" in run(files / "p", "serve", "--memory", "1MiB", code=1)


@pytest.mark.parametrize(
    "words",
    [("list",), ("show", "x"), ("unload", "x"), ("top",), ("preload", "rows.npy"), ("verify", "rows.npy")],
)
def test_commands_at_a_pool_that_is_not_there(files: Path, words: tuple[str, ...]) -> None:
    told = run(files / "none", *words, code=1)
    assert "Error: no server of the pool answers at" in told
    assert "start one: dpflow pool serve" in told


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [("server", 1, "Error: the server of the pool does not answer at"), ("command", 0, "")],
)
def test_top_ends_with_its_server_and_by_ctrl_c(tmp_path: Path, ends: str, code: int, says: str) -> None:
    command = [sys.executable, "-m", "torch_dpflow.cli", "pool", "top", "--interval-s", "0.1"]
    with (
        server(tmp_path / "p") as serving,
        # What was read up to a line may end in the midst of a character.
        Interpreter([*command, "--address", str(tmp_path / "p")], errors="replace") as top,
    ):
        assert top.stdout is not None
        while "bytes are free" not in top.stdout.readline():
            assert top.poll() is None
        if ends == "server":
            serving.kill()
        else:
            top.send_signal(signal.SIGINT)
        told = top.communicate()[1]
        assert top.returncode == code
        assert told.count("\n") == code  # no traceback
        assert says in told
