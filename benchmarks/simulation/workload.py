"""Who reads what, when and how fast: the input of a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Timing = Literal["steady", "exponential"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run.

    Time is in passes: 1.0 is what a job of speed 1 takes to read the whole data set once. A job that reads
    half of it at speed 0.5 takes 1.0 for an epoch too.
    """

    #: the samples it reads in every epoch, int64, distinct
    indices: NDArray[np.int64]
    #: when it joins, in passes
    start: float = 0.0
    #: samples per unit of time, relative to speed 1
    speed: float = 1.0
    epochs: int = 1
    #: samples asked for at once
    batch_size: int = 8
    #: when it is killed, in passes; None: it ends by itself
    killed_at: float | None = None
    #: "steady": every batch takes its mean time; "exponential": an exponential time of that mean
    timing: Timing = "steady"

    def __post_init__(self) -> None:
        if not len(self.indices):
            raise ValueError("indices is empty: a job must read at least one sample")
        if min(self.epochs, self.batch_size) < 1:
            raise ValueError(f"epochs={self.epochs}, batch_size={self.batch_size}: both must be 1 or more")
        if self.speed <= 0 or self.start < 0:
            raise ValueError(f"speed={self.speed}, start={self.start}: need speed > 0 and start >= 0")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Several jobs over one data set of `samples` samples."""

    name: str
    samples: int
    jobs: Sequence[Job] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if not self.jobs:
            raise ValueError(f"workload {self.name!r} has no jobs")
        outside = [k for k, job in enumerate(self.jobs) if _outside(job.indices, self.samples)]
        if outside:
            raise ValueError(f"jobs {outside} read samples outside 0..{self.samples - 1}")

    def with_jobs(self, **changes: object) -> "Workload":
        """The same workload with fields of every job changed, e.g. `with_jobs(epochs=4)`."""
        return replace(self, jobs=tuple(replace(job, **changes) for job in self.jobs))  # type: ignore[arg-type]


def _outside(indices: NDArray[np.int64], samples: int) -> bool:
    return bool(indices.min() < 0 or indices.max() >= samples)
