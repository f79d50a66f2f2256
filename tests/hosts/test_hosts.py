"""Hosts are apart from this one; cut off, slowed down and frozen when told; and gone with their owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.links import echo
from tests.shared_cluster import PATIENCE_S, wait
from tests.support.hosts import Host, Hosts

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Hosts(1) as hosts:
        yield hosts[0]


def comes_back(connection: socket.socket, within_s: float = PATIENCE_S) -> bool:
    """Whether a byte that is sent is sent back."""
    connection.settimeout(within_s)
    try:
        connection.sendall(b"x")
        return connection.recv(1) == b"x"
    except TimeoutError:
        return False


def seconds_for(connection: socket.socket, size: int) -> float:
    """How long so many bytes take there and back."""
    began = time.monotonic()
    sender = threading.Thread(target=connection.sendall, args=(bytes(size),))
    sender.start()
    while size:
        size -= len(connection.recv(1 << 20))
    sender.join()
    return time.monotonic() - began


def test_a_host_shares_no_process_or_memory_with_this_one(host: Host) -> None:
    (host.folder / "here").touch()
    seen = subprocess.check_output(
        [*host.prefix, "sh", "-c", "ls $TMPDIR /dev/shm; echo /proc/[0-9]*"], text=True
    ).split()
    (host.folder / "here").unlink()
    assert seen[:3] == ["/dev/shm:", "/mnt:", "here"]
    assert len(seen) == 5, "its first process and the shell"
    assert f"/proc/{os.getpid()}" not in seen
    assert host.pids() == []


@pytest.mark.parametrize("towards", ["", "here", "there"])
def test_a_cut_is_one_until_it_is_mended(host: Host, towards: str) -> None:
    with echo(host) as connection:
        assert comes_back(connection)
        host.cut(towards=towards)
        assert not comes_back(connection, within_s=0.1)
        host.mend()
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1) == b"x", "nothing is lost"


def test_a_frozen_host_answers_when_it_is_thawed(host: Host) -> None:
    with echo(host) as connection:
        host.freeze()
        assert not comes_back(connection, within_s=0.1)
        host.thaw()
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1) == b"x"


def test_a_limit_of_bandwidth_is_kept(host: Host) -> None:
    size, rate = 1_000_000, 40e6
    with echo(host) as connection:
        host.limit(rate)
        assert seconds_for(connection, size) >= 0.9 * (size * 8 - 2 * (1 << 20)) / rate
        host.cut(towards="here")
        host.mend()
        assert seconds_for(connection, size) >= 0.9 * (size * 8 - 2 * (1 << 20)) / rate, "as fast as it was"
        host.limit(None)


def test_latency_is_added_to_all_that_passes_and_a_stream_stays_one_if_some_is_lost() -> None:
    with Hosts(1, rtt_s=0.05, loss=0.001) as hosts, echo(hosts[0]) as connection:
        for _ in range(3):
            assert seconds_for(connection, 1) >= 0.05
        assert seconds_for(connection, 1_000_000) >= 0.05
        hosts[0].delay(0.1)
        assert all(seconds_for(connection, 1) >= 0.1 for _ in range(2))


def test_all_is_gone_with_an_owner_that_is_killed() -> None:
    code = (
        "import subprocess, sys; from tests.support.hosts import Hosts\n"
        "hosts = [Hosts(1), Hosts(1, rtt_s=0.01)]\n"
        "for one in hosts: subprocess.Popen([*one[0].prefix, 'sleep', '1000'])\n"
        "print(*(one[0].name for one in hosts), flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout is not None
        names = owner.stdout.readline().split()
        assert len(names) == 2
        started = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_below(pid, owner.pid)]
        assert started
        owner.send_signal(signal.SIGKILL)
    wait(lambda: not any(Path(f"/sys/class/net/{name}").exists() for name in names), what="the links' end")
    wait(lambda: not any(is_sleeping(pid) for pid in started), what="the processes' end")


def is_below(pid: int, ancestor: int) -> bool:
    """Whether a process descends from another."""
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
        if pid == ancestor:
            return True
    return False


def is_sleeping(pid: int) -> bool:
    """Whether it still is one that the test has started."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"sleep\x001000" in command or b"unshare" in command
