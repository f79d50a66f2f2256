"""ResNet-18 on a GPU with four processor cores: how near each way of loading comes to the model's own limit.

    python -m benchmarks.gpu [--json] [--rounds 5] [--cores 4] [--quick]

Each side trains the same model in bfloat16 on random crops of 224 x 224 from the JPEGs of `benchmarks.loader`. The
baseline trains on one batch that already lies on the GPU, which is the model's limit. Needs CUDA and a torchvision with
nvJPEG; processes of all sides share the first `--cores` processor cores.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.datasets import ImageFolder

from benchmarks.loader import IMAGES, SPECIFICATION, warm_page_cache
from benchmarks.report import Figures, Metric, Side, add_arguments, alternate, publish
from examples.natural_images import generate
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.vision import DecodedImages, DecodeRandomResizedCrop, collate_channels_last

SIZE = 224
BATCH = 256
METRICS = (Metric(name="images_per_s", label="images/s", spec=",.0f"),)

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def samples(times: int) -> list[tuple[str, int]]:
    """Paths and labels of all images, `times` over."""
    return ImageFolder(str(Path(IMAGES) / "train")).samples * times


class Training:
    """ResNet-18 with its optimizer; one step a batch."""

    def __init__(self) -> None:
        torch.backends.cudnn.benchmark = True
        self.model = models.resnet18(num_classes=10).cuda().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.step = torch.compile(self._loss)

    def _loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return torch.nn.functional.cross_entropy(self.model(images), labels)

    def run(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Train on all batches; images per second from the first batch's end on."""
        seen, begun = 0, 0.0
        for images, labels in batches:
            self.optimizer.zero_grad(set_to_none=True)
            self.step(images, labels).backward()
            self.optimizer.step()
            if not begun:
                torch.cuda.synchronize()
                begun = time.perf_counter()
                continue
            seen += len(images)
        torch.cuda.synchronize()
        return seen / (time.perf_counter() - begun)


def on_gpu(loader: Any, mean: Sequence[float], std: Sequence[float]) -> Batches:
    """Batches that the CPU decoded, normalised on the GPU."""
    centre = torch.tensor(mean, device="cuda").view(1, 3, 1, 1) * 255
    spread = torch.tensor(std, device="cuda").view(1, 3, 1, 1) * 255
    for images, labels in loader:
        there = images.cuda(non_blocking=True).float().sub_(centre).div_(spread).bfloat16()
        yield there.contiguous(memory_format=torch.channels_last), labels.cuda(non_blocking=True)


def sides(training: Training, batches: int, workers: int) -> dict[str, Side]:
    from examples import gpu_crops  # needs Triton, which CPU builds of torch lack

    data = samples(-(-batches * BATCH // SPECIFICATION.train))
    crop = DecodeRandomResizedCrop(SIZE)
    common: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "persistent_workers": True}
    one = torch.randn(BATCH, 3, SIZE, SIZE, device="cuda", dtype=torch.bfloat16).contiguous(
        memory_format=torch.channels_last
    )
    labels = torch.randint(10, (BATCH,), device="cuda")
    on_cpu = DPFlowDataLoader(
        DecodedImages(data, crop), num_workers=workers, collate_fn=collate_channels_last, pin_memory=True, **common
    )
    encoded = {"collate_fn": gpu_crops.only_batch, "num_workers": 2, "prefetch_factor": 4, **common}
    ours, theirs = (
        DPFlowDataLoader(gpu_crops.EncodedCrops(data), **encoded),
        DataLoader(gpu_crops.EncodedCrops(data), **encoded),
    )

    def side(source: Callable[[], Batches]) -> Side:
        def run() -> Figures:
            return {"images_per_s": training.run(islice(source(), batches))}

        return run

    return {
        "the model alone": side(lambda: iter([(one, labels)] * batches)),
        "DPFlowDataLoader, decoded by vision on the CPU": side(lambda: on_gpu(on_cpu, gpu_crops.MEAN, gpu_crops.STD)),
        "torch DataLoader, decoded on the GPU": side(lambda: gpu_crops.crops_ahead(theirs, size=SIZE)),
        "DPFlowDataLoader, decoded on the GPU": side(lambda: gpu_crops.crops_ahead(ours, size=SIZE)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--cores", type=int, default=4, help="processor cores of each side (default: %(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "benchmarks.gpu: torch finds no GPU with CUDA here\n")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    sys.setswitchinterval(0.0005)  # the decoding thread and the training thread take turns in shorter times
    generate(IMAGES, SPECIFICATION)
    warm_page_cache(IMAGES)
    batches = 20 if arguments.quick else 60
    training = Training()
    comparison = alternate(
        "gpu",
        f"ResNet-18, {arguments.cores} cores",
        sides(training, batches, arguments.cores),
        rounds=1 if arguments.quick else arguments.rounds,
        parameters={"batch": BATCH, "batches": batches, "device": torch.cuda.get_device_name()},
    )
    publish([comparison], METRICS, arguments)


if __name__ == "__main__":
    main()
