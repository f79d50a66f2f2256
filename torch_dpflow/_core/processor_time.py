"""Time that processes run and wait for a processor, and whether a lack of processors limits workers."""

from __future__ import annotations

import os
from contextlib import suppress

_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")
#: Workers that run, or wait for a processor, for a smaller share of the time are waiting for storage.
MIN_PROCESSOR_SHARE = 0.5
#: Processors are the limit if workers use, or wait for, this share of them; or if workers that do not wait for storage
#: wait this long for a processor per second of running.
FULL_SHARE, QUEUED_SHARE = 0.8, 0.5


def taken_by(pid: int) -> tuple[float, float]:
    """Return (seconds that a process has run, seconds that its present threads have waited for a processor).

    A time that cannot be read is 0.
    """
    cpu_s = queued_s = 0.0
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) * _TICKS_S
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                queued_s += int(file.read().split()[1]) / 1e9
    return cpu_s, queued_s


def are_processors_short(cpu_s: float, queued_s: float, watched_s: float, *, workers: int, processors: int) -> bool:
    """Return whether a lack of processors limits the workers.

    Args:
        cpu_s: time that all workers together ran, in seconds.
        queued_s: time that all workers together waited for a processor, in seconds.
        watched_s: time over which each worker was measured, in seconds.
        workers: number of workers.
        processors: number of processors of the workers' hosts.
    """
    if not (watched_s and workers and processors):
        return False
    wanted = (cpu_s + queued_s) / watched_s
    is_waiting = wanted / workers >= MIN_PROCESSOR_SHARE and queued_s > QUEUED_SHARE * cpu_s
    return is_waiting or wanted >= FULL_SHARE * processors
