"""Our loader, with and without `torch_dpflow.vision`, beside other libraries: the same files, the same two cores.

    python -m benchmarks.peers [--json] [--side NAME,...] [--rounds 5] [--quick]

Random resized crops of 224x224 as uint8, in batches of 64, from JPEGs. A side whose package is not installed is named,
with the command that installs it. What the sides do is told in benchmarks/README.md.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.loader import IMAGES, SPECIFICATION, LoaderRunError, warm_page_cache
from benchmarks.meter import time_epochs
from benchmarks.peers_sides import INSTALLED_AS, SIDES
from benchmarks.report import Figures, Metric, add_arguments, alternate, publish
from examples.natural_images import Specification, generate

CORES = 2
#: A fraction of the work.
FEW = (Path("demo_data/benchmark_few"), Specification(classes=4, train=128, val=4, seed=1))

METRICS = (
    Metric(name="samples_per_s", label="images/s"),
    Metric(name="cpu_ms_per_sample", label="CPU ms/image", higher_is_better=False),
    Metric(name="first_batch_ms", label="first batch, ms", higher_is_better=False, spec=",.0f"),
    Metric(name="peak_mib", label="peak MiB", higher_is_better=False, spec=",.0f"),
)


def measure(side: str, images: Path) -> Figures:
    """Read two epochs in this process."""
    with SIDES[side][0](images) as read:
        return time_epochs(read)


def run_side(side: str, images: Path) -> Figures:
    """The same in a process of its own. Raises LoaderRunError."""
    command = [sys.executable, "-m", "benchmarks.peers", f"--measure={side}", f"--images={images}"]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise LoaderRunError(f"{' '.join(command)} ended with {done.returncode}: see above")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def absent(side: str) -> str | None:
    """How to install what a side lacks."""
    package = SIDES[side][1]
    if importlib.util.find_spec(package) is not None:
        return None
    return f"{side}: not installed; pip install {INSTALLED_AS.get(package, package)}"


def chosen(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SIDES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SIDES)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="ours beside other libraries")
    parser.add_argument("--side", type=chosen, default=list(SIDES), help="e.g. 'tf.data,SPDL' (default: all)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--images", type=Path, help=argparse.SUPPRESS)
    add_arguments(parser)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.images)))
        return
    images, specification = FEW if arguments.quick else (IMAGES, SPECIFICATION)
    generate(images, specification)
    warm_page_cache(images)
    missing = [line for side in arguments.side if (line := absent(side)) is not None]
    sides: dict[str, Any] = {
        side: partial(run_side, side, images.resolve()) for side in arguments.side if absent(side) is None
    }
    rounds = 1 if arguments.quick else arguments.rounds
    publish([alternate("peers", "JPEG crops, uint8", sides, rounds=rounds)], METRICS, arguments)
    print("\n".join(missing), file=sys.stderr if arguments.json else sys.stdout)


if __name__ == "__main__":
    main()
