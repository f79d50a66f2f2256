"""The life of a fleet's workers, arc by arc; `test_lifecycle_properties` has what always holds."""

from __future__ import annotations

import pytest

from tests.remote.fleet.fleet_cases import (
    LEAST_S,
    MOST_S,
    PREFIX,
    Prompt,
    come,
    fleet,
    fleet_limits,
    named,
    only,
    starts,
    states,
    working,
)
from torch_dpflow.errors import (
    DeniedError,
    ExpiredError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)
from torch_dpflow.remote.fleet.lifecycle import (
    LEAVE_S,
    MAX_FALSE_STARTS,
    READY_S,
    STOP_S,
    Fleet,
)
from torch_dpflow.remote.fleet.worker_states import (
    AWAY_PAUSE_S,
    MAX_PAUSE_S,
    RAISE_S,
    RENEW_S,
    AdmitWorker,
    CheckWorker,
    DrainWorker,
    Fail,
    FleetInstruction,
    RejectWorker,
    Report,
    StartWorker,
    StopWorker,
)
from torch_dpflow.remote.launchers.contract import Accepted, Answerless, Ended, Refused
from torch_dpflow.workers.platform import End


def test_a_worker_that_is_connected_and_never_ready_is_replaced() -> None:
    """Its handshake may be lost, or the user's code does not return; while it fetches content it has time."""
    machine = fleet()
    machine.target(1, 0.0)
    machine.handle(Accepted(named(0, 1), "ref"), 1.0)
    machine.arrived(named(0, 1), "", 1.0)
    machine.progressed(named(0, 1), 100.0)
    assert only(RejectWorker, machine.tick(99.0 + READY_S)) == []
    (rejected,) = only(RejectWorker, machine.tick(100.0 + READY_S))
    assert rejected.name == named(0, 1)
    assert "not become ready" in rejected.why
    assert starts(machine.tick(101.0 + READY_S)) == [named(0, 2)]


@pytest.mark.parametrize("has_been_ready", [False, True])
def test_the_first_worker_that_hangs_at_an_import_ends_the_fleet_unless_another_was_ready(has_been_ready: bool) -> None:
    machine = fleet()
    machine.target(2, 0.0)
    if has_been_ready:
        come(machine, named(0, 1), 0.0)
    machine.arrived(named(1, 2), "", 0.0)
    machine.workers[-1].importing = "it was importing unfit"
    told, reason = machine.tick(READY_S), f"it has not become ready within {READY_S:g} s; it was importing unfit"
    assert only(RejectWorker, told) == [RejectWorker(named(1, 2), reason)]
    assert [one.text for one in only(Fail, told)] == ([] if has_been_ready else [reason])


def test_a_worker_lives_from_its_start_to_its_end() -> None:
    machine = fleet(lifetime_s=100.0)
    assert machine.target(1, 0.0) == [StartWorker(named(0, 1), 0, 1, 100.0)]
    assert states(machine) == {"0-1": "requested"}
    assert machine.handle(Accepted(named(0, 1), "ref"), 1.0) == []
    assert states(machine) == {"0-1": "starting"}
    assert machine.arrived(named(0, 1), "", 2.0) == []
    assert states(machine) == {"0-1": "on deck"}
    assert machine.arrived(named(0, 1), "", 2.5) == [], "hellos are repeated"
    assert machine.ready(named(0, 1), 3.0) == [AdmitWorker(named(0, 1))]
    assert machine.target(0, 4.0) == [DrainWorker(named(0, 1))]
    assert machine.goodbye(named(0, 1), 5.0) == [CheckWorker(named(0, 1))]
    assert states(machine) == {"0-1": "leaving"}
    assert machine.handle(Ended(named(0, 1), End(code=0)), 6.0) == []
    assert machine.workers == []


def test_what_follows_from_several_events_is_said_together() -> None:
    machine = Fleet(PREFIX, fleet_limits(), draw=lambda: 0.5)
    machine.target(2)
    first, second = starts(machine.tick(0.0))
    for name in (first, second):
        machine.handle(Accepted(name, "ref"), 1.0)
        machine.arrived(name, "", 1.0)
        machine.ready(name)
    machine.handle(Ended(second, End(code=1)), 1.0)
    assert machine.tick(1.0) == [AdmitWorker(first), StartWorker(named(1, 3), 1, 3, None)]


def test_one_that_calls_before_its_start_was_answered_is_not_taken_for_refused() -> None:
    machine = fleet()
    machine.target(1, 0.0)
    machine.arrived(named(0, 1), "", 1.0)
    assert machine.handle(Refused(named(0, 1), UnavailableError("503")), 2.0) == []
    assert machine.handle(Accepted(named(0, 1), "ref"), 2.0) == []
    assert states(machine) == {"0-1": "on deck"}


