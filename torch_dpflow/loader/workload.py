"""What a loader's workers take of this host's processors: read when somebody asks, and before they end."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from torch_dpflow.metrics import LoaderMeter

if TYPE_CHECKING:
    from torch_dpflow.loader.private_shard import PrivateShard

_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")


class Workload:
    """Adds up over iterations. Belongs to the training thread.

    Args:
        meter: the loader's.
    """

    def __init__(self, meter: LoaderMeter) -> None:
        self._meter = meter
        self._shard: weakref.ref[PrivateShard] | None = None
        #: By process, what it had taken when it was last looked at; and for how long the loader had iterated then.
        self._seen: dict[int, tuple[float, float]] = {}
        self._seen_at = 0.0
        #: Of this host's workers, seconds: how long they were watched, ran on a processor, and waited for one.
        self.watched_s = self.cpu_s = self.queued_s = 0.0
        #: Of a platform's: how many worked when they were last looked at, and why there were no more.
        self.working, self.refused = 0, ""

    def begin(self, shard: PrivateShard) -> None:
        """These workers have just been started."""
        self._shard = weakref.ref(shard)
        self._seen, self._seen_at = {}, self._meter.iterating_s

    def look(self) -> None:
        """Count what they have taken since the last time."""
        shard = None if self._shard is None else self._shard()
        if shard is None or not shard.is_own:
            return
        local, now_s = shard.processes.local, self._meter.iterating_s
        self.working, self.refused = shard.elsewhere()
        if local is not None:
            for handle in local.handles:
                cpu_s, queued_s = taken = taken_by(handle.pid)
                cpu_before_s, queued_before_s = self._seen.get(handle.pid, (0.0, 0.0))
                self._seen[handle.pid] = taken
                self.cpu_s += max(0.0, cpu_s - cpu_before_s)
                self.queued_s += max(0.0, queued_s - queued_before_s)
            self.watched_s += now_s - self._seen_at
        self._seen_at = now_s

    def end(self) -> None:
        """The workers are about to be ended."""
        self.look()
        self._shard = None


def taken_by(pid: int) -> tuple[float, float]:
    """Seconds that a process has run on processors, and its present threads have waited for one; 0 if it is gone."""
    cpu_s = queued_s = 0.0
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) * _TICKS_S
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                queued_s += int(file.read().split()[1]) / 1e9
    return cpu_s, queued_s
