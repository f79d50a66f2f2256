"""Workers beyond this host against local ones, and on Ray against Ray Data: same dataset, same cores, taking turns.

    python -m benchmarks.platforms --platform hosts|ray [--part crops,linear] [--json] [--rounds 5] [--quick]

What the parts are, and what the figures mean, is told in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial

from benchmarks.loader import IMAGES, SPECIFICATION, LoaderRunError, warm_page_cache
from benchmarks.platforms_run import BATCH, SAMPLES, SIDES, SLEEPERS, SleepingLoader
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from examples.natural_images import generate
from tests.support.hosts import missing

#: Round trips of the part `linear`, seconds.
ROUND_TRIPS_S = {"rtt 0": 0.0, "rtt 20 ms": 0.020}
PARTS = {"hosts": ("crops", "linear"), "ray": ("crops",)}

METRICS = (
    Metric(name="samples_per_s", label="samples/s"),
    Metric(name="of_linear", label="of linear", spec=".3f"),
    Metric(name="whole_epoch_of_linear", label="with its ends", spec=".3f"),
    Metric(name="cpu_ms_per_sample", label="CPU ms/sample", higher_is_better=False),
    Metric(name="first_batch_ms", label="first batch, ms", higher_is_better=False, spec=",.0f"),
    Metric(name="peak_mib", label="peak MiB, all", higher_is_better=False, spec=",.0f"),
)


def run_side(side: str, quick: bool) -> Figures:
    """Run one side in a process of its own and return what it printed last."""
    command = [sys.executable, "-m", "benchmarks.platforms_run", side, f"--images={IMAGES.resolve()}"]
    done = subprocess.run([*command, *(["--quick"] if quick else [])], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise LoaderRunError(f"{' '.join(command)} ended with {done.returncode}: see above")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def crops(platform: str, rounds: int, quick: bool) -> Comparison:
    """Random crops of JPEGs, uint8."""
    sides: Mapping[str, str] = SIDES[platform]
    digests = {name: run_side(f"{side}-digest", quick)["digest"] for name, side in sides.items()}
    if len(set(digests.values())) != 1:
        raise LoaderRunError(f"the sides deliver different samples: {digests}")
    return alternate(
        "platforms",
        f"{platform}: JPEG crops, uint8",
        {name: partial(run_side, side, quick) for name, side in sides.items()},
        rounds=rounds,
        parameters={"workers": 2, "batch_size": BATCH, "samples": SAMPLES},
    )


def linear(rounds: int, quick: bool) -> Comparison:
    """Many remote workers that sleep, which are started once: that takes minutes of processor time."""
    with closing(SleepingLoader(quick)) as loader:
        return alternate(
            "platforms",
            f"hosts: {loader.workers} workers that sleep",
            {name: partial(loader.read, rtt_s) for name, rtt_s in ROUND_TRIPS_S.items()},
            rounds=rounds,
            parameters={"workers": loader.workers, **SLEEPERS},
        )


def compare(arguments: argparse.Namespace) -> Iterator[Comparison]:
    rounds = 1 if arguments.quick else arguments.rounds
    for part in arguments.part or PARTS[arguments.platform]:
        if part == "crops":
            yield crops(arguments.platform, rounds, arguments.quick)
        else:
            yield linear(rounds, arguments.quick)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.platforms", description="workers beyond this host")
    parser.add_argument("--platform", choices=PARTS, required=True)
    parser.add_argument("--part", type=lambda text: text.split(","), help="e.g. crops,linear (default: all)")
    add_arguments(parser)
    arguments = parser.parse_args()
    if unknown := {*(arguments.part or ())} - {*PARTS[arguments.platform]}:
        parser.error(f"--part: {', '.join(sorted(unknown))} is none of {', '.join(PARTS[arguments.platform])}")
    if arguments.platform == "hosts" and (why := missing()):
        parser.error(f"--platform hosts: {why}")
    generate(IMAGES, SPECIFICATION)
    warm_page_cache(IMAGES)
    publish(compare(arguments), METRICS, arguments)


if __name__ == "__main__":
    main()
