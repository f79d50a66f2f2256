"""A worker in a fork: its exit code and last words are told, and nothing of it is left."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.processes import CODE, LAST_WORDS
from tests.new_process import ROOT
from tests.shared_cluster import PATIENCE_S, wait
from torch_dpflow.remote.worker.forking import Fork


def words(launch_spec: bytes) -> None:
    print(launch_spec.decode(), file=sys.stderr)


def leave(launch_spec: bytes) -> None:
    print(LAST_WORDS, file=sys.stderr)
    sys.exit(CODE)


def fail(launch_spec: bytes) -> None:
    raise RuntimeError("no cupboard")


def variable(launch_spec: bytes) -> int:
    print(os.environ.get("KEY_OF_ONE"), file=sys.stderr)
    return 3


@pytest.mark.parametrize(
    ("run", "code", "report"),
    [
        (words, 0, "a launch spec"),
        (leave, CODE, LAST_WORDS),
        (lambda _: sys.exit("a reason"), 1, "a reason"),
        (fail, 1, "RuntimeError: no cupboard"),
        (lambda _: os._exit(5), 5, ""),
        (variable, 3, "of one"),
    ],
)
def test_the_exit_code_and_the_last_words_are_told(run: Callable[[bytes], Any], code: int, report: str) -> None:
    end = Fork(run, b"a launch spec", env={"KEY_OF_ONE": "of one"}).wait()
    assert (end.code, end.signal) == (code, None)
    assert report in end.report
    assert end.ran_s is not None
    assert end.ran_s > 0
    assert "KEY_OF_ONE" not in os.environ


def test_only_the_end_of_what_it_says_is_kept() -> None:
    end = Fork(lambda _: print("x" * 100_000 + "the end", file=sys.stderr), b"").wait()
    assert end.report.endswith("xthe end")
    assert len(end.report) <= 4000


def test_a_kill_is_told_by_its_signal() -> None:
    fork = Fork(lambda _: time.sleep(60), b"")
    assert fork.poll() is None
    fork.kill()
    end = fork.wait()
    assert (end.code, end.signal) == (None, signal.SIGKILL)
    assert fork.poll() == end
    fork.kill()  # which is nobody any more
    assert fork.descriptors == []


def test_who_closes_its_standard_error_runs_on_and_nobody_spins() -> None:
    there, here = os.pipe()

    def run(launch_spec: bytes) -> int:
        os.close(here)
        os.close(2)
        os.read(there, 1)
        return 4

    fork = Fork(run, b"")
    os.close(there)
    wait(lambda: fork.poll() is None and len(fork.descriptors) == 1, what="the end of its output")
    os.close(here)
    assert fork.wait().code == 4


def test_what_it_has_started_ends_with_it_and_so_do_all_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run(launch_spec: bytes) -> None:
            socket.create_connection(server.getsockname()).send(b"x")
            connection = socket.create_connection(server.getsockname())
            if os.fork() == 0:
                connection.send(b"y")
                time.sleep(60)
            os.close(0)

        fork = Fork(run, b"")
        accepted = [server.accept()[0] for _ in range(2)]
        with closing(accepted[0]), closing(accepted[1]):
            assert {one.recv(1) for one in accepted} == {b"x", b"y"}
            fork.wait()
            for one in accepted:
                assert one.recv(1) == b"", "its connection is closed"


def test_it_has_none_of_the_descriptors_that_it_is_not_to_have() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = os.readlink(f"/proc/self/fd/{server.fileno()}")

        def run(launch_spec: bytes) -> int:
            has = [
                os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd")
                if os.path.lexists(f"/proc/self/fd/{fd}")
            ]
            return 9 if listener in has else 8  # its number may be another's by now

        assert Fork(run, b"").wait().code == 9
        assert Fork(run, b"", close=[server.fileno()]).wait().code == 8


def test_it_ends_with_the_process_that_has_forked_it() -> None:
    there, here = os.pipe()

    def middle(launch_spec: bytes) -> None:
        Fork(lambda _: time.sleep(60), b"")  # which keeps `here` open
        os.write(here, b"x")
        time.sleep(60)

    fork = Fork(middle, b"")
    os.close(here)
    assert os.read(there, 1) == b"x"
    os.kill(fork.pid, signal.SIGKILL)
    assert select.select([there], (), (), 30)[0]
    assert os.read(there, 1) == b"", "both have ended"
    fork.wait()
    os.close(there)


def test_an_instance_ends_by_a_signal_that_another_of_its_threads_has_got(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text(
        "from threading import *\nThread(target=Event().wait, daemon=True).start()\nrun = None"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "FC_SERVER_PORT": "0"}
    with subprocess.Popen([sys.executable, "-m", "torch_dpflow.remote.worker.fc", "idle"], env=env) as process:
        place = Path(f"/proc/{process.pid}")

        def waits() -> bool:
            said = dict(one.split(":\t", 1) for one in place.joinpath("status").read_text().splitlines())
            return said["State"].startswith("S") and bool(int(said["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)

        wait(waits, what="an instance that waits for requests")
        other = next(one for one in map(int, os.listdir(place / "task")) if one != process.pid)
        assert ctypes.CDLL(None).tgkill(process.pid, other, signal.SIGTERM) == 0
        assert process.wait(PATIENCE_S) == 0
