"""One job of `benchmarks.sharing`: a training run of a given speed, in a process that does nothing else."""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.loader_workloads import JpegCrops
from torch_dpflow import ALSDCache
from torch_dpflow.remote.client import JobOptions, open_job

BATCH = 32


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


def dataset_of(arguments: argparse.Namespace) -> Dataset[torch.Tensor]:
    """The images, cropped at random or, for a cache, always alike."""
    files = sorted(Path(arguments.images).resolve().glob("*/*/*.jpg"))
    if arguments.kept:
        return CentreCrops(files, arguments.samples)
    return DrawnCrops(files, arguments.samples, as_float=False)


def torch_epochs(arguments: argparse.Namespace) -> Iterator[Any]:
    """The epochs of a job with workers of its own."""
    loader = DataLoader(
        dataset_of(arguments),
        batch_size=BATCH,
        shuffle=True,
        num_workers=arguments.workers,
        persistent_workers=True,
    )
    for _ in range(1 + arguments.epochs):
        yield loader


def shared_epochs(arguments: argparse.Namespace) -> Iterator[Any]:
    """The epochs of a job that shares its loading."""
    dataset = dataset_of(arguments)
    shared = ALSDCache(dataset, "1GiB") if arguments.kept else dataset
    options = JobOptions(
        memory_bytes=arguments.memory, cache_samples=arguments.cache_samples, idle_s=30.0, asked=8
    )
    with open_job(
        "benchmark/sharing",
        shared,
        address=arguments.address,
        batch_size=BATCH,
        seed=arguments.number,
        workers=arguments.workers,
        options=options,
    ) as job:
        for epoch in range(1 + arguments.epochs):
            yield job.traverse(epoch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("torch", "dpflow"))
    for name in ("--number", "--samples", "--epochs", "--workers", "--memory", "--cache-samples"):
        parser.add_argument(name, type=int, default=0)
    for name in ("--images", "--address"):
        parser.add_argument(name, default="")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--kept", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    epochs = torch_epochs(arguments) if arguments.side == "torch" else shared_epochs(arguments)
    # The first epoch is not measured: workers start, and import what they need.
    for _ in next(epochs):
        pass
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(read(epochs, arguments.step_ms / 1e3)), flush=True)
    # What is closed after the figures is not part of them.
    list(epochs)
    os._exit(0)


def read(epochs: Iterator[Any], step_s: float) -> dict[str, float]:
    """Read all epochs, sleeping `step_s` after every batch as a training step."""
    samples, stall_s = 0, 0.0
    begun = entered = time.time()
    for epoch in epochs:
        for batch in epoch:
            stall_s += time.time() - entered
            samples += len(batch)
            if step_s:
                time.sleep(step_s)
            entered = time.time()
    ended = time.time()
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "samples": samples,
        "begun": begun,
        "ended": ended,
        "stall_s": stall_s,
        "main_mib": usage[0].ru_maxrss / 1024,
    }


if __name__ == "__main__":
    main()
