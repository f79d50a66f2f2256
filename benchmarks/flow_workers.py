"""Estimate the workers of a flow in simulated time: `python -m benchmarks.flow_workers --help`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from torch_dpflow.cli.common import Command, json_option, to_json
from torch_dpflow.errors import OptionError

if TYPE_CHECKING:
    from benchmarks.scaling_model import FlowModel, ScalingOutcome

#: Number of runs; medians of their figures are reported.
_SEEDS = 5
#: Most samples a second, and most workers, that can be simulated in a few seconds.
_MAX_RATE, _MAX_WORKERS = 1e7, 4096


def _number(
    name: str, text: str, *, least: float, most: float, default: float | None = None
) -> Callable[[Command], Command]:
    return click.option(
        name,
        type=click.FloatRange(least, most, min_open=least == 0.0),
        required=default is None,
        default=default,
        show_default=default is not None,
        help=text,
    )


def _seconds(context: click.Context, parameter: click.Parameter, text: str) -> float:
    from torch_dpflow._core.checks import parse_duration

    return parse_duration(str(parameter.opts[0]), text, maximum=86400.0)


@click.command()
@_number(
    "--samples-per-second",
    "Samples that one job reads a second if it never waits.",
    least=0.0,
    most=_MAX_RATE,
)
@_number("--sample-seconds", "Time in which a worker loads one sample.", least=0.0, most=3600.0)
@click.option("--jobs", type=click.IntRange(1, 1024), default=1, show_default=True, help="Number of jobs.")
@click.option("--apart", default="1m", show_default=True, callback=_seconds, help="Time between the starts of jobs.")
@click.option(
    "--cold-start",
    default="3s",
    show_default=True,
    callback=_seconds,
    help="Time from the start of a worker to its first sample.",
)
@click.option("--duration", default="30m", show_default=True, callback=_seconds, help="Simulated time.")
@_number(
    "--loads-per-sample",
    "Samples loaded per sample that jobs read, as in `dpflow top`: 1 / jobs if they share all.",
    least=0.0,
    most=10.0,
    default=1.0,
)
@click.option("--price", type=click.FloatRange(0.0, 1e6), help="Price of a worker per hour.")
@json_option
def main(as_json: bool, price: float | None, **given: Any) -> None:
    """Estimate how many workers a flow would have, how long jobs would wait, and the cost.

    The model is simple: it has no stragglers and no limits of the network or the storage.
    """
    model, duration_s = _model(**given), given["duration"]
    outcomes = [_run(model, duration_s, seed) for seed in range(_SEEDS)]
    facts = _facts(model, outcomes, duration_s, price)
    if as_json:
        click.echo(to_json(facts))
    else:
        _print(facts)


def _model(
    *,
    samples_per_second: float,
    sample_seconds: float,
    jobs: int,
    apart: float,
    cold_start: float,
    duration: float,
    loads_per_sample: float,
) -> FlowModel:
    from benchmarks.scaling_model import FlowModel

    if (jobs - 1) * apart >= duration:
        raise OptionError(
            f"--jobs {jobs} with --apart {apart:g} s: the last would start after --duration {duration:g} s; give more "
            "time, or a shorter --apart"
        )
    most = samples_per_second * jobs * loads_per_sample * sample_seconds
    if most > _MAX_WORKERS:
        raise OptionError(f"these jobs keep {most:,.0f} workers busy; a cluster has {_MAX_WORKERS} at most")

    def demand(now: float) -> float:
        return samples_per_second * (min(jobs - 1, int(now / apart)) + 1)

    return FlowModel(
        demand=demand,
        rate=1.0 / sample_seconds,
        cold_start_s=cold_start,
        per_sample=lambda now: loads_per_sample,
        prefetch=max(512, round(samples_per_second)),
    )


def _run(model: FlowModel, duration_s: float, seed: int) -> ScalingOutcome:
    from benchmarks.scaling_model import ScalingRun, autoscaled

    return ScalingRun(model, autoscaled(2, _MAX_WORKERS), seed).run(duration_s)


def _facts(model: FlowModel, outcomes: list[ScalingOutcome], duration_s: float, price: float | None) -> dict[str, Any]:
    def median(name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in outcomes))

    worker_s, min_s = median("worker_s"), median("min_worker_s")
    most = max(model.needed(now) for now in range(math.ceil(duration_s)))
    return {
        "workers_needed": most,
        "max_workers": round(median("max_workers")),
        "starts": round(median("starts")),
        "stall_share": median("stall_share"),
        "worker_seconds": worker_s,
        "min_worker_seconds": min_s,
        "fixed_worker_seconds": most * duration_s,
        "seconds": duration_s,
        "cost": None if price is None else worker_s / 3600 * price,
    }


def _print(facts: dict[str, Any]) -> None:
    def hours(name: str) -> str:
        return f"{facts[name] / 3600:,.2f} worker-hours"

    click.echo(
        f"workers: at most {facts['workers_needed']:,} are busy; autoscaling has up to {facts['max_workers']:,}, by "
        f"{facts['starts']:,} starts\n"
        f"stall: jobs wait for {facts['stall_share']:.1%} of {facts['seconds']:,.0f} s\n"
        f"time: {hours('worker_seconds')}; {hours('min_worker_seconds')} if all were known in advance, "
        f"{hours('fixed_worker_seconds')} with {facts['workers_needed']:,} workers all the time"
    )
    if facts["cost"] is not None:
        click.echo(f"cost: {facts['cost']:,.2f}")


if __name__ == "__main__":
    main()
