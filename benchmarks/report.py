"""What every benchmark needs: alternating rounds, medians, ratios, a table, and JSON lines.

A benchmark names its sides (the first is the baseline), hands each a callable that does the work once and
returns its figures, and prints what comes out::

    comparison = alternate("loader", "jpeg", {"torch": run_torch, "dpflow": run_dpflow}, rounds=5)
    show([comparison], METRICS)            # or: print_json(comparison)

Nothing is asserted here: a benchmark reports, a reader judges.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil
from rich.console import Console
from rich.table import Table

Figures = Mapping[str, float]
Side = Callable[[], Figures]

PACKAGES = ("torch", "torchvision", "numpy", "pillow", "pyzmq", "msgspec", "grpcio", "ray", "torch_dpflow")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One figure that the sides report, and how to print it. A side that does not have it reports NaN."""

    #: key in what a side returns
    name: str
    #: heading of its column, with the unit
    label: str
    higher_is_better: bool = True
    #: format spec of `format()`
    spec: str = ",.3g"

    def text(self, value: float) -> str:
        return "" if math.isnan(value) else format(value, self.spec)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The raw figures of several sides that did the same work, round by round."""

    benchmark: str
    workload: str
    #: side -> one mapping of figures for each round; the first side is the baseline
    rounds: Mapping[str, Sequence[Figures]]
    #: what was measured: sizes, costs, stated sleeps
    parameters: Mapping[str, object] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        return next(iter(self.rounds))

    def median(self, side: str, metric: str) -> float:
        """The median of one side's `metric` over the rounds; KeyError if a round lacks it."""
        return statistics.median(figures[metric] for figures in self.rounds[side])

    def ratio(self, side: str, metric: str) -> float:
        """The median over the rounds of `side` divided by the baseline of the same round.

        Neighbours in time are divided by each other, so a machine that slows down half-way changes little.
        """
        pairs = zip(self.rounds[side], self.rounds[self.baseline], strict=True)
        return statistics.median(_divide(ours[metric], theirs[metric]) for ours, theirs in pairs)

    def ratio_range(self, side: str, metric: str) -> tuple[float, float]:
        """The smallest and the largest ratio of any round: how much a single round is worth."""
        pairs = zip(self.rounds[side], self.rounds[self.baseline], strict=True)
        ratios = [_divide(ours[metric], theirs[metric]) for ours, theirs in pairs]
        return min(ratios), max(ratios)

    def metrics(self) -> list[str]:
        """The figures that every side reported in every round, in the baseline's order."""
        every = [figures for rounds in self.rounds.values() for figures in rounds]
        return [name for name in every[0] if all(name in figures for figures in every)] if every else []


def alternate(
    benchmark: str,
    workload: str,
    sides: Mapping[str, Side],
    *,
    rounds: int = 5,
    parameters: Mapping[str, object] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Run every side `rounds` times in turn; the side that goes first changes from round to round.

    `progress` is called with a line of text before each run, and with its figures after it (stderr by default).
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: at least one round is needed; five or more give a fair median")
    say = progress if progress is not None else _say
    taken: dict[str, list[Figures]] = {name: [] for name in sides}
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in order:
            run = f"{benchmark} {workload}: round {number + 1}/{rounds}, {name}"
            say(run)
            figures = dict(sides[name]())
            taken[name].append(figures)
            say(f"{run}: {', '.join(f'{figure} {value:.4g}' for figure, value in figures.items())}")
    return Comparison(benchmark=benchmark, workload=workload, rounds=taken, parameters=dict(parameters or {}))


def facts() -> dict[str, object]:
    """The machine and the versions that the figures belong to."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def print_json(comparison: Comparison) -> None:
    """Print one line: every side's raw figures, their medians and ratios, machine and versions."""
    shared = comparison.metrics()
    medians = {side: {m: comparison.median(side, m) for m in shared} for side in comparison.rounds}
    others = [side for side in comparison.rounds if side != comparison.baseline]
    ratios = {side: {m: comparison.ratio(side, m) for m in shared} for side in others}
    record = {
        "benchmark": comparison.benchmark,
        "workload": comparison.workload,
        "parameters": dict(comparison.parameters),
        "baseline": comparison.baseline,
        "median": medians,
        "ratio": ratios,
        "rounds": {side: [dict(figures) for figures in runs] for side, runs in comparison.rounds.items()},
        "machine": facts(),
    }
    print(json.dumps(record), flush=True)


def show(comparisons: Sequence[Comparison], metrics: Sequence[Metric], *, title: str | None = None) -> None:
    """Print one table: a row for each side of each workload, its medians, and its ratio to the baseline.

    The ratio column belongs to the first of `metrics` that the workload reports; its range over the rounds
    follows it. A figure that a workload does not report is left blank.
    """
    table = Table(title=title, caption=_caption(), caption_justify="left", title_justify="left")
    table.add_column("workload")
    table.add_column("side")
    for metric in metrics:
        table.add_column(metric.label, justify="right")
    table.add_column("ratio (range)", justify="right")
    for comparison in comparisons:
        for side in comparison.rounds:
            table.add_row(*_row(comparison, side, metrics))
        table.add_section()
    _console().print(table)


def markdown(comparisons: Sequence[Comparison], metrics: Sequence[Metric]) -> str:
    """The same table in Markdown, for a README."""
    heads = ["workload", "side", *(metric.label for metric in metrics), "ratio (range)"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    lines += [
        "| " + " | ".join(_row(comparison, side, metrics)) + " |"
        for comparison in comparisons
        for side in comparison.rounds
    ]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int = 5) -> None:
    """Add what every benchmark takes: --json, --markdown, --rounds, --quick."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object per line")
    form.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--rounds", type=_positive, default=rounds, help="runs of each side (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="less work, to see that it runs; no fair figures")


def publish(comparisons: Iterable[Comparison], metrics: Sequence[Metric], arguments: argparse.Namespace) -> None:
    """Print `comparisons` in the form that the arguments of `add_arguments` ask for, JSON as they come."""
    if arguments.json:
        for comparison in comparisons:
            print_json(comparison)
        return
    whole = list(comparisons)
    if arguments.markdown:
        print(markdown(whole, metrics))
        print(f"\n{_caption()}")
    else:
        show(whole, metrics)


def _row(comparison: Comparison, side: str, metrics: Sequence[Metric]) -> list[str]:
    reported = [metric for metric in metrics if metric.name in comparison.metrics()]
    cells = [metric.text(comparison.median(side, metric.name)) if metric in reported else "" for metric in metrics]
    return [comparison.workload, side, *cells, _ratio_text(comparison, side, reported)]


def _ratio_text(comparison: Comparison, side: str, reported: Sequence[Metric]) -> str:
    if not reported or side == comparison.baseline:
        return ""
    metric = reported[0]
    low, high = comparison.ratio_range(side, metric.name)
    better = "higher" if metric.higher_is_better else "lower"
    return f"{comparison.ratio(side, metric.name):.2f} ({low:.2f}-{high:.2f}), {better} is better"


def _caption() -> str:
    machine = facts()
    packages = machine["packages"]
    assert isinstance(packages, dict)
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Python {machine['python']}, {versions}"
    )


def _console() -> Console:
    # A pipe or a log has no width of its own, and a table folded to 80 columns cannot be read.
    return Console() if sys.stdout.isatty() else Console(width=160)


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _divide(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else float("nan")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 is needed")
    return value
