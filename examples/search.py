"""A search for the best learning rate: four trials at once, which share one loading of their images.

    python -m examples.search                      # --loader torch: each trial has workers of its own

Each trial is a process that trains a small network on the same generated JPEGs (examples/natural_images.py), cropped
and mirrored at random. With torch's loader every trial decodes every image in every epoch. With ours a cluster decodes
each once for all of them; that is one line of `open_loader`. If no cluster runs (`dpflow up`), the search starts one
for itself. Takes about a minute on two cores, images included.
"""

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, Dataset

from examples import natural_images
from examples.cluster import found_or_started, loads
from examples.option_values import address_or_new, positive, rate, require_answer
from examples.stopwatch import Stopwatch
from examples.train_classifier import build_dataset, seed_everything
from torch_dpflow import DPFlowDataLoader

LOADERS = ("torch", "dpflow")
FLOW = "examples/search"
CLASSES = 4
IMAGE_SIZE = 64
BATCH_SIZE = 16
#: How old a cluster's figures may be, seconds.
STATUS_AGE_S = 1.5


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training run of the search."""

    number: int
    lr: float
    loader: str
    #: Of the cluster.
    address: str
    #: Folder with train/ and val/.
    data: Path
    epochs: int
    #: Of this trial with torch's loader; of all trials together with ours.
    workers: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a trial."""

    trial: Trial
    #: On the images for validation.
    accuracy: float
    #: Share of the time that training waited for its loader.
    stall_share: float
    #: Images that it was given, again in each epoch.
    samples: int
    seconds: float


def open_loader(trial: Trial, dataset: Dataset[Any]) -> Any:
    """Make the loader: the one line in which the sides differ."""
    given: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": trial.workers}
    given["generator"] = torch.Generator().manual_seed(trial.number)
    if trial.loader == "torch":
        return DataLoader(dataset, persistent_workers=True, **given)
    return DPFlowDataLoader(dataset, flow=FLOW, address=trial.address, **given)


def build_model() -> nn.Module:
    """A network that trains faster than two cores decode."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def run(trial: Trial) -> Outcome:
    """Train from scratch, in a process of its own."""
    torch.set_num_threads(1)
    seed_everything(0)
    loader = open_loader(trial, build_dataset(trial.data, "train", IMAGE_SIZE))
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), trial.lr, momentum=0.9)
    samples, begun, stall_s = 0, time.perf_counter(), 0.0
    for _ in range(trial.epochs):
        watch = Stopwatch(loader)
        for images, labels in watch:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples += len(labels)
        stall_s += watch.stall_s
    seconds = time.perf_counter() - begun
    return Outcome(
        trial=trial,
        accuracy=accuracy(model, build_dataset(trial.data, "val", IMAGE_SIZE)),
        stall_share=stall_s / seconds,
        samples=samples,
        seconds=seconds,
    )


@torch.inference_mode()
def accuracy(model: nn.Module, images: Dataset[Any]) -> float:
    model.eval()
    batches = [(model(batch), labels) for batch, labels in DataLoader(images, batch_size=BATCH_SIZE)]
    right = sum(int((scores.argmax(1) == labels).sum()) for scores, labels in batches)
    return right / sum(len(labels) for _, labels in batches)


def search(options: argparse.Namespace, address: str) -> tuple[list[Outcome], int]:
    """All trials at once; what they came to, and how many images were decoded for it."""
    count = len(options.lr)
    workers = max(1, options.workers // count) if options.loader == "torch" else options.workers
    trials = [
        Trial(
            number=number,
            lr=lr,
            loader=options.loader,
            address=address,
            data=options.data.absolute(),
            epochs=options.epochs,
            workers=workers,
        )
        for number, lr in enumerate(options.lr)
    ]
    before = loads(address, FLOW) if address else 0
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as processes:
        outcomes = list(processes.map(run, trials))
    if not address:
        return outcomes, sum(outcome.samples for outcome in outcomes)
    time.sleep(STATUS_AGE_S)
    return outcomes, loads(address, FLOW) - before


def results(outcomes: Sequence[Outcome], decodes: int) -> Table:
    """The table that the search ends with."""
    samples = sum(outcome.samples for outcome in outcomes)
    seconds = max(outcome.seconds for outcome in outcomes)
    best = max(outcomes, key=lambda outcome: outcome.accuracy)
    table = Table(
        title=f"{len(outcomes)} trials with the {outcomes[0].trial.loader} loader",
        caption=f"best: trial {best.trial.number}, learning rate {best.trial.lr:g}. {decodes:,} images were decoded "
        f"for the {samples:,} that were trained on, in {seconds:.0f} s.",
    )
    for heading in ("trial", "learning rate", "accuracy", "stall", "samples/s", "decodes/sample"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        table.add_row(
            str(outcome.trial.number),
            f"{outcome.trial.lr:g}",
            f"{outcome.accuracy:.1%}",
            f"{outcome.stall_share:.0%}",
            f"{outcome.samples / outcome.seconds:,.0f}",
            f"{decodes / samples:.2f}",
        )
    return table


def learning_rates(text: str) -> list[float]:
    return [rate(part) for part in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.search", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--loader", choices=LOADERS, default="dpflow")
    add(
        "--address",
        type=address_or_new,
        default="auto",
        help="of a cluster: a connection file; auto: the one that runs, or a new one",
    )
    add("--data", type=Path, default=Path("demo_data/images"), help="folder of the images; made if need be")
    add("--train", type=positive, default=400, help="images to train on, where they are made")
    add("--val", type=positive, default=80, help="images to validate with")
    add("--lr", type=learning_rates, default=[0.003, 0.01, 0.03, 0.1], help="a trial for each")
    add("--epochs", type=positive, default=12)
    add("--workers", type=positive, default=4, help="that load, of all trials together")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    require_answer(parser, None if options.address == "auto" else options.address)
    console = Console()
    images = natural_images.Specification(classes=CLASSES, train=options.train, val=options.val)
    try:
        natural_images.generate(options.data, images)
        if options.loader == "torch":
            outcomes, decodes = search(options, "")
        else:
            with found_or_started(options.address) as address:
                outcomes, decodes = search(options, address)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    console.print(results(outcomes, decodes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
