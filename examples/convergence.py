"""Compare what a model learns from both loaders, with the same model, seeds and data.

    python -m examples.convergence --problem digits --plot runs/convergence.png

Trains with torch's loader and with ours. If `--address` names a cluster, it also trains with ours over a shared flow.
Each side has several seeds. A seed decides the model's first weights and the order of samples. Both loaders read the
same order, but draw different random augmentation: torch's from a stream for each worker, ours from one for each batch.
A shared flow also reads another order. So the accuracies differ a little for each seed. Their means over the seeds
should not differ by more than the seeds do among themselves.

`digits` are scikit-learn's 1,797 images of 8x8 pixels, about two minutes on two cores. `jpegs` are generated
photographs (examples/natural_images.py), about ten minutes. The decoder scales them down, because that costs a quarter.
Small convolutional networks learn both.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from examples import natural_images
from examples.option_values import address, positive, require_answer
from examples.train_classifier import build_dataset, seed_everything
from torch_dpflow import DPFlowDataLoader

#: Of the digits, so many are for testing.
TEST_DIGITS = 450
#: Pixels along each side, of the JPEGs as the model sees them.
JPEG_SIZE = 64
#: Pixels that are left of a JPEG at least when it is decoded.
DECODED = (120, 80)
JPEGS = natural_images.Specification(classes=4, train=600, val=400)


class ShiftedDigits(Dataset[tuple[torch.Tensor, int]]):
    """Digits, each shifted at random by at most one pixel along both axes."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        down, right = (int(shift) for shift in torch.randint(-1, 2, (2,)))
        return self._images[index].roll((down, right), (1, 2)), int(self._labels[index])


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model with its data and hyperparameters."""

    name: str
    train: Dataset[Any]
    #: Images and labels, whole.
    test: tuple[torch.Tensor, torch.Tensor]
    classes: int
    batch_size: int
    lr: float

    def model(self) -> nn.Module:
        """With the weights that torch's generator draws."""
        if self.name == "jpegs":
            widths = (3, 16, 32, 64)
            layers = [
                layer
                for before, after in itertools.pairwise(widths)
                for layer in (nn.Conv2d(before, after, 5, 2, 2), nn.BatchNorm2d(after), nn.ReLU())
            ]
            head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], self.classes))
            return nn.Sequential(*layers, *head)
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()),
            nn.Linear(32 * 4 * 4, self.classes),
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: figures after each epoch."""

    side: str
    seed: int
    losses: list[float]
    accuracies: list[float]
    #: Of the time, the share that training waited for the loader.
    stall_share: float | None


def digits() -> Problem:
    found = load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(found.target)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    test, train = order[:TEST_DIGITS], order[TEST_DIGITS:]
    return Problem(
        name="digits",
        train=ShiftedDigits(images[train], labels[train]),
        test=(images[test], labels[test]),
        classes=10,
        batch_size=64,
        lr=0.05,
    )


def decode_small(path: str) -> Image.Image:
    """An image at a half or a quarter of its size, which is as much less to decode."""
    with Image.open(path) as image:
        image.draft("RGB", DECODED)
        return image.convert("RGB")


def jpegs(folder: Path) -> Problem:
    natural_images.generate(folder, JPEGS)
    train, test = (build_dataset(folder, split, JPEG_SIZE) for split in ("train", "val"))
    train.loader = test.loader = decode_small
    val = list(test)
    return Problem(
        name="jpegs",
        train=train,
        test=(torch.stack([image for image, _ in val]), torch.tensor([label for _, label in val])),
        classes=JPEGS.classes,
        batch_size=16,
        lr=0.02,
    )


def open_loader(problem: Problem, side: str, seed: int, options: argparse.Namespace) -> Any:
    """Make the loader of a side: the one line in which the sides differ."""
    given: dict[str, Any] = {
        "batch_size": problem.batch_size,
        "shuffle": True,
        "num_workers": options.workers,
        "generator": torch.Generator().manual_seed(seed),
    }
    if side == "torch":
        return DataLoader(problem.train, persistent_workers=True, **given)
    if side == "dpflow private":
        return DPFlowDataLoader(problem.train, persistent_workers=True, **given)
    return DPFlowDataLoader(problem.train, flow=f"convergence/{problem.name}", address=options.address, **given)


def train(problem: Problem, side: str, seed: int, options: argparse.Namespace) -> Run:
    """Train a model from scratch."""
    seed_everything(seed)
    model = problem.model()
    loader = open_loader(problem, side, seed, options)
    optimizer = torch.optim.SGD(model.parameters(), problem.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    losses, accuracies = [], []
    for _ in range(options.epochs):
        losses.append(train_epoch(model, loader, optimizer))
        schedule.step()
        accuracies.append(accuracy(model, problem.test))
    stall = loader.stats().stall_share if isinstance(loader, DPFlowDataLoader) else None
    return Run(side=side, seed=seed, losses=losses, accuracies=accuracies, stall_share=stall)


def train_epoch(model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer) -> float:
    """The mean loss of the epoch's samples."""
    model.train()
    total, samples = 0.0, 0
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
        samples += len(labels)
    return total / samples


