"""The simulator's command line: a figure, the targets, or a question of the user's own."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.simulation import options, plots, tables
from benchmarks.simulation.figures import FIGURES, draw_curves
from benchmarks.simulation.question import Question
from benchmarks.simulation.study import OVERLAP_CAPACITY, Case, Outcome, measure
from benchmarks.simulation.targets import all_targets, compare
from benchmarks.simulation.uniformity import LEVEL
from benchmarks.simulation.uniformity_study import SCENARIO_NAMES, Judgement, judge_all

#: those that must pass, and the control that must fail
JUDGED = ("independent", "coordl", "joader", "shared-log", "dynagcs-letter")
#: capacities of the curve that answers a question, as shares of the data set
CURVE = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if a target is missed."""
    parser = options.parser()
    arguments = parser.parse_args(argv)
    if arguments.figure in options.UNIFORMITY:
        _uniformity(arguments)
    elif arguments.figure == options.TARGETS:
        return _targets(arguments)
    elif arguments.figure is not None:
        _figure(arguments)
    else:
        try:
            question = options.question(arguments)
        except ValueError as error:
            parser.error(str(error))
        _answer(question, arguments)
    return 0


def _figure(arguments: argparse.Namespace) -> None:
    figure = FIGURES[arguments.figure]()
    outcomes = _measure_all(figure.cases, arguments.seeds)
    _publish_outcomes(arguments, outcomes, figure.title)
    if arguments.plot:
        figure.draw(arguments.plot, figure.title, outcomes)


def _answer(question: Question, arguments: argparse.Namespace) -> None:
    shares = question.shares()
    cases, at_five = question.cases(shares), question.cases([OVERLAP_CAPACITY] * len(shares))
    outcomes = _measure_all([*cases, *at_five], arguments.seeds)
    asked, overlaps = outcomes[: len(cases)], outcomes[len(cases) :]
    title = question.describe_scale()
    _publish_outcomes(arguments, asked, title, overlaps)
    if arguments.plot:
        curve = _measure_all(question.cases(sorted({*CURVE, *shares})), 1)
        marks = {100 * share: capacity.text for share, capacity in zip(shares, arguments.capacity)}
        draw_curves(arguments.plot, title, curve, marks)


def _targets(arguments: argparse.Namespace) -> int:
    targets = all_targets()
    with _progress() as progress:
        task = progress.add_task("targets", total=len(targets))
        comparisons = compare(targets, range(arguments.seeds), lambda: progress.advance(task))
    if arguments.json:
        tables.print_json("simulate", (comparison.record() for comparison in comparisons))
    else:
        title = f"Targets, means over {arguments.seeds} seeds (hit rates in % of accesses)"
        _console().print(tables.targets_table(comparisons, title))
    return 0 if all(comparison.passed for comparison in comparisons) else 1


def _uniformity(arguments: argparse.Namespace) -> None:
    epochs = arguments.epochs if arguments.epochs is not None else 10_000
    scenarios = list(arguments.scenario or SCENARIO_NAMES)
    samplers = list(arguments.sampler or JUDGED)
    with _progress() as progress:
        task = progress.add_task("epochs", total=epochs * len(scenarios) * len(samplers))
        judging = judge_all(
            samplers,
            scenarios,
            epochs=epochs,
            workers=arguments.workers,
            progress=lambda done: progress.advance(task, done),
        )
        judgements = []
        for judgement in judging:
            judgements.append(judgement)
            # At once, because the next one may be minutes away.
            if arguments.json:
                tables.print_json("uniformity", [judgement.record()])
    title = f"Uniformity over {epochs:,} epochs of 1,000 samples, Benjamini-Hochberg at {LEVEL}; worst job"
    if not arguments.json:
        _console().print(tables.judgements_table(judgements, title))
    if arguments.plot:
        _draw_p_values(arguments.plot, title, judgements)


def _draw_p_values(path: Path, title: str, judgements: Iterable[Judgement]) -> None:
    panels: dict[str, dict[str, plots.Values]] = {}
    for judgement in judgements:
        worst = max(judgement.verdicts, key=lambda verdict: verdict.failing_positions)
        panels.setdefault(judgement.scenario, {})[judgement.sampler] = worst.position_p
    plots.p_values(path, title, panels, level=LEVEL)


def _measure_all(cases: Sequence[Case], seeds: int) -> list[Outcome]:
    with _progress() as progress:
        return [measure(case, range(seeds)) for case in progress.track(cases, description="cases")]


def _publish_outcomes(
    arguments: argparse.Namespace, outcomes: Sequence[Outcome], title: str, overlaps: Sequence[Outcome] = ()
) -> None:
    if arguments.json:
        tables.print_json("simulate", tables.outcome_records(outcomes, overlaps))
    else:
        heading = f"{title}\nrates in % of accesses, means over {arguments.seeds} seeds"
        _console().print(tables.outcomes_table(outcomes, heading, overlaps))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Redirected, lines of JSON for a file would go to the terminal that shows the bar.
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)


def _console() -> Console:
    # A pipe or a log has no width of its own, and a table folded to 80 columns cannot be read.
    return Console() if sys.stdout.isatty() else Console(width=160)
