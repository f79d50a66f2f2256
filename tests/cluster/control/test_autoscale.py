"""The law that sets a flow's number of workers: what it promises whatever it sees, and what it says limits a flow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torch_dpflow.cluster.control.autoscale import (
    EMPTY_S,
    SATURATED_S,
    Autoscaler,
    FlowCounts,
    JobCounts,
)
from torch_dpflow.cluster.messages.coordinator import AutoscaleLimits

MOST = 64


@dataclass
class Flow:
    """A flow whose workers come after some seconds, and the law that sets their number; a second at a time."""

    law: Autoscaler
    rate: float = 10.0
    demand: float = 0.0
    per_sample: float = 1.0
    storage: float = math.inf
    cold_s: int = 3
    jobs: int = 1
    refused: str = ""
    #: Whether what the job waits for are loads; and if not, whether it is its own link.
    by_loading: bool = True
    by_link: bool = True
    #: What the workers' link lets through, loads a second: they wait for it, and their shard takes that for work.
    link: float = math.inf
    #: More workers than these are not had.
    ceiling: int = MOST
    now: float = 0.0
    working: int = 0
    coming: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    limited_by: str = ""
    taken: float = 0.0
    loads: float = 0.0
    due: float = 0.0
    busy_s: float = 0.0
    worker_s: float = 0.0
    away_s: float = 0.0
    stall_s: float = 0.0
    late_s: float = 0.0
    reading_s: float = 0.0
    #: Seconds a second that each worker runs on a processor and waits for one; and the processors of its host.
    cpu: float = 0.0
    queued: float = 0.0
    processors: int = 0

    def second(self) -> None:
        self.now += 1.0
        self._flow()
        readings = {"job": JobCounts(int(self.taken), self.stall_s, self.reading_s)} if self.jobs else {}
        counts = FlowCounts(
            jobs=self.jobs,
            readings=readings,
            requested=int(self.taken),
            due=int(self.due),
            loads=int(self.loads),
            busy_s=self.busy_s,
            worker_s=self.worker_s,
            away_s=self.away_s,
            late_s=self.late_s,
            link_s=0.0 if self.by_loading or not self.by_link else self.stall_s,
            cpu_s=self.worker_s * self.cpu,
            queued_s=self.worker_s * self.queued,
            processors=self.processors,
            working=self.working,
            refused=self.refused,
        )
        self.limited_by = self.law.step(counts, self.now)
        self.targets.append(self.law.target)
        wanted = min(self.law.target, self.ceiling)
        there = self.working + len(self.coming)
        self.coming += [self.now + self.cold_s] * (wanted - there)
        if wanted < there:
            self.coming = self.coming[: max(0, wanted - self.working)]
            self.working = min(self.working, wanted)
        self.working += sum(at <= self.now for at in self.coming)
        self.coming = [at for at in self.coming if at > self.now]

    def _flow(self) -> None:
        most = min(self.working * self.rate, self.storage, self.link)
        wanted = self.demand if self.jobs else 0.0
        needed = wanted * self.per_sample
        share = 1.0 if not needed else min(1.0, most / needed)
        self.taken += wanted * share
        self.loads += needed * share
        self.due += needed * share
        self.worker_s += self.working
        self.busy_s += self.working * (min(1.0, needed / most) if most else 0.0)
        if self.link < math.inf and self.working:
            self.away_s += self.working * (min(1.0, needed / most) if most else 0.0) - needed * share / self.rate
        if wanted:
            self.reading_s += 1.0
            self.stall_s += 1.0 - share if self.by_loading else 0.5
            self.late_s += 1.0 - share

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.second()


def flow(demand: float = 0.0, *, least: int = 0, most: int = MOST, first: int = 2, hold_s: float = 60.0) -> Flow:
    return Flow(Autoscaler(AutoscaleLimits(least, most, hold_s), first), demand=demand)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.floats(0, 5000),
            st.sampled_from([0.0, 0.1, 1.0]),
            st.sampled_from([math.inf, 50.0]),
            st.sampled_from(["", "quota"]),
            st.integers(1, 40),
        ),
        max_size=12,
    ),
    st.integers(0, 5),
    st.integers(5, 70),
)
# The workers that a step begins with have loaded nothing.
@example(
    [
        (0, 0.0, 0.0, math.inf, "", 2),
        (1, 184.0, 0.1, math.inf, "quota", 4),
        (0, 0.0, 0.0, math.inf, "", 5),
        (1, 1.0, 0.1, math.inf, "", 10),
    ],
    0,
    5,
)
def test_bounds_are_kept_whatever_it_sees(
    phases: list[tuple[int, float, float, float, str, int]], least: int, most: int
) -> None:
    one = flow(least=least, most=most)
    for jobs, demand, per_sample, storage, refused, seconds in phases:
        one.jobs, one.demand, one.per_sample = jobs, demand, per_sample
        one.storage, one.refused = storage, refused
        one.run(seconds)
    assert all(least <= target <= most for target in one.targets)


@given(st.floats(0, 3000), st.integers(0, 60))
def test_without_jobs_there_are_none(demand: float, first: int) -> None:
    one = flow(demand, first=first)
    one.run(30)
    one.jobs = 0
    one.run(EMPTY_S + 1)
    assert (one.law.target, one.limited_by) == (0, "")
    one.run(60)
    assert set(one.targets[-60:]) == {0}


@given(
    st.floats(1, 500),
    st.floats(0.02, 1.0),
    st.integers(1, 60),
    st.integers(0, 20),
    st.sampled_from([0.5, 10.0]),
)
def test_what_does_not_change_is_answered_by_one_number(
    demand: float, per_sample: float, first: int, cold_s: int, rate: float
) -> None:
    one = flow(demand, first=first)
    one.per_sample, one.cold_s, one.rate = per_sample, cold_s, rate
    one.run(400)
    assert len(set(one.targets[-200:])) == 1
    enough = demand * per_sample / rate
    assert enough * 0.99 <= one.targets[-1] or one.targets[-1] == MOST
    assert one.targets[-1] <= max(2, 1.3 * enough + 2)


@given(st.floats(5, 500), st.integers(8, 55))
def test_a_pause_is_held(demand: float, pause_s: int) -> None:
    one = flow(demand)
    one.run(120)
    before = one.law.target
    one.demand = 0.0
    one.run(pause_s)
    one.demand = demand
    one.run(30)
    assert set(one.targets[-(pause_s + 30) :]) == {before}


@given(st.floats(20, 500))
def test_after_a_long_pause_it_has_the_former_number_at_once(demand: float) -> None:
    one = flow(demand)
    one.run(120)
    before = one.law.target
    one.demand = 0.0
    one.run(62)
    assert one.law.target == 0
    one.demand = demand
    one.run(2)
    assert before <= one.law.target <= 1.1 * before + 1


def test_a_job_that_comes_finds_the_former_number_on_its_way() -> None:
    one = flow(200.0)
    one.run(60)
    before = one.law.target
    one.jobs = 0
    one.run(60)
    assert one.law.target == 0
    one.law.begin(one.now)
    assert one.law.target == before


@given(st.integers(1, 20), st.floats(300, 2000))
def test_a_ceiling_of_the_platform_is_respected(ceiling: int, demand: float) -> None:
    one = flow(demand)
    one.ceiling = ceiling
    one.run(3)
    one.refused = "quota"
    before = one.law.target
    one.run(60)
    assert max(one.targets[-60:]) <= before
    assert one.limited_by == "quota"
    one.refused, one.ceiling = "", MOST
    one.run(60)
    assert one.law.target >= min(MOST, demand / one.rate)


@pytest.mark.parametrize("storage", [100.0, 250.0])
def test_full_storage_is_not_chased_and_the_cap_lifts_again(storage: float) -> None:
    one = flow(600.0)
    one.storage = storage
    one.run(120)
    assert one.limited_by == "storage"
    assert one.law.target <= 1.5 * storage / one.rate
    one.storage = math.inf
    one.run(SATURATED_S + 120)
    assert one.law.target >= 60
    assert one.stall_s > 0
    stalled = one.stall_s
    one.run(60)
    assert one.stall_s == pytest.approx(stalled)


def _of(demand: float, seconds: float, change: Callable[[Flow], None]) -> Flow:
    one = flow(demand)
    change(one)
    one.run(seconds)
    return one


def test_what_limits_a_flow_is_named() -> None:
    assert _of(100.0, 60, lambda one: None).limited_by == "job"
    assert _of(300.0, 3, lambda one: None).limited_by == "cold start"
    assert _of(5000.0, 60, lambda one: None).limited_by == "budget"

    def by_network(one: Flow) -> None:
        one.by_loading = False

    slow = _of(15.0, 60, by_network)
    assert (slow.law.target, slow.limited_by) == (slow.targets[0], "network")
    slow.by_link = False
    slow.run(60)
    assert (slow.law.target, slow.limited_by) == (slow.targets[0], "job")


@pytest.mark.parametrize(
    ("cpu", "queued", "processors", "limit"),
    [
        (0.4, 0.5, 1000, "processors"),  # they wait for one longer than half as long as they run
        (0.9, 0.1, 70, "processors"),  # they use them all
        (0.9, 0.1, 1000, "budget"),
        (0.1, 0.1, 1000, "budget"),  # they wait for storage most of the time
        (0.0, 0.0, 0, "budget"),  # not measured
    ],
)
def test_workers_that_wait_for_processors_are_limited_by_them(
    cpu: float, queued: float, processors: int, limit: str
) -> None:
    one = flow(5000.0)
    one.cpu, one.queued, one.processors = cpu, queued, processors
    one.run(60)
    assert (one.law.target, one.limited_by) == (MOST, limit)


def test_workers_whose_link_is_full_get_no_others_beside_them() -> None:
    def narrow(one: Flow) -> None:
        one.law, one.link = Autoscaler(AutoscaleLimits(0, MOST), 8), 20.0

    full = _of(300.0, 60, narrow)
    assert (full.law.target, full.limited_by) == (8, "network")
    full.link = math.inf
    full.run(60)
    assert (full.law.target, full.limited_by) == (full.targets[-1], "job")
    assert full.law.target > 25


@pytest.mark.parametrize("link", [25.0, 45.0, 100.0, 250.0])
def test_a_full_link_is_not_chased_and_the_cap_lifts_again(link: float) -> None:
    one = flow(600.0)
    one.link = link
    one.run(120)
    assert one.limited_by == "network"
    assert one.law.target <= 2 * link / one.rate + 1
    one.link = math.inf
    one.run(SATURATED_S + 120)
    assert one.law.target >= 60
    assert one.limited_by == "job"


def test_a_service_that_counts_anew_is_no_reason_for_anything() -> None:
    one = flow(300.0)
    one.run(60)
    before = one.law.target
    one.taken = one.due = one.loads = one.busy_s = one.worker_s = one.stall_s = one.late_s = one.reading_s = 0.0
    one.run(30)
    assert set(one.targets[-30:]) == {before}


def test_a_flow_served_from_its_cache_has_no_workers() -> None:
    one = flow(300.0)
    one.run(60)
    one.per_sample = 0.0
    one.run(60)
    assert one.law.target == 1
    one.run(30)
    assert one.law.target == 0
