"""Flows that read stored datasets: the thesis's three kinds of tasks, and what can go wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.flows.task_flows import (
    classification,
    detection,
    pad,
    publish_source,
    speech,
    write_detection,
    write_images,
    write_speech,
)
from torch_dpflow.datasets import DatasetStore
from torch_dpflow.errors import DatasetNotFoundError, ObjectMissingError, StageError
from torch_dpflow.flows import DataLoadFlowRead, LocalDataLoadFlowReader, random_split

Publish = Callable[..., None]


@pytest.fixture
def store(tmp_path: Path) -> DatasetStore:
    return DatasetStore.create(str(tmp_path / "datasets"))


@pytest.fixture
def publish(store: DatasetStore) -> Publish:
    """Imports a source as a variant of version v1."""
    return partial(publish_source, store)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "cifar100/train", 10)


def test_image_classification(store: DatasetStore, publish: Publish, images: Path) -> None:
    publish("core/cifar100", "train", "imagefolder", images)
    flow_train = classification()
    flow_val = flow_train.clone()
    reader = LocalDataLoadFlowReader(store)
    train, val = random_split(
        flows=[flow_train.prepare_read(reader), flow_val.prepare_read(reader)], lengths=[0.8, 0.2]
    )
    assert str(train) == (
        "Dataset(core/cifar100:v1:train) -> Map(image_decode) -> Map(transform_target) -> Map(to_tensor) "
        "-> Map(random_hflip) -> Map(normalize)"
    )
    assert [len(batch[1]) for batch in train.to_shuffled(batch_size=3, num_workers=2)] == [3, 3, 2]
    ((data, labels),) = val.to_shuffled(batch_size=4)
    assert (data.shape, data.dtype) == (torch.Size([2, 3, 32, 32]), torch.float32)
    assert set(labels.tolist()) <= {0, 1}


def test_detection(store: DatasetStore, publish: Publish, tmp_path: Path) -> None:
    sizes = [(40 + number, 30) for number in range(6)]
    write_detection(tmp_path, sizes)
    publish("core/mscoco", "train2017", "coco", tmp_path / "instances.json", images=f"{tmp_path}/train2017")

    read = detection().prepare_read(LocalDataLoadFlowReader(store))
    loader = read.to_shuffled(batch_size=4, collate_fn=lambda samples: tuple(zip(*samples)), num_workers=1)
    seen = {}
    for images, targets in loader:
        for image, target in zip(images, targets):
            seen[target["id"]] = (image.shape, len(target["boxes"]))
            assert target["boxes"].min() >= 0 if len(target["boxes"]) else True
            assert (target["boxes"][:, 2] > target["boxes"][:, 0]).all()
    assert seen == {n: ((3, 30, width), n) for n, (width, _) in enumerate(sizes)}


def test_speech(store: DatasetStore, publish: Publish, tmp_path: Path) -> None:
    root = write_speech(tmp_path / "train-clean-100", 5)
    publish("core/libri-speech", "train-clean-100", "speech", root)

    read = speech().prepare_read(LocalDataLoadFlowReader(store, cache="10MiB"))
    for _ in range(2):
        ((frames, lengths, letters),) = read.to_shuffled(batch_size=5, collate_fn=pad)
        assert frames.shape == (5, int(lengths.max()), 33)
        assert sorted(zip(lengths.tolist(), map(len, letters))) == [(10 * n + 1, 2 * n) for n in range(1, 6)]


# -- what can go wrong --------------------------------------------------------------------------------------


def _read(store: DatasetStore, **options: Any) -> DataLoadFlowRead:
    return classification(**options).prepare_read(LocalDataLoadFlowReader(store))


def test_a_flow_of_a_dataset_that_is_not_there_is_told(store: DatasetStore) -> None:
    with pytest.raises(DatasetNotFoundError, match="no dataset core/cifar100"):
        _read(store)


def test_missing_objects_and_cut_images_are_raised_with_their_names(
    store: DatasetStore, publish: Publish, images: Path
) -> None:
    publish("core/cifar100", "train", "imagefolder", images)
    (images / "apple/3.png").unlink()
    cut = images / "bear/4.png"
    # As long as it was: what is missing was never written.
    cut.write_bytes(cut.read_bytes()[:1500] + bytes(len(cut.read_bytes()) - 1500))
    mapped = _read(store).to_mapped()
    with pytest.raises(ObjectMissingError, match=r"apple/3\.png"):
        mapped[1]
    with pytest.raises(StageError, match="example/cls_cifar100_train:1, sample 7: stage 'image_decode' failed"):
        mapped[7]


@pytest.mark.parametrize("workers", [0, 2])
def test_missing_objects_and_cut_images_are_skipped_when_asked(
    store: DatasetStore, publish: Publish, images: Path, workers: int
) -> None:
    publish("core/cifar100", "train", "imagefolder", images)
    (images / "apple/3.png").unlink()
    cut = images / "bear/4.png"
    cut.write_bytes(cut.read_bytes()[:1500] + bytes(len(cut.read_bytes()) - 1500))
    read = _read(store, on_error="skip")
    batches = list(read.to_shuffled(batch_size=5, num_workers=workers))
    assert sum(len(labels) for _, labels in batches) == 8
    assert read.skipped() == {"read": 1, "image_decode": 1}
