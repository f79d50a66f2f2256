"""Laws that set the number of a flow's workers, in one simulation: `python -m benchmarks.autoscale [--markdown]`.

Simulated time: no figure depends on the machine. The model (`torch_dpflow.cluster.control.scaling_model`) is crude: one
job, no stragglers, no network. It ranks laws; it proves nothing about clouds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.autoscale_laws import LAWS
from torch_dpflow.cluster.control.scaling_model import (
    SPREAD,
    FlowModel,
    Law,
    ScalingOutcome,
    ScalingRun,
)

#: workers before anything changes, and samples a second that they can just serve, at 90% of their time
FIRST, STEADY = 24, 432.0
#: when demand doubles, seconds
CHANGE_S = 60.0


@dataclass(frozen=True)
class Scenario:
    """What happens to a flow, for how long, and when its demand changes."""

    name: str
    model: FlowModel
    duration_s: float
    changes_at: float | None = None


def _doubles(now: float) -> float:
    return STEADY if now < CHANGE_S else 2 * STEADY


def _waves(now: float) -> float:
    return 500.0 - 300.0 * math.cos(2 * math.pi * now / 300.0)


def _gaps(now: float) -> float:
    return STEADY if now % 120.0 < 90.0 else 0.0


def _constant(now: float) -> float:
    return STEADY


SCENARIOS = [
    *(
        Scenario(
            f"demand x 2, cold start {cold_s:g} s",
            FlowModel(demand=_doubles, cold_start_s=cold_s, first=FIRST),
            360.0,
            CHANGE_S,
        )
        for cold_s in (3.0, 10.0, 40.0)
    ),
    Scenario("waves, 200 to 800 a second", FlowModel(demand=_waves, first=12), 600.0),
    Scenario("waves, cold start 40 s", FlowModel(demand=_waves, cold_start_s=40.0, first=12), 600.0),
    Scenario("gaps of 30 s each 120 s", FlowModel(demand=_gaps, first=FIRST), 600.0),
    Scenario(
        "storage gives 500 of 800 a second",
        FlowModel(demand=lambda now: 800.0, storage=500.0, first=FIRST),
        600.0,
    ),
    Scenario(
        "second epoch from the cache",
        FlowModel(demand=_constant, per_sample=lambda now: 1.0 if now < 200.0 else 0.1, first=FIRST),
        600.0,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over seeds of one law in one scenario."""

    scenario: str
    law: str
    #: seconds from the change until the job stalls no more; None where it does not change, inf: until the end
    settled_s: float | None
    stall_share: float
    #: worker-seconds per those of somebody who knows all beforehand
    ratio: float
    starts: float


def run(scenario: Scenario, law: Law, seed: int) -> ScalingOutcome:
    """One run."""
    return ScalingRun(scenario.model, law, seed).run(scenario.duration_s)


def measure(scenario: Scenario, name: str, make: Callable[[int], Law], seeds: Sequence[int]) -> Row:
    """One law in one scenario."""
    outcomes = [run(scenario, make(scenario.model.first), seed) for seed in seeds]
    return Row(
        scenario=scenario.name,
        law=name,
        settled_s=_settled(scenario, outcomes),
        stall_share=statistics.median(one.stall_share for one in outcomes),
        ratio=statistics.median(one.ratio for one in outcomes),
        starts=statistics.median(one.starts for one in outcomes),
    )


def settled_s(outcome: ScalingOutcome, since: float) -> float:
    """Return how long after `since` the job last stalled, seconds; 0 if it did not stall."""
    return max([0.0, *(at - since for at in outcome.stalled_at)])


def cold_start_percentile(median_s: float) -> float:
    """Return the time within which 95% of workers start, seconds."""
    return median_s * math.exp(SPREAD * 1.645)


def _settled(scenario: Scenario, outcomes: Sequence[ScalingOutcome]) -> float | None:
    since = scenario.changes_at
    if since is None:
        return None
    settled = statistics.median(settled_s(one, since) for one in outcomes)
    return settled if settled < scenario.duration_s - since - 10.0 else math.inf


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscale", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="one scenario, to see that it runs")
    parser.add_argument("--seeds", type=int, default=9, help="runs of each law (default: %(default)s)")
    parser.add_argument("--law", action="append", choices=LAWS, help="only this law; may be repeated")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds}: at least 1 is needed")
    names = arguments.law or [*LAWS]
    scenarios = SCENARIOS[:1] if arguments.quick else SCENARIOS
    rows = [[measure(scenario, name, LAWS[name], range(arguments.seeds)) for name in names] for scenario in scenarios]
    if arguments.json:
        for row in (one for same in rows for one in same):
            settles = row.settled_s is None or row.settled_s < math.inf
            print(json.dumps({**asdict(row), **({} if settles else {"settled_s": "never"})}))
    elif arguments.markdown:
        print(_markdown(names, rows))
    else:
        _show(names, rows)
    return 0


def _cell(row: Row) -> str:
    parts = [f"{100 * row.stall_share:.1f}%", f"{row.ratio:.2f}", f"{row.starts:,.0f}"]
    if row.settled_s is not None:
        parts.insert(0, "never" if row.settled_s == math.inf else f"{row.settled_s:.0f} s")
    return ", ".join(parts)


def _name(scenario: Scenario) -> str:
    if scenario.changes_at is None:
        return scenario.name
    most_s = cold_start_percentile(scenario.model.cold_start_s) + 10
    return f"{scenario.name} (its 95th percentile + 10 s: {most_s:.0f} s)"


_CAPTION = (
    "Medians. Seconds until stall stays below 5% after the change | stall over the run | worker-seconds per those of "
    "somebody who knows all beforehand | starts"
)


def _markdown(names: Sequence[str], rows: Sequence[Sequence[Row]]) -> str:
    lines = ["| | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for scenario, same in zip(SCENARIOS, rows):
        lines.append(f"| {_name(scenario)} | " + " | ".join(map(_cell, same)) + " |")
    return "\n".join([*lines, "", _CAPTION])


def _show(names: Sequence[str], rows: Sequence[Sequence[Row]]) -> None:
    table = Table(caption=_CAPTION, caption_justify="left")
    for heading in ("", *names):
        table.add_column(heading)
    for scenario, same in zip(SCENARIOS, rows):
        table.add_row(_name(scenario), *map(_cell, same))
    Console(width=200).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
