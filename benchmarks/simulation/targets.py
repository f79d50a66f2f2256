"""The figures that the simulator must reproduce, and how near what it measures comes."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.simulation.contestants import DIRECTORY
from benchmarks.simulation.scenarios import SCENARIOS
from benchmarks.simulation.study import Case, Outcome, measure
from benchmarks.simulation.workload import Workload

SAMPLES = 1000
#: the comparison of cache policies reads samples one by one: in batches, jobs that start together would share
#: what they ask for at one instant, which no policy can take credit for
ONE_BY_ONE = {"samples": 500, "batch_size": 1}
FOUR = ("same1", "same2", "speed1", "speed2")

#: hit rates in percent over seeds, or what else is to be compared
Value = Callable[[Outcome], Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One figure to reproduce: `measured` must be at least `amount`, or within `tolerance` of it."""

    figure: str
    what: str
    #: None: all cases together
    case: Case | None
    amount: float
    #: percentage points; None: `amount` is the least that passes
    tolerance: float | None
    value: Value

    @property
    def demand(self) -> str:
        if self.tolerance is None:
            return f">= {self.amount:.1f}"
        return f"{self.amount:.1f} ± {self.tolerance:.1f}"

    def accepts(self, measured: float) -> bool:
        if self.tolerance is None:
            return round(measured, 1) >= self.amount
        return abs(measured - self.amount) <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A target, and what several seeds gave."""

    target: Target
    values: Sequence[float]

    @property
    def measured(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def passed(self) -> bool:
        return self.target.accepts(self.measured)

    def record(self) -> dict[str, object]:
        """Plain data for one line of JSON."""
        return {
            "figure": self.target.figure,
            "what": self.target.what,
            "target": self.target.demand,
            "values": list(self.values),
            "passed": self.passed,
        }


def compare(targets: Sequence[Target], seeds: Sequence[int], progress: Callable[[], None]) -> list[Comparison]:
    """Measure all targets; cases that several share are run once."""
    known: dict[tuple[object, ...], Outcome] = {}
    comparisons = []
    for target in targets:
        if target.case is None:
            values = [min(target.value(outcome)) for outcome in known.values()]
            comparisons.append(Comparison(target=target, values=[min(values)]))
        else:
            key = _key(target.case)
            if key not in known:
                known[key] = measure(target.case, seeds)
            comparisons.append(Comparison(target=target, values=target.value(known[key])))
        progress()
    return comparisons


def _key(case: Case) -> tuple[object, ...]:
    return case.scenario, case.sampler, case.policy, case.capacity, case.announce


def all_targets() -> list[Target]:
    """Every figure, in the order of the thesis."""
    never_above = Target(
        figure="all",
        what="least of OPT less hit rate, any case, any seed",
        case=None,
        amount=0.0,
        tolerance=None,
        value=below_optimum,
    )
    return [*_cache_policies(), *_overlap(), *_longer_runs(), never_above]


def hit_rates(outcome: Outcome) -> list[float]:
    return [100 * rate for rate in outcome.hit_rates]


def optima(outcome: Outcome) -> list[float]:
    return [100 * rate for rate in outcome.optima]


def below_optimum(outcome: Outcome) -> list[float]:
    """By how many points the policy stays below the best evictions; negative would be a fault."""
    return [100 * (best - hit) for best, hit in zip(outcome.optima, outcome.hit_rates)]


def scenario(name: str, samples: int = SAMPLES, **changes: object) -> Callable[[int], Workload]:
    """A named workload as a function of the seed, with fields of all its jobs changed."""
    return partial(_build, name, samples, changes)


def _build(name: str, samples: int, changes: dict[str, object], seed: int) -> Workload:
    return SCENARIOS[name](samples, seed).with_jobs(**changes)


def _case(name: str, sampler: str, policy: str, capacity: float, samples: int = SAMPLES, **changes: object) -> Case:
    """The thesis's setting: policies hear of the epoch under way, not of the next."""
    return Case(
        scenario=" ".join([name, *(f"{key}={value}" for key, value in changes.items())]),
        workload=scenario(name, samples, **changes),
        sampler=sampler,
        policy=policy,
        capacity=capacity,
        announce="epoch",
    )


def _cache_policies() -> Iterator[Target]:
    staggered = {"lru": 30.4, "lfu": 29.8, "minio": 37.5, "refcnt": 54.3, "alsd-mean": 57.7, "alsd": 57.8}
    for policy, amount in staggered.items():
        case = _case("same2", "independent", policy, 0.5, **ONE_BY_ONE)
        tolerance = 1.5 if policy == "lfu" else 1.0
        yield Target(
            figure="5-1",
            what=f"staggered, 50%: {policy}",
            case=case,
            amount=amount,
            tolerance=tolerance,
            value=hit_rates,
        )
    optimum = _case("same2", "independent", "alsd", 0.5, **ONE_BY_ONE)
    yield Target(figure="5-1", what="staggered, 50%: OPT", case=optimum, amount=59.5, tolerance=1.0, value=optima)
    mean, least = (_case("same1", "independent", policy, 0.05, **ONE_BY_ONE) for policy in ("alsd-mean", "alsd"))
    yield Target(
        figure="5-1",
        what="same start, 5%: alsd-mean",
        case=mean,
        amount=15.2,
        tolerance=1.0,
        value=hit_rates,
    )
    yield Target(
        figure="5-1",
        what="same start, 5%: OPT less alsd",
        case=least,
        amount=0.0,
        tolerance=0.3,
        value=below_optimum,
    )


#: sampler -> (policy, tolerance or None for "at least", figures of same1, same2, speed1, speed2); each
#: sampler with the policy that it was published with
OVERLAP: dict[str, tuple[str, float | None, tuple[float, ...]]] = {
    "shared-log": (DIRECTORY, None, (75.0, 50.5, 55.5, 42.5)),
    "dynagcs": ("alsd-mean", 2.0, (73.9, 50.1, 48.1, 39.6)),
    "dynagcs-letter": ("alsd-mean", None, (49.8, 35.2, 28.3, 29.9)),
    "joader": ("refcnt", 1.5, (73.7, 18.0, 33.0, 16.0)),
    "coordl": ("alsd-mean", 1.0, (75.0, 6.0, 19.0, 5.0)),
}


def _overlap() -> Iterator[Target]:
    for sampler, (policy, tolerance, amounts) in OVERLAP.items():
        for name, amount in zip(FOUR, amounts, strict=True):
            case = _case(name, sampler, policy, 0.05)
            yield Target(
                figure="5-3",
                what=f"{name}, 5%: {sampler}",
                case=case,
                amount=amount,
                tolerance=tolerance,
                value=hit_rates,
            )


def _longer_runs() -> Iterator[Target]:
    for name, amount in zip(FOUR, (77.5, 72.0, 62.0, 59.5), strict=True):
        yield _shared(f"{name}, four epochs, 25%", _case(name, "shared-log", DIRECTORY, 0.25, epochs=4), amount)
    irregular = _case("irregular", "shared-log", DIRECTORY, 0.05, 2000, epochs=4)
    yield _shared("exponential batch times, 2,000 samples, four epochs, 5%", irregular, 66.5)
    for capacity, amount in ((0.05, 55.0), (0.25, 63.0)):
        yield _shared(f"churn, {capacity:.0%}", _case("churn", "shared-log", DIRECTORY, capacity), amount)


def _shared(what: str, case: Case, amount: float) -> Target:
    return Target(
        figure="beyond",
        what=f"{what}: shared-log",
        case=case,
        amount=amount,
        tolerance=None,
        value=hit_rates,
    )
