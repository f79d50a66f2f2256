"""Servers of the pool for tests: a process by the command, and a thread of this process."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.new_process import Interpreter
from torch_dpflow.pool import DataServer


class ServerProcess(Interpreter):
    """A server's process."""

    #: Its first line.
    said = ""


@contextmanager
def server(
    folder: Path, memory: str = "16MiB", join: Path | str | None = None, *, more: Sequence[str] = ()
) -> Iterator[ServerProcess]:
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
        *more,
        *(() if join is None else ("--join", str(join))),
    ]
    with ServerProcess(command, stderr=None) as process:
        try:
            assert process.stdout is not None
            process.said = process.stdout.readline()
            assert "the pool listens at" in process.said
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()


@contextmanager
def inner_server(folder: Path, memory_bytes: int, **options: Any) -> Iterator[DataServer]:
    """A server in a thread."""
    serving = DataServer(memory_bytes, folder, **options)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    try:
        yield serving
    finally:
        serving.stop()
        thread.join()
