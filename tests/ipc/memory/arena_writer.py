"""A writer of shared memory in a process of its own, driven over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.new_process import held_by_child
from torch_dpflow.ipc.memory.arena import Arena, Block
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.headers import BlockRef

#: Bytes of a block.
SIZE = 300_000


def pair() -> tuple[Arena, ArenaReader]:
    """Return both ends of an arena in this process."""
    return Arena(budget_bytes=1 << 28), ArenaReader(os.getpid())


class Writer:
    """What the process does; each method is one command."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.arena = Arena(**options)
        self.kept: list[Block] = []

    def probe(self) -> Any:
        return self.arena.probe_ref()

    def write(self, nbytes: int, fill: int, *, keep: bool = False) -> BlockRef | None:
        """Publish a block of `nbytes` times `fill`."""
        block = self.arena.allocate(nbytes)
        if block is None:
            return None
        block.memory[:] = fill
        if keep:
            self.kept.append(block)
        return self.arena.publish(block)

    def waste(self, nbytes: int, times: int) -> None:
        """Allocate and throw away."""
        for _ in range(times):
            self.arena.allocate(nbytes)

    def drop(self) -> None:
        self.kept.clear()

    def look(self, fill: int) -> bool:
        """Whether all that was kept is still filled with `fill`."""
        return all(bool(np.all(block.memory == fill)) for block in self.kept)

    def holdings(self) -> tuple[int, int, int]:
        """Segments, their bytes, and open descriptors of the process."""
        return self.arena.segments, self.arena.allocated_bytes, len(os.listdir("/proc/self/fd"))

    def look_in_child(self, nbytes: int, fill: int) -> bool:
        """Whether a child that is forked now still sees `fill` in what was kept, after blocks were written here."""
        with held_by_child("os.fork", lambda: self.look(fill)) as looked:
            self.drop()
            for _ in range(8):
                self.write(nbytes, fill + 1)
            return bool(looked())

    def in_child(self, nbytes: int) -> bool:
        """Whether a forked child is refused a block."""
        child = os.fork()
        if child == 0:
            os._exit(0 if self.arena.allocate(nbytes) is None else 1)
        return os.waitpid(child, 0)[1] == 0


def run(connection: Connection, theirs: Connection, options: dict[str, Any]) -> None:
    """The process's body."""
    theirs.close()  # a forked process has both ends, and would never see the other one closed
    writer = Writer(options)
    with contextlib.suppress(EOFError):
        while True:
            name, args, keywords = connection.recv()
            connection.send(getattr(writer, name)(*args, **keywords))


class RemoteWriter:
    """The other end of the pipe."""

    def __init__(self, method: str, options: dict[str, Any]) -> None:
        context: Any = multiprocessing.get_context(method)
        self._connection, theirs = context.Pipe()
        args = (theirs, self._connection, options)
        self.process = context.Process(target=run, args=args, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            self._connection.send((name, args, keywords))
            return self._connection.recv()

        return call

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone altogether."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.join()

    def close(self) -> None:
        self._connection.close()
        self.process.join()
        self.process.close()


@contextlib.contextmanager
def writer(method: str = "fork", **options: Any) -> Iterator[RemoteWriter]:
    """A process with an `Arena(**options)` for as long as the context lasts."""
    remote = RemoteWriter(method, {"budget_bytes": 1 << 28, **options})
    try:
        yield remote
    finally:
        remote.close()
