"""The targets of the processes in `torch_dpflow.testing.platforms`: apart, so that they import no torch or pytest."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torch_dpflow.workers.platform import Platform, ProcessSpec

#: Time limit for whatever a test awaits, seconds.
PATIENCE_S = 150.0


def sleep(seconds: float) -> None:
    """Sleep."""
    time.sleep(seconds)


def leave(code: int) -> None:
    """Exit with this code."""
    sys.exit(code)


def write_and_die(path: str, text: str) -> None:
    """Write an exit report, then die of SIGTERM."""
    Path(path).write_text(text)
    os.kill(os.getpid(), signal.SIGTERM)


def call_at(address: tuple[str, int], data: bytes) -> None:
    """Send `data` to `address` and hang up."""
    with socket.create_connection(address) as connection:
        connection.sendall(data)


def answer(address: tuple[str, int]) -> None:
    """Listen, send the port to `address`, and answer one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        call_at(address, str(server.getsockname()[1]).encode())
        server.accept()[0].sendall(b"here")


def lend(address: tuple[str, int]) -> None:
    """Send `address` a greeting with a probe of shared memory, and keep running."""
    from torch_dpflow.ipc.memory.arena import Arena
    from torch_dpflow.ipc.messages.headers import WorkerHandshake, encode

    arena = Arena(budget_bytes=1 << 20)
    call_at(address, encode(WorkerHandshake(0, 0, os.getpid(), arena.probe_ref())))
    time.sleep(PATIENCE_S)


def ignore(number: int, address: tuple[str, int]) -> None:
    """Ignore a signal, report to `address`, and keep running."""
    signal.signal(number, signal.SIG_IGN)
    call_at(address, b"deaf")
    time.sleep(PATIENCE_S)


def hold(address: tuple[str, int]) -> None:
    """Connect to `address` and keep the connection open."""
    with socket.create_connection(address) as connection:
        connection.sendall(b"held")
        connection.recv(1)


def start_and_stay(new_platform: Callable[[], Platform], address: tuple[str, int]) -> None:
    """Launch a process that connects to `address`, and keep running."""
    platform = new_platform()
    platform.launch(ProcessSpec(name="held", incarnation=0, target=hold, arguments=(address,)))
    time.sleep(PATIENCE_S)
