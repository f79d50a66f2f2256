"""JPEGs decoded and cropped on a GPU: `make test-gpu`, on a machine that has one."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torch_dpflow import DPFlowDataLoader

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU with CUDA here", allow_module_level=True)

from examples import gpu_crops


def picture(number: int) -> bytes:
    """A smooth JPEG, so that decoders agree about it."""
    height, width = 180 + 37 * number, 400 - 29 * number
    y, x = np.mgrid[:height, :width]
    planes = [np.sin(y / (9 + number)) + np.cos(x / 13), np.sin((x + y) / 21), np.cos(y / 17)]
    pixels = np.stack([np.interp(plane, (-2, 2), (0, 255)) for plane in planes], axis=-1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.getvalue()


@pytest.fixture
def samples(tmp_path: Path) -> list[tuple[str, int]]:
    paths = [tmp_path / f"{number}.jpg" for number in range(8)]
    for number, path in enumerate(paths):
        path.write_bytes(picture(number))
    return [(str(path), number) for number, path in enumerate(paths)]


def resized(pixels: np.ndarray, box: list[int], size: int) -> torch.Tensor:
    """The same crop on the CPU."""
    top, left, height, width, flip = box
    part = torch.tensor(pixels).permute(2, 0, 1)[:, top : top + height, left : left + width].float()
    out = torch.nn.functional.interpolate(part[None], (size, size), mode="bilinear", antialias=True)[0]
    mean, std = torch.tensor(gpu_crops.MEAN).view(3, 1, 1), torch.tensor(gpu_crops.STD).view(3, 1, 1)
    return ((out / 255 - mean) / std).flip(2) if flip else (out / 255 - mean) / std


def test_crops_of_the_gpu_are_those_of_the_cpu(samples: list[tuple[str, int]]) -> None:
    batch = gpu_crops.EncodedCrops(samples).__getitems__(range(len(samples)))[0]
    images, labels = gpu_crops.decode_and_crop(batch, size=96, dtype=torch.float32)
    torch.cuda.synchronize()
    assert labels.tolist() == list(range(len(samples)))
    for (path, _), box, image in zip(samples, batch.boxes.tolist(), images.cpu(), strict=True):
        expected = resized(np.asarray(Image.open(path).convert("RGB")), box, 96)
        assert float((image - expected).abs().max()) < 4 / 255 / min(gpu_crops.STD)  # decoders differ by rounding


def test_enlarged_and_reduced_crops_equal_interpolate() -> None:
    pixels = torch.randint(256, (3, 211, 307), dtype=torch.uint8)
    boxes = [[0, 0, 211, 307, 0], [5, 7, 40, 300, 1], [200, 300, 11, 7, 0], [17, 3, 96, 96, 1]]
    images = [pixels.cuda()] * len(boxes)
    made = gpu_crops.crop_on_gpu(images, torch.tensor(boxes, dtype=torch.int32), size=96, dtype=torch.float32)
    for box, image in zip(boxes, made.cpu(), strict=True):
        torch.testing.assert_close(image, resized(pixels.permute(1, 2, 0).numpy(), box, 96), atol=2e-4, rtol=0)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_epoch_is_read_once_and_the_same_with_any_number_of_workers(
    samples: list[tuple[str, int]], workers: int
) -> None:
    def epoch(number: int) -> list[tuple[list[int], torch.Tensor]]:
        torch.manual_seed(0)
        loader = DPFlowDataLoader(
            gpu_crops.EncodedCrops(samples), 3, shuffle=True, num_workers=number,
            collate_fn=gpu_crops.only_batch,
        )  # fmt: skip
        return [(labels.tolist(), images.cpu()) for images, labels in gpu_crops.crops_ahead(loader, size=64)]

    batches, alone = epoch(workers), epoch(2)
    assert sorted(label for labels, _ in batches for label in labels) == list(range(len(samples)))
    assert [labels for labels, _ in batches] == [labels for labels, _ in alone]
    assert all(torch.equal(here, there) for (_, here), (_, there) in zip(batches, alone, strict=True))
