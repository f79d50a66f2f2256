"""Every platform of ours keeps the contract."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

import torch_dpflow
from tests.contracts.platforms import PlatformContract, wakes
from tests.contracts.processes import sleep
from tests.new_process import ROOT, run_interpreter
from tests.shared_cluster import wait
from tests.worker_cases import has_ended
from torch_dpflow.errors import DescriptorLimitError, LaunchError
from torch_dpflow.workers import fork_server as fork_servers
from torch_dpflow.workers.fork_server import GUARD, ForkServerPlatform, _new_interpreter_agrees, local_platform
from torch_dpflow.workers.local_platform import LocalPlatform
from torch_dpflow.workers.platform import Platform, ProcessSpec


class TestFork(PlatformContract):
    def new_platform(self) -> Platform:
        return LocalPlatform(multiprocessing.get_context("fork"))


class TestSpawn(PlatformContract):
    def new_platform(self) -> Platform:
        return LocalPlatform(multiprocessing.get_context("spawn"))


class TestForkServer(PlatformContract):
    starter = multiprocessing.get_context("spawn")  # a fork takes its parent's fork server for its own

    def new_platform(self) -> Platform:
        return local_platform(multiprocessing.get_context("forkserver"))


@pytest.fixture
def fork_server() -> Iterator[ForkServerPlatform]:
    platform = ForkServerPlatform(timeouts_s=(60.0, 60.0), outlived=True)
    yield platform
    platform.close()


def test_a_worker_with_a_subprocess_is_seen_to_end() -> None:
    platform = LocalPlatform(multiprocessing.get_context("fork"))
    handle = platform.launch(ProcessSpec(name="parent", incarnation=0, target=run_sleep))
    try:
        handle.kill()
        assert wakes(platform, 30.0), "its pipe lives on in the subprocess"
        assert list(platform.take_ended()) == [handle]
    finally:
        platform.close()


def test_a_spawned_process_begins_with_control_c_blocked() -> None:
    """Also the first one, with which multiprocessing starts its resource tracker."""
    program = """if True:
        import multiprocessing, signal
        from torch_dpflow.workers.platform import ProcessSpec
        from torch_dpflow.workers.local_platform import LocalPlatform

        platform = LocalPlatform(multiprocessing.get_context("spawn"))
        spec = ProcessSpec(name="one", incarnation=0, target=signal.raise_signal, arguments=(signal.SIGINT,))
        handle = platform.launch(spec)
        handle.process.join()
        assert handle.process.exitcode == 0
        platform.close()
    """
    ended = run_interpreter(program)
    assert (ended.returncode, ended.stderr) == (0, "")


def write_collector(path: str) -> None:
    Path(path).write_text(f"{gc.isenabled()} {len(gc.get_objects()) < gc.get_freeze_count() / 10}")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_collects_garbage_and_passes_over_what_it_began_with(method: str, tmp_path: Path) -> None:
    path = tmp_path / "found"
    with closing(local_platform(multiprocessing.get_context(method))) as platform:
        spec = ProcessSpec(name="one", incarnation=0, target=write_collector, arguments=(str(path),))
        handle = platform.launch(spec)
        handle.process.join()
        assert handle.process.name == "dpflow-one"
    assert path.read_text() == "True True"


PRELOADING = """
import multiprocessing
from multiprocessing import forkserver
from pathlib import Path

import torch
from tests.worker_cases import worker_pids
from torch_dpflow import DPFlowDataLoader

