"""What a loader keeps between its iterations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch_dpflow.epoch.state import LoaderState
from torch_dpflow.loader.workload import Workload
from torch_dpflow.metrics import LoaderMeter

if TYPE_CHECKING:
    from torch_dpflow.cluster.client.shared_job import SharedJob


class IterationProgress(Protocol):
    """What a loader reads of its latest iteration."""

    def state(self) -> LoaderState:
        """The state to resume the iteration from, or the next one if it is over. No side effect."""


class LoaderRuntime:
    """What a loader keeps between its iterations. A copied or pickled one keeps only the epoch."""

    def __init__(self, epoch: int = 0) -> None:
        #: The number of the next iteration.
        self.epoch = epoch
        #: A state that the next iteration begins with.
        self.pending: LoaderState | None = None
        #: Fingerprints of the process's generators where the first iteration of all began.
        self.began: dict[str, str] = {}
        #: The latest iteration.
        self.progress: IterationProgress | None = None
        #: By number, the jobs of a loader with a flow: one for each of its iterations that go on side by side.
        self.jobs: dict[int, SharedJob] = {}
        #: What the jobs were opened for, to be compared with what the loader has at its next iteration.
        self.opened_for: Any = None
        self.meter = LoaderMeter()
        self.workload = Workload(self.meter)
        #: Returns the latest iteration with workers of its own, while it lives; for who watches.
        self.iterator: Callable[[], Any] = lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        return LoaderRuntime, (self.epoch,)

    def take_pending(self) -> LoaderState | None:
        """Return the loaded state and drop it: it is for one iteration."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.epoch, self.began = pending.epoch, pending.began
        return pending
