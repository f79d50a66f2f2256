"""Workers that live for a limited time, and numbers of workers that change: successors, warnings, quotas, targets."""

from __future__ import annotations

import pytest

from tests.remote.fleet.fleet_cases import PREFIX, come, fleet, fleet_limits, named, only, starts, states, working
from torch_dpflow.errors import QuotaError
from torch_dpflow.remote.fleet.lifecycle import (
    DRAIN_S,
    LEASE_S,
    ROTATE,
    Fleet,
)
from torch_dpflow.remote.fleet.worker_states import (
    RAISE_S,
    AdmitWorker,
    CheckWorker,
    DrainWorker,
    StartWorker,
    StopWorker,
    WorkerState,
)
from torch_dpflow.remote.launchers.contract import Accepted, Ended, Refused, Warned
from torch_dpflow.workers.platform import End


def test_workers_count_from_their_call_to_their_end_as_whoever_ran_them_has_measured_it() -> None:
    machine = fleet()
    machine.target(4, 0.0)
    for number in range(4):
        machine.handle(Accepted(named(number, number + 1), "ref"), 1.0)
        assert machine.worker_s(5.0) == 0, "waited for"
    for number in range(3):
        come(machine, named(number, number + 1), 10.0)
    assert machine.worker_s(12.0) == 3 * 2
    silent = machine.by_user("2/3")
    assert silent is not None
    silent.nonce, silent.last_seen = b"nonce", 11.5
    assert machine.worker_s(12.0) == 3 * 2 - 0.5, "a silent worker may be gone"
    silent.last_seen = 16.0
    machine.handle(Ended(named(0, 1), End(code=0, ran_s=2.5)), 14.0)
    assert machine.worker_s(14.0) == 2.5 + 4 + 6
    machine.goodbye(named(1, 2), 15.0)
    assert machine.tick(16.0 + LEASE_S)[0] == StopWorker(named(2, 3), f"no heartbeat for {LEASE_S:g} s")
    assert machine.worker_s(30.0) == 2.5 + 5 + 6
    machine.handle(Ended(named(3, 4), End(ran_s=7.0)), 31.0)
    machine.end(40.0)
    assert machine.workers == []
    assert machine.worker_s(50.0) == 2.5 + 5 + 6 + 7.0


def test_who_has_not_come_leaves_first_then_who_ends_soonest() -> None:
    machine = working(3, lifetime_s=1000.0)
    machine.target(5, 10.0)
    machine.handle(Warned(named(1, 2), 120.0), 10.0)
    assert machine.target(3, 11.0) == [
        StopWorker(named(4, 5), "it is not needed any more"),
        StopWorker(named(3, 4), "it is not needed any more"),
    ]
    assert machine.target(2, 12.0) == [
        DrainWorker(named(1, 2)),
        StopWorker(named(1, 6), "it is not needed any more"),
    ], "the warned one, and its successor"
    assert machine.target(1, 13.0) == [DrainWorker(named(2, 3))], "of equals the highest number"


def test_a_worker_gets_a_successor_before_its_lifetime_ends() -> None:
    machine = working(2, lifetime_s=1000.0)
    rotates = 1000.0 * sum(ROTATE) / 2
    assert machine.tick(rotates - 20.0) == []
    assert starts(machine.tick(rotates)) == [named(0, 3)], "one at a time"
    machine.handle(Accepted(named(0, 3), "ref"), rotates)
    assert machine.arrived(named(0, 3), "", rotates + 2.0) == []
    assert machine.ready(named(0, 3), rotates + 3.0) == [DrainWorker(named(0, 1))]
    assert states(machine) == {"0-1": "draining", "1-2": "working", "0-3": "on deck"}
    told = machine.goodbye(named(0, 1), rotates + 5.0)
    assert told == [CheckWorker(named(0, 1)), AdmitWorker(named(0, 3))]
    assert starts(machine.handle(Ended(named(0, 1), End(code=0)), rotates + 6.0)) == [named(1, 4)], "the next"