@pytest.mark.parametrize(
    ("error", "by", "pause_s"),
    [
        (ThrottledError("slow down"), "throttling", 0.25),
        (ThrottledError("slow down", 7.0), "throttling", 7.0),
        (UnavailableError("503"), "platform", 0.25),
        (DeniedError("no right"), "credentials", RENEW_S + 0.25),
        (ExpiredError("expired"), "credentials", RENEW_S + 0.25),
        (QuotaError("full"), "quota", 0.25),
    ],
)
def test_refusals_are_waited_out_and_told(error: PlatformError, by: str, pause_s: float) -> None:
    machine = fleet()
    machine.target(1, 0.0)
    assert machine.handle(Refused(named(0, 1), error), 1.0) == [Report(by, str(error))]
    assert machine.limited_by == by
    assert machine.tick(1.0 + pause_s - 0.01) == []
    assert starts(machine.tick(1.0 + pause_s)) == [named(0, 2)]
    assert come(machine, named(0, 2), 100.0)[-1] == AdmitWorker(named(0, 2))
    assert machine.limited_by == ""


def test_after_a_refusal_one_start_is_tried_at_a_time() -> None:
    machine = fleet()
    for name in starts(machine.target(4, 0.0)):
        machine.handle(Refused(name, UnavailableError("503")), 0.0)
    now = MAX_PAUSE_S
    (tried,) = starts(machine.tick(now))
    assert starts(machine.tick(now + 1.0)) == []
    assert len(starts(machine.handle(Accepted(tried, "ref"), now + 2.0))) == 3


def test_a_quota_is_a_ceiling_that_rises_by_one_a_minute() -> None:
    machine = fleet()
    names = starts(machine.target(5, 0.0))
    for name in names[:3]:
        come(machine, name, 1.0)
    for name in names[3:]:
        machine.handle(Refused(name, QuotaError("full")), 10.0)
    assert starts(machine.tick(9.0 + RAISE_S)) == []
    (one,) = starts(machine.tick(10.0 + RAISE_S))
    assert starts(machine.handle(Refused(one, QuotaError("full")), 10.0 + RAISE_S)) == []
    assert starts(machine.handle(Ended(names[0], End(code=1)), 11.0 + RAISE_S)) == [named(0, 7)], "below it at once"


def test_once_there_is_room_again_all_that_are_missing_are_started_at_once() -> None:
    machine = fleet()
    names = starts(machine.target(5, 0.0))
    come(machine, names[0], 1.0)
    for name in names[1:]:
        machine.handle(Refused(name, QuotaError("full")), 10.0)
    (one,) = starts(machine.tick(10.0 + RAISE_S))
    assert len(starts(machine.handle(Accepted(one, "ref"), 11.0 + RAISE_S))) == 3


def test_workers_that_were_accepted_before_the_platform_was_full_show_no_room() -> None:
    machine = fleet()
    names = starts(machine.target(5, 0.0))
    for name in names[2:]:
        machine.handle(Refused(name, QuotaError("full")), 10.0)
    for name in names[:2]:
        assert starts(come(machine, name, 11.0)) == []


def lost(machine: Prompt, now: float) -> list[str]:
    """All workers end; the names of those that are started in their places."""
    told: list[FleetInstruction] = []
    for name in [one.name for one in machine.workers]:
        told += machine.goodbye(name, now)
        told += machine.handle(Ended(name, End()), now)
    return starts(told)


@pytest.mark.parametrize("error", [QuotaError("no node has any room"), UnavailableError("no answer")])
def test_workers_of_a_platform_that_was_away_come_back_together(error: PlatformError) -> None:
    machine, now = working(4), 100.0
    asked = lost(machine, now)
    while now < 160.0:  # refused again and again
        for name in asked:
            machine.handle(Refused(name, error), now)
        now += 1.0
        asked = starts(machine.tick(now))
    while not asked:
        now += 1.0
        asked = starts(machine.tick(now))
    assert now <= 160.0 + MAX_PAUSE_S
    assert isinstance(error, QuotaError) or now <= 160.0 + AWAY_PAUSE_S
    told = machine.handle(Accepted(asked[0], "ref"), now)
    assert len([*asked, *starts(told)]) == 4


def test_starts_that_a_platform_never_answers_are_no_sign_of_a_lack_of_room() -> None:
    machine = working(4)
    asked = lost(machine, 100.0)
    assert len(asked) == 4
    overdue = 100.0 + LEAST_S + LEAVE_S
    machine.tick(100.0 + LEAST_S)
    told = machine.tick(overdue)
    assert machine.limited_by == "platform"
    assert "has not answered for its start" in only(Report, told)[0].text
    for name in asked:
        told = machine.handle(Ended(name, End()), overdue)
    again = [*starts(told), *starts(machine.tick(overdue + AWAY_PAUSE_S))]
    assert again
    told = machine.handle(Accepted(again[0], "ref"), overdue + AWAY_PAUSE_S + 1.0)
    assert len([*again, *starts(told)]) == 4


def test_a_rejected_start_fails_the_fleet() -> None:
    machine = working(1)
    machine.target(2, 2.0)
    told = machine.handle(Refused(named(1, 2), RejectedError("no image")), 3.0)
    assert Fail("no image") in told
    assert starts(machine.target(5, 1000.0)) == []
    assert states(machine)["0-1"] == "working", "who works goes on"
    machine.retry()
    assert starts(machine.tick(1001.0)) == [named(number, number + 2) for number in range(1, 5)]


