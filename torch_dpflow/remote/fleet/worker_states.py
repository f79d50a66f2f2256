"""States of a fleet's workers, and the instructions that a fleet issues."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TypeAlias

import msgspec


class WorkerState(enum.Enum):
    """State of a remote worker; see `lifecycle`."""

    #: The platform has not answered.
    REQUESTED = "requested"
    STARTING = "starting"
    #: Connected, getting ready, without tasks yet.
    ON_DECK = "on deck"
    WORKING = "working"
    #: Gets no more tasks.
    DRAINING = "draining"
    #: Ending by itself, or said to have ended; the platform is asked.
    LEAVING = "leaving"
    #: Being ended by force.
    STOPPING = "stopping"

    @property
    def holds_place(self) -> bool:
        """Whether the worker has its number, or will get it."""
        return self in (WorkerState.REQUESTED, WorkerState.STARTING, WorkerState.ON_DECK, WorkerState.WORKING)

    @property
    def is_expected(self) -> bool:
        """Whether the worker has been started and has not connected."""
        return self in (WorkerState.REQUESTED, WorkerState.STARTING)


@dataclass(slots=True)
class FleetWorker:
    """A worker that is not gone. Times are seconds on the clock of the machine's caller."""

    name: str
    number: int
    incarnation: int
    begun: float
    #: When its state times out; infinite while the lease at its shard watches it.
    due: float
    #: When the platform ends it.
    ends: float = math.inf
    #: From when on a successor is started, and when it is drained even without one.
    rotates: float = math.inf
    drains: float = math.inf
    state: WorkerState = WorkerState.REQUESTED
    #: Whether the platform has accepted its start, and whether it has connected.
    accepted: bool = False
    arrived: bool = False
    ready: bool = False
    #: When it connected, and when it left, as far as is known.
    since: float | None = None
    until: float | None = None

    def ran_s(self, last_seen: float) -> float:
        """Return how long the worker has run, seconds: from its connection until it left, or until its last message."""
        until = last_seen if self.until is None else self.until
        return 0.0 if self.since is None else max(0.0, until - self.since)


class StartWorker(msgspec.Struct, frozen=True):
    """Start this worker; its name is new. It ends by itself after `lifetime_s`, None: never."""

    name: str
    number: int
    incarnation: int
    lifetime_s: float | None


class AdmitWorker(msgspec.Struct, frozen=True):
    """Give this worker tasks: its number is free."""

    name: str


class RejectWorker(msgspec.Struct, frozen=True):
    """Make the worker of this name leave, and give the reason."""

    name: str
    why: str


class DrainWorker(msgspec.Struct, frozen=True):
    """Give this worker no more tasks, and make it leave when it has none."""

    name: str


class CheckWorker(msgspec.Struct, frozen=True):
    """Query the platform about this worker."""

    name: str


class StopWorker(msgspec.Struct, frozen=True):
    """Make the platform end this worker by force."""

    name: str
    why: str


class Report(msgspec.Struct, frozen=True):
    """For display: what limits the fleet now, empty if nothing does, and details."""

    limited_by: str
    text: str


class Fail(msgspec.Struct, frozen=True):
    """The fleet starts no worker any more: report the reason to the jobs."""

    text: str


FleetInstruction: TypeAlias = (
    StartWorker | AdmitWorker | RejectWorker | DrainWorker | CheckWorker | StopWorker | Report | Fail
)
