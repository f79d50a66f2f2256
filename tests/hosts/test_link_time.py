"""For how long what is sent is on its way is counted where a link is slow, and not where the reader is."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared_cluster import wait
from tests.support.hosts import Hosts
from torch_dpflow.ipc.transport.link_time import LinkTime

#: Sends so many bytes from there, and looks, until all have come, for how long they were on their way.
SENDER = """
import select, socket, sys
from torch_dpflow.ipc.transport.link_time import LinkTime

address, port, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
link = LinkTime(port)
with socket.create_connection((address, port)) as sender:
    sender.sendall(bytes(nbytes))
    sender.shutdown(socket.SHUT_WR)
    passed_s = 0.0
    while not select.select([sender], [], [], 0.02)[0]:
        passed_s += link.passed_s()
    print(passed_s, link.passed_s())
"""


@pytest.mark.hosts
def test_what_a_slow_link_takes_is_counted() -> None:
    with Hosts(1) as hosts, socket.create_server((hosts.address, 0)) as server:
        hosts[0].limit(8e6)
        port, nbytes = server.getsockname()[1], 1 << 19
        command = [*hosts[0].prefix, f"PYTHONPATH={Path(__file__).parents[2]}", sys.executable, "-c", SENDER]
        with subprocess.Popen(
            [*command, hosts.address, str(port), str(nbytes)], stdout=subprocess.PIPE, text=True
        ) as sender:
            connection, _ = server.accept()
            with connection:
                while connection.recv(1 << 16):
                    pass
                connection.sendall(b"!")
                assert sender.stdout is not None
                first, again = map(float, sender.stdout.readline().split())
    # The link lets 128 KiB through at once, and takes 0.39 s for the rest, less the time since the latest look.
    assert first > 0.1
    assert again == 0.0


def test_what_a_slow_reader_takes_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        link = LinkTime.of(f"tcp://127.0.0.1:{port}")
        with socket.create_connection(("127.0.0.1", port)) as sender, server.accept()[0]:
            sender.setblocking(False)
            passed = []

            def is_full() -> bool:
                try:
                    while True:
                        sender.send(bytes(1 << 20))
                except BlockingIOError:
                    return True

            def waits_for_the_reader() -> bool:
                passed.append(link.passed_s())
                return len(passed) > 5 and passed[-1] == 0.0

            assert is_full()
            wait(waits_for_the_reader, what="the kernel's count to stand still")


def test_of_other_addresses_nothing_is_told() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
    ):
        sender.sendall(b"!")
        assert LinkTime.of("ipc:///nowhere").passed_s() == 0.0
        assert LinkTime(1).passed_s() == 0.0
