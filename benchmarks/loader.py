"""Our loader against torch's: same dataset, same number of workers, taking turns.

    python -m benchmarks.loader [--json] [--workload a,b,c,d,e,f,g,h,i] [--rounds 5] [--quick]

What the workloads are, and what the figures mean, is told in benchmarks/README.md.
"""

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.loader_workloads import WORKERS, WORKLOADS, Setting, Workload, calibrate_spin
from benchmarks.report import Comparison, Metric, add_arguments, alternate, publish
from examples.natural_images import Specification, generate

IMAGES = Path("demo_data/benchmark")
SPECIFICATION = Specification(classes=4, train=1024, val=4, seed=1)

METRICS = (
    Metric(name="samples_per_s", label="samples/s"),
    Metric(name="first_batch_ms", label="first batch, ms", higher_is_better=False),
    Metric(name="later_first_batch_ms", label="later epochs, ms", higher_is_better=False),
    Metric(name="cpu_ms_per_sample", label="CPU ms/sample", higher_is_better=False),
    Metric(name="stall_share", label="stall share", higher_is_better=False, spec=".0%"),
    Metric(name="close_ms", label="close, ms", higher_is_better=False),
    Metric(name="main_mib", label="peak MiB, main", higher_is_better=False, spec=",.0f"),
    Metric(name="worker_mib", label="peak MiB, worker", higher_is_better=False, spec=",.0f"),
    Metric(name="import_ms", label="import, ms", higher_is_better=False),
)


class LoaderRunError(RuntimeError):
    """One side failed, or the sides did not deliver the same."""


def run_side(key: str, side: str, setting: Setting, *options: str) -> Any:
    """Run one side in a process of its own and return what it printed."""
    command = [sys.executable, "-m", "benchmarks.loader_run", key, side]
    command += [f"--images={setting.images}", f"--spin={setting.spin}", *options]
    if setting.quick:
        command.append("--quick")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise LoaderRunError(f"{' '.join(command)} ended with {done.returncode}: see above")
    return json.loads(done.stdout)


def check_same_batches(key: str, workload: Workload, setting: Setting) -> None:
    """Raise LoaderRunError unless every side delivers the same bits in the same order."""
    digests = {side: run_side(key, side, setting, "--digest") for side in workload.sides}
    if len(set(digests.values())) != 1:
        raise LoaderRunError(f"workload {key}: the sides deliver different batches: {digests}")


def compare(key: str, setting: Setting, rounds: int, step_ms: float) -> Comparison:
    """Run every side of one workload `rounds` times in turn."""
    workload = WORKLOADS[key]
    check_same_batches(key, workload, setting)
    return alternate(
        "loader",
        f"{key}: {workload.title}",
        {side: partial(run_side, key, side, setting, f"--step-ms={step_ms}") for side in workload.sides},
        rounds=rounds,
        parameters={
            "workers": WORKERS,
            "batch_size": workload.batch_size,
            "step_ms": step_ms,
            "quick": setting.quick,
            **workload.parameters,
        },
    )


def warm_page_cache(images: Path) -> None:
    for path in images.glob("*/*/*.jpg"):
        path.read_bytes()


def chosen(text: str) -> list[str]:
    """The workloads that a list such as `a,e` names; `e` stands for all of its variants."""
    keys = []
    for letter in text.split(","):
        named = [key for key in WORKLOADS if key == letter or key.split()[0] == letter]
        if not named:
            raise argparse.ArgumentTypeError(f"{letter!r} is none of {', '.join(WORKLOADS)}")
        keys += named
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description="ours against torch's loader")
    parser.add_argument("--workload", type=chosen, default=list(WORKLOADS), help="letters, e.g. a,c (default: all)")
    parser.add_argument("--step-ms", type=float, default=0.0, help="sleep after each batch, as a training step")
    add_arguments(parser)
    arguments = parser.parse_args()
    generate(IMAGES, SPECIFICATION)
    warm_page_cache(IMAGES)
    setting = Setting(images=IMAGES, spin=calibrate_spin(), quick=arguments.quick)
    rounds = 1 if arguments.quick else arguments.rounds
    comparisons = [compare(key, setting, rounds, arguments.step_ms) for key in arguments.workload]
    publish(comparisons, METRICS, arguments)


if __name__ == "__main__":
    main()
