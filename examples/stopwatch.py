"""Stopwatch for the time that a training loop waits for any loader."""

import time
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class Stopwatch(Generic[Batch]):
    """Iterates over `loader` once and measures the stall: the time spent waiting in `next()`.

    The clock starts when the object is made, which is also when the loader's iterator, and with it its
    workers, is started.
    """

    def __init__(self, loader: Iterable[Batch]) -> None:
        self._begun = time.perf_counter()
        self._ended: float | None = None
        self._batches = iter(loader)
        #: seconds spent in `next()` so far
        self.stall_s = 0.0
        #: seconds from the start of the iterator to the first batch; None before it came
        self.time_to_first_batch_s: float | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        requested = time.perf_counter()
        try:
            batch = next(self._batches)
        finally:
            answered = time.perf_counter()
            self.stall_s += answered - requested
        if self.time_to_first_batch_s is None:
            self.time_to_first_batch_s = answered - self._begun
        return batch

    def stop(self) -> None:
        """Stop the clock and let go of the loader's iterator, and so of its workers."""
        self._ended = time.perf_counter()
        self._batches = iter(())

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start to `stop`, or to now."""
        return (time.perf_counter() if self._ended is None else self._ended) - self._begun

    @property
    def stall_share(self) -> float:
        """The stall's share of the time so far, 0 to 1."""
        return self.stall_s / self.elapsed_s
