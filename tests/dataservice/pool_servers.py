"""Servers of the pool for tests: a process by the command, and a thread of this process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_dpflow.dataservice import DataServer


@contextmanager
def server(folder: Path, memory: str = "16MiB") -> Iterator[subprocess.Popen[str]]:
    """`dpflow pool serve`, once it listens."""
    command = [
        sys.executable,
        "-m",
        "torch_dpflow.cli",
        "pool",
        "serve",
        "--memory",
        memory,
        "--address",
        str(folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "the pool listens at" in process.stdout.readline()
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()


@contextmanager
def inner_server(folder: Path, memory_bytes: int, **options: float) -> Iterator[DataServer]:
    """A server in a thread."""
    serving = DataServer(memory_bytes, folder, **options)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    try:
        yield serving
    finally:
        serving.stop()
        thread.join()
