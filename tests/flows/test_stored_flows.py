"""Flows that read stored datasets: the thesis's three kinds of tasks, and what can go wrong."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers.registry import make_importer
from torch_dpflow.errors import DatasetNotFoundError, ObjectMissingError, StageError
from torch_dpflow.flows import (
    DataLoadFlow,
    DataLoadFlowRead,
    ImagePilDecode,
    LocalDataLoadFlowReader,
    TargetTransform,
    random_split,
)

Publish = Callable[..., None]


@pytest.fixture
def store(tmp_path: Path) -> DatasetStore:
    return DatasetStore.create(str(tmp_path / "datasets"))


@pytest.fixture
def publish(store: DatasetStore) -> Publish:
    """Imports a source as a variant of version v1."""

    def publish(name: str, variant: str, kind: str, source: Path, **settings: str) -> None:
        draft = Draft(store, name, "v1")
        draft.add(variant, make_importer(kind, str(source), settings), shard_size=4)
        draft.publish()

    return publish


def _image(number: int, size: tuple[int, int] = (32, 32)) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = tmp_path / "cifar100/train"
    for number in range(10):
        folder = root / ("apple" if number % 2 else "bear")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(_image(number))
    return root


def _classification(**options: Any) -> DataLoadFlow:
    """The thesis's example (section 3.3.2)."""
    flow = DataLoadFlow(name="example/cls_cifar100_train", version=1, **options)
    flow.dataset(name="core/cifar100", version="v1", variant="train")
    flow.map_data("image_decode", ImagePilDecode(), cache="always")
    flow.map("transform_target", lambda x: x["label"], transform=TargetTransform(), cache="always")
    flow.map_data(
        "to_tensor", v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]), cache="always"
    )
    flow.map_data("random_hflip", v2.RandomHorizontalFlip())
    return flow.map_data("normalize", v2.Normalize([0.5] * 3, [0.25] * 3))


def test_image_classification(store: DatasetStore, publish: Publish, images: Path) -> None:
    publish("core/cifar100", "train", "imagefolder", images)
    flow_train = _classification()
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


def _detection() -> DataLoadFlow:
    def boxes(sample: Any) -> Any:
        image, target = sample
        found = torch.tensor([box["bbox"] for box in target["annotations"]]).reshape(-1, 4)
        corners = torch.cat([found[:, :2], found[:, :2] + found[:, 2:]], 1)
        labels = torch.tensor([box["category_id"] for box in target["annotations"]], dtype=torch.int64)
        return image, {"boxes": corners, "labels": labels, "id": target["image_id"]}

    def flip(sample: Any) -> Any:
        image, target = sample
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
            target = {**target, "boxes": image.shape[-1] - target["boxes"][:, [2, 1, 0, 3]]}
        return image, target

    flow = DataLoadFlow("example/od", 1).dataset("core/mscoco", "v1", "train2017")
    flow.map_data("decode", ImagePilDecode(), cache="always").map("transform_target", boxes, cache="always")
    flow.map_data("to_tensor", v2.functional.pil_to_tensor, cache="always")
    return flow.map("random_hflip", flip)


def test_detection(store: DatasetStore, publish: Publish, tmp_path: Path) -> None:
    sizes = [(40 + number, 30) for number in range(6)]
    (tmp_path / "train2017").mkdir()
    for number, size in enumerate(sizes):
        (tmp_path / f"train2017/{number}.png").write_bytes(_image(number, size))
    annotations = [
        {"id": 10 * image + n, "image_id": image, "category_id": n + 1, "bbox": [n, 2.5, 4, 8], "iscrowd": 0}
        for image in range(6)
        for n in range(image)
    ]
    listed = [{"id": n, "file_name": f"{n}.png", "width": w, "height": h} for n, (w, h) in enumerate(sizes)]
    document = {"images": listed, "annotations": annotations, "categories": []}
    (tmp_path / "instances.json").write_text(json.dumps(document))
    publish("core/mscoco", "train2017", "coco", tmp_path / "instances.json", images=f"{tmp_path}/train2017")

    read = _detection().prepare_read(LocalDataLoadFlowReader(store))
    loader = read.to_shuffled(batch_size=4, collate_fn=lambda samples: tuple(zip(*samples)), num_workers=1)
    seen = {}
    for images, targets in loader:
        for image, target in zip(images, targets):
            seen[target["id"]] = (image.shape, len(target["boxes"]))
            assert target["boxes"].min() >= 0 if len(target["boxes"]) else True
            assert (target["boxes"][:, 2] > target["boxes"][:, 0]).all()
    assert seen == {n: ((3, 30, width), n) for n, (width, _) in enumerate(sizes)}


def _waveform(data: bytes) -> torch.Tensor:
    with wave.open(io.BytesIO(data)) as sound:
        frames = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
    return torch.from_numpy(frames / 32768).float()


def _log_spectrum(sound: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(64)
    return torch.stft(sound, 64, 32, window=window, return_complex=True).abs().add(1e-6).log().T


def _speech() -> DataLoadFlow:
    flow = DataLoadFlow("example/asr", 1).dataset("core/libri-speech", "v1", "train-clean-100")
    flow.map_data("decode", _waveform, cache="always").map_data("log_spectrum", _log_spectrum, cache="always")
    flow.map_target("letters", lambda target: torch.tensor([ord(letter) for letter in target["text"]]))
    return flow.map_data("time_masking", lambda frames: frames * (torch.rand(len(frames), 1) > 0.1))


def _pad(samples: list[Any]) -> Any:
    frames, letters = zip(*samples)
    lengths = torch.tensor([len(part) for part in frames])
    return torch.nn.utils.rnn.pad_sequence(frames, batch_first=True), lengths, letters


def test_speech(store: DatasetStore, publish: Publish, tmp_path: Path) -> None:
    root = tmp_path / "train-clean-100"
    chapter = root / "19/198"
    chapter.mkdir(parents=True)
    for number in range(5):
        with wave.open(str(chapter / f"19-198-{number:04d}.wav"), "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(16_000)
            sound.writeframes(np.arange(320 * (number + 1), dtype=np.int16).tobytes())
    lines = [f"19-198-{number:04d} {'AB' * (number + 1)}" for number in range(5)]
    (chapter / "19-198.trans.txt").write_text("\n".join(lines))
    publish("core/libri-speech", "train-clean-100", "speech", root)

    read = _speech().prepare_read(LocalDataLoadFlowReader(store, cache="10MiB"))
    for _ in range(2):
        ((frames, lengths, letters),) = read.to_shuffled(batch_size=5, collate_fn=_pad)
        assert frames.shape == (5, int(lengths.max()), 33)
        assert sorted(zip(lengths.tolist(), map(len, letters))) == [(10 * n + 1, 2 * n) for n in range(1, 6)]


# -- what can go wrong --------------------------------------------------------------------------------------


def _read(store: DatasetStore, **options: Any) -> DataLoadFlowRead:
    return _classification(**options).prepare_read(LocalDataLoadFlowReader(store))


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
    with pytest.raises(
        StageError, match="example/cls_cifar100_train:1, sample 7: stage 'image_decode' failed"
    ):
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
