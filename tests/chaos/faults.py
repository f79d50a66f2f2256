"""Faults at random: processes of a cluster and jobs are killed, frozen with connections open, and brought back."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tests.chaos.chaos_jobs import ChaosJob
from tests.shared_cluster import TestCluster
from torch_dpflow.errors import DPFlowError

ROLES = ("worker", "shard", "router", "coordinator", "node", "job")
#: How long the node may take to list its processes, seconds: it may be frozen, or have ended.
LIST_S = 1.0


@dataclass(frozen=True)
class Fault:
    """What was done to one process, and when; seconds of the monotonic clock."""

    action: str
    role: str
    #: Of the process; of a job, its number.
    id: str
    at: float
    #: When a frozen process was to go on and a killed job to come back; for others, which come back by themselves,
    #: when they were killed.
    until: float

    @property
    def kind(self) -> str:
        return f"{self.action} {self.role}"

    def __str__(self) -> str:
        lasted = f", {self.until - self.at:.1f} s" if self.until > self.at else ""
        return f"{self.kind} ({self.id}{lasted})"


@dataclass(frozen=True)
class _Target:
    role: str
    id: str
    pid: int
    job: ChaosJob | None = None


class Chaos:
    """Strikes one process after another.

    Args:
        longest_s: a process is frozen, and a killed job away, for at most so long.
        others: what else may happen: does it, and returns what it was, to what, and for how long it lasts.
    """

    def __init__(
        self,
        cluster: TestCluster,
        jobs: list[ChaosJob],
        chance: random.Random,
        *,
        longest_s: float,
        others: Sequence[Callable[[random.Random], tuple[str, str, float]]] = (),
    ) -> None:
        self._others = others
        self._cluster = cluster
        self._jobs = jobs
        self._chance = chance
        self._longest_s = longest_s
        self.faults: list[Fault] = []
        #: What is to be undone, the next first.
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._frozen: set[int] = set()
        self._pause = threading.Event()

    def run(self, faults: int, *, most_s: float) -> None:
        """Strike so many times, with pauses of up to `most_s`; returns once everything has been undone."""
        while len(self.faults) < faults:
            self._wait(time.monotonic() + self._chance.uniform(0.1, most_s))
            failed = [job.error() for job in self._jobs if job.has_failed]
            assert not failed, failed[0]
            self._strike()
        while self._later:
            self._wait(self._later[0][0])

    def thaw(self) -> None:
        """Undo at once whatever is to be undone."""
        while self._later:
            heapq.heappop(self._later)[2]()

    def _wait(self, until: float) -> None:
        while True:
            while self._later and self._later[0][0] <= time.monotonic():
                heapq.heappop(self._later)[2]()
            left = min(until, self._later[0][0] if self._later else until) - time.monotonic()
            if left > 0:
                self._pause.wait(left)
            if time.monotonic() >= until:
                return

    def _strike(self) -> None:
        if self._others and self._chance.random() < 0.2:
            action, role, lasts = self._chance.choice(self._others)(self._chance)
            now = time.monotonic()
            self.faults.append(Fault(action, role, role, now, now + lasts))
            return
        targets = self._targets()
        roles = [role for role in ROLES if any(target.role == role for target in targets)]
        if not roles:
            return
        role = self._chance.choice(roles)
        target = self._chance.choice([target for target in targets if target.role == role])
        lasts = self._duration()
        with suppress(ProcessLookupError):
            if self._chance.random() < 0.6 and role != "node":
                self._kill(target, lasts)
            else:
                self._freeze(target, lasts)

    def _targets(self) -> list[_Target]:
        found = [_Target("job", str(job.given.number), job.pid, job) for job in self._jobs if job.alive]
        with suppress(DPFlowError):
            views = self._cluster.running(timeout_s=LIST_S)
            found += [_Target(view.role, view.id, view.pid) for view in views]
            found.append(_Target("node", "node", self._cluster.pid))
        return [target for target in found if target.pid not in self._frozen]

    def _duration(self) -> float:
        """Mostly short; now and then longer than any lease."""
        most = self._longest_s if self._chance.random() < 0.2 else min(3.0, self._longest_s)
        return self._chance.uniform(0.1, most)

    def _kill(self, target: _Target, lasts: float) -> None:
        now = time.monotonic()
        if target.job is None:
            os.kill(target.pid, signal.SIGKILL)
            self._note("kill", target, now, now)
        else:
            back = now + min(lasts, 3.0)
            target.job.kill()
            self._note("kill", target, now, back)
            self._do_later(back, target.job.revive)

    def _freeze(self, target: _Target, lasts: float) -> None:
        # By descriptor: by the time it is to go on, its node may have ended it and its number be another's.
        descriptor = os.pidfd_open(target.pid)
        signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
        self._frozen.add(target.pid)

        def thaw() -> None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
            os.close(descriptor)
            self._frozen.discard(target.pid)

        now = time.monotonic()
        self._note("freeze", target, now, now + lasts)
        self._do_later(now + lasts, thaw)

    def _note(self, action: str, target: _Target, at: float, until: float) -> None:
        self.faults.append(Fault(action, target.role, target.id, at, until))

    def _do_later(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (when, next(self._numbers), action))
