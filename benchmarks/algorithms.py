"""How fast samplers and cache policies are: `python -m benchmarks.algorithms [--json] [--quick]`.

Indices per second of every sampler and accesses per second of every policy at 1.28 million samples with 1 to
16 jobs; how long a set takes to insert and an epoch to start; bytes per sample per job; growth from 10^4 to
10^7 samples. One process, one thread. Medians of several rounds, with their range.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import report
from benchmarks.algorithm_timing import (
    LIMIT,
    Jobs,
    Timed,
    access_rate,
    draw_rate,
    group_memory,
    policy_memory,
)
from benchmarks.simulation.contestants import DIRECTORY, POLICY_NAMES, SAMPLER_NAMES

IMAGENET = 1_281_167
JOBS = (1, 2, 4, 8, 16)
GROWTH = (10_000, 100_000, 1_000_000, 10_000_000)
#: told with every order, so not for policies that need another kind of knowledge
POLICIES = tuple(name for name in POLICY_NAMES if name != DIRECTORY)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One figure: raw values of all rounds."""

    what: str
    subject: str
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

    def row(self) -> tuple[str, ...]:
        low, high = min(self.values), max(self.values)
        middle = statistics.median(self.values)
        return self.what, self.subject, self.setting, f"{middle:,.4g}", f"{low:,.4g} - {high:,.4g}", self.unit


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
            yield f"{sampler}, {_label(jobs)}", _draws(sampler, jobs, scale)
    for policy in POLICIES:
        for count in scale.jobs:
            yield f"{policy}, {count} jobs", _accesses(policy, scale.samples, count, scale)
    for samples in scale.growth:
        yield (
            f"growth: shared-log, {samples:,}",
            _draws("shared-log", Jobs.equal(samples, 2), scale, "growth"),
        )
        yield f"growth: alsd, {samples:,}", _accesses("alsd", samples, 2, scale, "growth")
    yield from _memory(min(scale.samples, 200_000))


def _label(jobs: Jobs) -> str:
    return f"{len(jobs.sets)} jobs, {jobs.label}"


def _draws(sampler: str, jobs: Jobs, scale: Scale, what: str = "draw") -> Callable[[], list[Result]]:
    def run() -> list[Result]:
        timed = [draw_rate(sampler, jobs, limit=scale.limit) for _ in range(scale.rounds)]
        where = f"{jobs.samples:,} samples, {_label(jobs)}"
        joins = [each.extra["join_s"] * 1e3 for each in timed]
        starts = [each.extra["epoch_start_s"] * 1e3 for each in timed]
        return [
            _rates(what, sampler, where, "indices/s", timed),
            Result(what="insert a set", subject=sampler, setting=where, unit="ms", values=joins),
            Result(what="start an epoch", subject=sampler, setting=where, unit="ms", values=starts),
        ]

    return run


def _accesses(
    policy: str, samples: int, jobs: int, scale: Scale, what: str = "access"
) -> Callable[[], list[Result]]:
    def run() -> list[Result]:
        results = []
        for bulk in (False, True):
            timed = [
                access_rate(policy, samples, jobs, bulk=bulk, limit=scale.limit) for _ in range(scale.rounds)
            ]
            where = f"{samples:,} samples, {jobs} jobs, {'in bulk' if bulk else 'one by one'}"
            results.append(_rates(what, policy, where, "accesses/s", timed))
        return results

    return run


def _memory(samples: int) -> Iterator[Step]:
    for sampler in SAMPLER_NAMES:
        for jobs in (Jobs.equal(samples, 8), Jobs.overlapping(samples)):
            where = f"{samples:,} samples, {_label(jobs)}"
            yield (
                f"memory: {sampler}, {_label(jobs)}",
                lambda sampler=sampler, jobs=jobs, where=where: [
                    _bytes(sampler, where, group_memory(sampler, jobs))
                ],
            )
    for policy in POLICIES:
        where = f"{samples:,} samples, 8 jobs"
        yield (
            f"memory: {policy}",
            lambda policy=policy, where=where: [_bytes(policy, where, policy_memory(policy, samples, 8))],
        )


def _rates(what: str, subject: str, setting: str, unit: str, timed: Sequence[Timed]) -> Result:
    return Result(
        what=what, subject=subject, setting=setting, unit=unit, values=[each.rate for each in timed]
    )


def _bytes(subject: str, setting: str, held: float) -> Result:
    return Result(
        what="memory", subject=subject, setting=setting, unit="bytes/sample/job", values=[round(held, 2)]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    scale = Scale.quick() if arguments.quick else Scale(rounds=arguments.rounds)
    todo = [step for step in steps(scale) if arguments.only is None or arguments.only in step[0]]
    results: list[Result] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=len(todo))
        for label, measure in todo:
            progress.update(task, description=label)
            results += measure()
            progress.advance(task)
    _publish(results, as_json=arguments.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.algorithms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument(
        "--quick", action="store_true", help="less work, to see that it runs; no fair figures"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--only", metavar="TEXT", help="only measurements whose name contains TEXT, e.g. 'alsd'"
    )
    return parser


def _publish(results: Sequence[Result], *, as_json: bool) -> None:
    if as_json:
        machine = report.facts()
        for result in results:
            print(json.dumps({"benchmark": "algorithms", **result.record(), "machine": machine}), flush=True)
        return
    table = Table(title="Samplers and cache policies, one thread", title_justify="left")
    for heading in ("what", "subject", "setting", "median", "range", "unit"):
        table.add_column(heading, justify="right" if heading in ("median", "range") else "left")
    for result in results:
        table.add_row(*result.row())
    (Console() if sys.stdout.isatty() else Console(width=160)).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
