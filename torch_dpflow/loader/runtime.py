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
    """Processor time of a loader's workers on this host, over all iterations. Only the training thread uses it.

    `look` and `end` read the time from the kernel.
    """

    def __init__(self, meter: LoaderMeter) -> None:
        self._meter = meter
        self._shard: weakref.ref[PrivateShard] | None = None
        #: By process, its processor time at the latest look; and how long the loader had iterated then.
        self._seen: dict[int, tuple[float, float]] = {}
        self._seen_at = 0.0
        #: Seconds that this host's workers were watched, ran on a processor, and waited for one.
        self.watched_s = self.cpu_s = self.queued_s = 0.0
        #: How many remote workers worked at the latest look, and why there were no more.
        self.working, self.refused = 0, ""

    def begin(self, shard: PrivateShard) -> None:
        """Watch the workers of this shard, which have just been started."""
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
        """Return the state to resume the iteration, or to begin the next one if it has ended. No side effect.

        held: see `LoaderRuntime.held`.
        """


class LoaderRuntime:
    """State of a loader between its iterations. A copy or a pickle contains only the number of the epoch."""

    def __init__(self, epoch: int = 0) -> None:
        #: The number of the next iteration.
        self.epoch = epoch
        #: A state that the next iteration begins with.
        self.pending: LoaderState | None = None
        #: Number of the batch at which the epoch of that state ends, also while it is read; None: at the usual end.
        self.resumed_end: int | None = None
        #: Whether the script has read the loader's length before a state was loaded.
        self.is_measured = False
        #: Returns how many batches of the latest iteration a trainer has read and not used.
        self.held = _none
        #: Fingerprints of the process's generators at the beginning of the first iteration.
        self.began: dict[str, str] = {}
        self.progress: IterationProgress | None = None
        #: The jobs of a loader with a flow, by number: one for each concurrent iteration.
        self.jobs: dict[int, SharedJob] = {}
        #: The arguments that the jobs were opened with, compared at the next iteration.
        self.opened_for: Any = None
        #: The content that the flow's workers received when the first job was opened; None: no job was opened.
        self.content: FlowContent | None = None
        #: Parts of this content that have changed in this process, as was logged.
        self.warned: set[str] = set()
        self.meter = LoaderMeter()
        self.workload = Workload(self.meter)
        #: Returns the latest iteration with workers, while it lives; for the live page.
        self.iterator: Callable[[], Any] = lambda: None

    @property
    def may_be_held(self) -> bool:
        """Whether a trainer reads ahead in this iteration."""
        return self.held is not _none

    def __reduce__(self) -> tuple[Any, ...]:
        return LoaderRuntime, (self.epoch,)

    def end_of_epoch(self) -> int | None:
        """Return the number of the batch at which the resumed epoch ends; None: the usual end, or none is resumed."""
        is_over = self.pending is None and (self.progress is None or self.progress.finished)
        return None if is_over else self.resumed_end

    def take_pending(self) -> LoaderState | None:
        """Return the loaded state, or None, and drop it, because it applies to one iteration only."""
        pending, self.pending, self.held = self.pending, None, _none
        if pending is None:
            self.resumed_end = None
        else:
            self.epoch, self.began = pending.epoch, pending.began
        return pending
