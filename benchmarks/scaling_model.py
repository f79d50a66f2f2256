"""Simulation of one flow whose number of workers an autoscaling policy sets.

Samples are a continuous quantity; workers start and end one by one. It compares policies and predicts numbers of
workers. It models one job, without stragglers and without a network. Pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from torch_dpflow.cluster.control.autoscale import Autoscaler, FlowCounts, JobCounts
from torch_dpflow.cluster.messages.coordinator import AutoscaleLimits
from torch_dpflow.remote.fleet.lifecycle import Fleet
from torch_dpflow.remote.fleet.worker_states import (
    AdmitWorker,
    CheckWorker,
    DrainWorker,
    RejectWorker,
    StartWorker,
    StopWorker,
)
from torch_dpflow.remote.launchers.contract import Accepted, Ended
from torch_dpflow.workers.platform import End, Limits

#: The model's step, and the time between the job's reports, seconds.
STEP_S, HEARTBEAT_S = 0.25, 2.0
#: The window over which a stall is measured, seconds, and the share of it from which waiting counts as a stall.
JUDGED_S, STALLED = 5.0, 0.05
#: Standard deviation of the logarithm of cold start times.
SPREAD = 0.35

#: A policy: returns the number of workers, each second.
Law: TypeAlias = Callable[[FlowCounts, float], int]


def autoscaled(first: int, most: int) -> Law:
    """Return the autoscaling of a flow that begins with `first` workers."""
    law = Autoscaler(AutoscaleLimits(0, most), first)

    def step(counts: FlowCounts, now: float) -> int:
        law.step(counts, now)
        return law.target

    return step


@dataclass(frozen=True, kw_only=True)
class FlowModel:
    """A flow with one job.

    Args:
        demand: samples per second that the job takes if it never waits, as a function of time; 0 while it pauses.
        rate: samples per second of a worker.
        cold_start_s: the median of the time from a worker's start until it works, seconds.
        per_sample: loads per sample that the job reads, as a function of time; below 1 if a cache serves a part.
        storage: maximum samples per second of the storage.
        prefetch: samples that are loaded ahead.
        first: workers that work from the beginning.
        noise: relative deviation of the demand and of workers' rates from second to second.
        starts_per_s: how many workers may be started per second.
    """

    demand: Callable[[float], float]
    rate: float = 20.0
    cold_start_s: float = 10.0
    per_sample: Callable[[float], float] = lambda now: 1.0
    storage: float = math.inf
    prefetch: int = 512
    first: int = 0
    noise: float = 0.1
    starts_per_s: float = 10.0

    def needed(self, now: float) -> int:
        """Return how many workers the job keeps busy."""
        return math.ceil(min(self.demand(now) * self.per_sample(now), self.storage) / self.rate - 1e-9)


@dataclass(kw_only=True)
class ScalingOutcome:
    """Result of a run. Worker-seconds are counted from a worker's start to its end."""

    worker_s: float = 0.0
    #: Worker-seconds of an ideal policy that knows the future and starts workers in no time.
    min_worker_s: float = 0.0
    starts: int = 0
    stall_s: float = 0.0
    reading_s: float = 0.0
    max_workers: int = 0
    samples: float = 0.0
    #: When the job waited for more than `STALLED` of the time before, seconds.
    stalled_at: list[float] = field(default_factory=list)

    @property
    def stall_share(self) -> float:
        """The share of its reading time that the job waited."""
        return self.stall_s / self.reading_s if self.reading_s else 0.0

    @property
    def ratio(self) -> float:
        """Worker-seconds divided by those of the ideal policy."""
        return self.worker_s / self.min_worker_s if self.min_worker_s else math.inf


