"""Leases, event by event: heartbeats, leases, generations."""

import math

import pytest

from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.ipc.rpc.leases import (
    MAX_REMEMBERED,
    ExpireLeases,
    LeaseGranted,
    Leases,
    Leave,
    Lost,
    RenewLease,
    Stale,
)


def told(leases, *events):
    for event in events:
        changes = leases.handle(event)
        leases.validate()
    return changes


def test_a_peer_joins_when_it_is_first_heard():
    leases = Leases(lease_s=10.0)
    assert told(leases, RenewLease("a", 1, 0.0)) == [LeaseGranted("a", 1)]
    assert leases.members == {"a": 1}


def test_a_heartbeat_renews_the_lease():
    leases = Leases(lease_s=10.0)
    assert told(leases, RenewLease("a", 1, 0.0), RenewLease("a", 1, 9.0)) == []
    assert told(leases, ExpireLeases(18.9)) == []
    assert told(leases, ExpireLeases(19.0)) == [Lost("a", 1, "expired")]


def test_silence_for_a_lease_loses_the_peer_and_no_other():
    leases = Leases(lease_s=10.0)
    assert told(leases, RenewLease("a", 1, 0.0), RenewLease("b", 1, 5.0), ExpireLeases(10.0)) == [
        Lost("a", 1, "expired")
    ]
    assert leases.members == {"b": 1}
    assert told(leases, ExpireLeases(15.0)) == [Lost("b", 1, "expired")]


def test_what_arrived_before_the_tick_counts_even_if_the_lease_is_over():
    leases = Leases(lease_s=10.0)
    assert told(leases, RenewLease("a", 1, 0.0), RenewLease("a", 1, 60.0), ExpireLeases(60.0)) == []


def test_a_lost_generation_stays_lost():
    leases = Leases(lease_s=10.0)
    told(leases, RenewLease("a", 1, 0.0), ExpireLeases(10.0))
    assert told(leases, RenewLease("a", 1, 11.0)) == [Stale("a", 1, 1)]
    assert told(leases, RenewLease("a", 2, 12.0)) == [LeaseGranted("a", 2)]


def test_a_new_generation_replaces_the_old_one():
    leases = Leases(lease_s=10.0)
    answer = told(leases, RenewLease("a", 1, 0.0), RenewLease("a", 3, 1.0))
    assert answer == [Lost("a", 1, "replaced"), LeaseGranted("a", 3)]
    assert told(leases, RenewLease("a", 2, 2.0)) == [Stale("a", 2, 3)]
    assert told(leases, ExpireLeases(11.0)) == [Lost("a", 3, "expired")], "a stale heartbeat renews nothing"


def test_a_peer_that_leaves_is_lost_at_once():
    leases = Leases(lease_s=10.0)
    assert told(leases, RenewLease("a", 1, 0.0), Leave("a", 1, 1.0)) == [Lost("a", 1, "left")]
    assert told(leases, RenewLease("a", 1, 2.0)) == [Stale("a", 1, 1)]
    assert told(leases, ExpireLeases(99.0)) == []


def test_the_goodbye_of_an_old_generation_does_not_touch_the_new_one():
    leases = Leases(lease_s=10.0)
    assert told(leases, RenewLease("a", 2, 0.0), Leave("a", 1, 1.0)) == []
    assert leases.members == {"a": 2}


def test_the_goodbye_of_an_unheard_generation_ends_it_and_those_before():
    leases = Leases(lease_s=10.0)
    assert told(leases, RenewLease("a", 1, 0.0), Leave("a", 2, 1.0)) == [Lost("a", 1, "replaced")]
    assert told(leases, RenewLease("a", 2, 2.0)) == [Stale("a", 2, 2)]


def test_who_is_gone_is_forgotten_in_time():
    leases = Leases(lease_s=10.0, remember_s=20.0)
    for number in range(1_000):
        told(leases, RenewLease(f"peer {number}", 1, float(number)), ExpireLeases(float(number)))
    assert len(leases._gone) <= 20
    assert told(leases, RenewLease("peer 0", 1, 1_000.0)) == [LeaseGranted("peer 0", 1)]


def test_time_that_runs_backwards_stands_still():
    leases = Leases(lease_s=10.0)
    told(leases, RenewLease("a", 1, 100.0), RenewLease("b", 1, 0.0))
    assert told(leases, ExpireLeases(50.0)) == []
    assert told(leases, ExpireLeases(110.0)) == [Lost("a", 1, "expired"), Lost("b", 1, "expired")]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lease_s": 0}, OptionError),
        ({"lease_s": math.inf}, OptionError),
        ({"lease_s": "5"}, OptionTypeError),
        ({"lease_s": 5.0, "remember_s": math.nan}, OptionError),
        ({"lease_s": 5.0, "remember_s": 4.0}, OptionError),
    ],
)
def test_options_out_of_range_are_refused_with_their_value(options, error):
    with pytest.raises(error) as caught:
        Leases(**options)
    assert repr(list(options.values())[-1]) in str(caught.value)


def test_something_else_than_an_event_is_refused():
    with pytest.raises(OptionTypeError, match="takes RenewLease, Leave and ExpireLeases"):
        Leases(lease_s=1.0).handle(Stale("a", 1, 1))


def test_of_those_that_are_gone_only_so_many_are_remembered():
    leases = Leases(lease_s=10.0)
    for number in range(MAX_REMEMBERED + 1):
        leases.handle(Leave(f"stranger {number}", 1, 0.0))
    leases.validate()
    assert told(leases, RenewLease("stranger 1", 1, 0.0)) == [Stale("stranger 1", 1, 1)]
    assert told(leases, RenewLease("stranger 0", 1, 0.0)) == [LeaseGranted("stranger 0", 1)]
