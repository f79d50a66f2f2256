"""Programs that the suites of platforms and launchers start.

A module of its own, so that it imports no torch or pytest.

Launchers whose platform starts a command run this module by `python -m`; functions of a cloud call `handler`, and
all others `run`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_dpflow.remote.launchers.processes import take_launch_spec
from torch_dpflow.workers.platform import Platform, ProcessSpec
from torch_dpflow.workers.process_control import LIBC

#: Time limit of each wait, seconds.
TIMEOUT_S = 150.0

#: What a worker writes before it leaves, and its exit code.
LAST_WORDS, CODE = "the cupboard is bare", 7


def sleep(seconds: float) -> None:
    """Sleep."""
    time.sleep(seconds)


def leave(code: int) -> None:
    """Exit with this code."""
    sys.exit(code)


def end_main_thread() -> None:
    """End the main thread as the kernel does first when a process exits; another thread keeps running."""
    threading.Thread(target=time.sleep, args=(TIMEOUT_S,)).start()
    LIBC.pthread_exit(None)


def write_and_die(path: str, text: str) -> None:
    """Write an exit report, then die of SIGTERM."""
    Path(path).write_text(text)
    os.kill(os.getpid(), signal.SIGTERM)


def raise_signals(*numbers: int) -> None:
    """Send this process these signals."""
    for number in numbers:
        signal.raise_signal(number)


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
    time.sleep(TIMEOUT_S)


def ignore(number: int, address: tuple[str, int]) -> None:
    """Ignore a signal, report to `address`, and keep running."""
    signal.signal(number, signal.SIG_IGN)
    call_at(address, b"ready")
    time.sleep(TIMEOUT_S)


def hold(address: tuple[str, int]) -> None:
    """Connect to `address` and keep the connection open."""
    with socket.create_connection(address) as connection:
        connection.sendall(b"held")
        connection.recv(1)


def start_and_stay(new_platform: Callable[[], Platform], address: tuple[str, int]) -> None:
    """Launch a process that connects to `address`, and keep running."""
    platform = new_platform()
    platform.launch(ProcessSpec(name="held", incarnation=0, target=hold, arguments=(address,)))
    time.sleep(TIMEOUT_S)


def run(launch_spec: bytes) -> None:
    """Send the launch spec to the address in it, and run until that hangs up; with "leave" in it end at once."""
    spec = json.loads(launch_spec)
    if spec.get("leave"):
        print(LAST_WORDS, file=sys.stderr)
        sys.exit(CODE)
    with socket.create_connection(tuple(spec["address"])) as connection:
        connection.sendall(len(launch_spec).to_bytes(4, "big") + launch_spec)
        connection.recv(1)


def handler(event: Any, context: Any) -> dict[str, Any]:
    """Run `run` as a function of AWS Lambda."""
    from torch_dpflow.remote.worker.aws_lambda import answer_of

    return answer_of(run, event, context)


if __name__ == "__main__":
    run(take_launch_spec(*sys.argv[1:2]))
