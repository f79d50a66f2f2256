"""Deadlines for calls of libraries without deadlines."""

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

from torch_dpflow._core.processes import PerProcess

T = TypeVar("T")

#: Modules whose file systems are thread-safe. Calls of others are serialized: `tar` and `zip` would return each other's
#: bytes (they share one position in one file), `sftp` hangs, `memory` fails to list what another thread removes and
#: creates a file twice.
_THREAD_SAFE = ("fsspec.implementations.local", "fsspec.implementations.arrow", "ossfs")
#: One lock for all of them, since one may read through another. Held for single calls.
_SERIAL_LOCK = PerProcess(threading.Lock)


def is_thread_safe(file_system: Any) -> bool:
    """Return whether several threads may call a file system of fsspec at once. Asynchronous ones run in one loop."""
    if isinstance(file_system, DirFileSystem):
        return is_thread_safe(file_system.fs)
    module = type(file_system).__module__
    return isinstance(file_system, AsyncFileSystem) or any(
        module == known or module.startswith(f"{known}.") for known in _THREAD_SAFE
    )


def exclusive(file_system: Any) -> AbstractContextManager[Any]:
    """Serialize calls of a file system that is not thread-safe. Do not use `call_with_deadline` inside."""
    return nullcontext() if is_thread_safe(file_system) else _SERIAL_LOCK.get()


def call_with_deadline(file_system: Any, seconds: float, call: Callable[[], T]) -> T:
    """Call a file system of fsspec with a time limit, as vendors' libraries may wait for hours and then try again.

    Calls are serialized if the file system is not thread-safe. Calls on disks have no limit; on memory only the wait
    for other calls has one.

    Raises what the call raises, and TimeoutError if it has not ended in time.
    """
    if isinstance(file_system, LocalFileSystem):
        return call()
    if isinstance(file_system, MemoryFileSystem):
        return _serialized(seconds, call)
    if is_thread_safe(file_system):
        return call_within(seconds, call)
    return call_within(seconds, lambda: _serialized(seconds, call))


def _serialized(seconds: float, call: Callable[[], T]) -> T:
    lock = _SERIAL_LOCK.get()
    if not lock.acquire(timeout=max(seconds, 0.0)):
        raise TimeoutError(f"other reads took {seconds:.1f} s, and this kind of file system serves one at a time")
    try:
        return call()
    finally:
        lock.release()


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Run `call` in its own thread and wait for at most `seconds`. A call that hangs keeps its thread.

    Raises what the call raises, and TimeoutError if it has not ended in time.
    """
    results: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except Exception as error:
            results.put((None, error))

    worker = threading.Thread(target=run, name="dpflow-storage-call", daemon=True)
    worker.start()
    worker.join(max(seconds, 0.0))
    if results.empty():
        raise TimeoutError(f"no response within {seconds:.1f} s")
    value, error = results.get()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
