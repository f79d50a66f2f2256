"""The numbers of workers of a cluster's flows: from what services report to what they are to run."""

from __future__ import annotations

from typing import Any

from torch_dpflow.cluster.control.flow_scaling import LINGER_S, FlowScaling
from torch_dpflow.cluster.control.placement import launches_of, parts_of
from torch_dpflow.cluster.messages.coordinator import AutoscaleLimits, ClusterLimits, FlowSpec, Part
from torch_dpflow.cluster.messages.node import ProcessView

LIMITS = AutoscaleLimits(0, 16)


def spec(name: str = "flow", **changes: Any) -> FlowSpec:
    return FlowSpec(name=name, version=1, size=100, content="0" * 64, fingerprint={}, **changes)


def view(name: str, role: str, incarnation: int = 1, **status: Any) -> ProcessView:
    return ProcessView(name, role, incarnation, 7, "ipc://x", status)


def processes(jobs: dict[str, int], worker_s: float, *, incarnation: int = 1) -> list[ProcessView]:
    readings = {name: {"samples": many, "stall_s": 0.0, "reading_s": 1.0} for name, many in jobs.items()}
    return [
        view("flow:v1/router", "router", jobs=len(jobs), readings=readings),
        view("flow:v1/shard-000", "shard", incarnation, worker_s=worker_s, working=2),
    ]


def test_workers_go_after_the_last_job_and_linger_until_their_shard_knows() -> None:
    scaling, flow = FlowScaling(LIMITS), spec(workers=3)
    running = {flow.instance: flow}
    for second in range(4):
        scaling.observe(running, processes({"a": second}, 0.0), float(second))
    assert scaling.target(flow) == 3
    changed = [scaling.observe(running, processes({}, 0.0), float(second)) for second in range(4, 9)]
    assert changed == [False, False, False, False, True]
    assert (scaling.target(flow), scaling.lingering(flow, 8.0)) == (0, 3)
    for second in range(9, 12):
        scaling.observe(running, processes({}, 0.0), float(second))
    assert scaling.lingering(flow, 8.0 + LINGER_S + 1) == 0
    scaling.begin(flow, 12.0)
    assert scaling.target(flow) == 3


def test_a_flow_without_workers_keeps_its_shards() -> None:
    flow = spec(workers=4, shards=2)
    assert parts_of([flow], ClusterLimits(workers=16), targets=[0]) == [Part(2, 0, 1 << 30)]
    launches = launches_of(flow, Part(2, 0, 1 << 30), [], lingering=3)
    assert [one.role for one in launches] == ["router", "shard", "worker", "shard", "worker", "worker"]
    assert [one.role for one in launches_of(flow, Part(2, 0, 1 << 30), [])] == ["router", "shard", "shard"]


def test_worker_seconds_are_divided_by_what_jobs_read_and_outlive_a_shard() -> None:
    scaling, flow = FlowScaling(LIMITS), spec()
    running = {flow.instance: flow}
    scaling.observe(running, processes({"a": 0, "b": 0}, 0.0), 0.0)
    scaling.observe(running, processes({"a": 30, "b": 10}, 8.0), 1.0)
    taken = scaling.worker_seconds(flow.instance)
    assert (taken.total, taken.by_job) == (8.0, {"a": 6.0, "b": 2.0})
    scaling.observe(running, processes({"a": 40, "b": 10}, 3.0, incarnation=2), 2.0)
    taken = scaling.worker_seconds(flow.instance)
    assert (taken.total, taken.by_job) == (11.0, {"a": 9.0, "b": 2.0})


def test_the_least_number_is_one_for_all_flows() -> None:
    scaling = FlowScaling(AutoscaleLimits(3, 16))
    running = {one.instance: one for one in (spec("flow"), spec("g"), spec("h"))}
    for second in range(10):
        routers = [view(f"{instance}/router", "router", jobs=0, readings={}) for instance in running]
        scaling.observe(running, routers, float(second))
    assert [scaling.target(one) for one in running.values()] == [1, 1, 1]


def test_a_coordinator_that_starts_anew_goes_on_with_the_workers_that_run() -> None:
    scaling, flow = FlowScaling(LIMITS), spec(workers=2)
    scaling.begin(flow, 0.0)
    found = processes({"a": 100}, 60.0)
    found += [view(f"flow:v1/shard-000/worker-{number}", "worker") for number in range(9)]
    scaling.observe({flow.instance: flow}, found, 0.0)
    assert scaling.target(flow) == 9


def test_without_limits_flows_are_watched_and_keep_what_they_ask_for() -> None:
    scaling, flow = FlowScaling(None), spec(workers=5)
    for second in range(20):
        scaling.observe({flow.instance: flow}, processes({}, 0.0), float(second))
    assert scaling.target(flow) == 5
    assert not scaling.sets_numbers
