"""What a server of the pool and its commands are given and cannot be: said in a line, before anything is made."""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.new_process import in_fork
from torch_dpflow.cli.main import root
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.pool import DataClient, DataServer, open_array
from torch_dpflow.pool.messages import boot_id
from torch_dpflow.pool.transport.address import find_address


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--address", "tcp://127.0.0.1:7400"], "a server needs a directory of this host"),
        (["--address", ""], "a server needs a directory of this host"),
        (["--address", "file"], "cannot be a server's directory: File exists"),
        (["--address", "file/below"], "cannot be a server's directory: Not a directory"),
        (["--address", "udp://127.0.0.1:7400"], "a server needs a directory of this host"),
        (["--memory", "0.1B"], "is below one byte"),
        (["--memory", "100TiB"], "is more than this process can have"),
        (["--memory", "999999999999TiB"], "is more than this process can have"),
        (["--ahead-memory", "999999999999TiB"], "is more than this process can have"),
        (["--listen", "7400"], "other hosts reach a server at tcp://HOST:PORT"),
        (["--listen", "tcp://127.0.0.1:0", "--connection", "none"], "`dpflow keygen` has written"),
        (["--join", ""], "a server needs a directory of this host"),
        (["--join", "tcp://127.0.0.1:1", "--listen", "tcp://127.0.0.1:0"], "`dpflow keygen` has written"),
    ],
)
def test_a_server_that_cannot_be_says_why(
    given: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o700)
    Path("file").touch()
    done = CliRunner().invoke(root, ["pool", "serve", "--memory", "1MiB", "--address", "p", *given])
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert says in done.output
    assert not [*tmp_path.glob("**/socket")]


@pytest.mark.parametrize("seconds", ["nan", "1e300"])
def test_tables_come_after_seconds_that_pass(seconds: str, tmp_path: Path) -> None:
    words = ["pool", "top", "--interval-s", seconds, "--count", "2", "--address", str(tmp_path)]
    done = CliRunner().invoke(root, words)
    assert done.exit_code == 1
    assert "give seconds" in done.output


@pytest.mark.parametrize("options", [3, "key", {3: 4}])
def test_options_of_a_storage_are_looked_at_at_once(options: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionTypeError, match=r"storage_options=.*give a dict of fsspec's options, or None"):
        DataClient(tmp_path / "p", storage_options=options)


def test_places_that_are_none(tmp_path: Path) -> None:
    for wrong in ("tcp://127.0.0.1:0", ["tcp://127.0.0.1:0"], [3]):
        with pytest.raises(OptionTypeError, match="give a PoolAddress"):
            DataServer(1 << 20, tmp_path / "p", listen=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="null byte"):
        find_address("a\0b")
    with pytest.raises(OptionTypeError, match="connection=3 is of type int"):
        find_address(connection=3)  # type: ignore[arg-type]
    with pytest.raises(OptionTypeError, match="url=3 is of type int"):
        open_array(3)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def test_a_server_does_not_start_where_others_may_enter(tmp_path: Path) -> None:
    place = tmp_path / "p"
    place.mkdir()
    place.chmod(0o770)
    done = CliRunner().invoke(root, ["pool", "serve", "--memory", "1MiB", "--address", str(place)])
    assert done.exit_code == 1
    assert "no other user may enter (mode 0700)" in done.output


def test_a_server_without_space_for_its_lock_names_the_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    in_fork(serve_without_space, tmp_path)
    DataServer(1 << 20, tmp_path / "p").stop()


def serve_without_space(folder: Path) -> None:
    """Fail twice, as the pool's process of a cluster tries again: the first attempt must not keep the lock."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # fails as a full disk does
    for _ in range(2):
        with pytest.raises(OptionError, match="p cannot be a server's directory: File too large"):
            DataServer(1 << 20, folder / "p")


def test_a_host_is_known_by_its_name_where_a_sandbox_hides_its_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(boot_id()) == 36

    def hidden(path: Path, *_: Any, **__: Any) -> str:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "read_text", hidden)
    assert boot_id.__wrapped__() == socket.gethostname()
