"""When workers that died are replaced, and when a loader gives up."""

from __future__ import annotations

from typing import Any

from torch_dpflow.errors import PoisonTaskError, WorkerStartError
from torch_dpflow.loader.worker_processes import WorkerProcesses
from torch_dpflow.log import LOADER
from torch_dpflow.metrics import LoaderMeter
from torch_dpflow.workers.platform import Handle

#: Deaths in a row that are tolerated unless the user says otherwise; and how many more than there are workers while
#: none has ever loaded anything.
LIMIT, FALSE_STARTS = 8, 2


class Restarts:
    """Replaces the workers of one iterator that died.

    Args:
        limit: deaths in a row, with no batch in between, that are tolerated; None: as `LoaderOptions` says.
        workers: how many workers there are.
        meter: counts the replacements.
    """

    def __init__(self, limit: int | None, workers: int, meter: LoaderMeter) -> None:
        self._limit = limit
        self._workers = workers
        self._meter = meter
        self._deaths = 0
        self._has_loaded = False
        self._exit_report = ""
        #: How the process of each worker before the present one ended.
        self.ends: dict[int, str] = {}

    def note_result(self) -> None:
        """A worker has loaded a batch, or died over one."""
        self._deaths = 0
        self._has_loaded = True

    def replace(self, processes: WorkerProcesses, worker: int, dead: Handle) -> None:
        """Start another process in place of one that died.

        Raises:
            WorkerStartError: too many have died in a row.
            DescriptorLimitError: this process has too many files open; it can be called again.
        """
        self._deaths += 1
        if self._are_too_many():
            raise self._given_up(worker, processes.reap(worker))
        self._replaced(worker, processes.replace(worker, dead))

    def note_lost(self, worker: int, how: str) -> None:
        """A worker elsewhere has ended, and is replaced without a call from here.

        how: empty if it was told to.

        Raises:
            WorkerStartError: too many have died in a row.
        """
        if not how:
            return
        self._deaths += 1
        if self._are_too_many():
            raise self._given_up(worker, how)
        self._replaced(worker, how)

    def _are_too_many(self) -> bool:
        at_start = LIMIT if self._has_loaded else min(LIMIT, self._workers + FALSE_STARTS)
        return self._deaths > (at_start if self._limit is None else self._limit)

    def _given_up(self, worker: int, how: str) -> WorkerStartError:
        self._exit_report = how
        return WorkerStartError(
            f"{self._deaths} workers ended one after the other and no batch came in between; the last one, "
            f"worker {worker}, {how}\nRun with num_workers=0 to see where it happens. Raise "
            "LoaderOptions(restart_limit=...) if they are killed from outside"
        )

    def _replaced(self, worker: int, how: str) -> None:
        self._exit_report = self.ends[worker] = how
        self._meter.restarts += 1
        LOADER.warning("worker %d is replaced: %s", worker, how)

    def poison_error(self, index: Any, deaths: int) -> PoisonTaskError:
        """The error for the batch of these indices, which so many workers died over."""
        return PoisonTaskError(
            f"the batch of {named(index)} took down {deaths} workers one after the other and is given up; the last "
            f"one, {self._exit_report}\nLoad these samples with num_workers=0 to see why; the loader can go on with "
            "the batches after it"
        )


def named(index: Any) -> str:
    """The indices of a batch, for people."""
    if index is None or (isinstance(index, list) and all(i is None for i in index)):
        return "the next samples of the stream"
    text = repr(index)
    return f"index {text}" if len(text) <= 400 else f"indices {text[:400]}… ({len(index)} of them)"
