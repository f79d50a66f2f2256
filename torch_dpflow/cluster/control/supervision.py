"""Processes that a node keeps running: a pure state machine without a process, thread or clock inside.

A process that ends is restarted under a higher incarnation, as long as it is desired. If it ends at once repeatedly,
the pauses grow. A worker that ends before it is up (has its dataset) counts as having ended at once, however long it
took. A process that sends no heartbeats is killed, and then restarted.

Workers are started a few at a time: if all started at once on few cores, they would delay all heartbeats. If most
heartbeats are late, the host is short of processor time, and the time limit for heartbeats is extended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from torch_dpflow._core import clocks
from torch_dpflow.cluster.messages.node import Launch, ProcessView
from torch_dpflow.workers.platform import RETRY_S, shortened

#: A process without a heartbeat for this long is killed and restarted (seconds).
LEASE_S = 2 * clocks.LEASE_S
#: After the n-th end at once in a row (n > 1), a process is restarted `FIRST_PAUSE_S * 2**n` seconds later, at most
#: `LONGEST_PAUSE_S`; a worker that was never up, at most `RETRY_S`.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
#: A process that has run for this long did not end at once (seconds), and is restarted without a pause. Equal to the
#: longest pause, so that no process is restarted more often.
STABLE_S = 2.0
#: Time limit for the first heartbeat of a process (seconds), since its start or its latest progress. It doubles with
#: each start in a row that exceeds it, at most `MAX_DOUBLINGS` times.
START_S, MAX_DOUBLINGS = clocks.START_S, 3
#: Longest time for which a starting worker delays the next ones (seconds).
START_PACE_S = 10.0
#: A lease is extended if three in four of the other processes' intervals between heartbeats exceed `LATE_HEARTBEAT_S`
#: (seconds): in proportion, by at most the factor `MAX_LEASE_FACTOR`.
LATE_HEARTBEAT_S, MAX_LEASE_FACTOR = 2 * clocks.HEARTBEAT_S, 6.0
WORKER = "worker"
#: Maximum number of characters of the description of how a process ended.
MAX_ENDED = 1500
#: Key in the status of a worker, true once the worker has its dataset.
UP = "up"


class Spawn(msgspec.Struct, frozen=True):
    """Instruction: start this process."""

    launch: Launch
    incarnation: int
    #: Where the previous incarnation listened; empty for the first.
    address: str


class Kill(msgspec.Struct, frozen=True):
    """Instruction: kill this process, and report its end like any other end."""

    id: str
    incarnation: int


class CleanUp(msgspec.Struct, frozen=True):
    """Instruction: remove files that this process has left, such as its socket, because it is not restarted."""

    id: str


SupervisorInstruction: TypeAlias = Spawn | Kill | CleanUp


@dataclass(slots=True)
class _Process:
    launch: Launch
    desired: bool = True
    incarnation: int = 0
    #: Whether it runs, and its pid, for display; 0 while it does not run, or has none.
    runs: bool = False
    pid: int = 0
    began: float = 0.0
    #: Whether it is being launched, and for a running one without a heartbeat when it last used its processor
    #: (seconds).
    launching: bool = False
    progressed: float = 0.0
    progress: tuple[int, ...] = ()
    #: How many incarnations in a row were killed before their first heartbeat.
    late_starts: int = 0
    #: The time of its last heartbeat, None before the first, and the interval before that one (seconds).
    heartbeat: float | None = None
    interval: float = 0.0
    #: Whether it has been killed because its lease had expired.
    killed: bool = False
    #: Whether its end was requested, and is therefore not a failure.
    stopped: bool = False
    #: Whether it has been launched, is not up, and delays the start of others; and whether it is a worker that is up.
    starting: bool = False
    up: bool = False
    #: When to start the next incarnation (seconds); None while one runs.
    due: float | None = None
    #: How many incarnations in a row have ended at once, and how many there have been after the first.
    failures: int = 0
    restarts: int = 0
    #: How the latest that has ended did so, for display.
    ended: str = ""
    #: Where the latest incarnation that reported an address listens.
    address: str = ""
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether the process should be started at its due time."""
        return self.due is not None and self.desired and (self.launch.needed or not self.failures)

    @property
    def reported_address(self) -> str:
        """Address of the running incarnation; empty until it has reported one."""
        return self.address if self.heartbeat is not None else ""


