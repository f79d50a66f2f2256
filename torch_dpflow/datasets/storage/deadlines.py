"""Deadlines for calls of libraries that have none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from torch_dpflow.datasets.storage.per_process import PerProcess

T = TypeVar("T")


#: Modules whose file systems are made for several threads. Others get one at a time: `tar` and `zip` would give
#: each other's bytes (they share one position in one file), `sftp` hangs.
_FOR_MANY_THREADS = (
    "fsspec.implementations.local",
    "fsspec.implementations.memory",
    "fsspec.implementations.arrow",
    "ossfs",
)
#: All of them together, since one may read through another. Held for single calls.
_TURNS = PerProcess(threading.Lock)


def is_for_many_threads(file_system: Any) -> bool:
    """Whether several threads may call a file system of fsspec at once; asynchronous ones run in one loop."""
    if isinstance(file_system, DirFileSystem):
        return is_for_many_threads(file_system.fs)
    module = type(file_system).__module__
    return isinstance(file_system, AsyncFileSystem) or any(
        module == known or module.startswith(f"{known}.") for known in _FOR_MANY_THREADS
    )


def turn(file_system: Any) -> AbstractContextManager[Any]:
    """Held around a call of a file system, without one of `ask` inside."""
    return nullcontext() if is_for_many_threads(file_system) else _TURNS.get()


def ask(file_system: Any, seconds: float, call: Callable[[], T]) -> T:
    """What a file system of fsspec answers in so long: vendors' libraries may wait for hours, and then try again.

    One call at a time where the file system bears no more. Raises what the call raises, and TimeoutError where it
    has not ended in time. Disks are not timed.
    """
    if isinstance(file_system, LocalFileSystem | MemoryFileSystem):
        return call()
    if is_for_many_threads(file_system):
        return call_within(seconds, call)
    return call_within(seconds, lambda: _in_turn(seconds, call))


def _in_turn(seconds: float, call: Callable[[], T]) -> T:
    lock = _TURNS.get()
    if not lock.acquire(timeout=max(seconds, 0.0)):
        raise TimeoutError(
            f"other reads took {seconds:.1f} s, and such file systems are read by one at a time"
        )
    try:
        return call()
    finally:
        lock.release()


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Call it in a thread of its own and wait no longer than that; a call that hangs keeps its thread.

    Raises what the call raises, and TimeoutError where it has not ended in time.
    """
    answers: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:
            answers.put((None, error))

    worker = threading.Thread(target=run, name="dpflow-storage-call", daemon=True)
    worker.start()
    worker.join(max(seconds, 0.0))
    if answers.empty():
        raise TimeoutError(f"no answer within {seconds:.1f} s")
    value, error = answers.get()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
