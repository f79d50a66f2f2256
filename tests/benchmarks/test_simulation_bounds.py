"""The bounds are bounds: exact against brute force, above every cache, and what is known in closed form."""

from collections import OrderedDict
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.bounds import best_evictions, upper_bound
from benchmarks.simulation.opt import OPT
from benchmarks.simulation.scenarios import SCENARIOS
from benchmarks.simulation.schedule import Kind, schedule


def exhaustive_hits(rounds: list[list[int]], capacity: int) -> int:
    """The most hits over all ways to choose what to keep after each round."""
    best = {frozenset[int](): 0}
    for asked in rounds:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            total = hits + sum(x in kept for x in set(asked)) + len(asked) - len(set(asked))
            choices = kept | set(asked)
            for chosen in combinations(choices, min(capacity, len(choices))):
                content = frozenset(chosen)
                after[content] = max(after.get(content, 0), total)
        best = after
    return max(best.values())


def flat(rounds: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    samples = np.array([x for asked in rounds for x in asked], dtype=np.int64)
    return samples, np.repeat(np.arange(len(rounds)), [len(asked) for asked in rounds])


rounds_of_requests = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(rounds=rounds_of_requests, capacity=st.integers(1, 4))
def test_the_best_evictions_are_the_best_there_are(rounds: list[list[int]], capacity: int) -> None:
    samples, instants = flat(rounds)
    assert best_evictions(samples, instants, capacity).sum() == exhaustive_hits(rounds, capacity)


@settings(max_examples=100, deadline=None)
@given(rounds=rounds_of_requests, capacity=st.integers(1, 4))
def test_no_lru_is_better(rounds: list[list[int]], capacity: int) -> None:
    samples, instants = flat(rounds)
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for asked in rounds:
        for x in set(asked):
            hits += x in kept
            kept.pop(x, None)
            kept[x] = None
        while len(kept) > capacity:
            kept.popitem(last=False)
    repeats = sum(len(asked) - len(set(asked)) for asked in rounds)
    assert best_evictions(samples, instants, capacity).sum() >= hits + repeats


@settings(max_examples=100, deadline=None)
@given(stream=st.lists(st.integers(0, 8), min_size=1, max_size=60), capacity=st.integers(1, 6))
def test_one_access_at_a_time_it_is_opt_as_a_policy(stream: list[int], capacity: int) -> None:
    samples = np.array(stream, dtype=np.int64)
    policy = OPT(stream=samples, max_items=capacity)
    for key in stream:
        if not policy.access(key, "job"):
            policy.admit(key)
    assert best_evictions(samples, np.arange(len(samples)), capacity).sum() == policy.statistics().hits


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("capacity", [1, 20, 100, 300])
def test_no_order_beats_the_upper_bound(name: str, capacity: int) -> None:
    """Not even where all jobs follow one order, the best sharing that equal jobs can have."""
    plan = schedule(SCENARIOS[name](200, 5), seed=5)
    for shared in (True, False):
        rng = np.random.default_rng(7)
        one = rng.permutation(200)
        orders: dict[int, np.ndarray] = {}
        samples, instants = [], []
        for event in plan.events:
            if event.kind is Kind.EPOCH:
                members = plan.workload.jobs[event.job].indices
                orders[event.job] = one[np.isin(one, members)] if shared else rng.permutation(members)
            elif event.kind is Kind.REQUEST:
                taken, orders[event.job] = np.split(orders[event.job], [event.size])
                samples.append(taken)
                instants.append(np.full(event.size, event.instant))
        hits = best_evictions(np.concatenate(samples), np.concatenate(instants), capacity)
        assert hits.mean() <= upper_bound(plan, capacity) + 1e-12


@pytest.mark.parametrize(
    ("name", "capacity", "percent"),
    [
        ("same1", 0.05, 75.0),
        ("same2", 0.05, 51.2),
        ("speed1", 0.05, 59.2),
        ("speed2", 0.05, 44.2),
        ("speed2", 0.25, 55.8),
        ("speed2", 0.5, 62.5),
    ],
)
def test_the_upper_bound_of_the_known_scenarios(name: str, capacity: float, percent: float) -> None:
    plan = schedule(SCENARIOS[name](1000, 0))
    assert 100 * upper_bound(plan, round(capacity * 1000)) == pytest.approx(percent, abs=0.15)