@torch.inference_mode()
def accuracy(model: nn.Module, test: tuple[torch.Tensor, torch.Tensor]) -> float:
    model.eval()
    images, labels = test
    scores = torch.cat([model(part) for part in images.split(100)])
    return float((scores.argmax(1) == labels).float().mean())


def report(runs: Sequence[Run]) -> Iterator[str]:
    """Lines of a Markdown table: final accuracies of each side, in percent, and how far they are from torch's."""
    yield "| loader | accuracy, % | spread over seeds (standard deviation) | lowest to highest | less torch's |"
    yield "| --- | --- | --- | --- | --- |"
    finals = {side: [100 * run.accuracies[-1] for run in runs if run.side == side] for side in sides_of(runs)}
    for side, found in finals.items():
        mean = statistics.mean(found)
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        apart = mean - statistics.mean(finals["torch"])
        yield f"| {side} | {mean:.2f} | {spread:.2f} | {min(found):.2f} to {max(found):.2f} | {apart:+.2f} |"


def sides_of(runs: Sequence[Run]) -> list[str]:
    """The sides, in the order in which they were trained first."""
    return list(dict.fromkeys(run.side for run in runs))


def plot(runs: Sequence[Run], title: str, path: Path) -> None:
    """Loss and accuracy over the epochs: the mean of each side, and between which values its seeds lie."""
    from matplotlib.figure import Figure  # without pyplot, which looks for a display

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, curve, name in zip(figure.subplots(1, 2), ("losses", "accuracies"), ("training loss", "test accuracy")):
        for side in sides_of(runs):
            curves = np.array([getattr(run, curve) for run in runs if run.side == side])
            epochs = np.arange(1, curves.shape[1] + 1)
            axes.plot(epochs, curves.mean(0), label=side)
            axes.fill_between(epochs, curves.min(0), curves.max(0), alpha=0.2)
        axes.set(xlabel="epoch", ylabel=name)
        axes.grid(alpha=0.3)
    axes.legend()
    seeds = len({run.seed for run in runs})
    figure.suptitle(f"{title}: mean of {seeds} seeds, shaded from lowest to highest")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.convergence", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--problem", choices=("digits", "jpegs"), default="digits")
    add(
        "--images",
        type=Path,
        default=Path("demo_data/convergence"),
        help="folder of the JPEGs; made if need be",
    )
    add(
        "--address",
        type=address,
        help="of a cluster, to train over a shared flow too: a connection file, or auto",
    )
    add("--epochs", type=positive, default=20)
    add("--seeds", type=positive, default=5, help="how many")
    add("--workers", type=positive, default=2)
    add("--threads", type=positive, default=1, help="of torch in the training process")
    add("--plot", type=Path, default=Path("runs/convergence.png"), help="file for the curves")
    add("--json", type=Path, help="file for all figures")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    require_answer(parser, options.address)
    torch.set_num_threads(options.threads)
    problem = digits() if options.problem == "digits" else jpegs(options.images)
    sides = ["torch", "dpflow private"] + ["dpflow shared"] * (options.address is not None)
    # Seeds in the outer loop, so that whatever disturbs the machine disturbs all sides.
    plan = [(seed, side) for seed in range(options.seeds) for side in sides]
    runs = []
    for seed, side in tqdm(plan, unit="training", disable=options.quiet):
        runs.append(train(problem, side, seed, options))
    print(f"{problem.name}: {options.epochs} epochs, {options.seeds} seeds")
    print("\n".join(report(runs)))
    plot(runs, problem.name, options.plot)
    print(f"curves: {options.plot}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(run) for run in runs], indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
