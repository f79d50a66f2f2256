"""A loader whose workers are on other hosts: the same batches, through faults, and nothing to read for others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.hosts.links import echo, sniffed
from tests.hosts.recorded_hosts import MARK, Marked, Recorded, shuffled
from tests.loader_cases import assert_same
from tests.shared_cluster import PATIENCE_S, wait
from tests.support.hosts import Hosts
from torch_dpflow.errors import PeerLostError
from torch_dpflow.ipc.messages.remote_worker import LaunchSpec, encode_launch_spec
from torch_dpflow.ipc.transport import TransportOptions, connect
from torch_dpflow.ipc.transport.base import ClientKeys

pytestmark = pytest.mark.hosts

SIZE = 96


class Pair:
    """Two loaders of the same epochs, one with workers on other hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.platform = Recorded.of(hosts)
        self.remote = shuffled(Marked(SIZE, 0.01), 2, platform=self.platform)
        self.local = shuffled(Marked(SIZE), 2)

    def read(self) -> None:
        """An epoch of both."""
        assert_same(list(self.remote), list(self.local))

    def close(self) -> None:
        for loader in (self.remote, self.local):
            loader._iterator._shutdown_workers()  # type: ignore[union-attr]


def test_batches_are_the_same_through_faults_and_nobody_else_can_read_them_or_use_an_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One test for all: members take seconds to start."""
    caplog.set_level("DEBUG")
    with Hosts(2) as hosts:
        pair = Pair(hosts)
        pair.read()
        cannot_be_read_on_the_link(pair)
        an_order_is_refused_a_second_time_and_from_another_host(pair)
        a_kill_a_frozen_host_and_a_cut_change_nothing(pair)
        an_order_is_refused_once_its_member_is_gone(pair)
        no_key_is_found_on_this_machine(pair, caplog)
        pair.close()
        wait(lambda: not [pid for host in hosts for pid in host.pids()], what="the members' end")


def cannot_be_read_on_the_link(pair: Pair) -> None:
    host = pair.hosts[0]
    with sniffed(host) as packets:
        pair.read()
    with sniffed(host) as plain, echo(host) as connection:
        connection.sendall(MARK)
        connection.recv(len(MARK), socket.MSG_WAITALL)
    assert MARK in b"".join(plain), "it would be seen"
    seen = b"".join(packets)
    assert len(seen) > len(MARK) * 40, "samples have come over this link"
    assert MARK not in seen


def an_order_is_refused_a_second_time_and_from_another_host(pair: Pair) -> None:
    batches, expected = iter(pair.remote), list(pair.local)
    seen = [next(batches)]
    order = pair.platform.orders[0]
    elsewhere = pair.hosts[order.number - 1]
    copy = subprocess.run(
        [*elsewhere.prefix, sys.executable, "-m", "torch_dpflow.remote.worker"],
        input=encode_launch_spec(order),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
    )
    assert copy.returncode == 0, copy.stderr
    assert b"another process is" in copy.stderr, copy.stderr
    assert_same([*seen, *batches], expected)
    assert len(pair.platform.orders) == 2, "its members have gone on"


def a_kill_a_frozen_host_and_a_cut_change_nothing(pair: Pair) -> None:
    batches, expected = iter(pair.remote), list(pair.local)
    seen = [next(batches) for _ in range(8)]
    first, second = pair.hosts
    for pid in first.pids():
        os.kill(pid, signal.SIGKILL)
    second.freeze()
    thaw = threading.Timer(0.5, second.thaw)
    thaw.start()
    seen += [next(batches) for _ in range(8)]
    thaw.join()
    second.cut()
    mend = threading.Timer(1.0, second.mend)
    mend.start()
    assert_same([*seen, *batches], expected)
    mend.join()


def an_order_is_refused_once_its_member_is_gone(pair: Pair) -> None:
    orders = pair.platform.orders
    killed = orders[0]
    wait(lambda: [order for order in orders[1:] if order.number == killed.number], what="its successor")
    assert is_heard(orders[1], PATIENCE_S)
    assert not is_heard(killed, 0.5)
    pair.read()


def is_heard(order: LaunchSpec, within_s: float) -> bool:
    """Whether a connection with an order's key gets any answer in so many seconds."""
    keys = ClientKeys(
        public=order.public.encode(), secret=order.secret.encode(), server_public=order.server_public.encode()
    )
    identity = f"{order.number}/{order.incarnation}/other/line".encode()
    connection = connect(order.addresses[0], identity=identity, options=TransportOptions(keys=keys))
    try:
        connection.send([b"garbage"])
        return connection.receive(within_s) is not None
    except PeerLostError:  # nobody has taken it
        return False
    finally:
        connection.close()


def no_key_is_found_on_this_machine(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    orders = pair.platform.orders
    wait(lambda: all(host.pids() for host in pair.hosts), what="a member on each host")
    pair.read()
    secrets = [order.secret.encode() for order in orders]
    texts: dict[str, bytes] = {"log": caplog.text.encode(), "orders": repr(orders).encode()}
    for process in Path("/proc").iterdir():
        for file in ("environ", "cmdline", "fd/0") if process.name.isdigit() else ():
            try:
                if file != "fd/0" or os.readlink(process / file).startswith("/memfd:"):
                    texts[f"{process / file}"] = (process / file).read_bytes()
            except OSError:  # it has ended
                continue
    assert len(secrets) >= 3
    assert not [place for place, text in texts.items() if any(secret in text for secret in secrets)]
