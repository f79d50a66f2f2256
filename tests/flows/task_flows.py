"""The thesis's three kinds of tasks in small: sources that importers read, and flows over them."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.later import Later
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers import make_importer
from torch_dpflow.flows import DataLoadFlow, ImagePilDecode, TargetTransform

v2 = Later("torchvision.transforms.v2")


def publish_source(store: DatasetStore, name: str, variant: str, kind: str, source: Path, **settings: str) -> None:
    """Import a source as a variant of version v1."""
    draft = Draft(store, name, "v1")
    draft.add(variant, make_importer(kind, str(source), settings), shard_size=4)
    draft.publish()


def image_bytes(number: int, size: tuple[int, int] = (32, 32)) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def write_images(root: Path, count: int) -> Path:
    """A tree of images for classification, two classes; its root."""
    for number in range(count):
        folder = root / ("apple" if number % 2 else "bear")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(image_bytes(number))
    return root


def classification(**options: Any) -> DataLoadFlow:
    """The thesis's example (section 3.3.2)."""
    flow = DataLoadFlow(name="example/cls_cifar100_train", version=1, **options)
    flow.dataset(name="core/cifar100", version="v1", variant="train")
    flow.map_data("image_decode", ImagePilDecode(), cache="always")
    flow.map("transform_target", lambda x: x["label"], transform=TargetTransform(), cache="always")
    flow.map_data("to_tensor", v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]), cache="always")
    flow.map_data("random_hflip", v2.RandomHorizontalFlip())
    return flow.map_data("normalize", v2.Normalize([0.5] * 3, [0.25] * 3))


def detection() -> DataLoadFlow:
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


def write_detection(root: Path, sizes: list[tuple[int, int]]) -> Path:
    """Images of these sizes with as many boxes as their number, and the document that describes them."""
    (root / "train2017").mkdir()
    for number, size in enumerate(sizes):
        (root / f"train2017/{number}.png").write_bytes(image_bytes(number, size))
    annotations = [
        {"id": 10 * image + n, "image_id": image, "category_id": n + 1, "bbox": [n, 2.5, 4, 8], "iscrowd": 0}
        for image in range(len(sizes))
        for n in range(image)
    ]
    listed = [{"id": n, "file_name": f"{n}.png", "width": w, "height": h} for n, (w, h) in enumerate(sizes)]
    categories = [{"id": n + 1, "name": f"kind {n}"} for n in range(len(sizes))]
    document = {"images": listed, "annotations": annotations, "categories": categories}
    (root / "instances.json").write_text(json.dumps(document))
    return root / "instances.json"


def _waveform(data: bytes) -> torch.Tensor:
    with wave.open(io.BytesIO(data)) as sound:
        frames = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
    return torch.from_numpy(frames / 32768).float()


def _log_spectrum(sound: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(64)
    return torch.stft(sound, 64, 32, window=window, return_complex=True).abs().add(1e-6).log().T


def speech() -> DataLoadFlow:
    flow = DataLoadFlow("example/asr", 1).dataset("core/libri-speech", "v1", "train-clean-100")
    flow.map_data("decode", _waveform, cache="always").map_data("log_spectrum", _log_spectrum, cache="always")
    flow.map_target("letters", lambda target: torch.tensor([ord(letter) for letter in target["text"]]))
    return flow.map_data("time_masking", lambda frames: frames * (torch.rand(len(frames), 1) > 0.1))


def pad(samples: list[Any]) -> Any:
    frames, letters = zip(*samples)
    lengths = torch.tensor([len(part) for part in frames])
    return torch.nn.utils.rnn.pad_sequence(frames, batch_first=True), lengths, letters


def write_speech(root: Path, count: int) -> Path:
    """Utterances of growing length with their transcripts; the folder's root."""
    chapter = root / "19/198"
    chapter.mkdir(parents=True)
    for number in range(count):
        with wave.open(str(chapter / f"19-198-{number:04d}.wav"), "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(16_000)
            sound.writeframes(np.arange(320 * (number + 1), dtype=np.int16).tobytes())
    lines = [f"19-198-{number:04d} {'AB' * (number + 1)}" for number in range(count)]
    (chapter / "19-198.trans.txt").write_text("\n".join(lines))
    return root
