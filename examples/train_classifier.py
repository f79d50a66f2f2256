"""Train an image classifier: a small version of torchvision's reference recipe for classification.

    python -m examples.train_classifier --data DIR --loader dpflow --arch resnet18 --epochs 3

`DIR` contains train/ and val/, each with one folder of images for each class. One line in `build_loader` decides which
loader feeds the training; everything else is the same for both.

A checkpoint contains the model, the optimizer, the schedule, the random generators and the position in the data.
`--resume` continues from there: in the middle of an epoch if the loader has `state_dict` (as ours has), else at the
next epoch. On one machine, with the same options, the same seed gives the same weights, interrupted or not.
"""

import argparse
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import datasets, transforms

from examples.option_values import not_negative, positive, rate, seed, share, weight
from examples.training import Training
from torch_dpflow import DPFlowDataLoader

LOADERS: dict[str, Any] = {"torch": DataLoader, "dpflow": DPFlowDataLoader}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build_dataset(data: Path, split: str, size: int, *, vision: bool = False) -> datasets.ImageFolder:
    """The images of one split; with `vision` torch_dpflow decodes, crops and resizes them in one step."""
    if vision:
        return fast_dataset(data, split, size)
    if split == "train":
        geometry = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    else:
        geometry = [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)]
    to_tensor = [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float32)]
    steps = [*geometry, *to_tensor, transforms.Normalize(MEAN, STD)]
    return datasets.ImageFolder(data / split, transforms.Compose(steps))


def fast_dataset(data: Path, split: str, size: int) -> datasets.ImageFolder:
    from torchvision.transforms import v2

    from torch_dpflow.vision import DecodeCenterCrop, DecodeRandomResizedCrop

    train = split == "train"
    loader: Any = DecodeRandomResizedCrop(size) if train else DecodeCenterCrop(size, resize=size * 256 // 224)
    steps = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    flip = [v2.RandomHorizontalFlip()] if train else []
    return datasets.ImageFolder(data / split, v2.Compose([*flip, *steps]), loader=loader)


def limited(dataset: Any, samples: int | None) -> Dataset[Any]:
    """Return at most `samples` of `dataset`, spread over all of it and so over all classes."""
    if samples is None or samples >= len(dataset):
        return dataset
    return Subset(dataset, [number * len(dataset) // samples for number in range(samples)])


def build_loader(options: argparse.Namespace, dataset: Dataset[Any], *, shuffle: bool) -> Any:
    return LOADERS[options.loader](
        dataset,
        batch_size=options.batch_size,
        shuffle=shuffle,
        num_workers=options.workers,
        pin_memory=options.pin_memory,
    )


def prepare(options: argparse.Namespace) -> Training:
    """Data, loaders and model; raise FileNotFoundError or ValueError if the data is not as it must be."""
    for split in ("train", "val"):
        if not (options.data / split).is_dir():
            raise FileNotFoundError(
                f"{options.data / split} is missing: --data names a folder with train/ and val/, such as "
                "demo_data/images, which `make demo` generates"
            )
    train, val = (
        build_dataset(options.data, split, options.image_size, vision=options.vision) for split in ("train", "val")
    )
    if train.classes != val.classes:
        raise ValueError(f"train/ has the classes {train.classes}, val/ has {val.classes}: they must be equal")
    samples = options.limit_batches and options.limit_batches * options.batch_size
    return Training(
        options,
        build_loader(options, limited(train, samples), shuffle=True),
        build_loader(options, limited(val, samples), shuffle=False),
        train.classes,
    )


def seed_everything(seed: int) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may differ by run
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = False  # it picks algorithms by timing them, so the choice differs by run
    torch.use_deterministic_algorithms(True, warn_only=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_classifier", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with train/ and val/")
    add("--loader", choices=sorted(LOADERS), default="dpflow")
    add("--arch", default="resnet18", help="any classification model of torchvision.models")
    add("--epochs", type=positive, default=10)
    add("--batch-size", type=positive, default=32)
    add("--workers", type=not_negative, default=2, help="0 loads in the training process")
    add("--lr", type=rate, default=0.1)
    add("--momentum", type=weight, default=0.9)
    add("--weight-decay", type=weight, default=1e-4)
    add("--label-smoothing", type=share, default=0.0)
    add("--lr-scheduler", choices=("cosine", "step"), default="cosine")
    add("--lr-step-size", type=positive, default=30, help="epochs")
    add("--lr-gamma", type=rate, default=0.1)
    add("--image-size", type=positive, default=224, help="pixels")
    add("--vision", action="store_true", help="decode and crop with torch_dpflow.vision (extra vision)")
    add("--seed", type=seed, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=positive, help="of torch in the training process; None leaves it to torch")
    add("--pin-memory", action="store_true")
    add("--limit-batches", type=positive, help="batches of an epoch, in training and in validation")
    add("--max-steps", type=positive, help="stop after so many steps, as a job does whose time is up")
    add("--output", type=Path, help="folder for checkpoint.pth")
    add("--checkpoint-every", type=positive, help="batches between checkpoints within an epoch")
    add("--resume", type=Path, help="a checkpoint")
    add("--summary-json", type=Path, help="file for the figures of the run")
    add("--quiet", action="store_true", help="no progress bars")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    seed_everything(options.seed)
    try:
        training = prepare(options)
        if options.resume is not None:
            training.resume(options.resume)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    try:
        training.run()
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    if options.summary_json is not None:
        options.summary_json.write_text(json.dumps(training.summary(), indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
