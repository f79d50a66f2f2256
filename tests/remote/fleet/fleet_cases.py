"""A fleet that says at once what follows from each event, for tests of its workers' lives."""

from __future__ import annotations

from typing import Any, TypeVar

from torch_dpflow.remote.fleet.lifecycle import (
    Fleet,
)
from torch_dpflow.remote.fleet.worker_states import (
    AdmitWorker,
    FleetInstruction,
    StartWorker,
)
from torch_dpflow.remote.launchers.contract import Accepted, Outcome
from torch_dpflow.workers.platform import Limits

PREFIX = "dpf-0c0ffee0-0123456789-"
LEAST_S, MOST_S = 10.0, 60.0
T = TypeVar("T")


class Prompt(Fleet):
    """Says at once what follows from an event."""

    def target(self, workers: int, now: float) -> list[FleetInstruction]:
        super().target(workers)
        return self.tick(now)

    def handle(self, outcome: Outcome, now: float) -> list[FleetInstruction]:
        super().handle(outcome, now)
        return self.tick(now)

    def arrived(self, name: str, unfit: str, now: float) -> list[FleetInstruction]:
        super().arrived(name, unfit, now)
        return self.tick(now)

    def ready(self, name: str, now: float) -> list[FleetInstruction]:
        super().ready(name)
        return self.tick(now)

    def goodbye(self, name: str, now: float) -> list[FleetInstruction]:
        super().goodbye(name, now)
        return self.tick(now)


def fleet_limits(*, lifetime_s: float | None = None, **limits: Any) -> Limits:
    return Limits(
        max_lifetime_s=lifetime_s,
        start_timeout_s=(LEAST_S, MOST_S),
        **limits,
    )


def fleet(**limits: Any) -> Prompt:
    return Prompt(PREFIX, fleet_limits(**limits), draw=lambda: 0.5)


def named(number: int, incarnation: int) -> str:
    return f"{PREFIX}{number}-{incarnation}"


def only(kind: type[T], instructions: list[FleetInstruction]) -> list[T]:
    return [one for one in instructions if isinstance(one, kind)]


def starts(instructions: list[FleetInstruction]) -> list[str]:
    return [start.name for start in only(StartWorker, instructions)]


def come(machine: Prompt, name: str, now: float) -> list[FleetInstruction]:
    machine.handle(Accepted(name, "ref"), now)
    machine.arrived(name, "", now)
    return machine.ready(name, now)


def working(workers: int, **limits: Any) -> Prompt:
    machine = fleet(**limits)
    for name in starts(machine.target(workers, 0.0)):
        assert come(machine, name, 1.0)[0] == AdmitWorker(name)
    return machine


def states(machine: Fleet) -> dict[str, str]:
    return {one.name.removeprefix(PREFIX): one.state.value for one in machine.workers}
