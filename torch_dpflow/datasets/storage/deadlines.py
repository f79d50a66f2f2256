"""Deadlines for calls of libraries without deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
#: All file systems in memory share one table of files.
_MEMORY_LOCK = PerProcess(threading.Lock)
#: The attribute of a file system with its lock. A forked process opens its own file systems.
_LOCK = "_dpflow_lock"
#: Longest single wait, seconds: systems refuse infinity, and sockets more milliseconds than 31 bits have.
MAX_WAIT_S = 1e6


def is_thread_safe(file_system: Any) -> bool:
    """Return whether several threads may call a file system of fsspec at once. Asynchronous ones run in one loop."""
    if isinstance(file_system, DirFileSystem):
        return is_thread_safe(file_system.fs)
    module = type(file_system).__module__
    return isinstance(file_system, AsyncFileSystem) or any(
        module == known or module.startswith(f"{known}.") for known in _THREAD_SAFE
    )


def _locks(file_system: Any) -> list[threading.Lock]:
    """Return the locks of file systems that are not thread-safe: this one and the ones it wraps, inner ones first.

    All callers take the locks in this order. A call that hangs keeps only the locks of the file systems it uses.
    """
    found = []
    while file_system is not None:
        if isinstance(file_system, MemoryFileSystem):
            found.append(_MEMORY_LOCK.get())
        elif not isinstance(file_system, DirFileSystem) and not is_thread_safe(file_system):
            found.append(vars(file_system).setdefault(_LOCK, threading.Lock()))  # atomic
        outer = getattr(file_system, "of", None) or getattr(file_system, "fo", None)  # of archives
        file_system = getattr(file_system if outer is None else outer, "fs", None)
    return found


def exclusive(file_system: Any) -> AbstractContextManager[Any]:
    """Serialize calls of a file system that is not thread-safe. Do not use `call_with_deadline` inside."""
    return _held(_locks(file_system), MAX_WAIT_S)


@contextmanager
def _held(locks: Sequence[threading.Lock], seconds: float) -> Iterator[None]:
    """Hold all locks. Raises TimeoutError if one is not to be had within `seconds`."""
    end = time.monotonic() + seconds
    with ExitStack() as held:
        for lock in locks:
            if not lock.acquire(timeout=min(max(end - time.monotonic(), 0.0), MAX_WAIT_S)):
                raise TimeoutError(f"other reads took {seconds:.1f} s, and this file system serves one at a time")
            held.callback(lock.release)
        yield


def call_with_deadline(file_system: Any, seconds: float, call: Callable[[], T]) -> T:
    """Call a file system of fsspec with a time limit, as vendors' libraries may wait for hours and then try again.

    Calls are serialized if the file system is not thread-safe. Calls on disks have no limit; on memory only the wait
    for other calls has one.

    Raises what the call raises, and TimeoutError if it has not ended in time.
    """
    if isinstance(file_system, LocalFileSystem):
        return call()
    locks = _locks(file_system)

    def serialized() -> T:
        with _held(locks, seconds):
            return call()

    return serialized() if isinstance(file_system, MemoryFileSystem) else call_within(seconds, serialized)


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
    worker.join(min(max(seconds, 0.0), MAX_WAIT_S))
    if results.empty():
        raise TimeoutError(f"no response within {seconds:.1f} s")
    value, error = results.get()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
