"""What keeps a loader whose workers are elsewhere from reading faster, by the law that flows have."""

from __future__ import annotations

from torch_dpflow.cluster.control.autoscale import Autoscaler, Bounds
from torch_dpflow.cluster.control.flow_counts import FlowCounts, JobCounts
from torch_dpflow.metrics import LoaderMeter
from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers
from torch_dpflow.workers.scheduler.machine import Scheduler

#: How often the law is asked, seconds.
STEP_S = 1.0


class LoaderLimit:
    """Belongs to the shard's thread.

    Args:
        meter: of the loader; is told.
        remote: the workers elsewhere.
        workers: how many there are to be, with those of this host.
    """

    def __init__(self, meter: LoaderMeter, remote: RemoteWorkers, workers: int) -> None:
        self._meter, self._remote = meter, remote
        self._law = Autoscaler(Bounds(least=workers, most=workers), workers)
        #: Seconds in which there were workers, and in which they had tasks, all of them together; counted until.
        self._worker_s = self._busy_s = 0.0
        self._counted_at: float | None = None
        self._due_at = self._reading_s = 0.0

    def look(self, scheduler: Scheduler, now: float) -> None:
        """Count, and tell the meter what limits the loader where that is due."""
        passed_s = 0.0 if self._counted_at is None else now - self._counted_at
        self._counted_at = now
        workers, busy = scheduler.workers
        self._worker_s += workers * passed_s
        self._busy_s += busy * passed_s
        meter, waiting_s = self._meter, self._meter.waiting_s()
        reading_s = meter.iterating_s + waiting_s
        if now < self._due_at or reading_s == self._reading_s:  # nobody reads at present
            return
        self._due_at, self._reading_s = now + STEP_S, reading_s
        # Whatever the training loop waits for here is loaded for it alone.
        stall_s, loads = meter.stall_s + waiting_s, scheduler.counters.delivered
        counts = FlowCounts(
            jobs=1,
            readings={"": JobCounts(meter.batches, stall_s, reading_s)},
            asked=meter.batches,
            due=loads,
            loads=loads,
            busy_s=self._busy_s,
            worker_s=self._worker_s,
            away_s=self._remote.time.away_s,
            late_s=stall_s,
            working=workers,
            refused=self._remote.limited_by,
        )
        limited_by = self._law.step(counts, now).limited_by
        meter.limited_by = "workers" if limited_by == "budget" else limited_by
