"""The demonstration: train the same classifier with torch's loader and with ours, and compare.

    python -m examples.demo        (`make demo` sets everything up first)

Generates 480 JPEGs once, then trains resnet18 from scratch for four epochs with each loader: same seed, same
workers, same threads, each in a process of its own. Takes three to four minutes on two cores.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples import natural_images
from examples.option_values import positive

LOADERS = ("torch", "dpflow")
CLASSES = 4
WORKERS = 2
IMAGE_SIZE = 112
BATCH_SIZE = 16
LEARNING_RATE = 0.01
#: Seconds that an interrupted training has to shut its workers down.
GRACE_S = 10.0


def training_threads() -> int:
    """Threads of torch in the training process, the same for both loaders.

    The workers decode while the model trains; threads that share a core with them only wait for each other.
    """
    return max(1, len(os.sched_getaffinity(0)) - WORKERS)


def sides(vision: bool) -> list[str]:
    """Return the names of the sides, in the table's order."""
    return [*LOADERS, *(f"{loader} + vision" for loader in LOADERS if vision)]


def train(side: str, data: Path, epochs: int, summary: Path) -> Mapping[str, Any]:
    """Train with one side in a process of its own; return what it wrote to `summary`."""
    loader, _, vision = side.partition(" + ")
    options = {
        "data": data,
        "loader": loader,
        "arch": "resnet18",
        "epochs": epochs,
        "batch-size": BATCH_SIZE,
        "workers": WORKERS,
        "image-size": IMAGE_SIZE,
        "lr": LEARNING_RATE,
        "threads": training_threads(),
        "seed": 0,
        "summary-json": summary,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    if vision:
        arguments.append("--vision")
    process = subprocess.Popen([sys.executable, "-m", "examples.train_classifier", *arguments])
    try:
        code = process.wait()
    except BaseException:
        stop(process)
        raise
    if code != 0:
        raise SystemExit(f"training with {side} failed with exit code {code}: see above")
    figures: Mapping[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
    return figures


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt a training, so that it shuts its workers down; kill it if it takes too long."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def results(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """The table that the demonstration ends with."""
    table = Table(title="resnet18, trained from scratch")
    table.add_column("loader")
    for heading in ("samples/s", "stall share", "time to first batch", "accuracy"):
        table.add_column(heading, justify="right")
    for loader, summary in figures.items():
        table.add_row(
            loader,
            f"{summary['samples_per_s']:.1f}",
            f"{summary['stall_share']:.1%}",
            f"{summary['time_to_first_batch_s'] * 1e3:.0f} ms",
            f"{summary['accuracy']:.1%}",
        )
    return table


def run(
    console: Console, data: Path, images: natural_images.Specification, epochs: int, *, vision: bool = False
) -> None:
    begun = time.monotonic()
    console.rule("images")
    if not natural_images.generate(data, images):
        console.print(f"{data} is there already")
    figures = {}
    with tempfile.TemporaryDirectory(prefix="torch_dpflow-demo-") as folder:
        for side in sides(vision):
            console.rule(f"training with {side}")
            figures[side] = train(side, data, epochs, Path(folder, f"{side}.json"))
    console.rule("results")
    console.print(results(figures))
    console.print(
        f"{time.monotonic() - begun:.0f} s in all. Each loader: {epochs} epochs of {images.train} images, "
        f"{WORKERS} workers, {training_threads()} training thread(s), the same seed. Chance is "
        f"{1 / CLASSES:.0%}. torch's loader draws random crops from a generator per worker, ours from one "
        "per batch, so the accuracies differ a little."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("demo_data/images"), help="folder for the images")
    parser.add_argument("--train", type=positive, default=400, help="images to train on")
    parser.add_argument("--val", type=positive, default=80, help="images to validate with")
    parser.add_argument("--epochs", type=positive, default=4)
    parser.add_argument("--vision", action="store_true", help="train with torch_dpflow.vision too, under both loaders")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        images = natural_images.Specification(classes=CLASSES, train=options.train, val=options.val)
        run(console, options.data, images, options.epochs, vision=options.vision)
    except KeyboardInterrupt:
        shutil.rmtree(natural_images.partial_directory(options.data), ignore_errors=True)
        console.print("interrupted: nothing is left behind but finished images")
        return 130
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
