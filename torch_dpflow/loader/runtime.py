"""State of a loader between its iterations."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch_dpflow._core.processor_time import taken_by
from torch_dpflow.epoch.state import LoaderState
from torch_dpflow.metrics import LoaderMeter

if TYPE_CHECKING:
    from torch_dpflow.cluster.client.flow_registration import FlowContent
    from torch_dpflow.cluster.client.shared_job import SharedJob
    from torch_dpflow.loader.private_shard import PrivateShard


class Workload:
    """Processor time of a loader's workers on this host, over all iterations. Not thread-safe."""

    def __init__(self, meter: LoaderMeter) -> None:
        self._meter = meter
        self._shard: weakref.ref[PrivateShard] | None = None
        #: By process, its processor time at the latest look; and how long the loader had iterated then.
        self._seen: dict[int, tuple[float, float]] = {}
        self._seen_at = 0.0
        #: Seconds that this host's workers were watched, ran on a processor, and waited for one.
        self.watched_s = self.cpu_s = self.queued_s = 0.0
        #: How many remote workers worked at the latest call of `look`, and why there were no more.
        self.working, self.refused = 0, ""

    def begin(self, shard: PrivateShard) -> None:
        """Begin to watch the workers of this shard."""
        self._shard = weakref.ref(shard)
        self._seen, self._seen_at = {}, self._meter.iterating_s

    def look(self) -> None:
        """Add the workers' processor time since the last call."""
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
        """Add the workers' processor time since the last call, and stop watching. Call this just before they end."""
        self.look()
        self._shard = None


def _none() -> int:
    return 0


class IterationProgress(Protocol):
    """Interface by which a loader reads the progress of an iteration."""

    @property
    def finished(self) -> bool:
        """Whether the epoch is over."""

    def state(self, held: int = 0) -> LoaderState:
        """Return the state to resume the iteration, or to begin the next one if it has ended.

        held: see `LoaderRuntime.held`.
        """


class LoaderRuntime:
    """State of a loader between its iterations. A copy or a pickle keeps only `epoch`."""

    def __init__(self, epoch: int = 0) -> None:
        #: The number of the next iteration.
        self.epoch = epoch
        #: The loaded state with which the next iteration begins; None if it begins an epoch.
        self.pending: LoaderState | None = None
        #: Number of batches in the epoch of a loaded state, until that epoch is over; None: as usual; -1: unknown.
        self.resumed_end: int | None = None
        #: Whether the script has read the loader's length before a state was loaded.
        self.is_measured = False
        #: Function that returns how many batches of the latest iteration a trainer has fetched and not used yet.
        self.held = _none
        #: Fingerprints of the process's generators at the beginning of the first iteration.
        self.began: dict[str, str] = {}
        self.progress: IterationProgress | None = None
        #: The jobs of a loader with a flow, by number: one for each concurrent iteration.
        self.jobs: dict[int, SharedJob] = {}
        #: The arguments that the jobs were opened with, compared at the next iteration.
        self.opened_for: Any = None
        #: The content that the flow's workers received when a job was opened; None: no job yet, or content has changed.
        self.content: FlowContent | None = None
        #: Parts of this content whose change in this process was logged.
        self.warned: set[str] = set()
        self.meter = LoaderMeter()
        self.workload = Workload(self.meter)
        #: Function that returns the latest iterator with workers, for the live page; None once it is freed.
        self.iterator: Callable[[], Any] = lambda: None

    @property
    def may_be_held(self) -> bool:
        """Whether a trainer reads ahead in this iteration."""
        return self.held is not _none

    def __reduce__(self) -> tuple[Any, ...]:
        return LoaderRuntime, (self.epoch,)

    def end_of_epoch(self) -> int | None:
        """Return the number of batches in the resumed epoch, -1 if unknown; None if usual, or no epoch is resumed."""
        is_over = self.pending is None and (self.progress is None or self.progress.finished)
        return None if is_over else self.resumed_end

    def take_pending(self) -> LoaderState | None:
        """Remove and return the loaded state, and take over its `epoch` and `began`; None if there is none."""
        pending, self.pending, self.held = self.pending, None, _none
        if pending is None:
            self.resumed_end = None
        else:
            self.epoch, self.began = pending.epoch, pending.began
        return pending
