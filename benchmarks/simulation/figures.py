"""The thesis's figures as cases to run and a picture to draw of their outcomes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulation import plots
from benchmarks.simulation.study import Case, Outcome
from benchmarks.simulation.targets import FOUR, ONE_BY_ONE, OVERLAP, scenario

#: what the scenarios are, for an axis
LABELS = {
    "same1": "same1\nsame start, same speed",
    "same2": "same2\nstaggered, same speed",
    "speed1": "speed1\nsame start, four speeds",
    "speed2": "speed2\nstaggered, four speeds",
}
CAPACITIES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
POLICIES = ("lru", "lfu", "minio", "refcnt", "alsd-mean", "alsd")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What to run, and how to draw it."""

    title: str
    cases: Sequence[Case]
    draw: Callable[[Path, str, Sequence[Outcome]], None]


def figure_5_1() -> Figure:
    """Cache policies over capacities, torch's own order, jobs that start together and a third apart."""
    panels = {"same start": "same1", "a third of an epoch apart": "same2"}
    cases = [
        Case(
            scenario=heading,
            workload=scenario(name, **ONE_BY_ONE),
            sampler="independent",
            policy=policy,
            capacity=capacity,
            announce="epoch",
        )
        for heading, name in panels.items()
        for policy in POLICIES
        for capacity in CAPACITIES
    ]
    title = "Cache policies: four jobs, independent orders, one epoch"
    return Figure(title=title, cases=cases, draw=draw_curves)


def figure_5_2() -> Figure:
    """What likely samples are worth: ALSD against use distance, under samplers that cannot say everything."""
    cases = [
        Case(
            scenario=f"{sampler}, a third of an epoch apart",
            workload=scenario("same2"),
            sampler=sampler,
            policy=policy,
            capacity=capacity,
            announce="epoch",
        )
        for sampler in ("joader", "dynagcs")
        for policy in ("use-distance", "alsd-mean", "alsd")
        for capacity in CAPACITIES
    ]
    title = "ALSD and use distance where the sampler knows part of the future"
    return Figure(title=title, cases=cases, draw=draw_curves)


def figure_5_3() -> Figure:
    """Overlap of the orders: hit rate with a cache of 5%, in the four scenarios."""
    return _overlap_figure(FOUR, (0.05,), "Overlap: hit rate with a cache of 5%, one epoch")


def figure_churn() -> Figure:
    """Eight jobs on three overlapping sets that come, go and die."""
    return _overlap_figure(("churn",), (0.05, 0.25), "Churn: eight jobs, three overlapping sets, two killed")


def _overlap_figure(names: Sequence[str], capacities: Sequence[float], title: str) -> Figure:
    samplers = {sampler: policy for sampler, (policy, *_) in OVERLAP.items()} | {"independent": "alsd-mean"}
    cases = [
        Case(
            scenario=name if len(capacities) == 1 else f"{name}, {capacity:.0%}",
            workload=scenario(name),
            sampler=sampler,
            policy=policy,
            capacity=capacity,
            announce="epoch",
        )
        for name in names
        for capacity in capacities
        for sampler, policy in samplers.items()
    ]
    return Figure(title=title, cases=cases, draw=draw_bars)


def draw_curves(path: Path, title: str, outcomes: Sequence[Outcome], marks: Mapping[float, str] | None = None) -> None:
    """One panel for each scenario, one curve for each contestant, the best evictions beside them."""
    panels: dict[str, dict[str, plots.Curve]] = {}
    for heading in dict.fromkeys(outcome.case.scenario for outcome in outcomes):
        here = [outcome for outcome in outcomes if outcome.case.scenario == heading]
        by_name: dict[str, list[Outcome]] = {}
        for outcome in here:
            by_name.setdefault(_contestant(outcome, here), []).append(outcome)
        series = {name: _curve(each, [o.hit_rate for o in each], False) for name, each in by_name.items()}
        first = next(iter(by_name.values()))
        bounds = {"OPT for this order": [o.optimum for o in first], "upper bound": [o.bound for o in first]}
        if len({outcome.case.sampler for outcome in here}) > 1:
            del bounds["OPT for this order"]
        panels[heading] = series | {name: _curve(first, rates, True) for name, rates in bounds.items()}
    plots.curves(path, title, panels, marks=marks)


def draw_bars(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """One group for each scenario, one bar for each contestant, the upper bound across."""
    groups = list(dict.fromkeys(outcome.case.scenario for outcome in outcomes))
    series: dict[str, list[tuple[float, float]]] = {}
    bounds: dict[str, float] = {}
    for outcome in outcomes:
        bar = (100 * outcome.hit_rate, 100 * outcome.spread)
        series.setdefault(_contestant(outcome, outcomes), []).append(bar)
        bounds[outcome.case.scenario] = 100 * outcome.bound
    labels = [LABELS.get(group, group) for group in groups]
    plots.bars(path, title, labels, series, [bounds[group] for group in groups])


def _contestant(outcome: Outcome, among: Sequence[Outcome]) -> str:
    """What tells this outcome from the others: its policy, or its sampler with it."""
    case = outcome.case
    if len({other.case.sampler for other in among}) == 1:
        return case.policy
    return f"{case.sampler} + {case.policy}"


def _curve(outcomes: Sequence[Outcome], rates: Sequence[float], is_bound: bool) -> plots.Curve:
    return plots.Curve(
        capacities=[100 * outcome.case.capacity for outcome in outcomes],
        rates=[100 * rate for rate in rates],
        spreads=[0.0 if is_bound else 100 * outcome.spread for outcome in outcomes],
        is_bound=is_bound,
    )


FIGURES: dict[str, Callable[[], Figure]] = {
    "5-1": figure_5_1,
    "5-2": figure_5_2,
    "5-3": figure_5_3,
    "churn": figure_churn,
}
