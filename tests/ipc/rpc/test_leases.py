"""Leases, call by call: heartbeats, leases, generations."""

from __future__ import annotations

import math

import pytest

from tests.invariants import validate
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.ipc.rpc import leases as module
from torch_dpflow.ipc.rpc.leases import Leases, Renewal


@pytest.fixture
def leases() -> Leases:
    made = Leases(lease_s=10.0)
    assert made.renew("a", 2, 0.0) is Renewal.GRANTED
    return made


def test_a_heartbeat_renews_the_lease_of_its_peer_and_of_no_other(leases: Leases) -> None:
    leases.renew("b", 1, 5.0)
    assert leases.renew("a", 2, 9.0) is Renewal.RENEWED
    assert leases.expire(14.9) == []
    assert leases.expire(15.0) == ["b"]
    assert leases.members == {"a": 2}
    assert leases.expire(19.0) == ["a"]


def test_what_arrived_before_the_tick_counts_even_if_the_lease_is_over(leases: Leases) -> None:
    leases.renew("a", 2, 60.0)
    assert leases.expire(60.0) == []


@pytest.mark.parametrize("end", ["expires", "leaves", "a later one leaves"])
def test_a_generation_that_has_ended_does_not_return(leases: Leases, end: str) -> None:
    newest = 3 if end == "a later one leaves" else 2
    assert leases.expire(10.0) == ["a"] if end == "expires" else leases.leave("a", newest, 1.0)
    assert leases.renew("a", newest, 11.0) is Renewal.STALE
    assert leases.renew("a", newest + 1, 12.0) is Renewal.GRANTED
    validate(leases)


def test_a_new_generation_replaces_the_old_one(leases: Leases) -> None:
    assert leases.renew("a", 4, 1.0) is Renewal.REPLACED
    assert leases.renew("a", 3, 2.0) is Renewal.STALE
    assert not leases.leave("a", 3, 2.0)
    assert leases.expire(11.0) == ["a"], "a stale heartbeat renews nothing"


def test_time_that_runs_backwards_stands_still(leases: Leases) -> None:
    leases.renew("a", 2, 100.0)
    leases.renew("b", 1, 0.0)
    assert leases.expire(50.0) == []
    assert leases.expire(110.0) == ["a", "b"]


@pytest.mark.parametrize(("lease_s", "error"), [(0, OptionError), (math.inf, OptionError), ("5", OptionTypeError)])
def test_a_lease_out_of_range_is_refused_with_its_value(lease_s: float, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Leases(lease_s=lease_s)
    assert repr(lease_s) in str(caught.value)


def test_of_those_that_are_gone_only_so_many_are_remembered_and_for_so_long(
    leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    for number in range(4):
        leases.leave(f"peer {number}", 1, 0.0)
    validate(leases)
    assert leases.renew("peer 0", 1, 0.0) is Renewal.GRANTED
    assert leases.renew("peer 1", 1, 0.0) is Renewal.STALE
    leases.expire(module.REMEMBER_S)
    assert leases.renew("peer 1", 1, module.REMEMBER_S) is Renewal.GRANTED
