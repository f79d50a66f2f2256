"""What a cluster does without its connection file, and where two want the same one."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from tests.new_process import interpreter
from tests.shared_cluster import TestCluster, free_port, open_job, wait
from tests.shared_datasets import Numbers
from tests.worker_cases import has_ended
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.client.open_job import JobOptions
from torch_dpflow.cluster.security.announcement import Announcement
from torch_dpflow.cluster.security.connection_file import (
    find_cluster,
    generate_keys,
    read_connection_file,
    write_connection_file,
)
from torch_dpflow.errors import OptionError, UsageError


@pytest.fixture(params=["ipc", pytest.param("tcp", marks=pytest.mark.slow)])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestCluster]:
    """A cluster whose connection file lies in a folder of its own, as that of a user's session."""
    (tmp_path / "session").mkdir()
    listen = f"tcp://127.0.0.1:{free_port()}" if request.param == "tcp" else ""
    cluster = TestCluster.start(tmp_path, listen=listen, connection=tmp_path / "session" / "connection")
    yield cluster
    cluster.stop()


def test_a_cluster_goes_on_without_its_connection_file_and_writes_it_again(session: TestCluster, flow: str) -> None:
    folder = Path(session.address).parent
    before = find_cluster(session.address)
    options = JobOptions(idle_s=3.0)
    with open_job(flow, Numbers(400), address=session.address, batch_size=4, options=options) as job:
        reading = job.traverse(0)
        keys = next(reading)[1].tolist()
        wait(lambda: len(session.processes(f"{flow}:v1/")) == 4, what="a router, a shard and two workers")
        victims = [view.pid for view in session.processes(f"{flow}:v1/")]
        shutil.rmtree(folder)
        for pid in victims:
            with suppress(ProcessLookupError):  # a worker ends with its shard
                os.kill(pid, signal.SIGKILL)
        keys += [int(key) for _, labels in reading for key in labels]
        assert sorted(keys) == list(range(400))
        assert not folder.exists()
        folder.mkdir()
        wait(lambda: Path(session.address).exists(), what="the file")
        assert find_cluster(session.address) == before
    # Over tcp it takes the keys of the file; on this machine the address that `dpflow up` has printed will do.
    address = session.address if before.address.startswith("tcp") else before.address
    if address == before.address:
        Path(session.address).unlink()
    ended = CliRunner().invoke(root, ["down", "--address", address])
    assert (ended.exit_code, ended.output) == (0, f"{before.address} is stopping\n")
    wait(lambda: has_ended(session.pid), what="the cluster's end")
    assert not list(folder.iterdir())


#: Announces a cluster as soon as it is told to, and says whether it has the file.
RIVAL = """
import sys
from pathlib import Path
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.cluster.security.announcement import Announcement
from torch_dpflow.cluster.security.connection_file import generate_keys
connection = generate_keys(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
try:
    held = Announcement(Path(sys.argv[1]), connection)
except UsageError as error:
    print(error, flush=True)
else:
    print("has it", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("leftover", [False, True])
def test_of_clusters_that_start_at_once_one_has_the_file_and_the_others_are_told(
    leftover: bool, tmp_path: Path
) -> None:
    path = tmp_path / "connection"
    if leftover:
        write_connection_file(path, generate_keys("ipc:///killed"))
    rivals = [interpreter(RIVAL, str(path), f"ipc:///{number}", stdin=-1) for number in range(4)]
    try:
        for rival in rivals:
            assert rival.stdout is not None
            assert rival.stdout.readline() == "ready\n"
        said: list[str] = []
        for rival in rivals:
            assert rival.stdin is not None
            rival.stdin.write("go\n")
            rival.stdin.flush()
        for rival in rivals:
            assert rival.stdout is not None
            said.append(rival.stdout.readline())
        winners = [number for number, line in enumerate(said) if line == "has it\n"]
        assert len(winners) == 1, said
        assert sum("a cluster is up already at ipc:///" in line for line in said) == 3, said
        assert read_connection_file(path).address == f"ipc:///{winners[0]}"
        assert [file.name for file in tmp_path.iterdir()] == ["connection"]
    finally:
        for rival in rivals:
            rival.communicate("end\n")


def test_a_cluster_leaves_the_file_of_another_that_has_come_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "connection"
    first = Announcement(path, generate_keys("ipc:///first"))
    with pytest.raises(UsageError, match="a cluster is up already at ipc:///first"):
        Announcement(path, generate_keys("ipc:///second"))
    path.unlink()
    second = Announcement(path, generate_keys("ipc:///second"))
    first.remove()
    assert read_connection_file(path).address == "ipc:///second"
    second.remove()
    assert not path.exists()


def fail(*_: object, **given: object) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


@pytest.mark.parametrize("step", ["link", "flock", "thread", "write"])
def test_an_announcement_that_fails_leaves_no_file_with_keys(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: dict[str, tuple[Any, str]] = {
        "link": (os, "link"),
        "flock": (fcntl, "flock"),
        "thread": (threading.Thread, "start"),
        "write": (msgspec.json, "format"),
    }
    keys = generate_keys("ipc:///first")
    monkeypatch.setattr(*where[step], fail)
    with pytest.raises((OptionError, OSError)):
        Announcement(tmp_path / "connection", keys)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_an_update_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "connection"
    held = Announcement(path, generate_keys("ipc:///first"))
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            held._update("ipc:///second")
    assert [file.name for file in tmp_path.iterdir()] == ["connection"]
    held._update("ipc:///third")
    assert read_connection_file(path).address == "ipc:///third"
    held.remove()
    assert list(tmp_path.iterdir()) == []
