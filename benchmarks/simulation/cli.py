"""The simulator's command line: a figure, the targets, or a question of the user's own."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.simulation import plots, tables
from benchmarks.simulation.contestants import DIRECTORY, POLICY_NAMES, SAMPLER_NAMES
from benchmarks.simulation.figures import FIGURES, draw_curves
from benchmarks.simulation.question import Question
from benchmarks.simulation.sizes import parse_size
from benchmarks.simulation.study import OVERLAP_CAPACITY, Case, Outcome, measure
from benchmarks.simulation.targets import all_targets, compare
from benchmarks.simulation.uniformity import LEVEL
from benchmarks.simulation.uniformity_study import SCENARIO_NAMES, Judgement, judge_all

T = TypeVar("T")

#: those that must pass, and the control that must fail
JUDGED = ("independent", "coordl", "joader", "shared-log", "dynagcs-letter")
#: capacities of the curve that answers a question, as shares of the data set
CURVE = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
EXAMPLE = """\
what would a 64 GiB cache give my four trials?
  python -m benchmarks.simulate --samples 1281167 --sample-size 110kB --capacity 64GiB \\
      --starts 0,0.25,0.5,0.75 --speeds 1,0.8,0.6,0.4 --epochs 3 --plot answer.png
every figure that the project promises, with pass or fail
  python -m benchmarks.simulate --figure targets
uniformity as in the thesis: 10,000 epochs of 1,000 samples
  python -m benchmarks.simulate --figure uniformity --epochs 10000 --workers 2 --plot uniformity.png
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.figure in ("5-4", "uniformity"):
            _uniformity(arguments)
        elif arguments.figure == "targets":
            return _targets(arguments)
        elif arguments.figure is not None:
            _figure(arguments)
        else:
            _question(arguments)
    except ValueError as error:
        parser.error(str(error))
    return 0


def _figure(arguments: argparse.Namespace) -> None:
    figure = FIGURES[arguments.figure]()
    outcomes = _measure_all(figure.cases, arguments.seeds)
    _publish_outcomes(arguments, outcomes, figure.title)
    if arguments.plot:
        figure.draw(arguments.plot, figure.title, outcomes)


def _question(arguments: argparse.Namespace) -> None:
    question = _question_of(arguments)
    shares = question.shares()
    cases, at_five = question.cases(shares), question.cases([OVERLAP_CAPACITY] * len(shares))
    outcomes = _measure_all([*cases, *at_five], arguments.seeds)
    asked, overlaps = outcomes[: len(cases)], outcomes[len(cases) :]
    title = question.describe_scale()
    _publish_outcomes(arguments, asked, title, overlaps)
    if arguments.plot:
        curve = _measure_all(question.cases(sorted({*CURVE, *shares})), 1)
        marks = {100 * share: f"{size / 2**30:.3g} GiB" for share, size in zip(shares, arguments.capacity)}
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
        judgements = list(judging)
    title = f"Uniformity over {epochs:,} epochs of 1,000 samples, Benjamini-Hochberg at {LEVEL}; worst job"
    if arguments.json:
        tables.print_json("uniformity", (judgement.record() for judgement in judgements))
    else:
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
        tables.print_json("simulate", (outcome.record() for outcome in outcomes))
    else:
        heading = f"{title}\nrates in % of accesses, means over {arguments.seeds} seeds"
        _console().print(tables.outcomes_table(outcomes, heading, overlaps))


def _question_of(arguments: argparse.Namespace) -> Question:
    if arguments.starts is None:
        arguments.starts = [0.0] * arguments.jobs
    if arguments.speeds is None:
        arguments.speeds = [1.0] * len(arguments.starts)
    return Question(
        samples=arguments.samples,
        sample_size=arguments.sample_size,
        capacities=arguments.capacity,
        starts=arguments.starts,
        speeds=arguments.speeds,
        epochs=arguments.epochs if arguments.epochs is not None else 1,
        batch_size=arguments.batch_size,
        timing="exponential" if arguments.irregular else "steady",
        samplers=arguments.sampler or ["shared-log", "independent"],
        policies=arguments.policy or [DIRECTORY],
        independence=arguments.independence,
        simulated=arguments.simulated,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--figure", choices=[*FIGURES, "5-4", "uniformity", "targets"], help="reproduce a figure")
    add("--json", action="store_true", help="print one JSON object per line instead of a table")
    add("--plot", type=Path, metavar="FILE.png", help="draw the result")
    add("--seeds", type=_count, default=5, help="runs of each case (default: %(default)s)")
    add("--workers", type=_count, default=1, help="processes, for uniformity (default: %(default)s)")
    add("--epochs", type=_count, help="epochs of each job (default: 1; for uniformity: 10000)")
    add("--sampler", type=_names(SAMPLER_NAMES), help=f"one or more of {', '.join(SAMPLER_NAMES)}")
    _add_question(parser)
    return parser


def _add_question(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("a question of your own").add_argument
    add("--scenario", type=_names(SCENARIO_NAMES), help="for uniformity: some of the scenarios")
    add("--policy", type=_names(POLICY_NAMES), help=f"one or more of {', '.join(POLICY_NAMES)}")
    add("--samples", type=_count, default=1_281_167, help="in the data set (default: %(default)s)")
    add("--sample-size", type=_size, default=110_000, help="of a cached sample, e.g. 110kB")
    add("--capacity", type=_list(_size), default=[64 * 2**30], help="of the cache, e.g. 16GiB,64GiB")
    add("--jobs", type=_count, default=4, help="when no starts are given (default: %(default)s)")
    add("--starts", type=_list(float), help="of each job, in epochs of the fastest job")
    add("--speeds", type=_list(float), help="of each job, relative to each other")
    add("--batch-size", type=_count, default=256, help="(default: %(default)s)")
    add("--irregular", action="store_true", help="exponential instead of steady batch times")
    add("--independence", type=float, default=0.0, help="share of picks that ignore what is loaded")
    add("--simulated", type=_count, default=2000, help="samples simulated (default: %(default)s)")


def _names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: allowed are {', '.join(allowed)}")
        return names

    return parse


def _list(parse_one: Callable[[str], T]) -> Callable[[str], list[T]]:
    return lambda text: [parse_one(part) for part in text.split(",")]


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    value = int(text.replace("_", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 is needed")
    return value


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _console() -> Console:
    # A pipe or a log has no width of its own, and a table folded to 80 columns cannot be read.
    return Console() if sys.stdout.isatty() else Console(width=160)
