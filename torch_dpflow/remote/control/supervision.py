"""Which processes a node keeps running: a pure state machine without a process, thread or clock inside.

A process that ends is started again under a higher incarnation, later and later while it ends at once; one
that falls silent is killed first. Only what is desired is started again.

Workers are started a few at a time, as those before have come up: all at once, on few cores, they would keep each other
and everything that runs from being heard. Where nearly all are late the host is short of processor time, and nobody is
killed for that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from torch_dpflow.remote.wire.node import Launch, ProcessView

#: The pause before a process that ended at once is started again, first and longest, seconds.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
#: A process that has run for so long has not ended at once, seconds. As long as the longest pause: so no process is
#: started more often than that, and one that others keep killing is not kept waiting for what is no fault of its.
STABLE_S = 2.0
#: How long a process may take until it is heard of first, seconds: it imports, and fetches what it is to load.
START_S = 60.0
#: How long a worker that comes up keeps the next ones waiting, at most, seconds.
START_PACE_S = 10.0
#: Where three in four of the others are heard less often than this, all leases grow in proportion, seconds; at most so
#: many times.
LATE_HEARTBEAT_S, MAX_LEASE_FACTOR = 2.0, 6.0
WORKER = "worker"
#: In the status of a worker that has come up.
UP = "up"


class Spawn(msgspec.Struct, frozen=True):
    """Start this process."""

    launch: Launch
    incarnation: int
    #: Where the process before it listened; empty for the first.
    address: str


class Kill(msgspec.Struct, frozen=True):
    """End this process at once; it will be heard that it has ended."""

    id: str
    incarnation: int


class CleanUp(msgspec.Struct, frozen=True):
    """Clear away what this process has left: it has ended, and none comes after it."""

    id: str


SupervisorInstruction: TypeAlias = Spawn | Kill | CleanUp


@dataclass(slots=True)
class _Process:
    launch: Launch
    desired: bool = True
    incarnation: int = 0
    #: Whether one runs, and its number where it runs, for people; 0 while none does, or where it has none.
    runs: bool = False
    pid: int = 0
    began: float = 0.0
    #: When it was heard last, seconds, and how long before that; None before it was heard at all.
    heard: float | None = None
    gap: float = 0.0
    #: Whether it has been told to end for its silence.
    killed: bool = False
    #: Whether it has been started and has not come up.
    starting: bool = False
    #: When to start the next one, seconds; None while one runs.
    due: float | None = None
    #: How many in a row have ended at once, and how many there have been after the first.
    failures: int = 0
    restarts: int = 0
    address: str = ""
    #: Whether the one that runs has said so itself: before that it may be elsewhere than the one before.
    listens: bool = False
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def reported_address(self) -> str:
        """Where the one that runs listens; empty until it has said so."""
        return self.address if self.listens else ""


class Supervisor:
    """Keeps what is desired running. Not thread-safe.

    Args:
        lease_s: how long a process may be silent before it is killed, seconds.
        most: processes at once; services come before workers.
        most_starting: workers that may be coming up at once.
    """

    def __init__(self, *, lease_s: float, most: int = sys.maxsize, most_starting: int = sys.maxsize) -> None:
        self._processes: dict[str, _Process] = {}
        self._lease_s = lease_s
        self._most = most
        self._most_starting = most_starting
        #: Numbers the incarnations, so that none is used twice under one id.
        self._spawns = 0
        #: Higher whenever the views differ in anything but what processes say of themselves.
        self.revision = 1

    def desire(self, launches: Iterable[Launch], now: float) -> list[SupervisorInstruction]:
        """Keep these running, and nothing else.

        A launch with other arguments than before replaces it. Other settings do not: the process hears of them.
        """
        wanted = {launch.id: launch for launch in launches}
        self.revision += 1
        out: list[SupervisorInstruction] = []
        for id, process in list(self._processes.items()):
            if id not in wanted or not _runs_as(process.launch, wanted[id]):
                process.desired = False
                out += self._kill(process)
                if not process.runs:
                    out.append(self._forget(id))
        for id, launch in wanted.items():
            known = self._processes.get(id)
            if known is None:
                self._processes[id] = _Process(launch, due=now)
            else:
                known.launch, known.desired = launch, True  # one that was to end is started when it has
        return out + self._spawn_due(now)

    def on_started(self, id: str, incarnation: int, pid: int, now: float) -> None:
        """A process has been spawned."""
        process = self._processes[id]
        process.runs, process.pid, process.began = True, pid, now
        self.revision += 1

    def on_ended(self, id: str, incarnation: int, now: float) -> list[SupervisorInstruction]:
        """A process has ended, for whatever reason."""
        process = self._processes.get(id)
        if process is None or process.incarnation != incarnation:
            return []
        process.runs, process.pid = False, 0
        process.starting = False
        self.revision += 1
        if not process.desired:
            return [self._forget(id)]
        process.failures = 0 if now - process.began >= STABLE_S else process.failures + 1
        pause = 0.0 if process.failures <= 1 else FIRST_PAUSE_S * 2 ** min(process.failures, 20)
        process.due = now + min(pause, LONGEST_PAUSE_S)
        return self._spawn_due(now)

    def on_heartbeat(
        self, id: str, incarnation: int, address: str, status: dict[str, Any], now: float
    ) -> bool:
        """A process says that it lives; whether it is one of those that should."""
        if not self.is_desired(id, incarnation):
            return False
        process = self._processes[id]
        self.revision += not process.listens or process.address != address
        process.address, process.status, process.listens = address, status, True
        process.gap = 0.0 if process.heard is None else now - process.heard
        process.heard = now
        # A worker is up when it has what it is to load, which takes longer than all before.
        process.starting &= process.launch.role == WORKER and not status.get(UP, False)
        return True

    def is_desired(self, id: str, incarnation: int) -> bool:
        """Whether this process is one of those that should run."""
        process = self._processes.get(id)
        return process is not None and process.incarnation == incarnation and process.desired

    def settings_of(self, id: str) -> bytes:
        """The settings of a process that is desired."""
        return self._processes[id].launch.settings

    def tick(self, now: float) -> list[SupervisorInstruction]:
        """Time has passed, and everything that had arrived by then has been told."""
        out: list[SupervisorInstruction] = []
        for process in self._processes.values():
            process.starting &= now - process.began < START_PACE_S
            if process.runs and not process.killed and self._is_silent(process, now):
                process.killed = True
                out += self._kill(process)
        return out + self._spawn_due(now)

    def views(self) -> list[ProcessView]:
        """What is desired, and how it does."""
        return [
            ProcessView(
                id,
                one.launch.role,
                one.incarnation,
                one.pid,
                one.reported_address,
                one.status,
                one.restarts,
                one.runs,
            )
            for id, one in self._processes.items()
            if one.desired
        ]

    def address_of(self, id: str) -> str:
        """Where a process has said that it listens; empty where it has not. Any thread may call."""
        process = self._processes.get(id)
        return "" if process is None else process.reported_address

    @property
    def next_due(self) -> float | None:
        """When the next process is to be started, seconds; None where none waits for nothing but time."""
        services, workers = self._capacity()
        dues = [
            one.due
            for one in self._processes.values()
            if one.due is not None and (workers if one.launch.role == WORKER else services) > 0
        ]
        return min(dues, default=None)

    @property
    def refused(self) -> int:
        """How many that are desired cannot be started, because there are as many as there may be."""
        if self._capacity()[0] > 0:
            return 0
        return sum(one.due is not None and one.desired for one in self._processes.values())

    def _capacity(self) -> tuple[int, int]:
        """How many services and how many workers may be started."""
        there = [one for one in self._processes.values() if one.due is None]
        room = self._most - len(there)
        return room, min(room, self._most_starting - sum(one.starting for one in there))

    def _is_silent(self, process: _Process, now: float) -> bool:
        if process.heard is None:
            return now - process.began >= START_S
        silent_s = now - process.heard
        return silent_s >= self._lease_s and silent_s >= self._lease_s * self._lease_factor(process, now)

    def _lease_factor(self, process: _Process, now: float) -> float:
        """How many times longer a lease is than it would be on a host with processor time for all."""
        others = sorted(
            max(one.gap, now - one.heard)
            for one in self._processes.values()
            if one is not process and one.runs and one.heard is not None and not one.killed
        )
        late = others[len(others) // 4] if others else 0.0
        return min(max(1.0, late / LATE_HEARTBEAT_S), MAX_LEASE_FACTOR)

    def _kill(self, process: _Process) -> list[SupervisorInstruction]:
        return [Kill(process.launch.id, process.incarnation)] if process.runs else []

    def _forget(self, id: str) -> SupervisorInstruction:
        del self._processes[id]
        return CleanUp(id)

    def _spawn_due(self, now: float) -> list[SupervisorInstruction]:
        out: list[SupervisorInstruction] = []
        # A service first: what workers load is of no use without.
        for process in sorted(self._processes.values(), key=lambda one: one.launch.role == WORKER):
            is_worker = process.launch.role == WORKER
            if (
                process.due is None
                or process.due > now
                or not process.desired
                or self._capacity()[is_worker] <= 0
            ):
                continue
            self._spawns += 1
            process.restarts += process.incarnation > 0
            process.incarnation = self._spawns
            process.due, process.began, process.heard, process.killed = None, now, None, False
            process.listens = False
            process.starting = is_worker
            out.append(Spawn(process.launch, process.incarnation, process.address))
        return out


def _runs_as(running: Launch, wanted: Launch) -> bool:
    """Whether a process that was launched so is the one that is wanted."""
    return (running.role, running.arguments) == (wanted.role, wanted.arguments)
