"""Which processes a flow takes, and what becomes of shards that are to go."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.cluster.control.flow_processes import launches_of
from torch_dpflow.cluster.messages.coordinator import FlowSpec, Part
from torch_dpflow.cluster.messages.node import Launch, ProcessView, instance_of
from torch_dpflow.cluster.messages.router import RouterSettings
from torch_dpflow.cluster.messages.shard import ShardSettings


def spec(**changes: Any) -> FlowSpec:
    return FlowSpec(name="f", version=1, size=100, content="0" * 64, fingerprint={}, **changes)


def shard(number: int, **status: Any) -> ProcessView:
    return ProcessView(f"f:v1/shard-{number:03}", "shard", 1, 9, "ipc://x", status)


def workers(number: int, count: int) -> list[ProcessView]:
    return [ProcessView(f"f:v1/shard-{number:03}/worker-{place}", "worker", 1, 9, "", {}) for place in range(count)]


def ids(launches: list[Launch], role: str) -> list[str]:
    return [launch.id.removeprefix("f:v1/") for launch in launches if launch.role == role]


def settings(launches: list[Launch]) -> dict[str, ShardSettings]:
    return {
        launch.id.removeprefix("f:v1/"): msgspec.msgpack.decode(launch.settings, type=ShardSettings)
        for launch in launches
        if launch.role == "shard"
    }


def test_workers_and_memory_are_dealt_evenly() -> None:
    launches = launches_of(spec(), Part(2, 5, 1000), [])
    assert ids(launches, "worker") == [
        "shard-000/worker-0",
        "shard-000/worker-1",
        "shard-001/worker-0",
        "shard-001/worker-1",
        "shard-001/worker-2",
    ]
    assert settings(launches) == {"shard-000": ShardSettings(2, 500), "shard-001": ShardSettings(3, 500)}
    router = msgspec.msgpack.decode(launches[0].settings, type=RouterSettings)
    assert router.shards == ["f:v1/shard-000", "f:v1/shard-001"]


@pytest.mark.parametrize("is_unread", [False, True])
def test_only_workers_are_not_needed_while_no_job_reads(is_unread: bool) -> None:
    launches = launches_of(spec(), Part(2, 2, 1000), [], is_unread=is_unread)
    assert {(one.role, one.needed) for one in launches} == {
        ("router", True),
        ("shard", True),
        ("worker", not is_unread),
    }


def test_scaling_changes_settings_and_no_arguments() -> None:
    before = {one.id: one.arguments for one in launches_of(spec(), Part(1, 2, 1000), [])}
    scaled = spec(shards=3, workers=9)
    after = {one.id: one.arguments for one in launches_of(scaled, Part(3, 9, 1000), [])}
    assert before.items() <= after.items()


def test_a_shard_that_is_to_go_stays_with_its_workers_until_others_own_its_keys() -> None:
    running = [shard(0, keys=50), shard(1, keys=50), *workers(0, 1), *workers(1, 1)]
    launches = launches_of(spec(), Part(1, 2, 1000), running)
    assert ids(launches, "worker") == ["shard-000/worker-0", "shard-001/worker-0"]
    assert settings(launches) == {"shard-000": ShardSettings(1, 500), "shard-001": ShardSettings(0, 500)}
    running[1] = shard(1, keys=0, drained=False)
    launches = launches_of(spec(), Part(1, 2, 1000), running)
    assert ids(launches, "shard") == ["shard-000", "shard-001"]
    assert ids(launches, "worker") == ["shard-000/worker-0", "shard-000/worker-1"]
    running[1] = shard(1, keys=0, drained=True)
    launches = launches_of(spec(), Part(1, 2, 1000), running)
    assert settings(launches) == {"shard-000": ShardSettings(2, 1000)}


def test_shards_with_a_platform_get_their_numbers_of_workers_and_the_node_starts_none() -> None:
    running = [shard(0, keys=50), shard(1, keys=50), shard(2, keys=50)]
    launches = launches_of(spec(), Part(1, 2, 999), running, has_platform=True)
    assert ids(launches, "worker") == []
    assert {id: one.workers for id, one in settings(launches).items()} == {
        "shard-000": 1,
        "shard-001": 1,
        "shard-002": 0,
    }


def test_shards_of_other_flows_and_versions_are_no_affair_of_this_one() -> None:
    others = [ProcessView(f"{flow}/shard-004", "shard", 1, 9, "", {}) for flow in ("f:v2", "g:v1", "f:v1/x:v1")]
    assert ids(launches_of(spec(), Part(1, 1, 1000), others), "shard") == ["shard-000"]


@given(st.integers(1, 6), st.integers(0, 10), st.lists(st.integers(0, 4), max_size=6))
def test_there_are_never_more_workers_than_the_flow_has(shards: int, more: int, running: list[int]) -> None:
    views = [shard(number, keys=9) for number in range(len(running))]
    views += [view for number, count in enumerate(running) for view in workers(number, count)]
    launches = launches_of(spec(), Part(shards, shards + more, 10**6), views)
    assert len(ids(launches, "worker")) == shards + more
    assert len(set(ids(launches, "worker"))) == shards + more
    staying = [name for name in ids(launches, "worker") if int(name[6:9]) < shards]
    assert {name.rpartition("/")[0] for name in staying} == {f"shard-{place:03}" for place in range(shards)}


@given(
    shards=st.integers(1, 9),
    extra=st.integers(0, 9),
    nodes=st.lists(st.sampled_from("abcde"), min_size=1, unique=True).map(sorted),
)
def test_shards_are_spread_over_nodes_and_workers_are_beside_them(shards: int, extra: int, nodes: list[str]) -> None:
    launches = launches_of(spec(), Part(shards, shards + extra, 1000), [], nodes=nodes)
    places = {launch.id: launch.node for launch in launches}
    assert places["f:v1/router"] == ""
    counts = [sum(one.role == "shard" and one.node == node for one in launches) for node in nodes]
    assert max(counts) - min(counts) <= 1
    for launch in launches:
        if launch.role == "worker":
            assert launch.node == places[launch.id.rpartition("/")[0]]


def test_a_node_that_goes_changes_no_shard_of_the_others() -> None:
    before = launches_of(spec(), Part(3, 3, 900), [], nodes=["a", "b", "c"])
    after = launches_of(spec(), Part(2, 2, 900), [], nodes=["a", "c"])
    assert ids(before, "shard") == ["shard-a-000", "shard-b-000", "shard-c-000"]
    assert ids(after, "shard") == ["shard-a-000", "shard-c-000"]


def test_a_node_that_leaves_keeps_its_workers_until_others_have_its_keys() -> None:
    there = [
        ProcessView("f:v1/shard-a-000", "shard", 1, 9, "ipc://x", {"keys": 50}, node="a"),
        ProcessView("f:v1/shard-a-000/worker-0", "worker", 1, 9, "", {}, node="a"),
    ]
    launches = launches_of(spec(), Part(1, 1, 1000), there, nodes=["b"])
    assert {one.id.removeprefix("f:v1/"): one.node for one in launches} == {
        "router": "",
        "shard-b-000": "b",
        "shard-b-000/worker-0": "b",
        "shard-a-000": "a",
        "shard-a-000/worker-0": "a",
    }
    there[0].status["keys"] = 0
    after = launches_of(spec(), Part(1, 1, 1000), there, nodes=["b"])
    assert ids(after, "shard") == ["shard-b-000", "shard-a-000"], "jobs may read from it still"
    assert ids(after, "worker") == ["shard-b-000/worker-0"]


def owners(launches: list[Launch]) -> list[str]:
    """The shards that the router is told to give keys to."""
    (router,) = (one for one in launches if one.role == "router")
    told = msgspec.msgpack.decode(router.settings, type=RouterSettings).shards
    return [id.removeprefix("f:v1/") for id in told]


def test_shards_keep_their_keys_until_all_that_are_to_have_them_listen() -> None:
    """A node's first process imports torch for seconds, for which jobs would have nobody to ask."""
    old = [ProcessView("f:v1/shard-000", "shard", 1, 9, "tcp://x:1", {"keys": 100}), *workers(0, 2)]
    a = ProcessView("f:v1/shard-a-000", "shard", 1, 9, "", {}, node="a")
    b = ProcessView("f:v1/shard-b-000", "shard", 1, 9, "tcp://b:1", {}, node="b")
    before = launches_of(spec(), Part(2, 2, 1000), [*old, a, b], nodes=["a", "b"])
    assert owners(before) == ["shard-000", "shard-b-000"]
    assert {"shard-000/worker-0", "shard-000/worker-1"} < {*ids(before, "worker")}
    a = msgspec.structs.replace(a, address="tcp://a:1")
    after = launches_of(spec(), Part(2, 2, 1000), [*old, a, b], nodes=["a", "b"])
    assert owners(after) == ["shard-a-000", "shard-b-000"]


def test_a_shard_that_is_dead_keeps_no_keys() -> None:
    dead = ProcessView("f:v1/shard-a-000", "shard", 1, 0, "", {"keys": 100}, runs=False, node="a")
    assert owners(launches_of(spec(), Part(1, 1, 1000), [dead], nodes=["b"])) == ["shard-b-000"]


@pytest.mark.parametrize(
    ("id", "instance"),
    [
        ("a:v1/router", "a:v1"),
        ("a/b:v12/shard-000", "a/b:v12"),
        ("a/b:v12/shard-x-000/worker-3", "a/b:v12"),
        ("coordinator", ""),
    ],
)
def test_the_flow_of_a_process(id: str, instance: str) -> None:
    assert instance_of(id) == instance
