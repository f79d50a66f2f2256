"""Processor time and memory of everything that a benchmark has started."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

from benchmarks.cluster import cpu_s
from benchmarks.report import Figures

#: The batches of an epoch; called anew for each.
Read = Callable[[], Iterable[Any]]

#: How often processor time and memory are looked at, seconds.
CPU_S, MEMORY_S = 0.25, 1.0
#: The kernel counts page by page: a look at gigabytes takes tenths of a second. Most of the time that looks may take.
MEMORY_SHARE = 0.01


class Meter:
    """Adds up processor time and memory of this process's descendants, from now on, in a thread.

    itself: whether this process counts too.
    """

    def __init__(self, *, itself: bool = False) -> None:
        self._itself = itself
        self._used: dict[int, float] = {}
        self._base: dict[int, float] = {}
        self._peak = 0
        self._stopped = threading.Event()
        self._look_at_cpu(self._base)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[float, float]:
        """Seconds of processor time, and the highest sum of memory (shared pages count once), MiB."""
        self._stopped.set()
        self._thread.join()
        self._look_at_cpu(self._used)
        self._look_at_memory()
        return sum(used - self._base.get(pid, 0.0) for pid, used in self._used.items()), self._peak / 2**20

    def _run(self) -> None:
        memory_at = 0.0
        while not self._stopped.wait(CPU_S):
            self._look_at_cpu(self._used)
            if time.monotonic() >= memory_at:
                began = time.monotonic()
                self._look_at_memory()
                ended = time.monotonic()
                memory_at = ended + max(MEMORY_S, (ended - began) / MEMORY_SHARE)

    def _processes(self) -> list[psutil.Process]:
        this = psutil.Process()
        return [*this.children(recursive=True), *([this] if self._itself else [])]

    def _look_at_cpu(self, into: dict[int, float]) -> None:
        for process in self._processes():
            try:
                into[process.pid] = cpu_s(process.pid)
            except OSError:  # it has ended since
                continue

    def _look_at_memory(self) -> None:
        held = 0
        for process in self._processes():
            try:
                held += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self._peak = max(self._peak, held)


def time_epochs(read: Read) -> Figures:
    """The first batch of one epoch, which brings workers and caches up, and figures of the next one.

    Processor time and memory are those of this process and of all that it has started. Raises ValueError if nothing is
    read.
    """
    begun = time.perf_counter()
    first_s = 0.0
    for _ in read():
        first_s = first_s or time.perf_counter() - begun
    meter = Meter(itself=True)
    begun = time.perf_counter()
    samples = sum(len(batch) for batch in read())
    wall_s = time.perf_counter() - begun
    processor_s, peak_mib = meter.stop()
    if samples == 0:
        raise ValueError("there was nothing to read")
    return {
        "samples_per_s": samples / wall_s,
        "cpu_ms_per_sample": processor_s / samples * 1e3,
        "first_batch_ms": first_s * 1e3,
        "peak_mib": peak_mib,
    }
