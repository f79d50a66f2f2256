"""OPT: the best that any policy can do, knowing all accesses beforehand (Belady, 1966)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torch_dpflow.caches.policy import Job, check_weight
from torch_dpflow.caches.ranked import RankedPolicy
from torch_dpflow.caches.residents import Distances, Loads, Ranking
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.lookahead import Keys, Lookahead


class _NextAccess(Ranking):
    """By key, the place of the next access; it changes only when the key is read."""

    def __init__(self) -> None:
        self.places: Distances = np.zeros(0)

    def distance(self, key: int, load: int) -> float:
        return float(self.places[key])

    def distances(self, keys: Keys, loads: Loads) -> Distances:
        return self.places.take(keys)


class OPT(RankedPolicy):
    """Evicts the key whose next access is last in `stream`. For comparison: no one knows it while jobs run.

    Args:
        stream: the keys of all accesses of all jobs, in order, shape (accesses,), not negative.

    Raises:
        OptionError: `stream` is no one-dimensional integer array, or has negative keys.
        UsageError: from `access`, when another key is read than `stream` says.
    """

    name = "opt"

    def __init__(
        self,
        *,
        stream: Keys,
        max_items: int | None = None,
        max_bytes: int | None = None,
        keys: int | None = None,
    ) -> None:
        if stream.ndim != 1 or stream.dtype.kind not in "iu":
            raise OptionError(f"stream: a one-dimensional integer array is required, got {stream.dtype} {stream.shape}")
        self._stream = stream
        self._next_access = _next_accesses(stream)
        self._place = 0
        self._due = _NextAccess()
        self._jobs: dict[Job, None] = {}
        super().__init__(self._due, max_items=max_items, max_bytes=max_bytes, keys=keys)
        self._reach_many(stream)

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(self._jobs)

    def join(self, job: Job, *, weight: float = 1.0) -> None:
        check_weight(job, weight)
        self._jobs[job] = None

    def hint(self, job: Job, lookahead: Lookahead) -> None:
        self._jobs[job] = None

    def forget(self, job: Job) -> None:
        self._jobs.pop(job, None)

    def _read(self, key: int, job: Job) -> None:
        self._read_many(np.array([key]), job)

    def _read_many(self, keys: Keys, job: Job) -> None:
        end = self._place + len(keys)
        promised = self._stream[self._place : end]
        if not np.array_equal(promised, keys):
            raise UsageError(
                f"job {job!r} reads {keys.tolist()[:8]} at accesses {self._place} to {end}, but the stream "
                f"given has {promised.tolist()[:8]} there; make a policy for the stream that you replay"
            )
        self._jobs[job] = None
        self._due.places[keys] = self._next_access[self._place : end]
        self._place = end

    def _grow(self, span: int) -> None:
        places = self._due.places
        self._due.places = np.concatenate([places, np.zeros(span - len(places))])


def _next_accesses(stream: Keys) -> npt.NDArray[np.float64]:
    """For each access the place of the next one of the same key; infinite where there is none."""
    order = stream.argsort(kind="stable")
    following = np.full(len(stream), np.inf)
    again = stream[order[1:]] == stream[order[:-1]]
    following[order[:-1][again]] = order[1:][again]
    return following
