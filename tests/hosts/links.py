"""What passes over a host's link: a way to send something, and to see all of it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.shared_cluster import PATIENCE_S
from tests.support.hosts import Host

#: Sends back what it gets.
ECHO = """
import os, socket, sys
server = socket.create_server((sys.argv[1], 7))
print(os.getpid(), flush=True)
connection, _ = server.accept()
while data := connection.recv(1 << 20):
    connection.sendall(data)
"""


@contextmanager
def echo(host: Host) -> Iterator[socket.socket]:
    """A connection to a process there that sends all back."""
    with subprocess.Popen(
        [*host.prefix, sys.executable, "-c", ECHO, host.address], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) < 100, "it is numbered anew there"
        with socket.create_connection((host.address, 7)) as connection:
            connection.settimeout(PATIENCE_S)
            yield connection
    assert process.returncode == 0


#: Every protocol, for a socket of packets.
_ALL = 0x0003


@contextmanager
def sniffed(host: Host) -> Iterator[list[bytes]]:
    """Every packet of a host's link, until the end of the block."""
    packets: list[bytes] = []
    is_over = threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        link.bind((host.name, 0))
        link.settimeout(0.05)

        def read() -> None:
            while not is_over.is_set():
                with suppress(TimeoutError):
                    packets.append(link.recv(1 << 17))
            link.setblocking(False)  # what has come by now is read too
            with suppress(BlockingIOError):
                while True:
                    packets.append(link.recv(1 << 17))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield packets
        finally:
            is_over.set()
            reader.join()