multiprocessing.set_forkserver_preload(["colorsys"])
loader = DPFlowDataLoader(torch.arange(4), batch_size=2, num_workers=1, multiprocessing_context="forkserver")
assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
server = forkserver._forkserver
print("libtorch" in Path(f"/proc/{server._forkserver_pid}/maps").read_text(), "colorsys" in server._preload_modules)
"""


def test_a_loaders_fork_server_imports_torch_and_what_the_user_has_chosen() -> None:
    done = run_interpreter(PRELOADING)
    assert (done.stdout, done.returncode) == ("True True\n", 0), done.stderr


def test_a_fork_server_that_would_find_another_package_imports_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = forkserver._forkserver
    monkeypatch.setattr(state, "_preload_modules", ["colorsys"])
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(torch_dpflow, "__spec__", ModuleSpec("torch_dpflow", None, origin="/elsewhere/__init__.py"))
    _new_interpreter_agrees.cache_clear()
    local_platform(context, preload=["decimal"]).close()
    assert state._preload_modules == ["colorsys"]
    monkeypatch.undo()
    _new_interpreter_agrees.cache_clear()
    monkeypatch.setattr(state, "_preload_modules", ["colorsys"])
    local_platform(context, preload=["decimal"]).close()
    assert state._preload_modules == [GUARD, "colorsys", "decimal"]


def run_sleep() -> None:
    subprocess.run(["sleep", "2"], check=False)


def test_too_many_open_files_are_told_as_such() -> None:
    platform = LocalPlatform(multiprocessing.get_context("fork"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spec = ProcessSpec(name="one", incarnation=0, target=sleep, arguments=(60.0,))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(DescriptorLimitError, match="one cannot be started"):
            platform.launch(spec)
        with pytest.raises(DescriptorLimitError, match="no process can be started"):
            LocalPlatform(multiprocessing.get_context("fork"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    platform.close()


def test_a_hanging_fork_server_is_killed_and_another_takes_its_place(
    fork_server: ForkServerPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fork_server.launch(ProcessSpec(name="first", incarnation=0, target=sleep, arguments=(60.0,)))
    server = fork_server_of(first.pid)
    os.kill(server, signal.SIGSTOP)
    monkeypatch.setattr(fork_server, "_timeouts_s", (0.5, 60.0))
    spec = ProcessSpec(name="second", incarnation=0, target=sleep, arguments=(60.0,))
    second = fork_server.launch(spec)
    assert fork_server_of(second.pid) != server
    assert not has_ended(first.pid)
    assert first.describe() is None
    first.kill()  # which multiprocessing takes for dead
    assert wakes(fork_server, 30.0)
    assert list(fork_server.take_ended()) == [first]


def fork_server_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_killed_fork_server_is_replaced_before_the_next_launch(fork_server: ForkServerPlatform) -> None:
    first = fork_server.launch(ProcessSpec(name="first", incarnation=0, target=sleep, arguments=(60.0,)))
    server = fork_server_of(first.pid)
    os.kill(server, signal.SIGKILL)
    wait(lambda: has_ended(server), what="the fork server's end")
    assert list(fork_server.take_ended()) == []
    state: Any = forkserver._forkserver
    begun = state._forkserver_pid
    assert begun != server
    second = fork_server.launch(ProcessSpec(name="second", incarnation=0, target=sleep, arguments=(60.0,)))
    assert fork_server_of(second.pid) == begun
    assert not has_ended(first.pid)


def test_a_fork_server_that_has_closed_its_socket_is_replaced_at_once(
    fork_server: ForkServerPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = without_fork_server()
    (tmp_path / "long_end.py").write_text("import atexit, time\natexit.register(time.sleep, 60)\n")
    spec = ProcessSpec(name="one", incarnation=0, target=sleep, arguments=(60.0,))
    with monkeypatch.context() as while_it_starts:
        while_it_starts.setenv("PYTHONPATH", str(tmp_path))
        while_it_starts.setattr(state, "_preload_modules", ["long_end"])
        first = fork_server.launch(spec)
    server = fork_server_of(first.pid)
    assert not is_refused(state._forkserver_address, b"GET / HTTP/1.1\r\n\r\n")
    wait(lambda: is_refused(state._forkserver_address, b""), what="the end of the fork server's loop")
    assert not has_ended(server)
    second = fork_server.launch(spec)
    assert has_ended(server)
    assert fork_server_of(second.pid) == state._forkserver_pid
    assert not has_ended(first.pid)


def test_a_fork_server_with_a_guard_survives_what_is_no_request(
    fork_server: ForkServerPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = without_fork_server()
    monkeypatch.setattr(state, "_preload_modules", [GUARD])
    spec = ProcessSpec(name="one", incarnation=0, target=sleep, arguments=(60.0,))
    server = fork_server_of(fork_server.launch(spec).pid)
    for sent, descriptors in ((b"", []), (b"GET / HTTP/1.1\r\n\r\n", []), (b"\1", [0]), (b"\x07", [0, 1])):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(state._forkserver_address)
            if sent:
                socket.send_fds(stranger, [sent], descriptors)
    assert fork_server_of(fork_server.launch(spec).pid) == server


#: A module that writes its process to a file "starts" of a folder, and waits until a file "gate" is there.
GATED = """
import os, time
open({folder!r} + "/starts", "a").write(f"{{os.getpid()}}\\n")
while not os.path.exists({folder!r} + "/gate"):
    time.sleep(0.01)
