"""What a node starts, ends and starts again."""

from __future__ import annotations

import itertools

import pytest

from torch_dpflow.remote.protocol import Launch
from torch_dpflow.remote.supervision import LONGEST_PAUSE_S, SETTLED_S, Forget, Kill, Spawn, Supervisor

ROUTER, SHARD = Launch("flow@1/router", "router", b"a"), Launch("flow@1/shard-0", "shard", b"b")


def running(*launches: Launch) -> Supervisor:
    supervisor = Supervisor(lease_s=10.0)
    for spawn in supervisor.desire(launches, 0.0):
        assert isinstance(spawn, Spawn)
        supervisor.started(spawn.launch.id, spawn.incarnation, 100 + spawn.incarnation, 0.0)
    return supervisor


def test_what_is_desired_is_started_once() -> None:
    supervisor = Supervisor(lease_s=10.0)
    assert supervisor.desire([ROUTER, SHARD], 0.0) == [Spawn(ROUTER, 1, ""), Spawn(SHARD, 2, "")]
    assert supervisor.desire([ROUTER, SHARD], 1.0) == []


def test_what_ends_is_started_again_where_it_was() -> None:
    supervisor = running(ROUTER)
    assert supervisor.beat(ROUTER.id, 1, "tcp://127.0.0.1:99", {"jobs": 2}, 1.0)
    assert supervisor.ended(ROUTER.id, 1, 20.0) == [Spawn(ROUTER, 2, "tcp://127.0.0.1:99")]
    assert supervisor.ended(ROUTER.id, 1, 21.0) == []
    assert [(view.incarnation, view.status) for view in supervisor.views()] == [(2, {"jobs": 2})]


def test_where_a_process_listens_is_told_once_it_has_said_so_itself() -> None:
    """The one before it may have listened elsewhere: somebody else may have the port now."""
    supervisor = running(ROUTER)
    supervisor.beat(ROUTER.id, 1, "tcp://127.0.0.1:99", {}, 1.0)
    assert supervisor.address_of(ROUTER.id) == "tcp://127.0.0.1:99"
    supervisor.ended(ROUTER.id, 1, 20.0)
    assert [view.address for view in supervisor.views()] == [""]
    assert supervisor.address_of(ROUTER.id) == ""
    seen = supervisor.revision
    supervisor.beat(ROUTER.id, 2, "tcp://127.0.0.1:99", {}, 21.0)
    assert supervisor.revision > seen
    assert [view.address for view in supervisor.views()] == ["tcp://127.0.0.1:99"]
    assert supervisor.address_of("other") == ""


def test_what_ends_at_once_again_and_again_is_started_later_and_later() -> None:
    supervisor = running(ROUTER)
    now, pauses = 0.0, []
    for incarnation in range(1, 15):
        told = supervisor.ended(ROUTER.id, incarnation, now)
        if not told:
            due = supervisor.next_due
            assert due is not None
            assert supervisor.tick(due - 0.001) == []
            pauses.append(due - now)
            now = due
            told = supervisor.tick(now)
        assert told == [Spawn(ROUTER, incarnation + 1, "")]
        supervisor.started(ROUTER.id, incarnation + 1, 1, now)
    assert all(later >= 0.99 * sooner for sooner, later in itertools.pairwise(pauses))
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S)
    assert supervisor.ended(ROUTER.id, 15, now + SETTLED_S) == [Spawn(ROUTER, 16, "")]


def test_a_revision_is_of_what_runs_and_not_of_what_it_says() -> None:
    supervisor = Supervisor(lease_s=10.0)
    seen = [supervisor.revision]
    supervisor.desire([ROUTER], 0.0)
    seen.append(supervisor.revision)
    supervisor.started(ROUTER.id, 1, 101, 0.0)
    seen.append(supervisor.revision)
    supervisor.beat(ROUTER.id, 1, "tcp://127.0.0.1:99", {"jobs": 0}, 1.0)
    seen.append(supervisor.revision)
    supervisor.beat(ROUTER.id, 1, "tcp://127.0.0.1:99", {"jobs": 2}, 2.0)
    assert supervisor.revision == seen[-1]
    supervisor.ended(ROUTER.id, 1, 3.0)
    seen.append(supervisor.revision)
    assert sorted(set(seen)) == seen
    assert seen[0] > 0  # 0 is who has seen nothing