class Supervisor:
    """State machine that keeps the desired processes running. Not thread-safe.

    Methods return instructions, which the caller must carry out in the order of the list.

    Args:
        lease_s: time without a heartbeat after which a process is killed (seconds).
        most: maximum number of processes; services are started before workers.
        max_starting: maximum number of workers that are starting at the same time.
    """

    def __init__(self, *, lease_s: float, most: int = sys.maxsize, max_starting: int = sys.maxsize) -> None:
        self._processes: dict[str, _Process] = {}
        self._lease_s = lease_s
        self._most = most
        self._max_starting = max_starting
        #: The latest incarnation; all processes share the counter, so no id has the same one twice.
        self._spawns = 0
        #: Incremented whenever the views change in anything but the status of processes.
        self.revision = 1

    def begin(self, incarnations: int) -> None:
        """Use incarnations above this number, because processes with the same ids have run elsewhere before."""
        self._spawns = max(self._spawns, incarnations)

    def desire(self, launches: Iterable[Launch], now: float) -> list[SupervisorInstruction]:
        """Keep these processes running, and no others.

        A process whose arguments have changed is replaced. A process whose settings have changed receives them in the
        answer to its next heartbeat, because a restart would lose a shard's cache.
        """
        wanted = {launch.id: launch for launch in launches}
        self.revision += wanted != {id: process.launch for id, process in self._processes.items() if process.desired}
        out: list[SupervisorInstruction] = []
        for id, process in list(self._processes.items()):
            launch = process.launch
            if id not in wanted or (launch.role, launch.arguments) != (wanted[id].role, wanted[id].arguments):
                process.desired, process.stopped = False, process.runs or process.launching
                out += self._kill(process)
                if not process.stopped:
                    out.append(self._forget(id))
        for id, launch in wanted.items():
            known = self._processes.get(id)
            if known is None:
                self._processes[id] = _Process(launch, due=now)
            else:
                if launch.needed and not known.launch.needed:
                    known.failures = 0
                    known.due = None if known.due is None else min(known.due, now)
                known.launch, known.desired = launch, True  # one that is ending is started afterwards
        return out + self._spawn_due(now)

    def on_started(self, id: str, incarnation: int, pid: int, now: float) -> list[SupervisorInstruction]:
        """Record that a process has been launched. Call this after each `Spawn`, or `on_ended` if the launch failed."""
        process = self._processes[id]
        process.runs, process.pid, process.launching = True, pid, False
        process.began = process.progressed = now
        process.progress = ()
        self.revision += 1
        return self._kill(process) if process.stopped else []

    def note_progress(self, progress_of: Callable[[int], tuple[int, ...]], now: float) -> None:
        """Extend the time limit of each starting process that has made progress since the last call.

        progress_of: returns figures of a process, given its pid, that change while it runs, such as its processor time.
        """
        for process in self._processes.values():
            if process.runs and process.heartbeat is None:
                before, process.progress = process.progress, progress_of(process.pid)
                process.progressed = now if process.progress != before else process.progressed

    def on_ended(self, id: str, incarnation: int, now: float, how: str = "") -> list[SupervisorInstruction]:
        """Record that a process has ended, for any reason. how: how it ended, for display."""
        process = self._processes.get(id)
        if process is None or process.incarnation != incarnation:
            return []
        process.runs, process.pid, process.ended = False, 0, shortened(how, MAX_ENDED)
        process.starting = process.launching = False
        self.revision += 1
        if not process.desired:
            return [self._forget(id)]
        is_false_start = process.launch.role == WORKER and not process.up
        if process.stopped or (now - process.began >= STABLE_S and not is_false_start):
            process.failures = 0
        else:
            process.failures += 1
        pause = 0.0 if process.failures <= 1 else FIRST_PAUSE_S * 2 ** min(process.failures, 20)
        process.due = now + min(pause, RETRY_S if is_false_start else LONGEST_PAUSE_S)
        return self._spawn_due(now)

    def on_heartbeat(self, id: str, incarnation: int, address: str, status: dict[str, Any], now: float) -> bool:
        """Record a heartbeat of a process; return whether the process is desired."""
        if not self.is_desired(id, incarnation):
            return False
        process = self._processes[id]
        self.revision += process.heartbeat is None or process.address != address
        process.address, process.status = address, status
        process.interval = 0.0 if process.heartbeat is None else now - process.heartbeat
        process.heartbeat, process.late_starts = now, 0
        # A worker is up once it has its dataset, which takes longer than everything before.
        process.up |= process.launch.role == WORKER and bool(status.get(UP))
        process.starting &= process.launch.role == WORKER and not process.up
        return True

    def is_desired(self, id: str, incarnation: int) -> bool:
        """Return whether this incarnation of a process should run."""
        process = self._processes.get(id)
        return process is not None and process.incarnation == incarnation and process.desired

    def is_stopped(self, id: str, incarnation: int) -> bool:
        """Return whether the end of this incarnation was requested, even if its id is desired again by now."""
        process = self._processes.get(id)
        return process is not None and process.incarnation == incarnation and process.stopped

    def settings_of(self, id: str) -> bytes:
        return self._processes[id].launch.settings

    def tick(self, now: float) -> list[SupervisorInstruction]:
        """Kill silent processes and start due processes. The caller must have recorded all events up to `now`."""
        out: list[SupervisorInstruction] = []
        for process in self._processes.values():
            process.starting &= now - process.began < START_PACE_S
            if process.runs and not process.killed and self._has_expired(process, now):
                process.killed = True
                process.late_starts += process.heartbeat is None
                out += self._kill(process)
        return out + self._spawn_due(now)

    def views(self) -> list[ProcessView]:
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
                one.ended,
            )
            for id, one in self._processes.items()
            if one.desired
        ]

    def address_of(self, id: str) -> str:
        """Return the address of a process; empty until it has reported one. Any thread may call."""
        process = self._processes.get(id)
        return "" if process is None else process.reported_address

    @property
    def next_due(self) -> float | None:
        """Time at which the next process is due to start (seconds); None if none waits, or no more may be started."""
        services, workers = self._capacity()
        dues = [
            one.due
            for one in self._processes.values()
            if one.due is not None and one.waits and (workers if one.launch.role == WORKER else services) > 0
        ]
        return min(dues, default=None)

    @property
    def refused(self) -> int:
        """Number of desired processes that cannot be started because `most` processes run."""
        if self._capacity()[0] > 0:
            return 0
        return sum(one.waits for one in self._processes.values())

    def _capacity(self) -> tuple[int, int]:
        """Return (number of services, number of workers) that may be started."""
        running = [one for one in self._processes.values() if one.due is None]
        free = self._most - len(running)
        return free, min(free, self._max_starting - sum(one.starting for one in running))

    def _has_expired(self, process: _Process, now: float) -> bool:
        if process.heartbeat is None:
            return now - process.progressed >= START_S * (1 << min(process.late_starts, MAX_DOUBLINGS))
        silent_s = now - process.heartbeat
        return silent_s >= self._lease_s and silent_s >= self._lease_s * self._lease_factor(process, now)

    def _lease_factor(self, process: _Process, now: float) -> float:
        """Return the factor by which leases are extended because the host is short of processor time; at least 1."""
        others = sorted(
            max(one.interval, now - one.heartbeat)
            for one in self._processes.values()
            if one is not process and one.runs and one.heartbeat is not None and not one.killed
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
        # Services first: workers are of no use without them.
        for process in sorted(self._processes.values(), key=lambda one: one.launch.role == WORKER):
            is_worker = process.launch.role == WORKER
            if process.due is None or process.due > now or not process.waits or self._capacity()[is_worker] <= 0:
                continue
            self._spawns += 1
            process.restarts += process.incarnation > 0 and not process.stopped
            process.incarnation = self._spawns
            process.due, process.began, process.heartbeat, process.killed = None, now, None, False
            process.stopped = process.up = False
            process.starting, process.launching = is_worker, True
            out.append(Spawn(process.launch, process.incarnation, process.address))
        return out
