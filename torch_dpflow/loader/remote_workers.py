"""Remote workers of a private loader (`platform=`).

Imported only when such a loader is iterated.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch_dpflow.cluster.control.autoscale import Autoscaler, FlowCounts, JobCounts
from torch_dpflow.cluster.messages.coordinator import AutoscaleLimits
from torch_dpflow.loader.arguments import listen_address
from torch_dpflow.loader.private_shard import GRACE_S, PrivateShard
from torch_dpflow.loader.shard_events import RemoteWorkerLost, ShardFailed
from torch_dpflow.metrics import LoaderMeter
from torch_dpflow.options import LoaderOptions
from torch_dpflow.remote.fleet.content import BATCH_WORKERS, RemoteContent
from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers
from torch_dpflow.remote.launchers.registry import resolve
from torch_dpflow.remote.shipping.content_identity import own_content
from torch_dpflow.remote.shipping.content_pack import pack_load_spec
from torch_dpflow.remote.shipping.own_check import Beginning
from torch_dpflow.workers.batches import LoadSpec
from torch_dpflow.workers.scheduler.machine import Scheduler

#: The interval at which the autoscaler's rule is evaluated, seconds.
STEP_S = 1.0


def workers_of(
    loader: Any, options: LoaderOptions, spec: LoadSpec
) -> tuple[Callable[..., PrivateShard], RemoteWorkers]:
    """Return (constructor of the shard, its remote workers). The workers are not started yet.

    Raises, among others, the errors of `RemoteWorkers`.
    """
    platform = resolve(loader.platform)
    code = options.code if platform.sends_code or options.code != "auto" else None
    parts = {"dataset": spec.dataset, "collate_fn": spec.collate_fn, "worker_init_fn": spec.worker_init_fn}
    files, state = own_content(parts, code)
    packed = pack_load_spec(spec, before=Beginning(spec.settings, state), replaced=state.replaced())
    remote = RemoteWorkers(
        platform,
        RemoteContent(packed, files),
        spec.num_workers,
        listen_at=listen_address(platform, options),
        least=options.min_workers,
    )
    loader._runtime.meter.add_fleet(remote.time)
    return partial(RemoteShard, limit=LoaderLimit(loader._runtime.meter, remote, spec.num_workers)), remote


class RemoteShard(PrivateShard):
    """Private shard whose thread starts and replaces remote workers."""

    ticks = True
    max_window = BATCH_WORKERS.max_window

    def __init__(self, processes: RemoteWorkers, *, limit: LoaderLimit, **arguments: Any) -> None:
        self._remote, self._limit = processes, limit
        processes.shell = self
        super().__init__(processes, **arguments)
        # Runs before the exit hook of the platform's library, which was imported earlier and would end the workers.
        atexit.register(self.close)

    def close(self, *, grace_s: float = GRACE_S) -> None:
        super().close(grace_s=grace_s)
        if threading.current_thread() is not self._thread:
            atexit.unregister(self.close)

    def elsewhere(self) -> tuple[int, str]:
        return self._remote.working, self._remote.limited_by

    # -- callbacks of the remote workers (`Shell`) -------------------------------------------------------

    def lose(self, worker: int, how: str, *, had_tasks: bool, may_blame: bool) -> None:
        if had_tasks:
            self._lose(worker, RemoteWorkerLost(worker, how), may_blame=may_blame)
        else:
            self._notify(RemoteWorkerLost(worker, how))

    def fail(self, error: Exception) -> None:
        self._notify(ShardFailed(error))

    # -- the shard's thread ------------------------------------------------------------------------------

    def _receiver(self) -> Callable[[bytes, list[memoryview]], None]:
        self._remote.shard = self._shard
        return self._remote.on_message

    def _poll_once(self) -> None:
        super()._poll_once()
        self._remote.look()  # a message may have made another worker ready
        self._limit.look(self._scheduler, self._clock())

    def _shut_down(self) -> None:
        """Stop the workers and wait for workers that have tasks; the platform ends all other workers."""
        self._shard.stop_workers()
        self._remote.dismiss()
        deadline = time.monotonic() + self._grace_s
        while self._remote.working and (left_s := deadline - time.monotonic()) > 0:
            message = self._listener.receive(left_s)
            if message is not None:
                self._receive(*message)
        self._listener.close()


class LoaderLimit:
    """Diagnosis of what limits a loader with remote workers, by the autoscaler's rule. Only the shard's thread uses it.

    Args:
        meter: the loader's meter, whose `limited_by` is set.
        workers: the loader's number of workers.
    """

    def __init__(self, meter: LoaderMeter, remote: RemoteWorkers, workers: int) -> None:
        self._meter, self._remote = meter, remote
        self._rule = Autoscaler(AutoscaleLimits(workers, workers), workers)
        #: Worker seconds since the start, and those in which workers had tasks.
        self._worker_s = self._busy_s = 0.0
        self._counted_at: float | None = None
        self._next_at = self._reading_s = 0.0

    def look(self, scheduler: Scheduler, now: float) -> None:
        """Add the workers' time since the last call; at most once per `STEP_S`, update the meter's `limited_by`."""
        passed_s = 0.0 if self._counted_at is None else now - self._counted_at
        self._counted_at = now
        workers, busy = scheduler.workers
        self._worker_s += workers * passed_s
        self._busy_s += busy * passed_s
        meter, waiting_s = self._meter, self._meter.waiting_s()
        reading_s = meter.iterating_s + waiting_s
        if now < self._next_at or reading_s == self._reading_s:  # nothing was read since
            return
        self._next_at, self._reading_s = now + STEP_S, reading_s
        # All loads are for this one job.
        stall_s, loads = meter.stall_s + waiting_s, scheduler.counters.delivered
        counts = FlowCounts(
            jobs=1,
            readings={"": JobCounts(meter.batches, stall_s, reading_s)},
            requested=meter.batches,
            due=loads,
            loads=loads,
            busy_s=self._busy_s,
            worker_s=self._worker_s,
            away_s=self._remote.time.away_s,
            late_s=stall_s,
            working=workers,
            refused=self._remote.limited_by,
        )
        limited_by = self._rule.step(counts, now)
        meter.limited_by = "workers" if limited_by == "budget" else limited_by
