"""One job of `benchmarks.sharing`: a training run of a given speed, in a process that does nothing else.

It says, one JSON value a line, that it is ready; after a line of its input, that it has read the share of an epoch at
which the next job begins, where there is one; and its figures at the end.
"""

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.loader_workloads import JpegCrops
from torch_dpflow import ALSDCache, DPFlowDataLoader, JobOptions

BATCH = 32
#: The kind of a job of tf.data service that draws its crops as torchvision does.
LIKE_TORCHVISION = "tfdata-like-torchvision"


class DrawnCrops(JpegCrops):
    """A random crop, drawn afresh in every epoch: what a training run augments with."""

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        with Image.open(self.files[index % len(self.files)]) as image:
            crop: torch.Tensor = self.transform(image.convert("RGB"))
        return crop


class CentreCrops(JpegCrops):
    """A crop that is the same every time, so that a cache may keep it."""

    def __init__(self, files: list[Path], length: int) -> None:
        from torchvision import transforms

        super().__init__(files, length, as_float=False)
        self.transform = transforms.Compose(
            [transforms.Resize(256), transforms.CenterCrop(224), transforms.PILToTensor()]
        )


class FastCrops(Dataset[torch.Tensor]):
    """The same by torch_dpflow.vision. Holds nothing of torchvision's, which workers would take seconds to import."""

    def __init__(self, files: list[Path], length: int) -> None:
        from torch_dpflow.vision import DecodeRandomResizedCrop

        self.files, self.length = files, length
        self._decode = DecodeRandomResizedCrop(224)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._decode(self.files[index % len(self.files)])


def files_of(arguments: argparse.Namespace) -> list[Path]:
    return sorted(Path(arguments.images).resolve().glob("*/*/*.jpg"))


def dataset_of(arguments: argparse.Namespace) -> Dataset[torch.Tensor]:
    """The images, cropped at random or, for a cache, always alike."""
    files = files_of(arguments)
    if arguments.fast:
        return FastCrops(files, arguments.samples)
    if arguments.kept:
        return CentreCrops(files, arguments.samples)
    return DrawnCrops(files, arguments.samples, as_float=False)


def open_loader(arguments: argparse.Namespace) -> Any:
    """The job's loader: torch's with workers of its own, or one that shares its loading with the others."""
    if arguments.side in {"tfdata", LIKE_TORCHVISION}:
        from benchmarks.sharing_tfdata import Consumed as Streamed

        files = [str(file) for file in files_of(arguments)]
        like_torchvision = arguments.side == LIKE_TORCHVISION
        return Streamed(arguments.address, files, arguments.samples, BATCH, arguments.number, like_torchvision)
    dataset: Any = dataset_of(arguments)
    given: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": arguments.workers}
    given["generator"] = torch.Generator().manual_seed(arguments.number)
    if arguments.side == "tensorsocket":
        from benchmarks.sharing_tensorsocket import Consumed

        return Consumed(arguments.address)
    if arguments.fast:
        from torch_dpflow.vision import collate_channels_last

        given["collate_fn"] = collate_channels_last
    if arguments.side == "torch":
        return DataLoader(dataset, persistent_workers=True, **given)
    if arguments.side == "private":
        return DPFlowDataLoader(dataset, persistent_workers=True, **given)
    options = JobOptions(memory_bytes=arguments.memory, cache_samples=arguments.cache_samples, idle_s=30.0)
    shared = ALSDCache(dataset, arguments.memory) if arguments.kept else dataset
    return DPFlowDataLoader(shared, flow="benchmark/sharing", address=arguments.address, job=options, **given)


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("torch", "private", "dpflow", "tensorsocket", "tfdata", LIKE_TORCHVISION))
    for name in ("--number", "--samples", "--epochs", "--workers", "--memory", "--cache-samples"):
        parser.add_argument(name, type=int, default=0)
    for name in ("--images", "--address"):
        parser.add_argument(name, default="")
    for name in ("--step-ms", "--stagger"):
        parser.add_argument(name, type=float, default=0.0)
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--fast", action="store_true")
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create|TypedStorage is deprecated")
    loader = open_loader(arguments)
    # The first epoch is not measured: workers start, import what they need, and caches fill.
    for _ in loader:
        pass
    say("ready")
    sys.stdin.readline()
    figures = read(loader, arguments)
    limited_by = loader.stats().limited_by if isinstance(loader, DPFlowDataLoader) else ""
    if arguments.side == "dpflow":
        # A job that has ended leaves its flow. torch's workers stay, so that what they have used is counted.
        del loader
    say({**figures, "limited_by": limited_by})
    sys.stdin.read()
    os._exit(0)


def read(loader: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """Read all epochs, sleeping after every batch as a training step does."""
    samples, stall_s, passed = 0, 0.0, arguments.stagger == 0
    begun = entered = time.time()
    for _ in range(arguments.epochs):
        for batch in loader:
            stall_s += time.time() - entered
            samples += len(batch)
            if not passed and samples >= arguments.stagger * arguments.samples:
                passed = True
                say("passed")
            if arguments.step_ms:
                time.sleep(arguments.step_ms / 1e3)
            entered = time.time()
    return {"samples": samples, "begun": begun, "ended": time.time(), "stall_s": stall_s}


if __name__ == "__main__":
    main()
