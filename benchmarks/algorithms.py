"""How fast samplers and cache policies are: `python -m benchmarks.algorithms [--json] [--quick]`.

Indices per second of every sampler and accesses per second of every policy at 1.28 million samples with 1 to
16 jobs; how long a set takes to insert and an epoch to start; bytes per sample per job; growth from 10^4 to
10^7 samples. One process, one thread, by its CPU time. Medians of several rounds, with their range.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import report
from benchmarks.algorithm_timing import (
    LIMIT,
    Jobs,
    access_rate,
    draw_rate,
    group_memory,
    lookahead_cost,
    policy_memory,
)
from benchmarks.simulation.contestants import DIRECTORY, POLICY_NAMES, SAMPLER_NAMES

IMAGENET = 1_281_167
JOBS = (1, 2, 4, 8, 16)
GROWTH = (10_000, 100_000, 1_000_000, 10_000_000)
#: in bulk or not, and how the tables say it
FORMS = ((False, "one by one"), (True, "in bulk"))
POLICIES = tuple(name for name in POLICY_NAMES if name != DIRECTORY)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One cell of one table: raw values of all rounds."""

    #: the table
    what: str
    #: the row: a sampler or a policy
    subject: str
    #: the column
    setting: str
    unit: str
    values: Sequence[float]

    def record(self) -> dict[str, object]:
        return {
            "what": self.what,
            "subject": self.subject,
            "setting": self.setting,
            "unit": self.unit,
            "median": statistics.median(self.values),
            "values": list(self.values),
        }

    def cell(self) -> str:
        """The median, and the range if there were several rounds."""
        low, high = min(self.values), max(self.values)
        span = f" ({_short(low)}-{_short(high)})" if len(self.values) > 1 else ""
        return _short(statistics.median(self.values)) + span


def _short(value: float) -> str:
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.3g}"


#: one step of the benchmark: what is measured, and how
Step = tuple[str, Callable[[], list[Result]]]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much work the benchmark does."""

    samples: int = IMAGENET
    jobs: Sequence[int] = JOBS
    growth: Sequence[int] = GROWTH
    rounds: int = 3
    limit: float = LIMIT

    @classmethod
    def quick(cls) -> "Scale":
        """A minute's work, to see that it runs; no fair figures."""
        return cls(samples=100_000, jobs=(1, 8), growth=(10_000, 100_000), rounds=1, limit=0.3)


def steps(scale: Scale) -> Iterator[Step]:
    """Everything that is measured, in order."""
    settings = [Jobs.equal(scale.samples, jobs) for jobs in scale.jobs]
    settings += [Jobs.eight_speeds(scale.samples), Jobs.overlapping(scale.samples)]
    for sampler in SAMPLER_NAMES:
        for jobs in settings:
            yield f"{sampler}, {_label(jobs)}", partial(_draws, sampler, jobs, scale)
    for policy in POLICIES:
        for count in scale.jobs:
            yield f"{policy}, {_jobs(count)}", partial(_accesses, policy, count, scale)
    for samples in scale.growth:
        yield f"growth, {samples:,} samples", partial(_growth, samples, scale)
    for sampler in SAMPLER_NAMES:
        for jobs in (Jobs.equal(scale.samples, 8), Jobs.overlapping(scale.samples)):
            yield f"memory, {sampler}, {_label(jobs)}", partial(_group_memory, sampler, jobs)
    for policy in POLICIES:
        yield f"memory, {policy}", partial(_policy_memory, policy, scale.samples)
    for sampler in ("independent", "shared-log", "joader", "dynagcs"):
        yield f"lookahead, {sampler}", partial(_lookahead, sampler, scale)


def _draws(sampler: str, jobs: Jobs, scale: Scale) -> list[Result]:
    timed = [draw_rate(sampler, jobs, limit=scale.limit) for _ in range(scale.rounds)]
    tables = {
        f"indices drawn, {jobs.samples:,} samples": ("indices/s", [each.rate for each in timed]),
        "insertion of a set, the slowest": ("ms", [each.extra["join_s"] * 1e3 for each in timed]),
        "start of an epoch, the slowest": ("ms", [each.extra["epoch_start_s"] * 1e3 for each in timed]),
    }
    return [
        Result(what=what, subject=sampler, setting=_label(jobs), unit=unit, values=values)
        for what, (unit, values) in tables.items()
    ]


