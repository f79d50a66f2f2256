"""ALSD as the papers write it: every distance of every resident key worked out at every eviction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from torch_dpflow.lookahead import Lookahead


@dataclass
class PlainJob:
    """A position, and what is known of each key: S_v, S_c, S_uc, and S_uk for the rest of the members."""

    weight: float
    epoch: int | None = None
    length: int = 0
    position: int = 0
    members: set[int] = field(default_factory=set)
    visited: set[int] = field(default_factory=set)
    certain: dict[int, int] = field(default_factory=dict)
    certain_end: int = 0
    likely: set[int] = field(default_factory=set)
    likely_rank: float = 1.0
    following: list[int] | None = None
    pace: float = 1.0
    base: float = 0.0
    began: float = 0.0
    reads: int = 0

    def place(self, key: int) -> int | None:
        """The position at which the job certainly reads `key`, if there is one."""
        if key in self.visited:
            if self.following is not None and key in self.following:
                return self.length + self.following.index(key)
            return None
        return self.certain.get(key)

    def estimate(self, key: int) -> float:
        """Eq. 3-4 for a member without a certain position."""
        left = max(0, self.certain_end - self.position)
        if key in self.visited:
            return self.length
        if key in self.likely:
            return left + self.likely_rank * max(0, self.length - self.position - left)
        told = left + len(self.likely)
        return told + max(0, self.length - self.position - told) / 2


class PlainALSD:
    """`aggregate`: "min", "mean", or "certain" for the mean without estimates (use distance)."""

    def __init__(
        self, keys: int, *, max_items: int | None, max_bytes: int | None = None, aggregate: str
    ) -> None:
        self.keys, self.max_items, self.max_bytes, self.aggregate = keys, max_items, max_bytes, aggregate
        self.jobs: dict[object, PlainJob] = {}
        #: key -> number of its load, size
        self.resident: dict[int, tuple[int, int]] = {}
        self.loads = 0
        self.now = 0.0

    # -- distances -------------------------------------------------------------------------------------------

    def distance(self, key: int) -> float:
        if self.aggregate == "min":
            return min((self.time(job, key) for job in self.jobs.values()), default=float("inf"))
        return sum(job.weight * self.samples(job, key) for job in self.jobs.values())

    def time(self, job: PlainJob, key: int) -> float:
        place = job.place(key)
        if place is not None:
            return job.base + place * job.pace - self.now
        return job.estimate(key) * job.pace if key in job.members else float("inf")

    def samples(self, job: PlainJob, key: int) -> float:
        place = job.place(key)
        if place is not None:
            return place - job.position
        if key not in job.members or self.aggregate == "certain":
            return job.length
        return job.estimate(key)

    # -- the contract ----------------------------------------------------------------------------------------

    def access(self, key: int, name: object) -> bool:
        return self.access_many([key], name)[0]

    def access_many(self, keys: Sequence[int], name: object) -> list[bool]:
        """Distinct keys."""
        job = self.ready(name)
        places = [job.certain[key] for key in keys if key in job.certain and key not in job.visited]
        job.position = max([job.position, *(place + 1 for place in places)]) + len(keys) - len(places)
        job.likely.difference_update(keys)
        job.visited.update(keys)
        job.members.update(keys)
        job.reads += len(keys)
        if self.aggregate == "min":
            self.now = max(self.now, job.base + job.position * job.pace)
        return [key in self.resident for key in keys]

    def admit_many(self, keys: Sequence[int], sizes: Sequence[int] | None = None) -> list[int]:
        """Distinct keys that are not resident."""
        gone = []
        for key, size in zip(keys, sizes or [1] * len(keys)):
            if self.max_bytes is not None and size > self.max_bytes:
                gone.append(key)
            else:
                self.loads += 1
                self.resident[key] = (self.loads, size)
        while self.is_over():
            gone.append(self.evict())
        return gone

    def evict(self) -> int:
        key = max(self.resident, key=lambda key: (self.distance(key), -self.resident[key][0]))
        del self.resident[key]
        return key

    def is_over(self) -> bool:
        size = sum(size for _, size in self.resident.values())
        return (self.max_items is not None and len(self.resident) > self.max_items) or (
            self.max_bytes is not None and size > self.max_bytes
        )

    # -- jobs and epochs -------------------------------------------------------------------------------------

    def join(self, name: object, weight: float) -> None:
        if name in self.jobs:
            self.jobs[name].weight = weight
        else:
            job = self.jobs[name] = PlainJob(weight)
            self.begin(job, Lookahead.unknown(self.keys, epoch=0))
            job.epoch = None

    def forget(self, name: object) -> None:
        self.jobs.pop(name, None)

    def foresee(self, name: object, told: Lookahead) -> None:
        job = self.jobs.setdefault(name, PlainJob(1.0))
        goes_on = (job.epoch, job.length) == (told.epoch, told.length) and told.position >= job.position
        if not goes_on:
            self.begin(job, told)
            return
        job.certain = {k: p for k, p in job.certain.items() if p < told.position or k in job.visited}
        self.hear(job, told)
        if told.speed is not None and not 1 / 1.25 < told.speed * job.pace < 1.25:
            job.pace = 1 / told.speed
            job.base = self.now - job.position * job.pace
        if told.following is not None and job.following is None:
            job.following = told.following.tolist()

    def ready(self, name: object) -> PlainJob:
        if name not in self.jobs:
            self.join(name, 1.0)
        job = self.jobs[name]
        if job.position >= job.length:
            epoch = job.epoch
            if job.following is not None and epoch is not None:
                self.begin(job, Lookahead.of_order(np.array(job.following), epoch=epoch + 1))
            else:
                members = np.array(sorted(job.members))
                self.begin(job, Lookahead.unknown(job.length, epoch=0, members=members))
                job.epoch = None if epoch is None else epoch + 1
        return job

    def begin(self, job: PlainJob, told: Lookahead) -> None:
        others = [other.pace for other in self.jobs.values() if other is not job]
        if told.speed is not None:
            job.pace = 1 / told.speed
        elif job.reads and self.now > job.began:
            job.pace = (self.now - job.began) / job.reads
        else:
            job.pace = sum(others) / len(others) if others else 1.0
        certain = set(told.certain.tolist())
        everyone = certain if told.complete and told.position == 0 else set(range(self.keys))
        job.members = everyone if told.members is None else set(told.members.tolist())
        job.epoch, job.length, job.position = told.epoch, told.length, told.position
        job.visited = job.members - certain if told.complete else set()
        job.certain = {}
        job.following = None if told.following is None else told.following.tolist()
        job.began, job.reads = self.now, 0
        job.base = job.began - job.position * job.pace
        self.hear(job, told)

    def hear(self, job: PlainJob, told: Lookahead) -> None:
        for place in reversed(range(len(told.certain))):
            job.certain[int(told.certain[place])] = told.position + place
        job.likely = set(told.likely.tolist()) - job.visited - set(job.certain)
        job.members |= job.likely | set(job.certain)
        job.certain_end = told.position + len(told.certain)
        count = len(told.likely)
        weights = told.weights if len(told.weights) else np.ones(count)
        ranks = np.arange(1, count + 1) / max(1, count)
        job.likely_rank = float((weights * ranks).sum() / weights.sum()) if count else 1.0
