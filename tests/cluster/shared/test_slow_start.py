"""A cluster whose fork server takes long to import torch, as from a cold network disk: it comes up late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.new_process import ROOT
from tests.shared_cluster import free_port, wait
from tests.worker_cases import has_ended
from torch_dpflow.cluster.messages.node import Running
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient

#: The module that Python imports by itself: importing torch waits until a file exists.
SLOW = """
import os, sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        while name == "torch" and not os.path.exists({gate!r}):
            time.sleep(0.01)

sys.meta_path.insert(0, Slow())
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path is short enough for sockets."""
    return tmp_path_factory.mktemp("s")


@contextmanager
def starting(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command whose fork server waits for a file "gate" in `folder`; what it prints goes to "log" there."""
    (folder / "modules").mkdir()
    (folder / "modules" / "sitecustomize.py").write_text(SLOW.format(gate=str(folder / "gate")))
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": f"{folder / 'modules'}{os.pathsep}{ROOT}"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch_dpflow.cli", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
        )
    try:
        yield process
    finally:
        (folder / "gate").touch()
        process.terminate()
        process.communicate(timeout=60.0)


def fork_server_of(process: subprocess.Popen[str]) -> int:
    """The pid of the fork server that imports its first module; 0 without one."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if name == "dpflow-fork-0" and int(rest.split()[1]) == process.pid:
            return int(path.parent.name)
    return 0


def test_a_cluster_whose_fork_server_imports_for_long_answers_names_the_module_and_comes_up(folder: Path) -> None:
    with starting(folder, "up", "--json", "--address", str(folder / "connection")) as process:
        wait(lambda: fork_server_of(process), what="the fork server")
        (node,) = folder.glob("*/node")
        # The node answers, knows that the coordinator does not run, and no job finds a cluster yet.
        with RpcClient(f"ipc://{node}", options=ClientOptions(timeout_s=60.0)) as client:
            views = client.call("changes", 0, reply_type=Running).body.processes
        assert [(view.id, view.runs) for view in views] == [("coordinator", False)]
        assert not (folder / "connection").exists()
        wait(lambda: "it imports torch" in (folder / "log").read_text(), what="the line that names the module")
        (folder / "gate").touch()
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["connection_file"] == str(folder / "connection")
        assert (folder / "connection").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["up", "node"])
def test_a_signal_ends_a_command_whose_fork_server_imports_and_leaves_nothing(
    command: str, number: signal.Signals, folder: Path
) -> None:
    keys = folder / "keys"
    write_connection_file(keys, generate_keys(f"tcp://127.0.0.1:{free_port()}"))
    options = {"up": ["--address", str(folder / "connection")], "node": ["--join", str(keys), "--name", "a"]}
    with starting(folder, command, *options[command]) as process:
        wait(lambda: fork_server_of(process), what="the fork server")
        server = fork_server_of(process)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60.0)
        assert (process.returncode, said) == (0, "dpflow is down\n" if command == "up" else "node a has left\n")
        assert has_ended(server)
    assert sorted(path.name for path in folder.iterdir()) == ["gate", "keys", "log", "modules"]
