"""From a workload to events in time order. Timing depends on no sampler and no cache: it is drawn first."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from benchmarks.simulation.workload import Job, Workload

#: times closer than this are one instant, in passes: 0.8 and 1.0 meet exactly, floats do not
RESOLUTION = 1e-9


class Kind(IntEnum):
    """What happens; at one instant in this order, so that jobs that start together see each other."""

    LEAVE = 0
    JOIN = 1
    EPOCH = 2
    REQUEST = 3


class Event(NamedTuple):
    """Job `job` does `kind`."""

    #: number of the instant, from 0; simultaneous events share it
    instant: int
    #: in passes
    time: float
    kind: Kind
    #: place of the job in the workload
    job: int
    #: the job's epoch that starts or is read, from 0
    epoch: int
    #: samples asked for; 0 unless a REQUEST
    size: int


@dataclass(frozen=True)
class Schedule:
    """A workload and its events."""

    workload: Workload
    events: list[Event]


def schedule(workload: Workload, *, seed: int = 0) -> Schedule:
    """Draw the times of every batch of every job and merge them; `seed` matters to irregular timing."""
    timed = [row for k, job in enumerate(workload.jobs) for row in _job_events(workload, k, job, seed)]
    timed.sort()
    events, instant, previous = [], -1, -1
    for tick, kind, job, epoch, size in timed:
        if tick != previous:
            instant, previous = instant + 1, tick
        events.append(Event(instant, tick * RESOLUTION, kind, job, epoch, size))
    return Schedule(workload, events)


def _job_events(workload: Workload, k: int, job: Job, seed: int) -> list[tuple[int, Kind, int, int, int]]:
    """(tick, kind, job, epoch, size) of one job; none if it dies before it starts."""
    sizes = _batch_sizes(len(job.indices), job.batch_size)
    mean = np.tile(sizes, job.epochs) / (workload.samples * job.speed)
    if job.timing == "exponential":
        mean *= np.random.default_rng([seed, k]).exponential(size=len(mean))
    times = job.start + np.concatenate([[0.0], np.cumsum(mean)])
    end = times[-1] if job.killed_at is None else min(times[-1], job.killed_at)
    ticks = np.rint(times / RESOLUTION).astype(np.int64).tolist()
    last = round(end / RESOLUTION)
    if last <= ticks[0]:
        return []
    rows = [(ticks[0], Kind.JOIN, k, 0, 0), (last, Kind.LEAVE, k, 0, 0)]
    for b, size in enumerate(np.tile(sizes, job.epochs).tolist()):
        if ticks[b] >= last:
            break
        epoch, place = divmod(b, len(sizes))
        if place == 0:
            rows.append((ticks[b], Kind.EPOCH, k, epoch, 0))
        rows.append((ticks[b], Kind.REQUEST, k, epoch, size))
    return rows


def _batch_sizes(samples: int, batch_size: int) -> np.ndarray:
    full, rest = divmod(samples, batch_size)
    return np.array([batch_size] * full + ([rest] if rest else []), dtype=np.int64)


def job_seed(seed: int, job: int) -> int:
    """A job's seed in run `seed`.

    Orders are drawn from seed + epoch, so seeds a few apart would give one job's epoch to another job later.
    """
    return seed * 1_000_003 + job * 10_007
