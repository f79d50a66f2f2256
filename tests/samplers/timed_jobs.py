"""A few jobs that ask a group for batches at their own times, as one order of calls."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from torch_dpflow.samplers import Draw, SamplingGroup

#: Seeds of the jobs of one run lie apart: seed s in epoch 1 is seed s + 1 in epoch 0.
SEED_STRIDE = 10_007


@dataclass
class TimedJob:
    """Starts at `start`, reads `speed` samples per unit of time, `epochs` times its whole set."""

    start: float = 0.0
    speed: float = 1.0
    members: np.ndarray | None = None
    epochs: int = 1
    batch_size: int = 8
    independence: float = 0.0


@dataclass
class Reading:
    """One job's epochs as they were read."""

    orders: list[np.ndarray] = field(default_factory=list)
    loads: int = 0


def run_jobs(group: SamplingGroup, jobs: Sequence[TimedJob], seed: int = 0) -> list[Reading]:
    """Let all jobs read all their epochs; those that are due at one time take turns in the order given."""
    readings = [Reading() for _ in jobs]
    for number, epoch, drawn in _draws(group, jobs, seed):
        reading = readings[number]
        if epoch == len(reading.orders):
            reading.orders.append(drawn.indices)
        else:
            reading.orders[epoch] = np.concatenate([reading.orders[epoch], drawn.indices])
        reading.loads += int(drawn.led.sum()) if drawn.led is not None else 0
    return readings


def hit_rate(readings: Sequence[Reading]) -> float:
    """Percent of the accesses for which nothing was loaded, by the group's own directory."""
    accesses = sum(len(order) for reading in readings for order in reading.orders)
    return 100 * (1 - sum(reading.loads for reading in readings) / accesses)


def _draws(group: SamplingGroup, jobs: Sequence[TimedJob], seed: int) -> Iterator[tuple[int, int, Draw]]:
    due = [(job.start, number) for number, job in enumerate(jobs)]
    heapq.heapify(due)
    epochs = [-1] * len(jobs)
    while due:
        now = due[0][0]
        present = [heapq.heappop(due)[1] for _ in range(sum(1 for time, _ in due if time == now))]
        # Jobs that begin at the same time see each other's first loads.
        reading = [n for n in present if _is_reading(group, jobs, n, epochs, seed)]
        for number in reading:
            job = jobs[number]
            drawn = group.draw(str(number), job.batch_size, now)
            yield number, epochs[number], drawn
            heapq.heappush(due, (now + len(drawn.indices) / job.speed, number))


def _is_reading(group: SamplingGroup, jobs: Sequence[TimedJob], number: int, epochs: list[int], seed: int) -> bool:
    """Bring a job to where it can draw; False if it has read all its epochs and leaves."""
    name, job = str(number), jobs[number]
    if epochs[number] < 0:
        group.join(
            name,
            job.members,
            seed=(seed * len(jobs) + number) * SEED_STRIDE,
            batch_size=job.batch_size,
            independence=job.independence,
        )
    if not group.remaining(name):
        if epochs[number] + 1 == job.epochs:
            group.leave(name)
            return False
        epochs[number] += 1
        group.start_epoch(name, epochs[number])
    return True
