"""Calls that libraries give no deadline of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

T = TypeVar("T")


def ask(file_system: Any, seconds: float, call: Callable[[], T]) -> T:
    """What a file system of fsspec answers in so long: vendors' libraries may wait for hours, and then try again.

    Raises what the call raises, and TimeoutError where it has not ended in time. Disks are not timed.
    """
    if isinstance(file_system, LocalFileSystem | MemoryFileSystem):
        return call()
    return call_within(seconds, call)


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