"""


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServerPlatform]:
    """A platform whose fork server imports a module that waits; its limits are short."""
    state = without_fork_server()
    monkeypatch.setattr(state, "_preload_modules", [])
    monkeypatch.setattr(fork_servers, "NOTICE_S", 0.01)
    monkeypatch.setattr(fork_servers, "POLL_S", 0.01)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    (tmp_path / "gated_module.py").write_text(GATED.format(folder=str(tmp_path)))
    platform = ForkServerPlatform(preload=["colorsys", "gated_module"], timeouts_s=(60.0, 0.05), outlived=True)
    yield platform
    platform.close()
    without_fork_server()


def starts_of(folder: Path) -> list[str]:
    path = folder / "starts"
    return path.read_text().split() if path.exists() else []


def test_a_fork_server_that_hangs_is_started_again_with_more_time_and_its_module_is_named(
    gated: ForkServerPlatform, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thread = threading.Thread(target=gated.begin)
    thread.start()
    try:
        wait(lambda: len(starts_of(tmp_path)) >= 3, what="three starts")
    finally:
        (tmp_path / "gate").touch()
        thread.join()
    assert "it imports gated_module" in caplog.text
    limits = [float(text) for text in re.findall(r"no progress for ([0-9.]+) s", caplog.text)]
    assert limits[:2] == [0.05, 0.1]


def test_a_fork_server_that_makes_progress_is_not_killed(
    gated: ForkServerPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(fork_servers, "progress_of", lambda pid: (next(ticks),))
    thread = threading.Thread(target=gated.begin)
    thread.start()
    try:
        wait(lambda: caplog.text.count("waiting for the fork server") >= 6, what="six lines, after twice the limit")
    finally:
        (tmp_path / "gate").touch()
        thread.join()
    assert len(starts_of(tmp_path)) == 1


def test_a_launch_that_waits_ends_when_it_is_interrupted(gated: ForkServerPlatform, tmp_path: Path) -> None:
    gated._timeouts_s = (60.0, 60.0)
    spec = ProcessSpec(name="one", incarnation=0, target=sleep, arguments=(60.0,))
    with ThreadPoolExecutor(1) as pool:
        launch = pool.submit(gated.launch, spec)
        wait(lambda: starts_of(tmp_path), what="the start")
        gated.interrupt()
        assert isinstance(launch.exception(), LaunchError)
    with pytest.raises(LaunchError):
        gated.launch(spec)
    gated.begin()  # returns


def test_a_process_that_works_makes_progress() -> None:
    before = fork_servers.progress_of(os.getpid())
    wait(lambda: sum(range(100_000)) and fork_servers.progress_of(os.getpid()) != before, what="a clock tick")
    assert fork_servers.progress_of(0) == ()


def without_fork_server() -> Any:
    """multiprocessing's state, after the end of the fork server that there may be."""
    state: Any = forkserver._forkserver
    if state._forkserver_pid is not None:
        os.kill(state._forkserver_pid, signal.SIGKILL)
        wait(lambda: has_ended(state._forkserver_pid), what="the end of the one before")
    return state


def is_refused(address: str, sent: bytes) -> bool:
    with socket.socket(socket.AF_UNIX) as stranger:
        try:
            stranger.connect(address)
        except ConnectionRefusedError:
            return True
        stranger.sendall(sent)
        return False