@pytest.mark.parametrize(("workers", "start_s"), [(1, 8.0), (10, 3.0), (64, 3.0)])
def test_all_get_a_successor_in_time_though_they_began_together_and_live_shortly(workers: int, start_s: float) -> None:
    lifetime_s = 60.0
    machine = Fleet(PREFIX, fleet_limits(lifetime_s=lifetime_s), draw=lambda: 0.5)
    machine.target(workers)
    begun: dict[str, float] = {}
    leaving: dict[str, float] = {}
    drained = 0
    for step in range(4 * 300):
        now = step / 4
        for name in [name for name, at in begun.items() if now >= at + start_s]:
            del begun[name]
            machine.handle(Accepted(name, "ref"), now)
            machine.arrived(name, "", now)
            machine.ready(name)
        for name in [name for name, at in leaving.items() if now >= at + 0.5]:
            del leaving[name]
            machine.goodbye(name, now)
            machine.handle(Ended(name, End(code=0)), now)
        for instruction in machine.tick(now):
            if isinstance(instruction, StartWorker):
                begun[instruction.name] = now
            elif isinstance(instruction, DrainWorker):
                drained += 1
                leaving[instruction.name] = now
                number = instruction.name.split("-")[3]
                waiting = [one for one in machine.workers if one.state is WorkerState.ON_DECK]
                assert [one for one in waiting if str(one.number) == number], f"at {now} nobody waits"
            else:
                assert not isinstance(instruction, StopWorker)
    assert drained >= 4 * workers * 300 / lifetime_s / 5


def test_a_successor_that_waits_leaves_with_its_predecessor() -> None:
    machine = working(1)
    (successor,) = starts(machine.handle(Warned(named(0, 1), 1000.0), 10.0))
    machine.handle(Accepted(successor, "ref"), 11.0)
    machine.arrived(successor, "", 12.0)
    told = machine.target(0, 13.0)
    assert told == [DrainWorker(named(0, 1)), DrainWorker(successor), CheckWorker(successor)]
    assert machine.ready(successor, 14.0) == []
    assert states(machine) == {"0-1": "draining", "0-2": "leaving"}, "it has no tasks to finish"


def test_a_worker_without_a_successor_is_drained_at_last_and_stopped_in_the_end() -> None:
    machine = working(1, lifetime_s=1000.0, grace_s=5.0)
    (successor,) = starts(machine.tick(950.0))
    machine.handle(Refused(successor, QuotaError("full")), 950.0)
    assert machine.tick(960.0) == []
    assert only(DrainWorker, machine.tick(970.0)) == [DrainWorker(named(0, 1))]
    told = machine.tick(970.0 + DRAIN_S)
    assert only(StopWorker, told) == [StopWorker(named(0, 1), "it has not ended in time")]
    machine = working(1, lifetime_s=1000.0, grace_s=5.0)
    told = machine.tick(1006.0)  # as after a pause of the process
    assert only(StopWorker, told) == [StopWorker(named(0, 1), "its lifetime has ended")]


def test_a_warned_worker_is_replaced_and_drained_in_half_of_its_time() -> None:
    machine = working(1)
    assert starts(machine.handle(Warned(named(0, 1), 30.0), 10.0)) == [named(0, 2)]
    machine.arrived(named(0, 2), "", 12.0)
    assert machine.tick(24.0) == []
    assert machine.tick(25.0) == [DrainWorker(named(0, 1))]


def test_starts_are_no_more_than_the_platform_takes() -> None:
    machine = fleet(starts_per_s=0.3)
    assert len(starts(machine.target(8, 0.0))) == 3
    assert starts(machine.tick(9.9)) == []
    assert len(starts(machine.tick(10.0))) == 3


def test_there_are_never_more_than_the_account_may_have() -> None:
    machine = fleet(max_workers=3)
    assert len(starts(machine.target(8, 0.0))) == 3
    assert starts(machine.tick(10 * RAISE_S)) == []


def test_a_lowered_target_takes_back_starts_whose_answer_is_still_out() -> None:
    machine = fleet()
    machine.target(1, 0.0)
    assert machine.target(0, 1.0) == [StopWorker(named(0, 1), "it is not needed any more")]
    assert machine.handle(Accepted(named(0, 1), "ref"), 2.0) == []
    assert states(machine) == {"0-1": WorkerState.STOPPING.value}
    assert machine.handle(Ended(named(0, 1), End()), 3.0) == []
    assert machine.workers == []
    assert machine.limited_by == "", "it was no false start"
