"""Which shard owns which keys, and what a change of shards does to the table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.cluster.control.routing import RouteMap, Routing
from torch_dpflow.cluster.messages.router import RangeAssignment, Route, RoutingTable
from torch_dpflow.errors import OptionError


def routing(size: int = 10, expected: str = "ab") -> Routing:
    return Routing(size=size, expected=[*expected], lease_s=5.0)


def test_there_is_no_table_before_every_shard_that_is_expected_has_come() -> None:
    table = routing()
    assert table.register("a", 1, "ipc://a", 0.0) == RangeAssignment(0, 0, 0)
    assert not table.complete
    assert table.register("b", 1, "ipc://b", 0.0) == RangeAssignment(1, 5, 10)
    assert table.complete
    assert table.register("a", 1, "ipc://a", 1.0) == RangeAssignment(1, 0, 5)
    assert table.table.routes == [Route(0, 5, "a", "ipc://a"), Route(5, 10, "b", "ipc://b")]


def test_a_shard_that_is_expected_later_gets_its_part_under_a_new_generation() -> None:
    table = routing(expected="a")
    table.register("a", 1, "ipc://a", 0.0)
    assert table.register("b", 1, "ipc://b", 0.0) == RangeAssignment(1, 0, 0, True)
    table.expect("ab")
    assert table.generation == 1
    assert table.register("b", 1, "ipc://b", 0.0) == RangeAssignment(2, 5, 10)
    assert table.register("a", 1, "ipc://a", 0.0) == RangeAssignment(2, 0, 5)


def test_a_shard_that_falls_silent_or_is_expected_no_more_gives_its_keys_to_the_others() -> None:
    table = routing(expected="abc", size=9)
    for shard in "abc":
        table.register(shard, 1, shard, 0.0)
    table.register("b", 1, "b", 3.0)
    table.register("c", 1, "c", 3.0)
    assert table.tick(5.0) == ["a"]
    assert [(route.first, route.end, route.shard) for route in table.table.routes] == [
        (0, 4, "b"),
        (4, 9, "c"),
    ]
    for _ in range(2):
        table.expect("ac")
        assert table.register("b", 1, "b", 6.0) == RangeAssignment(3, 0, 0, True)
    assert [(route.first, route.end, route.shard) for route in table.table.routes] == [(0, 9, "c")]
    assert table.generation == 3


def test_a_shard_can_be_expected_again_and_one_that_was_silent_come_back() -> None:
    table = routing()
    for shard in "ab":
        table.register(shard, 1, shard, 0.0)
    table.expect("a")
    table.expect("ab")
    assert table.register("b", 1, "b", 1.0) == RangeAssignment(3, 5, 10)
    assert table.tick(5.5) == ["a"]
    assert table.register("a", 1, "a", 5.6) == RangeAssignment(5, 0, 5)


def test_a_table_is_complete_when_those_that_are_missing_are_expected_no_more() -> None:
    table = routing(expected="abc")
    for shard in "ab":
        table.register(shard, 1, shard, 0.0)
    assert not table.complete
    table.expect("ab")
    assert table.complete
    with pytest.raises(OptionError, match="at least one shard has to own the keys"):
        table.expect("")


def test_a_restarted_shard_owns_what_it_did_and_its_forerunner_is_stale() -> None:
    table = routing()
    table.register("a", 1, "ipc://a", 0.0)
    table.register("b", 1, "ipc://b", 0.0)
    assert table.register("a", 2, "ipc://a", 1.0) == RangeAssignment(1, 0, 5)
    assert table.register("a", 1, "ipc://a", 1.0) is None
    assert table.register("a", 3, "tcp://elsewhere", 1.0) == RangeAssignment(2, 0, 5)


def test_a_table_that_starts_anew_comes_after_those_before() -> None:
    table = Routing(size=10, expected="ab", lease_s=5.0, first=8)
    assert table.register("a", 1, "ipc://a", 0.0) == RangeAssignment(0, 0, 0)
    assert table.register("b", 1, "ipc://b", 0.0) == RangeAssignment(8, 5, 10)
    assert table.register("a", 1, "ipc://a", 1.0) == RangeAssignment(8, 0, 5)
    table.expect("abc")
    assert table.register("c", 1, "ipc://c", 1.0) == RangeAssignment(9, 6, 10)


def test_no_keys_and_no_shards_are_refused() -> None:
    with pytest.raises(OptionError, match="at least one of each is needed"):
        routing(size=0)
    with pytest.raises(OptionError, match="at least one of each is needed"):
        routing(expected="")


@given(st.integers(1, 300), st.integers(1, 12), st.data())
def test_every_key_has_one_owner_and_jobs_find_it(size: int, shards: int, data: st.DataObject) -> None:
    names = [f"{number:02}" for number in range(shards)]
    table = Routing(size=size, expected=names, lease_s=5.0)
    for name in names:
        table.register(name, 1, f"ipc://{name}", 0.0)
    routes = RouteMap(table.table)
    keys = data.draw(st.lists(st.integers(0, size - 1), min_size=1))
    for key, place in zip(keys, routes.places_of(keys).tolist()):
        owner = table.table.routes[place]
        assert owner.first <= key < owner.end
    lengths = [route.end - route.first for route in table.table.routes]
    assert sum(lengths) == size
    assert max(lengths) - min(lengths) <= 1


@given(
    st.integers(1, 40),
    st.lists(
        st.one_of(
            st.tuples(st.just("expect"), st.sets(st.sampled_from("abcd"), min_size=1)),
            st.tuples(st.just("register"), st.sampled_from("abcd")),
            st.tuples(st.just("tick"), st.integers(1, 6)),
        ),
        max_size=30,
    ),
)
def test_whoever_comes_and_goes_every_table_is_whole_and_newer(size: int, steps: list[tuple[str, Any]]) -> None:
    table, now, expected = Routing(size=size, expected="a", lease_s=5.0), 0.0, {"a"}
    tables = {0: RoutingTable(0, [])}
    for what, value in steps:
        if what == "expect":
            expected = set(value)
            table.expect(value)
        elif what == "register":
            range_ = table.register(value, 1, value, now)
            assert range_ is not None
            assert range_.retired == (value not in expected)
        else:
            now += value
            table.tick(now)
        # One generation is one table.
        assert tables.setdefault(table.generation, table.table) == table.table
        assert table.generation == max(tables)
        assert {route.shard for route in table.table.routes} <= expected
        if table.table.routes:
            assert RouteMap(table.table).places_of(range(size)).max() < len(table.table.routes)


@pytest.mark.parametrize("routes", [[], [Route(0, 3, "a", "a"), Route(4, 9, "b", "b")], [Route(1, 3, "a", "a")]])
def test_a_table_with_gaps_is_refused(routes: list[Route]) -> None:
    with pytest.raises(OptionError, match="without routes, or with gaps"):
        RouteMap(RoutingTable(1, routes))


def test_a_call_that_changes_nothing_assigns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"shard-{number:03}" for number in range(200)]
    table = Routing(size=1000, expected=names, lease_s=5.0)
    for name in names:
        table.register(name, 1, f"ipc://{name}", 0.0)
    calls: list[int] = []
    original = Routing._assign

    def counted(self: Routing) -> None:
        calls.append(1)
        original(self)

    monkeypatch.setattr(Routing, "_assign", counted)
    assert table.register(names[3], 1, f"ipc://{names[3]}", 1.0) == RangeAssignment(1, 15, 20)
    assert table.tick(2.0) == []
    assert calls == []
    assert table.register(names[3], 2, "ipc://elsewhere", 3.0) == RangeAssignment(2, 15, 20)
    assert len(table.tick(5.5)) == 199
    assert table.register(names[3], 2, "ipc://elsewhere", 6.0) == RangeAssignment(3, 0, 1000)
    assert len(calls) == 2
