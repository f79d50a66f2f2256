"""What the processes of `torch_dpflow.testing.platforms` run: apart, so that they begin without torch and pytest."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torch_dpflow.platforms.base import Platform, ProcessSpec

#: How long what must happen may take, seconds.
PATIENCE_S = 60.0


def sleep(seconds: float) -> None:
    """Does nothing for so long."""
    time.sleep(seconds)


def leave(code: int) -> None:
    """Ends with this exit code."""
    sys.exit(code)


def write_and_die(path: str, text: str) -> None:
    """Leaves these last words."""
    Path(path).write_text(text)
    os.kill(os.getpid(), signal.SIGTERM)


def call_at(address: tuple[str, int], data: bytes) -> None:
    """Sends so many bytes as there are to whoever listens there."""
    with socket.create_connection(address) as connection:
        connection.sendall(data)


def answer(address: tuple[str, int]) -> None:
    """Tells the one who listens there where it listens itself, and answers one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        call_at(address, str(server.getsockname()[1]).encode())
        server.accept()[0].sendall(b"here")


def lend(address: tuple[str, int]) -> None:
    """Tells the one who listens there of shared memory, and lives on."""
    from torch_dpflow.remote.shm.arena import Arena
    from torch_dpflow.remote.wire.headers import WorkerHello, encode

    arena = Arena(budget_bytes=1 << 20)
    call_at(address, encode(WorkerHello(0, 0, os.getpid(), arena.probe_ref())))
    time.sleep(PATIENCE_S)


def ignore(number: int, address: tuple[str, int]) -> None:
    """Ignores a signal, and lives on."""
    signal.signal(number, signal.SIG_IGN)
    call_at(address, b"deaf")
    time.sleep(PATIENCE_S)


def hold(address: tuple[str, int]) -> None:
    """Calls there, and stays on the line."""
    with socket.create_connection(address) as connection:
        connection.sendall(b"held")
        connection.recv(1)


def start_and_stay(new_platform: Callable[[], Platform], address: tuple[str, int]) -> None:
    """Has another process call there, and lives on."""
    platform = new_platform()
    platform.launch(ProcessSpec(name="held", incarnation=0, target=hold, arguments=(address,)))
    time.sleep(PATIENCE_S)
