"""How many shards a flow gets, by the law itself: a model of threads, workers and jobs that has any load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpflow.cluster.control.autoscale import FlowCounts, JobCounts
from torch_dpflow.cluster.control.shard_scaling import (
    DOWN_S,
    HOLD_S,
    NEARLY_FULL,
    SETTLE_S,
    WINDOW_S,
    ShardCounts,
    ShardScaler,
)

HOUR_S = 3600.0


@dataclass(kw_only=True)
class Load:
    """A flow as its shards see it.

    demand: samples per second that the jobs read where they do not wait. per_thread: what one thread can serve.
    workers: loads per second of all workers. hot: share of all reads that go to one shard, however many there are.
    overhead: by how much each further shard makes a sample dearer.
    """

    demand: float
    per_thread: float = 1000.0
    workers: float = math.inf
    hot: float = 0.0
    overhead: float = 0.0
    noise: float = 0.0

    def at(self, shards: int) -> tuple[float, float, float, float]:
        """The busiest thread's share, the rate, the workers' share and the stall share of so many shards."""
        part = max(1 / shards, self.hot)
        limit = self.per_thread / (1 + self.overhead * (shards - 1)) / part
        rate = min(self.demand, self.workers, limit)
        return rate / limit, rate, rate / self.workers, max(0.0, 1 - rate / self.demand)


@dataclass
class Flow:
    """Shards of a flow whose number the law sets."""

    least: int = 1
    most: int = 16
    seed: int = 0
    #: Time between two steps of the law, seconds.
    tick_s: float = 1.0
    law: ShardScaler = field(default_factory=ShardScaler)
    now: float = 0.0
    #: The number of shards after each change, and when it changed, seconds.
    changes: list[tuple[float, int]] = field(default_factory=list)
    _own: dict[tuple[str, int], ShardCounts] = field(default_factory=dict)
    _job: JobCounts = field(default_factory=lambda: JobCounts(0, 0.0, 0.0))
    _incarnations: int = 0

    @property
    def shards(self) -> int:
        return max(self.least, self.law.target)

    def run(
        self, duration_s: float, at: Callable[[int], tuple[float, float, float, float]], noise: float = 0.0
    ) -> None:
        """Have jobs read for so long."""
        chance = Random(self.seed)
        until = self.now + duration_s
        while self.now < until:
            before = self.shards
            names = [(f"shard-{number:03}", self._incarnations) for number in range(before)]
            own = {name: self._own.get(name, ShardCounts(0.0, 0.0, 0, 0.0, 0.0)) for name in names}
            busiest, rate, workers, stall = at(before)
            for place, (name, seen) in enumerate(own.items()):
                share = min(1.0, busiest * chance.gauss(1.0, noise)) if place == 0 else busiest / 2
                own[name] = ShardCounts(
                    seen.thread_s + max(0.0, share) * self.tick_s,
                    seen.serving_s + self.tick_s,
                    seen.served + int(rate * chance.gauss(1.0, noise) / before * self.tick_s),
                    seen.busy_s + workers * self.tick_s,
                    seen.worker_s + self.tick_s,
                )
            self._own = own
            if rate:
                job = self._job
                self._job = JobCounts(job.samples + 1, job.stall_s + stall * self.tick_s, job.reading_s + self.tick_s)
            counts = FlowCounts(jobs=1, readings={"job": self._job})
            self.law.step(counts, own, self.now, shards=before, least=self.least, most=self.most)
            if self.shards != before:
                self.changes.append((self.now, self.shards))
            self.now += self.tick_s

    def restart(self) -> None:
        """A shard is killed and starts again, with counters of zero."""
        self._incarnations += 1


def run(load: Load, duration_s: float = 600.0, **given: Any) -> Flow:
    flow = Flow(**given)
    flow.run(duration_s, load.at, load.noise)
    return flow


def test_a_thread_that_is_full_gets_others_until_none_is() -> None:
    flow = run(Load(demand=6000))
    assert [shards for _, shards in flow.changes] == [2, 3, 4, 6]
    assert not flow.law.is_limit
    assert flow.changes[0][0] >= WINDOW_S


@pytest.mark.parametrize(
    "load",
    [Load(demand=800), Load(demand=6000, workers=900), Load(demand=950)],
    ids=["not full", "busy workers", "jobs that do not wait"],
)
def test_it_stays_at_one_while_something_else_limits(load: Load) -> None:
    flow = run(load)
    assert flow.changes == []
    assert not flow.law.is_limit


def test_workers_whose_results_wait_for_the_thread_seem_busy() -> None:
    flow = Flow(most=3)
    flow.run(60.0, lambda shards: (1.0, 1000.0 * shards, 1.0, 0.5))
    assert flow.shards == 3
    assert flow.law.is_limit


def test_a_shard_limits_where_there_can_be_no_more() -> None:
    flow = run(Load(demand=6000), most=3)
    assert flow.shards == 3
    assert flow.law.is_limit
    fixed = run(Load(demand=6000), least=1, most=1)
    assert (fixed.changes, fixed.law.is_limit) == ([], True)


def test_shards_that_do_not_help_are_not_added_without_end() -> None:
    """All jobs read the same few keys, so that one shard has them whatever their number is."""
    flow = run(Load(demand=6000, hot=1.0), HOUR_S, tick_s=WINDOW_S)
    assert flow.law.is_limit
    pauses = [after - before for (before, _), (after, _) in zip(flow.changes, flow.changes[1:])]
    assert all(pause >= HOLD_S for pause in pauses)
    assert all(after > 1.5 * before for before, after in itertools.pairwise(pauses))


def test_they_go_again_one_after_the_other_once_they_are_idle_for_long() -> None:
    flow = run(Load(demand=6000))
    flow.changes.clear()
    flow.run(DOWN_S, Load(demand=400).at)
    assert flow.changes == []
    flow.run(60 * DOWN_S, Load(demand=400).at)
    numbers = [shards for _, shards in flow.changes]
    assert numbers == [*range(numbers[0], 0, -1)]
    assert flow.shards == 1


def test_a_pause_changes_nothing() -> None:
    flow = run(Load(demand=6000))
    flow.changes.clear()
    flow.run(100 * DOWN_S, lambda shards: (0.0, 0.0, 0.0, 0.0))
    assert flow.changes == []
    assert not flow.law.is_limit


def test_a_shard_that_died_is_measured_anew() -> None:
    flow = Flow()
    for _ in range(30):
        flow.run(SETTLE_S, Load(demand=6000).at)
        flow.restart()
    assert flow.changes == []


def test_an_earlier_number_is_gone_on_with() -> None:
    flow = Flow()
    flow.law.restore(5)
    flow.run(600.0, Load(demand=3500).at)
    assert (flow.shards, flow.changes) == (5, [])


def test_nodes_that_join_leave_the_number_alone() -> None:
    flow = run(Load(demand=100), least=3)
    assert (flow.shards, flow.law.target, flow.changes) == (3, 1, [])
    flow.run(600.0, Load(demand=5000).at)
    assert flow.shards >= 5


loads = st.builds(
    Load,
    demand=st.floats(10.0, 50_000.0),
    workers=st.floats(10.0, 50_000.0),
    hot=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    overhead=st.floats(0.0, 0.5),
    noise=st.floats(0.0, 0.1),
)


@settings(max_examples=20)
@given(loads, st.integers(1, 3), st.integers(1, 10), st.integers(0, 99))
def test_the_number_settles_under_any_constant_load(load: Load, least: int, most: int, seed: int) -> None:
    most = max(least, most)
    flow = run(load, HOUR_S, least=least, most=most, seed=seed, tick_s=WINDOW_S)
    assert all(least <= shards <= most for _, shards in flow.changes)
    assert len(flow.changes) <= 12
    assert sum(at > HOUR_S / 2 for at, _ in flow.changes) <= 3
    busiest, _, _, stall = load.at(flow.shards)
    if flow.law.is_limit:
        assert busiest > 0.7 * NEARLY_FULL
        assert stall > 0


table = st.tuples(st.floats(0.0, 1.0), st.floats(1.0, 1e4), st.floats(0.0, 1.0), st.floats(0.0, 1.0))


@settings(max_examples=20)
@given(st.lists(table, min_size=8, max_size=8))
def test_it_does_not_flap_whatever_shards_bring(rows: list[tuple[float, float, float, float]]) -> None:
    """The figures of each number of shards are arbitrary: each step back and forth takes twice as long as the last."""
    flow = Flow(most=len(rows), tick_s=WINDOW_S)
    flow.run(HOUR_S, lambda shards: rows[shards - 1])
    assert all(1 <= shards <= len(rows) for _, shards in flow.changes)
    assert len(flow.changes) <= 24
