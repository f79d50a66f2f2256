"""Cases and what comes of them over several seeds: hit rate, bounds, overlap, likeness of epochs."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.simulation.announcing import Announce
from benchmarks.simulation.bounds import upper_bound
from benchmarks.simulation.contestants import DIRECTORY, make_group, make_policy
from benchmarks.simulation.dependence import epoch_correlation
from benchmarks.simulation.engine import Simulation, Trace
from benchmarks.simulation.schedule import Schedule, schedule
from benchmarks.simulation.workload import Workload

#: the cache at which the hit rate is taken for the overlap of the orders, as the thesis does (5.2.2)
OVERLAP_CAPACITY = 0.05


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of a study."""

    scenario: str
    #: from a seed to the jobs
    workload: Callable[[int], Workload]
    sampler: str
    policy: str
    #: share of the data set that the cache holds
    capacity: float
    announce: Announce = "next"
    independence: float = 0.0

    def slots(self, samples: int) -> int:
        """The capacity in samples; at least one."""
        return max(1, round(self.capacity * samples))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a case gave, one entry for each seed; rates are shares of accesses."""

    case: Case
    hit_rates: Sequence[float]
    #: the best evictions for the same orders
    optima: Sequence[float]
    #: what no sampler with any policy exceeds
    bounds: Sequence[float]
    #: rank correlation between a job's successive epochs; nan with one epoch
    correlations: Sequence[float]

    @property
    def hit_rate(self) -> float:
        return statistics.fmean(self.hit_rates)

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds; 0 for one seed."""
        return statistics.stdev(self.hit_rates) if len(self.hit_rates) > 1 else 0.0

    @property
    def optimum(self) -> float:
        return statistics.fmean(self.optima)

    @property
    def bound(self) -> float:
        return statistics.fmean(self.bounds)

    @property
    def correlation(self) -> float:
        return statistics.fmean(self.correlations)

    @property
    def decodes_per_sample(self) -> float:
        """Loads for each sample delivered: 1 without sharing."""
        return 1 - self.hit_rate

    def record(self) -> dict[str, object]:
        """Plain data for one line of JSON; rates in percent."""
        return {
            "scenario": self.case.scenario,
            "sampler": self.case.sampler,
            "policy": self.case.policy,
            "capacity_percent": 100 * self.case.capacity,
            "announced": self.case.announce,
            "independence": self.case.independence,
            "hit_rate_percent": [100 * rate for rate in self.hit_rates],
            "optimum_percent": [100 * rate for rate in self.optima],
            "upper_bound_percent": [100 * rate for rate in self.bounds],
            "decodes_per_sample": self.decodes_per_sample,
            "epoch_correlation": list(self.correlations),
        }


def measure(case: Case, seeds: Iterable[int]) -> Outcome:
    """Run a case once for each seed."""
    hits, optima, bounds, correlations = [], [], [], []
    for seed in seeds:
        plan = schedule(case.workload(seed), seed=seed)
        trace = run(case, plan, seed)
        slots = case.slots(plan.workload.samples)
        hits.append(trace.hit_rate)
        optima.append(trace.optimum(slots))
        bounds.append(upper_bound(plan, slots))
        correlations.append(_mean_correlation(trace))
    return Outcome(case=case, hit_rates=hits, optima=optima, bounds=bounds, correlations=correlations)


def run(case: Case, plan: Schedule, seed: int) -> Trace:
    """Run one schedule with the sampler and the policy of `case`."""
    samples = plan.workload.samples
    slots = case.slots(samples)
    group = make_group(case.sampler, samples, capacity=slots, seed=seed)
    policy = None if case.policy == DIRECTORY else make_policy(case.policy, slots, samples)
    simulation = Simulation(plan, group, policy, seed=seed, announce=case.announce, independence=case.independence)
    return simulation.run()


def _mean_correlation(trace: Trace) -> float:
    each = [epoch_correlation(trace.orders_of(job)) for job in range(len(trace.plan.workload.jobs))]
    known = [value for value in each if value == value]
    return statistics.fmean(known) if known else float("nan")
