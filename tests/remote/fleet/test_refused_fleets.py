"""What a fleet waits out of the refusals of its platform, for how long, and what it does not wait for."""

from __future__ import annotations

import pytest

from tests.remote.fleet.fleet_cases import (
    Prompt,
    come,
    fleet,
    named,
    only,
    starts,
    working,
)
from torch_dpflow.errors import (
    DeniedError,
    ExpiredError,
    PlatformError,
    QuotaError,
    ThrottledError,
    UnavailableError,
)
from torch_dpflow.remote.fleet.worker_states import DENIED_S, REFUSED_TIMEOUT_S, RENEW_S, UNTRIED_S, Fail
from torch_dpflow.remote.launchers.contract import Ended, Refused
from torch_dpflow.workers.platform import End

DENIED = DeniedError("403 no right")


def refused(machine: Prompt, error: PlatformError, begin: float, until: float) -> list[tuple[float, str]]:
    """Refuse every start until then; the failures, and when they were told."""
    failures, now = [], begin
    while now < until:
        for one in machine.workers:
            if not one.arrived:
                told = machine.handle(Refused(one.name, error), now)
                failures += [(now, fail.text) for fail in only(Fail, told)]
        now += 1.0
        machine.tick(now)
    return failures


def test_credentials_that_are_wrong_are_looked_up_once_more_and_fail_the_fleet() -> None:
    machine = fleet()
    for name in starts(machine.target(3, 0.0)):
        assert only(Fail, machine.handle(Refused(name, DENIED), 1.0)) == [], "all of one moment are one refusal"
    (again,) = starts(machine.tick(1.0 + RENEW_S + 0.5))
    assert only(Fail, machine.handle(Refused(again, DENIED), 4.0)) == [Fail(str(DENIED))]
    assert starts(machine.tick(1000.0)) == []
    machine.retry()
    assert len(starts(machine.tick(1001.0))) == 3


def test_they_fail_nobody_while_a_worker_works_and_do_once_none_is_left() -> None:
    machine = working(1)
    machine.target(2, 2.0)
    assert refused(machine, DENIED, 2.0, 200.0) == []
    machine.handle(Ended(named(0, 1), End(code=1)), 200.0)
    ((when, text),) = refused(machine, DENIED, 200.0, 400.0)
    assert text == str(DENIED)
    assert when <= 201.0 + 2 * DENIED_S


def test_a_denial_that_has_passed_is_forgotten() -> None:
    machine = fleet()
    machine.target(1, 0.0)
    for now in (0.0, 100.0):
        (asked,) = [one.name for one in machine.workers]
        machine.handle(Refused(asked, DENIED), now)
        (name,) = starts(machine.tick(now + 2.0))
        come(machine, name, now + 3.0)
        machine.handle(Ended(name, End(code=1)), now + 50.0)
        machine.tick(now + 60.0)
    assert not machine.failure


@pytest.mark.parametrize(
    ("error", "tried", "reconnect_timeout_s"),
    [
        (ExpiredError("expired"), True, REFUSED_TIMEOUT_S),
        (ExpiredError("expired"), False, UNTRIED_S),
        (UnavailableError("503"), True, REFUSED_TIMEOUT_S),
        (UnavailableError("no such host"), False, UNTRIED_S),
        (ThrottledError("slow down"), False, REFUSED_TIMEOUT_S),
    ],
)
def test_what_may_pass_is_waited_out_and_not_for_ever(
    error: PlatformError, tried: bool, reconnect_timeout_s: float
) -> None:
    machine = working(1) if tried else fleet()
    machine.target(1, 0.0)
    if tried:
        machine.handle(Ended(named(0, 1), End(code=1)), 10.0)
    ((when, text),) = refused(machine, error, 10.0, 10.0 + 2 * REFUSED_TIMEOUT_S)
    assert text == str(error)
    assert 10.0 + reconnect_timeout_s <= when <= 80.0 + reconnect_timeout_s, "with the longest pause"


def test_room_is_waited_for() -> None:
    machine = fleet()
    machine.target(1, 0.0)
    assert refused(machine, QuotaError("full"), 0.0, 1000.0) == []
