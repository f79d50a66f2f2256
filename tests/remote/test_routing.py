"""Which shard owns which keys, and what a change of shards does to the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.errors import OptionError
from torch_dpflow.remote.protocol import RangeAssignment, Route, RoutingTable
from torch_dpflow.remote.routing import RouteMap, Routing


def routing(size: int = 10, expected: int = 2) -> Routing:
    return Routing(size=size, expected=expected, lease_s=5.0)


def test_there_is_no_table_before_every_shard_that_is_expected_has_come() -> None:
    table = routing()
    assert table.enlist("a", 1, "ipc://a", 0.0) == RangeAssignment(0, 0, 0)
    assert not table.complete
    assert table.enlist("b", 1, "ipc://b", 0.0) == RangeAssignment(1, 5, 10)
    assert table.complete
    assert table.enlist("a", 1, "ipc://a", 1.0) == RangeAssignment(1, 0, 5)
    assert table.table.routes == [Route(0, 5, "a", "ipc://a"), Route(5, 10, "b", "ipc://b")]


def test_a_shard_that_comes_later_gets_its_part_under_a_new_generation() -> None:
    table = routing(expected=1)
    table.enlist("a", 1, "ipc://a", 0.0)
    assert table.enlist("b", 1, "ipc://b", 0.0) == RangeAssignment(2, 5, 10)
    assert table.enlist("a", 1, "ipc://a", 0.0) == RangeAssignment(2, 0, 5)


def test_a_shard_that_falls_silent_or_is_dismissed_gives_its_keys_to_the_others() -> None:
    table = routing(expected=3, size=9)
    for shard in "abc":
        table.enlist(shard, 1, shard, 0.0)
    table.enlist("b", 1, "b", 3.0)
    table.enlist("c", 1, "c", 3.0)
    assert table.tick(5.0) == ["a"]
    assert [(route.first, route.end, route.shard) for route in table.table.routes] == [
        (0, 4, "b"),
        (4, 9, "c"),
    ]
    table.dismiss("b", 6.0)
    table.dismiss("b", 6.0)
    assert [(route.first, route.end, route.shard) for route in table.table.routes] == [(0, 9, "c")]
    assert table.generation == 3


def test_a_restarted_shard_owns_what_it_did_and_its_forerunner_is_stale() -> None:
    table = routing()
    table.enlist("a", 1, "ipc://a", 0.0)
    table.enlist("b", 1, "ipc://b", 0.0)
    assert table.enlist("a", 2, "ipc://a", 1.0) == RangeAssignment(1, 0, 5)
    assert table.enlist("a", 1, "ipc://a", 1.0) is None
    assert table.enlist("a", 3, "tcp://elsewhere", 1.0) == RangeAssignment(2, 0, 5)


def test_a_table_that_starts_anew_comes_after_whatever_a_shard_has_heard_of() -> None:
    table = routing()
    assert table.enlist("a", 1, "ipc://a", 0.0, known=7) == RangeAssignment(0, 0, 0)
    assert table.enlist("b", 1, "ipc://b", 0.0, known=4) == RangeAssignment(8, 5, 10)
    assert table.enlist("a", 1, "ipc://a", 1.0, known=8) == RangeAssignment(8, 0, 5)
    assert table.enlist("c", 1, "ipc://c", 1.0, known=20) == RangeAssignment(21, 6, 10)


def test_a_shard_that_was_lost_comes_back_under_a_new_incarnation_and_a_dismissed_one_does_not() -> None:
    table = routing()
    table.enlist("a", 1, "ipc://a", 0.0)
    table.enlist("b", 1, "ipc://b", 4.0)
    assert table.tick(5.0) == ["a"]
    assert table.enlist("a", 1, "ipc://a", 6.0) is None
    assert table.enlist("a", 2, "ipc://a", 6.0) == RangeAssignment(3, 0, 5)
    table.dismiss("a", 7.0)
    assert table.enlist("a", 3, "ipc://a", 7.0) is None
    assert table.dismissed == {"a"}


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(OptionError, match="both must be at least 1"):
        Routing(size=0, expected=1, lease_s=1.0)


@given(st.integers(1, 300), st.integers(1, 12), st.data())
def test_every_key_has_one_owner_and_jobs_find_it(size: int, shards: int, data: st.DataObject) -> None:
    table = routing(size=size, expected=shards)
    for number in range(shards):
        table.enlist(f"{number:02}", 1, f"ipc://{number}", 0.0)
    routes = RouteMap(table.table)
    keys = data.draw(st.lists(st.integers(0, size - 1), min_size=1))
    for key, place in zip(keys, routes.places_of(keys).tolist()):
        owner = table.table.routes[place]
        assert owner.first <= key < owner.end
    lengths = [route.end - route.first for route in table.table.routes]
    assert sum(lengths) == size
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    "routes", [[], [Route(0, 3, "a", "a"), Route(4, 9, "b", "b")], [Route(1, 3, "a", "a")]]
)
def test_a_table_with_gaps_is_refused(routes: list[Route]) -> None:
    with pytest.raises(OptionError, match="without routes, or with gaps"):
        RouteMap(RoutingTable(1, routes))
