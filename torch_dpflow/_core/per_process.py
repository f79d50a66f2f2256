"""A value that each process, also a forked child, makes for itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Makes its value on first use in every process; a forked child does not touch its parent's.

    Sockets, threads and held locks do not survive a fork, so a child must not use those of its parent, not
    even to close them. Thread-safe: at first use two threads may both call `make`; one result is kept. A pickle has
    `make` alone.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        # No lock: another thread of the parent could hold it at the moment of a fork.
        self._values: dict[int, T] = {}

    def get(self) -> T:
        process = os.getpid()
        try:
            return self._values[process]
        except KeyError:
            return self._values.setdefault(process, self._make())

    def __reduce__(self) -> tuple[Any, ...]:
        return PerProcess, (self._make,)

    def drop(self) -> T | None:
        """Forget this process's value and return it, if there is one."""
        return self._values.pop(os.getpid(), None)
