"""Models learn as well from images that `torch_dpflow.vision` decodes as from Pillow's and torchvision's.

.venv/bin/python -m pytest -n 0 -s -m slow tests/vision/test_vision_accuracy.py
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import natural_images
from tests.later import Later

convergence: Any = Later("examples.convergence")
train_classifier: Any = Later("examples.train_classifier")

IMAGES = natural_images.Specification(classes=4, train=600, val=400)
SEEDS, EPOCHS, SIZE = 5, 8, 64
#: Student's t, 95%, with one degree of freedom less than there are seeds.
T = 2.776
#: How far apart the accuracies may be, which the interval has to exclude more than: of 1.
MARGIN = 0.05


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """The 95% confidence interval of the mean of five differences that are paired by their seeds."""
    assert len(differences) == SEEDS
    mean, half = statistics.mean(differences), T * statistics.stdev(differences) / SEEDS**0.5
    return mean - half, mean + half


def problem(folder: Path, *, vision: bool) -> Any:
    """Crops from whole images, and the same images in the whole for the test, decoded in one way."""
    train, val = (train_classifier.build_dataset(folder, split, SIZE, vision=vision) for split in ("train", "val"))
    images, labels = zip(*val)
    return convergence.Problem(
        name="jpegs",
        train=train,
        test=(torch.stack(images), torch.tensor(labels)),
        classes=IMAGES.classes,
        batch_size=16,
        lr=0.02,
    )


def test_the_interval_is_students() -> None:
    low, high = interval([0.01, 0.03, -0.01, 0.00, 0.02])
    assert (round(low, 5), round(high, 5)) == (-0.00963, 0.02963)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_accuracies_over_five_seeds_are_equal(tmp_path: Path) -> None:
    natural_images.generate(tmp_path / "images", IMAGES, progress=False)
    options = convergence.build_parser().parse_args([f"--epochs={EPOCHS}"])
    problems = {vision: problem(tmp_path / "images", vision=vision) for vision in (False, True)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        finals = [
            [convergence.train(one, "dpflow private", seed, options).accuracies[-1] for one in problems.values()]
            for seed in range(SEEDS)
        ]
    finally:
        torch.set_num_threads(threads)
    pillow, vision = zip(*finals)
    low, high = interval([theirs - ours for ours, theirs in finals])
    print(
        f"\nPillow {statistics.mean(pillow):.2%} {[f'{one:.2%}' for one in pillow]}"
        f"\nvision {statistics.mean(vision):.2%} {[f'{one:.2%}' for one in vision]}"
        f"\nvision less Pillow, 95%: {low:+.2%} to {high:+.2%}"
    )
    assert min(pillow) > 0.5, "it learns: a guess is right in a quarter of all cases"
    assert low <= 0 <= high, "the accuracies differ by more than the seeds' chance explains"
    assert max(-low, high) < MARGIN, "the interval is too wide to show anything"