def test_a_worker_whose_answer_was_lost_may_come_or_is_stopped_by_its_name() -> None:
    machine = fleet()
    machine.target(2, 0.0)
    for number in (0, 1):
        told = machine.handle(Answerless(named(number, number + 1), "timed out"), 1.0)
        assert told == ([] if number else [Report("starts without an answer", "timed out")])
    machine.arrived(named(0, 1), "", 2.0)
    # What has come in two seconds teaches that the others come soon too.
    assert machine.tick(1.0 + MOST_S) == [CheckWorker(named(1, 2))]
    told = machine.tick(1.0 + MOST_S + LEAVE_S)
    assert [stop.name for stop in only(StopWorker, told)] == [named(1, 2)]
    told = machine.arrived(named(1, 2), "", 70.0)
    assert told[0] == RejectWorker(named(1, 2), "it is not expected any more")


def test_how_long_a_start_may_take_is_learned() -> None:
    machine = working(3)  # in a second each
    (late,) = starts(machine.target(4, 100.0))
    machine.handle(Accepted(late, "ref"), 100.0)
    assert machine.tick(100.0 + LEAST_S - 0.1) == []
    assert machine.tick(100.0 + LEAST_S) == [CheckWorker(late)]


def test_who_waits_for_room_that_a_platform_does_not_have_is_a_ceiling_too() -> None:
    machine = fleet()
    names = starts(machine.target(6, 0.0))
    for name in names[:2]:
        come(machine, name, 1.0)
    for name in names[2:]:
        machine.handle(Accepted(name, "ref"), 1.0)
    machine.tick(1.0 + MOST_S)
    told = machine.tick(1.0 + MOST_S + LEAVE_S)
    assert [stop.name for stop in only(StopWorker, told)] == names[2:]
    assert only(Fail, told) == [], "two work"
    assert machine.limited_by == "workers that do not connect"
    stopped_at = 1.0 + MOST_S + LEAVE_S
    assert starts(machine.tick(stopped_at + STOP_S)) == []
    assert len(starts(machine.tick(stopped_at + RAISE_S))) == 1


def test_workers_that_never_call_fail_the_fleet_with_their_last_words() -> None:
    machine = fleet()
    now = 0.0
    told = machine.target(1, now)
    for _ in range(MAX_FALSE_STARTS):
        (name,) = starts(told) or starts(machine.tick(now := now + MAX_PAUSE_S))
        told = machine.handle(Ended(name, End(code=1, place="pid 7", report="no module named foo")), now)
    (failure,) = only(Fail, told)
    assert "3 workers were started and none could be used" in failure.text
    assert "no module named foo" in failure.text


def test_an_unfit_worker_is_refused_and_three_for_one_reason_fail_the_fleet() -> None:
    machine = fleet()
    now = 0.0
    told = machine.target(1, now)
    for count in range(1, MAX_FALSE_STARTS + 1):
        (name,) = starts(told) or starts(machine.tick(now := now + MAX_PAUSE_S))
        told = machine.arrived(name, "image has 0.1, the cluster 0.2", now)
        assert only(RejectWorker, told) == [RejectWorker(name, "image has 0.1, the cluster 0.2")]
        assert bool(only(Fail, told)) is (count == MAX_FALSE_STARTS)
        assert only(AdmitWorker, machine.ready(name, now)) == []
        told = machine.handle(Ended(name, End(code=0)), now)
    assert starts(machine.tick(now + 1000.0)) == []


def test_why_a_worker_is_unfit_is_reported_without_its_traceback() -> None:
    """That is told with its end."""
    machine = fleet()
    (name,) = starts(machine.target(1, 0.0))
    machine.arrived(name, "", 0.0)
    machine.unfit(name, "Traceback (most recent call last):\n  ...\nKeyboardInterrupt", 0.0)
    assert only(Report, machine.tick(0.0)) == [Report("unfit workers", "KeyboardInterrupt")]


def test_workers_that_died_are_replaced_in_their_places() -> None:
    machine = working(3)
    assert starts(machine.handle(Ended(named(1, 2), End(signal=9)), 5.0)) == [named(1, 4)]
    told = machine.goodbye(named(0, 1), 6.0)
    assert told == [CheckWorker(named(0, 1)), StartWorker(named(0, 5), 0, 5, None)], "one may be too many meanwhile"
    machine.goodbye(named(2, 3), 6.0)
    assert starts(machine.tick(7.0)) == [], "two may not"
    for name in (named(1, 4), named(0, 5)):
        come(machine, name, 7.0)
    assert only(StopWorker, machine.tick(6.0 + LEAVE_S)) == [
        StopWorker(named(0, 1), "it has not ended in time"),
        StopWorker(named(2, 3), "it has not ended in time"),
    ]
    assert starts(machine.tick(6.0 + LEAVE_S + STOP_S)) == [named(2, 6)]
