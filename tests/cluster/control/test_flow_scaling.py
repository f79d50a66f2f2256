"""The numbers of workers and shards of a cluster's flows: from what services report to what they are to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from torch_dpflow.cluster.control.flow_processes import flow_parts, launches_of
from torch_dpflow.cluster.control.flow_registry import EndedJobs
from torch_dpflow.cluster.control.flow_scaling import LINGER_S, FlowScaling
from torch_dpflow.cluster.messages.coordinator import AutoscaleLimits, ClusterLimits, FlowSpec, Part
from torch_dpflow.cluster.messages.node import ProcessView

LIMITS = ClusterLimits(workers=16, autoscale=AutoscaleLimits(0, 16))
#: One host of eight processors.
HERE = {"": 8}


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


def observe(
    scaling: FlowScaling,
    running: Mapping[str, FlowSpec],
    views: Sequence[ProcessView],
    now: float,
    hosts: Mapping[str, int] = HERE,
) -> bool:
    return scaling.observe(running, views, scaling.parts(running, len(hosts), ()), hosts, now)


def test_workers_go_after_the_last_job_and_linger_until_their_shard_knows() -> None:
    scaling, flow = FlowScaling(LIMITS), spec(workers=3)
    running = {flow.instance: flow}
    for second in range(4):
        observe(scaling, running, processes({"a": second}, 0.0), float(second))
    assert scaling.target(flow) == 3
    changed = [observe(scaling, running, processes({}, 0.0), float(second)) for second in range(4, 9)]
    assert changed == [False, False, False, False, True]
    assert (scaling.target(flow), scaling.lingering(flow, 8.0)) == (0, 3)
    for second in range(9, 12):
        observe(scaling, running, processes({}, 0.0), float(second))
    assert scaling.lingering(flow, 8.0 + LINGER_S + 1) == 0
    scaling.begin(flow, 12.0)
    assert scaling.target(flow) == 3


def test_a_flow_without_workers_keeps_its_shards() -> None:
    flow = spec(workers=4, shards=2)
    assert flow_parts([flow], ClusterLimits(workers=16), targets=[0]) == [Part(2, 0, 1 << 30)]
    launches = launches_of(flow, Part(2, 0, 1 << 30), [], lingering=3)
    assert [one.role for one in launches] == ["router", "shard", "worker", "shard", "worker", "worker"]
    assert [one.role for one in launches_of(flow, Part(2, 0, 1 << 30), [])] == ["router", "shard", "shard"]


def test_worker_seconds_are_divided_by_what_jobs_read_and_outlive_a_shard() -> None:
    scaling, flow = FlowScaling(LIMITS), spec()
    running = {flow.instance: flow}
    observe(scaling, running, processes({"a": 0, "b": 0}, 0.0), 0.0)
    observe(scaling, running, processes({"a": 30, "b": 10}, 8.0), 1.0)
    taken = scaling.worker_seconds(flow.instance)
    assert (taken.total, taken.by_job) == (8.0, {"a": 6.0, "b": 2.0})
    observe(scaling, running, processes({"a": 40, "b": 10}, 3.0, incarnation=2), 2.0)
    taken = scaling.worker_seconds(flow.instance)
    assert (taken.total, taken.by_job) == (11.0, {"a": 9.0, "b": 2.0})


def test_jobs_that_have_ended_are_kept_with_what_limited_them_last() -> None:
    wall = iter(range(1_800_000_000, 1_800_001_000))
    scaling, flow = FlowScaling(replace(LIMITS, autoscale=None), wall_clock=lambda: float(next(wall))), spec(workers=2)
    running = {flow.instance: flow}

    def read(jobs: dict[str, tuple[int, float]], second: int) -> None:
        readings = {
            name: {"samples": many, "stall_s": share * second, "reading_s": second}
            for name, (many, share) in jobs.items()
        }
        shard = view("flow:v1/shard-000", "shard", worker_s=2.0 * second, working=2, late_s=1.0 * second)
        views = [view("flow:v1/router", "router", jobs=len(jobs), readings=readings), shard]
        observe(scaling, running, views, float(second))

    for second in range(1, 9):
        read({"waits": (second * 9, 0.5), "trains": (second * 9, 0.0), "looks": (0, 0.0)}, second)
    assert (scaling.limited_by(flow.instance), scaling.ended.views) == ("workers", [])
    read({"waits": (90, 0.5)}, 9)
    assert [(one.job, one.samples, one.limited_by) for one in scaling.ended.views] == [("trains", 72, "job")]
    for second in range(10, 13):
        read({}, second)
    assert [(one.job, one.limited_by) for one in scaling.ended.views] == [("trains", "job"), ("waits", "workers")]
    packed = scaling.ended.take_packed()
    assert packed is not None
    assert scaling.ended.take_packed() is None
    assert EndedJobs(packed).views == scaling.ended.views
    assert EndedJobs(b"of another release").views == []
    read({"waits": (9, 0.5)}, 13)
    assert [one.job for one in scaling.ended.views] == ["trains"]
    observe(scaling, {}, [], 14.0)  # its services have ended, and the job with them
    assert [one.job for one in scaling.ended.views] == ["trains", "waits"]


def test_the_least_number_is_one_for_all_flows() -> None:
    scaling = FlowScaling(ClusterLimits(workers=16, autoscale=AutoscaleLimits(3, 16)))
    running = {one.instance: one for one in (spec("flow"), spec("g"), spec("h"))}
    for second in range(10):
        routers = [view(f"{instance}/router", "router", jobs=0, readings={}) for instance in running]
        observe(scaling, running, routers, float(second))
    assert [scaling.target(one) for one in running.values()] == [1, 1, 1]


def test_a_coordinator_that_starts_anew_goes_on_with_the_workers_that_run() -> None:
    scaling, flow = FlowScaling(LIMITS), spec(workers=2)
    scaling.begin(flow, 0.0)
    found = processes({"a": 100}, 60.0)
    found += [view(f"flow:v1/shard-000/worker-{number}", "worker") for number in range(9)]
    observe(scaling, {flow.instance: flow}, found, 0.0)
    assert scaling.target(flow) == 9


def test_without_limits_flows_are_watched_and_keep_what_they_ask_for() -> None:
    scaling, flow = FlowScaling(ClusterLimits()), spec(workers=5)
    for second in range(20):
        observe(scaling, {flow.instance: flow}, processes({}, 0.0), float(second))
    assert scaling.target(flow) == 5
    assert scaling.lingering(flow, 19.0) == 0


@pytest.mark.parametrize(
    ("limits", "limit"),
    [(ClusterLimits(workers=2), "workers"), (ClusterLimits(workers=2, autoscale=AutoscaleLimits(0, 16)), "budget")],
)
def test_a_flow_whose_workers_are_all_there_is_not_limited_by_a_cold_start(limits: ClusterLimits, limit: str) -> None:
    scaling, flow = FlowScaling(limits), spec(workers=5)
    for second in range(20):
        views = processes({"a": second}, float(second))
        views[0].status["readings"]["a"] |= {"stall_s": 0.9 * second, "reading_s": float(second)}
        views[1].status.update(late_s=0.9 * second, loads_done=second, busy_s=float(second), requested=second)
        observe(scaling, {flow.instance: flow}, views, float(second))
    assert scaling.limited_by(flow.instance) == limit


@pytest.mark.parametrize("flow", [spec(shards=3, workers=4), spec(workers=4)], ids=["fixed", "auto"])
def test_every_shard_has_a_worker_while_there_are_any(flow: FlowSpec) -> None:
    """The keys of a shard without one would not be loaded, and its jobs would wait for ever."""
    scaling, running, hosts = FlowScaling(LIMITS), {flow.instance: flow}, {"a": 4, "b": 4, "c": 4}
    for second in range(60):
        job = {"samples": 10 * second, "stall_s": 0.0, "reading_s": float(second)}
        loads = dict.fromkeys(("requested", "due", "loads_done", "served"), 10 * second)
        views = [
            view("flow:v1/router", "router", jobs=1, readings={"a": job}),
            view("flow:v1/shard-a-000", "shard", worker_s=3.0 * second, busy_s=0.1 * second, working=3, **loads),
        ]
        observe(scaling, running, views, float(second), hosts)
    assert scaling.target(flow) == 1, "the job needs one"
    assert scaling.parts(running, 3, ()) == {flow.instance: Part(3, 3, 1 << 30)}
    few = FlowScaling(ClusterLimits(workers=2, autoscale=AutoscaleLimits(0, 2)))
    assert few.parts(running, 3, ()) == {flow.instance: Part(2, 2, 1 << 30)}


class BusyFlow:
    """Flows whose shards' threads are busy all the time, while workers are idle and jobs wait."""

    def __init__(self, limits: ClusterLimits, *flows: FlowSpec, hosts: Mapping[str, int] = HERE) -> None:
        self.scaling, self.hosts = FlowScaling(limits), hosts
        self.running = {flow.instance: flow for flow in flows}
        self.now = 0.0

    def run(self, seconds: int) -> dict[str, Part | None]:
        for _ in range(seconds):
            self.now += 1.0
            parts = self.scaling.parts(self.running, len(self.hosts), ())
            views: list[ProcessView] = []
            for instance, part in parts.items():
                job = {"samples": int(self.now), "stall_s": self.now, "reading_s": self.now}
                assert part is not None
                views.append(view(f"{instance}/router", "router", jobs=1, readings={"a": job}, shards=part.shards))
                status = {"keys": 9, "thread_s": self.now, "serving_s": self.now, "worker_s": 2 * self.now}
                served = int(1000 * self.now)
                names = [f"{instance}/shard-{number:03}" for number in range(part.shards)]
                views += [view(name, "shard", served=served, **status) for name in names]
            self.views = views
            self.scaling.observe(self.running, views, parts, self.hosts, self.now)
        return self.scaling.parts(self.running, len(self.hosts), ())

    def shards(self, seconds: int) -> list[int]:
        return [0 if part is None else part.shards for part in self.run(seconds).values()]


