"""What a node starts, ends and starts again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpflow.cluster.control.supervision import (
    LONGEST_PAUSE_S,
    MAX_DOUBLINGS,
    MAX_LEASE_FACTOR,
    STABLE_S,
    START_PACE_S,
    START_S,
    CleanUp,
    Kill,
    Spawn,
    Supervisor,
)
from torch_dpflow.cluster.messages.node import Launch
from torch_dpflow.workers.platform import RETRY_S

ROUTER, SHARD = Launch("flow:v1/router", "router", b"a"), Launch("flow:v1/shard-0", "shard", b"b")


def running(*launches: Launch) -> Supervisor:
    supervisor = Supervisor(lease_s=10.0)
    for spawn in supervisor.desire(launches, 0.0):
        assert isinstance(spawn, Spawn)
        supervisor.on_started(spawn.launch.id, spawn.incarnation, 100 + spawn.incarnation, 0.0)
    return supervisor


def test_what_is_desired_is_started_once() -> None:
    supervisor = Supervisor(lease_s=10.0)
    assert supervisor.desire([ROUTER, SHARD], 0.0) == [Spawn(ROUTER, 1, ""), Spawn(SHARD, 2, "")]
    assert supervisor.desire([ROUTER, SHARD], 1.0) == []


def test_what_ends_is_started_again_where_it_was() -> None:
    supervisor = running(ROUTER)
    assert supervisor.on_heartbeat(ROUTER.id, 1, "tcp://127.0.0.1:99", {"jobs": 2}, 1.0)
    assert supervisor.on_ended(ROUTER.id, 1, 20.0) == [Spawn(ROUTER, 2, "tcp://127.0.0.1:99")]
    assert supervisor.on_ended(ROUTER.id, 1, 21.0) == []
    assert [(view.incarnation, view.status) for view in supervisor.views()] == [(2, {"jobs": 2})]


def test_where_a_process_listens_is_told_once_it_has_said_so_itself() -> None:
    """The one before it may have listened elsewhere: somebody else may have the port now."""
    supervisor = running(ROUTER)
    supervisor.on_heartbeat(ROUTER.id, 1, "tcp://127.0.0.1:99", {}, 1.0)
    assert supervisor.address_of(ROUTER.id) == "tcp://127.0.0.1:99"
    supervisor.on_ended(ROUTER.id, 1, 20.0)
    assert [view.address for view in supervisor.views()] == [""]
    assert supervisor.address_of(ROUTER.id) == ""
    seen = supervisor.revision
    supervisor.on_heartbeat(ROUTER.id, 2, "tcp://127.0.0.1:99", {}, 21.0)
    assert supervisor.revision > seen
    assert [view.address for view in supervisor.views()] == ["tcp://127.0.0.1:99"]
    assert supervisor.address_of("other") == ""


def test_what_ends_at_once_again_and_again_is_started_later_and_later() -> None:
    supervisor = running(ROUTER)
    now, pauses = 0.0, []
    for incarnation in range(1, 15):
        told = supervisor.on_ended(ROUTER.id, incarnation, now)
        if not told:
            due = supervisor.next_due
            assert due is not None
            assert supervisor.tick(due - 0.001) == []
            pauses.append(due - now)
            now = due
            told = supervisor.tick(now)
        assert told == [Spawn(ROUTER, incarnation + 1, "")]
        supervisor.on_started(ROUTER.id, incarnation + 1, 1, now)
    assert all(later >= 0.99 * sooner for sooner, later in itertools.pairwise(pauses))
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S)
    assert supervisor.on_ended(ROUTER.id, 15, now + STABLE_S) == [Spawn(ROUTER, 16, "")]


def test_a_revision_is_of_what_runs_and_not_of_what_it_says() -> None:
    supervisor = Supervisor(lease_s=10.0)
    seen = [supervisor.revision]
    supervisor.desire([ROUTER], 0.0)
    seen.append(supervisor.revision)
    supervisor.on_started(ROUTER.id, 1, 101, 0.0)
    seen.append(supervisor.revision)
    supervisor.on_heartbeat(ROUTER.id, 1, "tcp://127.0.0.1:99", {"jobs": 0}, 1.0)
    seen.append(supervisor.revision)
    supervisor.on_heartbeat(ROUTER.id, 1, "tcp://127.0.0.1:99", {"jobs": 2}, 2.0)
    assert supervisor.revision == seen[-1]
    supervisor.on_ended(ROUTER.id, 1, 3.0)
    seen.append(supervisor.revision)
    assert sorted(set(seen)) == seen
    assert seen[0] > 0  # 0 is who has seen nothing


def test_what_falls_silent_is_killed_and_then_started_again() -> None:
    supervisor = running(ROUTER, SHARD)
    supervisor.on_heartbeat(ROUTER.id, 1, "", {}, 0.0)
    supervisor.on_heartbeat(SHARD.id, 2, "", {}, 9.0)
    assert supervisor.tick(9.0) == []
    assert supervisor.tick(10.0) == [Kill(ROUTER.id, 1)]
    assert supervisor.tick(11.0) == []
    assert supervisor.on_ended(ROUTER.id, 1, 12.0) == [Spawn(ROUTER, 3, "")]


def test_what_is_not_desired_any_more_is_killed_and_forgotten() -> None:
    supervisor = running(ROUTER, SHARD)
    assert supervisor.desire([ROUTER], 1.0) == [Kill(SHARD.id, 2)]
    assert not supervisor.on_heartbeat(SHARD.id, 2, "", {}, 1.0)
    assert [view.id for view in supervisor.views()] == [ROUTER.id]
    assert supervisor.on_ended(SHARD.id, 2, 2.0) == [CleanUp(SHARD.id)]
    assert supervisor.desire([ROUTER, SHARD], 3.0) == [Spawn(SHARD, 3, "")]


def test_what_waits_to_be_started_and_is_not_desired_any_more_is_forgotten() -> None:
    supervisor = running(ROUTER)
    assert supervisor.on_ended(ROUTER.id, 1, 0.0) == [Spawn(ROUTER, 2, "")]
    supervisor.on_started(ROUTER.id, 2, 102, 0.0)
    assert supervisor.on_ended(ROUTER.id, 2, 0.0) == []
    assert supervisor.desire([], 0.0) == [CleanUp(ROUTER.id)]
    assert supervisor.tick(100.0) == []


def test_what_is_desired_anew_while_it_ends_is_started_afterwards() -> None:
    supervisor = running(ROUTER)
    assert supervisor.desire([], 1.0) == [Kill(ROUTER.id, 1)]
    assert supervisor.desire([ROUTER], 2.0) == []
    assert supervisor.is_stopped(ROUTER.id, 1), "its end is told as one that was wanted"
    assert supervisor.on_ended(ROUTER.id, 1, 3.0) == [Spawn(ROUTER, 2, "")]
    assert not supervisor.is_stopped(ROUTER.id, 2)
    assert [one.restarts for one in supervisor.views()] == [0], "nothing has failed"


def test_other_arguments_replace_a_process() -> None:
    supervisor = running(ROUTER)
    other = Launch(ROUTER.id, "router", b"other")
    assert supervisor.desire([other], 1.0) == [Kill(ROUTER.id, 1)]
    assert supervisor.on_ended(ROUTER.id, 1, 2.0) == [Spawn(other, 2, "")]


def test_other_settings_do_not_replace_a_process_but_reach_it() -> None:
    supervisor = running(ROUTER)
    settled = Launch(ROUTER.id, "router", ROUTER.arguments, b"settings")
    assert supervisor.desire([settled], 1.0) == []
    assert supervisor.on_heartbeat(ROUTER.id, 1, "", {}, 1.0)
    assert supervisor.settings_of(ROUTER.id) == b"settings"
    assert supervisor.on_ended(ROUTER.id, 1, 20.0) == [Spawn(settled, 2, "")]


def test_restarts_are_counted() -> None:
    supervisor = running(ROUTER, SHARD)
    incarnation, now = 1, 0.0
    for _ in range(3):
        now += 2 * STABLE_S
        (told,) = supervisor.on_ended(ROUTER.id, incarnation, now)
        assert isinstance(told, Spawn)
        incarnation = told.incarnation
        supervisor.on_started(ROUTER.id, incarnation, 1, now)
    assert {view.id: view.restarts for view in supervisor.views()} == {ROUTER.id: 3, SHARD.id: 0}


def test_strangers_are_told_that_nobody_wants_them() -> None:
    supervisor = running(ROUTER)
    assert not supervisor.on_heartbeat("unknown", 1, "", {}, 0.0)
    assert not supervisor.on_heartbeat(ROUTER.id, 7, "", {}, 0.0)


def workers(count: int) -> list[Launch]:
    return [Launch(f"{SHARD.id}/worker-{number}", "worker", b"w") for number in range(count)]


def spawned(told: list[object], supervisor: Supervisor, now: float) -> list[Spawn]:
    """Have these started."""
    spawns = [one for one in told if isinstance(one, Spawn)]
    for spawn in spawns:
        supervisor.on_started(spawn.launch.id, spawn.incarnation, 100 + spawn.incarnation, now)
    return spawns


def test_who_is_starting_is_not_silent() -> None:
    supervisor = running(ROUTER)
    assert supervisor.tick(START_S - 1.0) == []
    assert supervisor.tick(START_S) == [Kill(ROUTER.id, 1)]


def test_a_start_that_makes_progress_is_not_killed_and_a_repeated_one_gets_more_time() -> None:
    supervisor = running(ROUTER)
    now, limit = 100.0, START_S
    for then, used in ((50.0, 1), (now, 2), (now + 10.0, 2)):
        supervisor.note_progress(lambda pid: (pid, used), then)  # noqa: B023
    for incarnation in range(1, MAX_DOUBLINGS + 3):
        assert supervisor.tick(now + limit - 1.0) == []
        now += limit
        assert supervisor.tick(now) == [Kill(ROUTER.id, incarnation)]
        (spawn,) = supervisor.on_ended(ROUTER.id, incarnation, now)
        assert spawn == Spawn(ROUTER, incarnation + 1, "")
        assert supervisor.on_started(ROUTER.id, incarnation + 1, 1, now) == []
        limit = min(2 * limit, START_S * 2**MAX_DOUBLINGS)
    supervisor.on_heartbeat(ROUTER.id, incarnation + 1, "", {}, now)
    supervisor.note_progress(lambda pid: pytest.fail("it has sent a heartbeat"), now)
    assert supervisor.tick(now + 10.0) == [Kill(ROUTER.id, incarnation + 1)]
    supervisor.on_ended(ROUTER.id, incarnation + 1, now)
    supervisor.on_started(ROUTER.id, incarnation + 2, 1, now)
    assert supervisor.tick(now + START_S) == [Kill(ROUTER.id, incarnation + 2)]


@pytest.mark.parametrize("returns", [False, True])
def test_a_process_that_is_not_desired_once_it_is_launched_is_killed(returns: bool) -> None:
    """Its launch takes time; meanwhile it may even be desired again, with other arguments."""
    supervisor = Supervisor(lease_s=10.0)
    assert supervisor.desire([ROUTER], 0.0) == [Spawn(ROUTER, 1, "")]
    assert supervisor.desire([], 1.0) == []
    again = Launch(ROUTER.id, ROUTER.role, b"other")
    assert supervisor.desire([again] * returns, 2.0) == []
    assert supervisor.on_started(ROUTER.id, 1, 101, 3.0) == [Kill(ROUTER.id, 1)]
    assert supervisor.is_stopped(ROUTER.id, 1)
    assert supervisor.on_ended(ROUTER.id, 1, 4.0) == ([Spawn(again, 2, "")] if returns else [CleanUp(ROUTER.id)])


def test_workers_are_started_as_those_before_have_come_up_and_services_at_once() -> None:
    supervisor = Supervisor(lease_s=10.0, max_starting=2)
    begun = spawned(supervisor.desire([*workers(5), ROUTER, SHARD], 0.0), supervisor, 0.0)
    assert [spawn.launch.role for spawn in begun] == ["router", "shard", "worker", "worker"]
    assert supervisor.next_due is None
    supervisor.on_heartbeat(begun[2].launch.id, begun[2].incarnation, "", {}, 1.0)
    assert supervisor.tick(1.0) == []  # it is heard, and has not loaded its dataset
    supervisor.on_heartbeat(begun[2].launch.id, begun[2].incarnation, "", {"up": True}, 2.0)
    assert supervisor.next_due == 0.0
    assert len(spawned(supervisor.tick(2.0), supervisor, 2.0)) == 1
    # One that does not come up keeps the others waiting for so long and no longer.
    assert len(spawned(supervisor.tick(START_PACE_S), supervisor, START_PACE_S)) == 1


def false_starts(supervisor: Supervisor, now: float, until: float) -> int:
    """How often a worker is started that always imports for longer than `STABLE_S`, and ends before it is up."""
    count = 0
    while (due := supervisor.next_due) is not None and max(due, now) < until:
        now = max(due, now)
        for spawn in spawned([*supervisor.tick(now)], supervisor, now):
            count += 1
            supervisor.on_heartbeat(spawn.launch.id, spawn.incarnation, "", {}, now + 1.0)
            now += STABLE_S + 1.0
            assert spawned([*supervisor.on_ended(spawn.launch.id, spawn.incarnation, now)], supervisor, now) == []
    return count


def test_a_worker_that_never_comes_up_is_started_later_and_later_and_not_while_none_needs_it() -> None:
    supervisor = Supervisor(lease_s=10.0)
    (worker,) = workers(1)
    (first,) = spawned([*supervisor.desire([worker], 0.0)], supervisor, 0.0)
    (second,) = spawned([*supervisor.on_ended(worker.id, first.incarnation, STABLE_S)], supervisor, STABLE_S)
    assert supervisor.on_ended(worker.id, second.incarnation, 2 * STABLE_S) == []
    assert 10 < false_starts(supervisor, 2 * STABLE_S, 1000.0) < 1000.0 / RETRY_S + 10
    idle = Launch(worker.id, worker.role, worker.arguments, needed=False)
    assert supervisor.desire([idle], 1000.0) == []
    assert false_starts(supervisor, 1000.0, 2000.0) == 0
    assert supervisor.tick(2000.0) == []
    (spawn,) = spawned([*supervisor.desire([worker], 2000.0)], supervisor, 2000.0)
    supervisor.on_heartbeat(worker.id, spawn.incarnation, "", {"up": True}, 2001.0)
    supervisor.desire([idle], 2001.0)
    assert len(supervisor.on_ended(worker.id, spawn.incarnation, 2010.0)) == 1, "it was up"


def test_no_more_are_started_than_there_may_be_and_services_come_first() -> None:
    supervisor = Supervisor(lease_s=10.0, most=4)
    begun = spawned(supervisor.desire([*workers(5), ROUTER, SHARD], 0.0), supervisor, 0.0)
    assert [spawn.launch.role for spawn in begun] == ["router", "shard", "worker", "worker"]
    assert supervisor.refused == 3
    assert supervisor.next_due is None
    assert supervisor.on_ended(begun[2].launch.id, begun[2].incarnation, 5.0) != []
    supervisor.desire([*workers(2), ROUTER, SHARD], 6.0)
    assert supervisor.refused == 0


def test_nobody_is_killed_where_all_are_late() -> None:
    supervisor = Supervisor(lease_s=10.0)
    launches = [ROUTER, SHARD, *workers(6)]
    begun = spawned(supervisor.desire(launches, 0.0), supervisor, 0.0)
    for now in range(0, 90, 9):
        for spawn in begun:
            assert supervisor.on_heartbeat(spawn.launch.id, spawn.incarnation, "", {"up": True}, float(now))
    frozen, *others = begun
    killed: list[float] = []
    for now in range(82, 160):
        if now % 9 == 0:
            for spawn in others:
                assert supervisor.on_heartbeat(spawn.launch.id, spawn.incarnation, "", {"up": True}, float(now))
        if (told := supervisor.tick(float(now))) != []:
            assert told == [Kill(frozen.launch.id, frozen.incarnation)]
            killed.append(now - 81.0)
    # Not at the end of its lease; but it has hung all along, and is not waited for for ever.
    assert len(killed) == 1
    assert 20.0 < killed[0] <= 10.0 * MAX_LEASE_FACTOR


@settings(deadline=None)
@given(data=st.data())
def test_paces_and_leases_hold_whatever_happens(data: st.DataObject) -> None:
    most, starting = data.draw(st.integers(2, 8)), data.draw(st.integers(1, 3))
    supervisor = Supervisor(lease_s=10.0, most=most, max_starting=starting)
    #: By id: the incarnation, when it was started, when it was heard, and whether it has come up.
    running: dict[str, tuple[int, float, float | None, bool]] = {}
    now = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.5, 1.0, 4.0]))
        action = data.draw(st.sampled_from(["desire", "end", "heartbeat", "up", "tick"]))
        told: list[object] = []
        if action == "desire":
            told = [*supervisor.desire([ROUTER, SHARD, *workers(data.draw(st.integers(0, 9)))], now)]
        elif action == "tick":
            told = [*supervisor.tick(now)]
        elif running:
            id = data.draw(st.sampled_from(sorted(running)))
            incarnation, began, heard, up = running[id]
            if action == "end":
                del running[id]
                told = [*supervisor.on_ended(id, incarnation, now)]
            elif supervisor.on_heartbeat(id, incarnation, "", {"up": action == "up"}, now):
                running[id] = (incarnation, began, now, up or action == "up")
        for one in told:
            if isinstance(one, Kill) and supervisor.is_desired(one.id, one.incarnation):
                _, began, heard, _ = running[one.id]
                assert now - (began if heard is None else heard) >= (START_S if heard is None else 10.0)
            elif isinstance(one, Spawn):
                assert one.launch.id not in running, "it is started while it runs"
                running[one.launch.id] = (one.incarnation, now, None, False)
                supervisor.on_started(one.launch.id, one.incarnation, 1, now)
        assert len(running) <= most
        assert (
            sum("worker" in id and not up and now - began < START_PACE_S for id, (_, began, _, up) in running.items())
            <= starting
        )
