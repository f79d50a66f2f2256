"""torchvision's training recipes: what its reference scripts give a loader, with this loader in its place.

Samplers and collate functions that are in those scripts alone, and not in the package, stand here as they are there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, default_collate

from tests.later import Later
from tests.loader_cases import assert_same
from torch_dpflow import LoaderOptions

tv_tensors, v2 = Later("torchvision.tv_tensors"), Later("torchvision.transforms.v2")
datasets, samplers = Later("torchvision.datasets"), Later("torchvision.datasets.samplers")
video_utils = Later("torchvision.datasets.video_utils")
pytestmark = pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")

#: torch's random numbers: the recipes augment.
ALIKE = {"options": LoaderOptions(seeding="worker")}


class RASampler(Sampler[int]):
    """Repeated augmentation, as in references/classification: each sample three times, for ranks in turn."""

    def __init__(self, size: int, num_replicas: int, rank: int, seed: int = 0, repetitions: int = 3) -> None:
        self.size, self.num_replicas, self.rank, self.seed = size, num_replicas, rank, seed
        self.repetitions, self.epoch = repetitions, 0
        self.selected = math.ceil(size / num_replicas)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        repeated = [index for index in order for _ in range(self.repetitions)]
        repeated += repeated[: -len(repeated) % self.num_replicas]
        return iter(repeated[self.rank :: self.num_replicas][: self.selected])

    def __len__(self) -> int:
        return self.selected

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class GroupedBatchSampler(BatchSampler):
    """Batches of one group of aspect ratios each, as in references/detection; what is left over fills the last."""

    def __init__(self, sampler: Any, group_ids: list[int], batch_size: int) -> None:
        self.sampler, self.group_ids, self.batch_size = sampler, group_ids, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        buffers: dict[int, list[int]] = defaultdict(list)
        drawn: dict[int, list[int]] = defaultdict(list)
        given = 0
        for index in self.sampler:
            group = self.group_ids[index]
            buffers[group].append(index)
            drawn[group].append(index)
            if len(buffers[group]) == self.batch_size:
                yield buffers.pop(group)
                given += 1
        for group, _ in sorted(buffers.items(), key=lambda one: len(one[1]), reverse=True)[: len(self) - given]:
            again = drawn[group] * math.ceil(self.batch_size / len(drawn[group]))
            yield (buffers[group] + again)[: self.batch_size]

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size


class Scenes(Dataset[Any]):
    """Images of different sizes, with one box more in each."""

    #: By aspect ratio.
    groups = tuple(index % 2 for index in range(11))

    def __init__(self) -> None:
        self.transforms = v2.Compose([v2.RandomPhotometricDistort(), v2.RandomIoUCrop(), v2.RandomHorizontalFlip()])

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> Any:
        canvas = (20, 30) if self.groups[index] else (30, 20 + index)
        boxes = torch.tensor([[1.0, 2.0, 9.0, 9.0 + row] for row in range(index)]).view(-1, 4)
        target = {
            "image_id": index,
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=canvas),  # type: ignore[call-overload]
            "masks": tv_tensors.Mask(torch.zeros(index, *canvas, dtype=torch.uint8)),
            "labels": torch.arange(index),
        }
        return self.transforms(tv_tensors.Image(torch.full((3, *canvas), index / 11)), target)


class Clips(Dataset[Any]):
    """Clips of two videos, as Kinetics gives them out."""

    def __init__(self) -> None:
        videos = {
            "video_paths": ["a", "b"],
            "video_pts": [torch.arange(12), torch.arange(20)],
            "video_fps": [10, 10],
        }
        self.video_clips = video_utils.VideoClips(["a", "b"], 4, 2, _precomputed_metadata=videos)

    def __len__(self) -> int:
        return int(self.video_clips.num_clips())

    def __getitem__(self, index: int) -> Any:
        video, clip = self.video_clips.get_clip_location(index)
        return tv_tensors.Video(torch.full((4, 3, 2, 2), index)), torch.zeros(1, 0), video, clip


def mixed(batch: Any) -> Any:
    mix = v2.RandomChoice([v2.MixUp(num_classes=10), v2.CutMix(num_classes=10)])
    return mix(*default_collate(batch))


def zipped(batch: Any) -> Any:
    return tuple(zip(*batch, strict=True))


def without_audio(batch: Any) -> Any:
    return default_collate([(video, label, clip) for video, _audio, label, clip in batch])


def classification() -> dict[str, Any]:
    preset = [v2.PILToTensor(), v2.RandomResizedCrop(16), v2.RandomHorizontalFlip(), v2.TrivialAugmentWide()]
    preset += [v2.ToDtype(torch.float, scale=True), v2.Normalize((0.5,), (0.5,)), v2.RandomErasing(0.5)]
    data = datasets.FakeData(20, (3, 24, 24), transform=v2.Compose([*preset, v2.ToPureTensor()]))
    return {"dataset": data, "batch_size": 4, "sampler": RASampler(20, 2, 1), "collate_fn": mixed}


def detection() -> dict[str, Any]:
    batches = GroupedBatchSampler(RandomSampler(range(11)), list(Scenes.groups), 2)
    return {"dataset": Scenes(), "batch_sampler": batches, "collate_fn": zipped}


def video(sampler: Any) -> dict[str, Any]:
    clips = Clips()
    chosen: Any = samplers.DistributedSampler(sampler(clips.video_clips, 3), num_replicas=2, rank=0, group_size=3)
    return {"dataset": clips, "batch_size": 2, "sampler": chosen, "collate_fn": without_audio}


RECIPES = {
    "classification": classification,
    "detection": detection,
    "random clips": lambda: video(samplers.RandomClipSampler),
    "uniform clips": lambda: video(samplers.UniformClipSampler),
}


def read(loader_class: Any, recipe: str, **options: Any) -> list[Any]:
    torch.manual_seed(7)
    given = RECIPES[recipe]()
    loader = loader_class(**given, num_workers=2, **options)
    epochs = []
    for epoch in range(2):
        for sampler in (given.get("sampler"), loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        epochs.append(list(loader))
    return epochs


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_gets_torchs_batches(OurLoader: Any, recipe: str, persistent_workers: bool) -> None:
    expected = read(DataLoader, recipe, persistent_workers=persistent_workers)
    got = read(OurLoader, recipe, persistent_workers=persistent_workers, **ALIKE)
    assert_same(got, expected)
    assert len(expected[0]) >= 2
    if recipe == "detection":
        boxes = [[target["boxes"] for _, targets in epoch for target in targets] for epoch in (got[0], expected[0])]
        assert [vars(one) for one in boxes[0]] == [vars(one) for one in boxes[1]]