@pytest.mark.parametrize(
    ("flow", "limits", "hosts", "most"),
    [
        (spec(workers=3), ClusterLimits(), HERE, 3),
        (spec(workers=64), ClusterLimits(), HERE, 8),
        (spec(workers=64), ClusterLimits(workers=6), HERE, 6),
        (spec(workers=64), ClusterLimits(), {"a": 2, "b": 3}, 5),
        (spec(workers=64, memory_bytes=4 << 20), ClusterLimits(), HERE, 4),
        (spec(workers=64), ClusterLimits(shards=5), HERE, 5),
        (spec(workers=64, shards=2), ClusterLimits(), HERE, 2),
        (spec(workers=2), LIMITS, HERE, 8),
    ],
    ids=["workers", "processors", "cluster's workers", "nodes", "memory", "ports", "fixed", "autoscaled"],
)
def test_a_flow_gets_shards_up_to_what_hosts_and_options_allow(
    flow: FlowSpec, limits: ClusterLimits, hosts: dict[str, int], most: int
) -> None:
    busy = BusyFlow(limits, flow, hosts=hosts)
    assert busy.shards(1) == [flow.shards or len(hosts)]
    assert busy.shards(120) == [most]
    assert busy.scaling.limited_by(flow.instance) == "shard"


def test_a_number_that_is_no_longer_fixed_is_gone_on_with() -> None:
    busy = BusyFlow(ClusterLimits(), spec(workers=8, shards=3))
    assert busy.shards(2) == [3]
    busy.running = {"flow:v1": spec(workers=8)}
    assert busy.shards(1) == [3]


def test_flows_share_the_ports_of_shards() -> None:
    busy = BusyFlow(ClusterLimits(shards=4), spec("flow", workers=8), spec("g", workers=8))
    numbers = busy.shards(120)
    assert sum(numbers) == 4
    assert min(numbers) >= 1


def test_a_coordinator_that_starts_anew_goes_on_with_the_shards_that_own_keys() -> None:
    flow = spec(workers=8)
    earlier = BusyFlow(ClusterLimits(), flow)
    before = earlier.run(40)
    part = before[flow.instance]
    assert part is not None
    assert part.shards > 1
    later = FlowScaling(ClusterLimits())
    later.begin(flow, 0.0)
    shards = [one for one in earlier.views if one.role == "shard"]
    for views in (shards, earlier.views):  # the router may not have reported yet
        observe(later, earlier.running, views, 0.0)
        assert later.parts(earlier.running, 1, ()) == before
    nodes = FlowScaling(ClusterLimits())
    observe(nodes, earlier.running, earlier.views, 0.0, dict.fromkeys("abcdefgh"[: part.shards], 4))
    assert nodes.parts(earlier.running, 1, ())[flow.instance] == Part(1, 8, 1 << 30), "one for each node"