def test_what_falls_silent_is_killed_and_then_started_again() -> None:
    supervisor = running(ROUTER, SHARD)
    supervisor.beat(SHARD.id, 2, "", {}, 5.0)
    assert supervisor.tick(9.0) == []
    assert supervisor.tick(10.0) == [Kill(ROUTER.id, 1)]
    assert supervisor.tick(11.0) == []
    assert supervisor.ended(ROUTER.id, 1, 12.0) == [Spawn(ROUTER, 3, "")]


def test_what_is_not_desired_any_more_is_killed_and_forgotten() -> None:
    supervisor = running(ROUTER, SHARD)
    assert supervisor.desire([ROUTER], 1.0) == [Kill(SHARD.id, 2)]
    assert not supervisor.beat(SHARD.id, 2, "", {}, 1.0)
    assert [view.id for view in supervisor.views()] == [ROUTER.id]
    assert supervisor.ended(SHARD.id, 2, 2.0) == [Forget(SHARD.id)]
    assert supervisor.desire([ROUTER, SHARD], 3.0) == [Spawn(SHARD, 3, "")]


def test_what_waits_to_be_started_and_is_not_desired_any_more_is_forgotten() -> None:
    supervisor = running(ROUTER)
    assert supervisor.ended(ROUTER.id, 1, 0.0) == [Spawn(ROUTER, 2, "")]
    supervisor.started(ROUTER.id, 2, 102, 0.0)
    assert supervisor.ended(ROUTER.id, 2, 0.0) == []
    assert supervisor.desire([], 0.0) == [Forget(ROUTER.id)]
    assert supervisor.tick(100.0) == []


def test_what_is_desired_anew_while_it_ends_is_started_afterwards() -> None:
    supervisor = running(ROUTER)
    assert supervisor.desire([], 1.0) == [Kill(ROUTER.id, 1)]
    assert supervisor.desire([ROUTER], 2.0) == []
    assert supervisor.ended(ROUTER.id, 1, 3.0) == [Spawn(ROUTER, 2, "")]


def test_other_arguments_replace_a_process() -> None:
    supervisor = running(ROUTER)
    other = Launch(ROUTER.id, "router", b"other")
    assert supervisor.desire([other], 1.0) == [Kill(ROUTER.id, 1)]
    assert supervisor.ended(ROUTER.id, 1, 2.0) == [Spawn(other, 2, "")]


def test_other_settings_do_not_replace_a_process_but_reach_it() -> None:
    supervisor = running(ROUTER)
    settled = Launch(ROUTER.id, "router", ROUTER.arguments, b"settings")
    assert supervisor.desire([settled], 1.0) == []
    assert supervisor.beat(ROUTER.id, 1, "", {}, 1.0)
    assert supervisor.settings_of(ROUTER.id) == b"settings"
    assert supervisor.ended(ROUTER.id, 1, 20.0) == [Spawn(settled, 2, "")]


def test_restarts_are_counted() -> None:
    supervisor = running(ROUTER, SHARD)
    incarnation, now = 1, 0.0
    for _ in range(3):
        now += 2 * SETTLED_S
        (told,) = supervisor.ended(ROUTER.id, incarnation, now)
        assert isinstance(told, Spawn)
        incarnation = told.incarnation
        supervisor.started(ROUTER.id, incarnation, 1, now)
    assert {view.id: view.restarts for view in supervisor.views()} == {ROUTER.id: 3, SHARD.id: 0}


def test_strangers_are_told_that_nobody_wants_them() -> None:
    supervisor = running(ROUTER)
    assert not supervisor.beat("unknown", 1, "", {}, 0.0)
    assert not supervisor.beat(ROUTER.id, 7, "", {}, 0.0)