def _accesses(policy: str, jobs: int, scale: Scale) -> list[Result]:
    return [
        Result(
            what=f"accesses {form}, {scale.samples:,} samples",
            subject=policy,
            setting=_jobs(jobs),
            unit="accesses/s",
            values=_access_rates(policy, scale.samples, jobs, scale, bulk=bulk),
        )
        for bulk, form in FORMS
    ]


def _growth(samples: int, scale: Scale) -> list[Result]:
    """What two equal jobs get as the data set grows."""
    jobs = Jobs.equal(samples, 2)
    timed = [draw_rate("shared-log", jobs, limit=scale.limit) for _ in range(scale.rounds)]
    rows = {
        ("shared-log", "indices/s"): [each.rate for each in timed],
        ("shared-log, start of an epoch", "ms"): [each.extra["epoch_start_s"] * 1e3 for each in timed],
    }
    for bulk, form in FORMS:
        rows[f"alsd, {form}", "accesses/s"] = _access_rates("alsd", samples, 2, scale, bulk=bulk)
    return [
        Result(what="growth, 2 jobs", subject=subject, setting=f"{samples:,}", unit=unit, values=values)
        for (subject, unit), values in rows.items()
    ]


def _access_rates(policy: str, samples: int, jobs: int, scale: Scale, *, bulk: bool) -> list[float]:
    rounds = range(scale.rounds)
    return [access_rate(policy, samples, jobs, bulk=bulk, limit=scale.limit).rate for _ in rounds]


def _group_memory(sampler: str, jobs: Jobs) -> list[Result]:
    return [_bytes(sampler, _label(jobs), group_memory(sampler, jobs))]


def _policy_memory(policy: str, samples: int) -> list[Result]:
    return [_bytes(policy, _jobs(8), policy_memory(policy, samples, 8))]


def _lookahead(sampler: str, scale: Scale) -> list[Result]:
    """What a cluster's lookaheads cost, with ALSD and 8 jobs."""
    taken = [lookahead_cost(sampler, "alsd", scale.samples, 8) for _ in range(scale.rounds)]
    what = f"at the start of an epoch, 8 jobs, {scale.samples:,} samples"
    tables = {"time of lookaheads": "µs/sample/job", "memory of lookaheads": "bytes/sample/job"}
    return [
        Result(
            what=f"{table} {what}",
            subject=sampler,
            setting="alsd",
            unit=unit,
            values=[cost[k] for cost in taken],
        )
        for k, (table, unit) in enumerate(tables.items())
    ]


def _bytes(subject: str, setting: str, held: float) -> Result:
    return Result(what="memory", subject=subject, setting=setting, unit="bytes/sample/job", values=[held])


def _label(jobs: Jobs) -> str:
    count = _jobs(len(jobs.sets))
    return count if jobs.label == "equal" else f"{count}, {jobs.label}"


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    scale = Scale.quick() if arguments.quick else Scale(rounds=arguments.rounds)
    todo = [step for step in steps(scale) if arguments.only is None or arguments.only in step[0]]
    results: list[Result] = []
    # Redirected, lines of JSON for a file would go to the terminal that shows the bar.
    with Progress(console=Console(stderr=True), transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("starting", total=len(todo))
        for label, measure in todo:
            progress.update(task, description=label)
            measured = measure()
            # At once, because all of it takes long and half of it is worth having.
            if arguments.json:
                _print_json(measured)
            results += measured
            progress.advance(task)
    if not arguments.json:
        _print_tables(results)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.algorithms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="less work, to see that it runs; no fair figures")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each measurement (default: %(default)s)")
    parser.add_argument("--only", metavar="TEXT", help="only measurements whose name contains TEXT, e.g. 'alsd'")
    return parser


def _print_json(results: Sequence[Result]) -> None:
    machine = report.facts()
    for result in results:
        print(json.dumps({"benchmark": "algorithms", **result.record(), "machine": machine}), flush=True)


def _print_tables(results: Sequence[Result]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=180)
    for what in dict.fromkeys(result.what for result in results):
        console.print(_table(what, [result for result in results if result.what == what]))


def _table(what: str, results: Sequence[Result]) -> Table:
    """A row for each subject, a column for each setting."""
    cells = {(result.subject, result.setting): result.cell() for result in results}
    table = Table(title=f"{what}: median (range)", title_justify="left")
    table.add_column("")
    settings = list(dict.fromkeys(result.setting for result in results))
    for setting in settings:
        table.add_column(setting, justify="right")
    table.add_column("")
    for subject, unit in dict.fromkeys((result.subject, result.unit) for result in results):
        table.add_row(subject, *(cells.get((subject, setting), "") for setting in settings), unit)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
