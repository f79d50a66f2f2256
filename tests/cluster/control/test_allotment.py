"""How a cluster's workers and memory are divided among the flows that run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.cluster.control.flow_processes import flow_parts, max_min, spread
from torch_dpflow.cluster.messages.coordinator import MIN_MEMORY, ClusterLimits, FlowSpec, Part
from torch_dpflow.errors import OptionError


def spec(name: str = "flow", **changes: Any) -> FlowSpec:
    fields = {"size": 100, "content": "0" * 64, "fingerprint": {}, **changes}
    return FlowSpec(name=name, version=1, **fields)


def test_without_limits_every_flow_has_what_it_asks_for() -> None:
    parts = flow_parts([spec(workers=8, shards=3), spec(memory_bytes=1 << 40)], ClusterLimits())
    assert parts == [Part(3, 8, 1 << 30), Part(1, 2, 1 << 40)]


def test_a_flow_with_fewer_workers_than_shards_has_fewer_shards() -> None:
    assert flow_parts([spec(workers=8, shards=4)], ClusterLimits(workers=3)) == [Part(3, 3, 1 << 30)]
    small = ClusterLimits(memory_bytes=2 * MIN_MEMORY)
    assert flow_parts([spec(workers=8, shards=4)], small) == [Part(2, 8, 2 * MIN_MEMORY)]


def test_what_a_modest_flow_leaves_goes_to_the_others() -> None:
    wishes = [spec(workers=1), spec(workers=9), spec(workers=9)]
    assert [part and part.workers for part in flow_parts(wishes, ClusterLimits(workers=8))] == [1, 3, 4]


def test_a_flow_without_jobs_has_no_worker_where_they_are_scarce() -> None:
    specs = [spec("a", workers=4, shards=2), spec("b", workers=4)]
    scarce, plenty = ClusterLimits(workers=5), ClusterLimits(workers=8)
    assert flow_parts(specs, scarce, unread=["a:v1"]) == [Part(2, 0, 1 << 30), Part(1, 4, 1 << 30)]
    assert flow_parts(specs, ClusterLimits(workers=3), unread=["a:v1"])[1] == Part(1, 3, 1 << 30)
    assert flow_parts(specs, plenty, unread=["a:v1"]) == [Part(2, 4, 1 << 30), Part(1, 4, 1 << 30)]


def test_shards_of_all_flows_share_the_ports_at_which_workers_call() -> None:
    specs = [spec("a", workers=8, shards=3), spec("b", workers=8, shards=1)]
    few = ClusterLimits(shards=3)
    assert [part and part.shards for part in flow_parts(specs, few)] == [2, 1]
    assert [part and part.shards for part in flow_parts([specs[0]], few)] == [3]
    assert [part and part.shards for part in flow_parts([specs[0], specs[0]], few, unread=["a:v1"])] == [1, 1]
    assert few.flows == 3


def test_a_flow_for_which_nothing_is_left_does_not_run() -> None:
    limits = ClusterLimits(workers=2)
    assert limits.flows == 2
    assert flow_parts([spec(), spec(), spec()], limits)[0] is None
    assert ClusterLimits(workers=9, memory_bytes=3 * MIN_MEMORY).flows == 3
    assert ClusterLimits().flows is None


@pytest.mark.parametrize("limits", [{"workers": 0}, {"workers": -1}, {"memory_bytes": 1}])
def test_limits_with_which_nothing_could_run_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="is out of range; give an int from"):
        ClusterLimits(**limits)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 200))
def test_parts_are_max_min_fair(wishes: list[int], total: int) -> None:
    parts = max_min(wishes, total)
    assert sum(parts) == min(sum(wishes), total)
    for part, wish in zip(parts, wishes):
        assert 0 <= part <= wish
        # Who does not get the wish has as much as anybody, but for what cannot be divided.
        assert part == wish or part >= max(parts) - 1


@given(
    shards=st.integers(1, 8),
    workers=st.integers(0, 20),
    memory=st.integers(8, 64).map(lambda count: count * MIN_MEMORY),
    nodes=st.integers(1, 20),
)
def test_a_flow_has_a_shard_for_each_node_that_it_has_a_worker_for(
    shards: int, workers: int, memory: int, nodes: int
) -> None:
    part = Part(shards, max(workers, shards) if workers else 0, memory)
    found = spread(part, nodes)
    assert (found.workers, found.memory_bytes) == (part.workers, part.memory_bytes)
    assert shards <= found.shards <= max(shards, nodes)
    assert found.memory_bytes // found.shards >= MIN_MEMORY
    if workers:
        assert found.shards <= found.workers
    else:
        assert found.shards == max(shards, min(nodes, memory // MIN_MEMORY)), "its workers rest"
    assert spread(part, 1) == part
