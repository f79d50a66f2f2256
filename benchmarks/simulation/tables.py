"""The simulator's tables and JSON lines."""

import json
from collections.abc import Iterable, Sequence

from rich.table import Table

from benchmarks import report
from benchmarks.simulation.study import Outcome
from benchmarks.simulation.targets import Comparison
from benchmarks.simulation.uniformity_study import Judgement


def outcomes_table(outcomes: Sequence[Outcome], title: str, overlaps: Sequence[Outcome] = ()) -> Table:
    """One row for each outcome; `overlaps`, where given, are the same cases at a 5% cache."""
    table = _table(title, "scenario", "sampler", "policy")
    for heading in ("cache", "hit rate", "±", "OPT", "upper bound", "decodes/sample"):
        table.add_column(heading, justify="right")
    if overlaps:
        table.add_column("overlap (hits at 5%)", justify="right")
    several_epochs = any(outcome.correlation == outcome.correlation for outcome in outcomes)
    if several_epochs:
        table.add_column("epoch-to-epoch corr.", justify="right")
    for k, outcome in enumerate(outcomes):
        case = outcome.case
        policy = f"{case.policy}, told nothing" if case.announce == "nothing" else case.policy
        rates = (outcome.hit_rate, outcome.spread, outcome.optimum, outcome.bound)
        cells = [*map(_percent, rates), f"{outcome.decodes_per_sample:.3f}"]
        cells += [_percent(overlaps[k].hit_rate)] if overlaps else []
        cells += [f"{outcome.correlation:.2f}"] if several_epochs else []
        table.add_row(case.scenario, case.sampler, policy, f"{case.capacity:.1%}", *cells)
    return table


def outcome_records(outcomes: Sequence[Outcome], overlaps: Sequence[Outcome]) -> list[dict[str, object]]:
    """The same rows as plain data."""
    records = [outcome.record() for outcome in outcomes]
    for record, overlap in zip(records, overlaps):
        record["overlap_percent"] = [100 * rate for rate in overlap.hit_rates]
    return records


def targets_table(comparisons: Sequence[Comparison], title: str) -> Table:
    """Target, measured, spread, pass or fail."""
    table = _table(title, "figure", "what")
    for heading in ("target", "measured", "±", "verdict"):
        table.add_column(heading, justify="right")
    for comparison in comparisons:
        target = comparison.target
        table.add_row(
            target.figure,
            target.what,
            target.demand,
            f"{comparison.measured:.2f}",
            f"{comparison.spread:.2f}",
            "[green]pass" if comparison.passed else "[bold red]FAIL",
        )
    return table


def judgements_table(judgements: Sequence[Judgement], title: str) -> Table:
    """One row for each scenario and sampler; the worst of its jobs."""
    table = _table(title, "scenario", "sampler")
    for heading in (
        "failing positions",
        "failing items",
        "chi²/df",
        "class share per tenth",
        "z of neighbours",
    ):
        table.add_column(heading, justify="right")
    for judgement in judgements:
        table.add_row(
            judgement.scenario,
            judgement.sampler,
            _percent(judgement.failing_positions) + "%",
            _percent(judgement.failing_items) + "%",
            "{:.3f} - {:.3f}".format(*judgement.ratio_range),
            "{:.3f} - {:.3f}".format(*judgement.share_range),
            f"{judgement.pair_z:.1f}",
        )
    return table


def print_json(benchmark: str, records: Iterable[dict[str, object]]) -> None:
    """Print one object per line, each with the machine and the versions."""
    machine = report.facts()
    for record in records:
        print(json.dumps({"benchmark": benchmark, **record, "machine": machine}), flush=True)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
