"""Lets a sampling group and a cache policy answer the events of a schedule, and records what happened."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.announcing import Announce, Announcer
from benchmarks.simulation.bounds import best_evictions
from benchmarks.simulation.schedule import Event, Kind, Schedule, job_seed
from torch_dpflow.caches.policy import Policy
from torch_dpflow.samplers.group import SamplingGroup


@dataclass(frozen=True)
class Trace:
    """Every access of a run, in order: arrays of equal length."""

    plan: Schedule
    #: place of the job in the workload
    jobs: NDArray[np.int64]
    epochs: NDArray[np.int64]
    instants: NDArray[np.int64]
    samples: NDArray[np.int64]
    #: False: the sample had to be loaded
    hits: NDArray[np.bool_]

    @cached_property
    def hit_rate(self) -> float:
        """The share of accesses that loaded nothing; 0 where there were none."""
        return float(self.hits.mean()) if len(self.hits) else 0.0

    def optimum(self, capacity: int) -> float:
        """The hit rate of the best evictions for the same order and a cache of `capacity` samples."""
        hits = best_evictions(self.samples, self.instants, capacity)
        return float(hits.mean()) if len(hits) else 0.0

    def orders_of(self, job: int) -> list[NDArray[np.int64]]:
        """The orders in which a job read its epochs, those alone that it finished."""
        mine = self.jobs == job
        whole = len(self.plan.workload.jobs[job].indices)
        epochs = [self.samples[mine & (self.epochs == e)] for e in np.unique(self.epochs[mine])]
        return [order for order in epochs if len(order) == whole]


class Simulation:
    """One run of a schedule: a sampling group, and a policy unless the group keeps a directory of its own."""

    def __init__(
        self,
        plan: Schedule,
        group: SamplingGroup,
        policy: Policy | None,
        *,
        seed: int = 0,
        announce: Announce = "next",
        independence: float = 0.0,
    ) -> None:
        """Prepare a run; `announce` limits what the policy hears of what samplers know of the future."""
        self._plan = plan
        self._group = group
        self._policy = policy
        self._seed = seed
        self._independence = independence
        self._announcer = None if policy is None else Announcer(group, policy, announce)
        self._recorder = _Recorder()

    def run(self) -> Trace:
        """Go through all events. Raises ValueError if the group hands out too few samples."""
        for event in self._plan.events:
            if event.kind is Kind.REQUEST:
                self._request(event)
            elif event.kind is Kind.EPOCH:
                self._group.start_epoch(str(event.job), event.epoch)
                if self._announcer is not None:
                    self._announcer.epoch_started(str(event.job))
            elif event.kind is Kind.JOIN:
                self._join(event)
            else:
                self._leave(event.job)
        return self._recorder.trace(self._plan)

    def _join(self, event: Event) -> None:
        job = self._plan.workload.jobs[event.job]
        self._group.join(
            str(event.job),
            job.indices,
            seed=job_seed(self._seed, event.job),
            batch_size=job.batch_size,
            independence=self._independence,
        )
        if self._policy is not None:
            self._policy.join(str(event.job))

    def _leave(self, job: int) -> None:
        self._group.leave(str(job))
        if self._policy is not None and self._announcer is not None:
            self._announcer.left(str(job))
            self._policy.forget(str(job))

    def _request(self, event: Event) -> None:
        draw = self._group.draw(str(event.job), event.size, now=event.time)
        if self._policy is None or self._announcer is None:
            if draw.led is None:
                raise ValueError(f"strategy {self._group.strategy!r} keeps no directory: name a cache policy")
            held = ~draw.led
        else:
            self._announcer.drawn(str(event.job))
            held = self._policy.access_many(draw.indices, str(event.job))
            self._policy.admit_many(draw.indices[~held])
        self._recorder.add(event, draw.indices, held)


class _Recorder:
    """Collects accesses; a repeated access within an instant is a hit whatever the cache says."""

    def __init__(self) -> None:
        self._instant = -1
        self._in_hand: set[int] = set()
        self._requests: list[tuple[int, int, int, int]] = []
        self._samples: list[NDArray[np.int64]] = []
        self._hits: list[NDArray[np.bool_]] = []

    def add(self, event: Event, samples: NDArray[np.int64], held: NDArray[np.bool_]) -> None:
        if len(samples) != event.size:
            raise ValueError(
                f"job {event.job}, epoch {event.epoch}: asked for {event.size} samples, got {len(samples)}"
            )
        if event.instant != self._instant:
            self._instant = event.instant
            self._in_hand.clear()
        asked = samples.tolist()
        shared = np.fromiter((x in self._in_hand for x in asked), dtype=bool, count=len(asked))
        self._in_hand.update(asked)
        self._requests.append((event.job, event.epoch, event.instant, event.size))
        self._samples.append(samples)
        self._hits.append(held | shared)

    def trace(self, plan: Schedule) -> Trace:
        requests = np.array(self._requests, dtype=np.int64).reshape(-1, 4)
        jobs, epochs, instants = (np.repeat(requests[:, k], requests[:, 3]) for k in range(3))
        samples = np.concatenate([np.empty(0, dtype=np.int64), *self._samples])
        hits = np.concatenate([np.empty(0, dtype=bool), *self._hits])
        return Trace(plan, jobs, epochs, instants, samples, hits)