class ScalingRun:
    """One run of a model under an autoscaling policy."""

    def __init__(self, model: FlowModel, law: Law, seed: int) -> None:
        self._model, self._law = model, law
        self._random = Random(seed)
        limits = Limits(
            starts_per_s=model.starts_per_s,
            start_timeout_s=(10.0, max(120.0, 6 * model.cold_start_s)),
        )
        self._fleet = Fleet("dpf-00000000-0000000000-", limits, draw=self._random.random)
        #: Coming events by time: workers connect, and end.
        self._agenda: list[tuple[float, str, bool]] = []
        self._working: set[str] = set()
        self._begun: dict[str, float] = {}
        self._outcome = ScalingOutcome()
        self._buffer = 0.0
        self._counts = _Sums()
        self._told = JobCounts(0, 0.0, 0.0)
        self._told_at = -math.inf
        self._recent: list[tuple[float, float]] = []

    def run(self, duration_s: float) -> ScalingOutcome:
        """Simulate this many seconds."""
        self._begin()
        steps = round(1 / STEP_S)
        demand_noise = rate_noise = 1.0
        for number in range(round(duration_s / STEP_S)):
            now = number * STEP_S
            due = number % steps == 0
            if due:
                demand_noise, rate_noise = self._noise(), self._noise(max(1, len(self._working)))
                self._ask_law(now)
            self._advance_members(now, due=due)
            self._flow(now, demand_noise, rate_noise)
        return self._outcome

    def _noise(self, workers: int = 1) -> float:
        return max(0.1, self._random.gauss(1.0, self._model.noise / math.sqrt(workers)))

    def _begin(self) -> None:
        """Add the workers that run from the beginning: the policy has not started them, and they cost from now on."""
        self._fleet.target(self._model.first)
        before = -1e6
        while len(self._working) < self._model.first:
            self._advance_members(before, due=True)
            before += 1.0
        self._outcome.starts, self._outcome.worker_s = 0, 0.0
        self._buffer = float(self._model.prefetch)

    def _ask_law(self, now: float) -> None:
        counts = self._counts
        if now - self._told_at >= HEARTBEAT_S:
            self._told = JobCounts(int(counts.taken), counts.stall_s, counts.reading_s)
            self._told_at = now
        seen = FlowCounts(
            jobs=1,
            readings={"job": self._told},
            requested=int(counts.taken),
            due=int(counts.due),
            loads=int(counts.loads),
            busy_s=counts.busy_s,
            worker_s=counts.worker_s,
            late_s=counts.stall_s,
            working=len(self._working),
            refused=self._fleet.limited_by,
        )
        self._fleet.target(self._law(seen, now))

    # -- members ---------------------------------------------------------------------------------------------

    def _advance_members(self, now: float, *, due: bool) -> None:
        fleet = self._fleet
        while self._agenda and self._agenda[0][0] <= now:
            _, name, ends = heapq.heappop(self._agenda)
            due = True
            if ends:
                fleet.handle(Ended(name, End(code=0)), now)
                self._begun.pop(name, None)
            else:
                fleet.arrived(name, "", now)
                fleet.ready(name)
        if not due:
            return
        for instruction in fleet.tick(now):
            match instruction:
                case StartWorker(name):
                    self._outcome.starts += 1
                    self._begun[name] = now
                    fleet.handle(Accepted(name, ""), now)
                    heapq.heappush(self._agenda, (now + self._cold_start_s(), name, False))
                case AdmitWorker(name):
                    self._working.add(name)
                case DrainWorker(name) | StopWorker(name) | RejectWorker(name) | CheckWorker(name):
                    self._working.discard(name)
                    fleet.goodbye(name, now)
                    heapq.heappush(self._agenda, (now + STEP_S, name, True))
        self._outcome.max_workers = max(self._outcome.max_workers, len(self._working))

    def _cold_start_s(self) -> float:
        return self._model.cold_start_s * math.exp(self._random.gauss(0.0, SPREAD))

    # -- samples ---------------------------------------------------------------------------------------------

    def _flow(self, now: float, demand_noise: float, rate_noise: float) -> None:
        model, counts, outcome = self._model, self._counts, self._outcome
        working, per_sample = len(self._working), model.per_sample(now)
        wanted = model.demand(now) * demand_noise * STEP_S
        possible = min(working * model.rate * rate_noise, model.storage) * STEP_S
        room = model.prefetch - self._buffer + wanted
        loads = min(possible, room * per_sample)
        available = self._buffer + (loads / per_sample if per_sample else room)
        taken = min(wanted, available)
        self._buffer = min(available - taken, model.prefetch)
        stall_s = STEP_S * (1 - taken / wanted) if wanted else 0.0
        counts.note(taken, taken * per_sample, loads, working * STEP_S * (loads / possible if possible else 0.0))
        counts.worker_s += working * STEP_S
        counts.stall_s += stall_s
        counts.reading_s += STEP_S if wanted else 0.0
        outcome.samples, outcome.stall_s, outcome.reading_s = counts.taken, counts.stall_s, counts.reading_s
        outcome.worker_s += len(self._begun) * STEP_S
        outcome.min_worker_s += model.needed(now) * STEP_S
        if wanted:
            self._judge(now, stall_s)

    def _judge(self, now: float, stall_s: float) -> None:
        self._recent.append((now, stall_s))
        while self._recent[0][0] <= now - JUDGED_S:
            del self._recent[0]
        if sum(one for _, one in self._recent) > STALLED * JUDGED_S:
            self._outcome.stalled_at.append(now)


@dataclass(slots=True)
class _Sums:
    taken: float = 0.0
    due: float = 0.0
    loads: float = 0.0
    busy_s: float = 0.0
    worker_s: float = 0.0
    stall_s: float = 0.0
    reading_s: float = 0.0

    def note(self, taken: float, due: float, loads: float, busy_s: float) -> None:
        """Add the quantities of one step."""
        self.taken += taken
        self.due += due
        self.loads += loads
        self.busy_s += busy_s
