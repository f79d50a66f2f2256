"""Runs of the real samplers and policies: what holds for every one of them."""

import numpy as np
import pytest

from benchmarks.simulation.bounds import upper_bound
from benchmarks.simulation.contestants import (
    DIRECTORY,
    POLICY_NAMES,
    SAMPLER_NAMES,
    has_directory,
    make_group,
    make_policy,
)
from benchmarks.simulation.dependence import epoch_correlation
from benchmarks.simulation.engine import Simulation, Trace
from benchmarks.simulation.scenarios import SCENARIOS
from benchmarks.simulation.schedule import schedule
from benchmarks.simulation.study import Case, measure

SAMPLES = 80
PAIRS = [
    (sampler, policy)
    for sampler in SAMPLER_NAMES
    for policy in POLICY_NAMES
    if policy != DIRECTORY or has_directory(sampler)
]


def simulate(scenario: str, sampler: str, policy: str, slots: int, seed: int = 0) -> Trace:
    plan = schedule(SCENARIOS[scenario](SAMPLES, seed).with_jobs(epochs=2), seed=seed)
    group = make_group(sampler, SAMPLES, capacity=slots, seed=seed)
    kept = None if policy == DIRECTORY else make_policy(policy, slots, SAMPLES)
    trace = Simulation(plan, group, kept, seed=seed).run()
    assert group.jobs == ()
    if kept is not None:
        assert kept.statistics().jobs == 0
        assert kept.statistics().hits + kept.statistics().misses == len(trace.hits)
        assert kept.statistics().hits <= trace.hits.sum()
    return trace


@pytest.mark.parametrize(("sampler", "policy"), PAIRS)
def test_nobody_beats_the_best_evictions_nor_they_the_upper_bound(sampler: str, policy: str) -> None:
    # By turns: each sampler and each policy meets each scenario.
    turn = SAMPLER_NAMES.index(sampler) + POLICY_NAMES.index(policy)
    scenario = ("speed2", "windows", "churn")[turn % 3]
    for slots in (4, 40):
        trace = simulate(scenario, sampler, policy, slots)
        assert trace.hit_rate <= trace.optimum(slots) + 1e-12
        assert trace.optimum(slots) <= upper_bound(trace.plan, slots) + 1e-12


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
def test_every_finished_epoch_is_a_permutation_of_the_set_whoever_is_killed(sampler: str) -> None:
    trace = simulate("churn", sampler, "lru", 20, seed=2)
    killed = 0
    for job, spec in enumerate(trace.plan.workload.jobs):
        orders = trace.orders_of(job)
        killed += len(orders) < 2
        assert all(np.array_equal(np.sort(order), np.sort(spec.indices)) for order in orders)
    assert killed == 2


def test_a_second_request_at_the_same_instant_is_a_hit_whatever_the_cache() -> None:
    trace = simulate("same1", "coordl", "lru", 1)
    assert trace.hit_rate == pytest.approx(0.75)


def test_a_policy_that_is_told_nothing_does_worse() -> None:
    case = Case(
        scenario="same1",
        workload=lambda seed: SCENARIOS["same1"](400, seed),
        sampler="independent",
        policy="alsd",
        capacity=0.3,
    )
    deaf = Case(**{**vars(case), "announce": "nothing"})
    assert measure(case, [0]).hit_rate > measure(deaf, [0]).hit_rate + 0.02


def test_outcomes_carry_one_figure_for_each_seed() -> None:
    case = Case(
        scenario="same2",
        workload=lambda seed: SCENARIOS["same2"](80, seed).with_jobs(epochs=2),
        sampler="shared-log",
        policy=DIRECTORY,
        capacity=0.1,
    )
    outcome = measure(case, range(3))
    assert len(outcome.hit_rates) == len(outcome.optima) == len(outcome.bounds) == 3
    assert outcome.decodes_per_sample == pytest.approx(1 - outcome.hit_rate)
    assert -1 <= outcome.correlation <= 1


def test_correlation_of_repeated_reversed_and_single_epochs() -> None:
    order = np.random.default_rng(0).permutation(50)
    assert epoch_correlation([order, order, order]) == pytest.approx(1)
    assert epoch_correlation([order, order[::-1]]) == pytest.approx(-1)
    assert np.isnan(epoch_correlation([order]))
