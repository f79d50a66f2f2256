"""Images decoded a batch at a time: what one at a time gives, with the same draws."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from torch_dpflow import DPFlowDataLoader
from torch_dpflow.errors import OptionTypeError
from torch_dpflow.vision import (
    DecodeCenterCrop,
    DecodedImages,
    DecodeRandomResizedCrop,
    collate_channels_last,
    crops,
    encoded,
)


def encode(number: int, kind: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (9, 12, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).resize((100 + number, 80), Image.Resampling.BICUBIC).save(data, kind)
    return data.getvalue()


@pytest.fixture
def samples(tmp_path: Path) -> list[tuple[str, int]]:
    """Files, most of them JPEGs, with their numbers."""
    paths = [tmp_path / str(number) for number in range(12)]
    for number, path in enumerate(paths):
        path.write_bytes(encode(number, "PNG" if number == 5 else "JPEG"))
    return [(str(path), number) for number, path in enumerate(paths)]


@pytest.mark.parametrize("decoder", ["simplejpeg", "pillow"])
@pytest.mark.parametrize("size", [32, (80, 100)])
def test_a_batch_has_the_crops_and_the_draws_of_one_image_after_the_other(
    samples: list[tuple[str, int]], size: Any, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if decoder == "pillow":
        monkeypatch.setattr(encoded, "simplejpeg", None)
    monkeypatch.setattr(crops, "_GROUP", 5)  # the last group is not full
    images = DecodedImages(samples, DecodeRandomResizedCrop(size, interpolation="bicubic"))
    torch.manual_seed(0)
    each = [images[index] for index in range(len(images))]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    together = images.__getitems__(range(len(images)))
    assert torch.equal(torch.get_rng_state(), state)
    for (one, target), (other, same) in zip(each, together, strict=True):
        assert torch.equal(one, other)
        assert target == same
    batch, targets = collate_channels_last(together)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert targets.tolist() == list(range(12))


def test_crops_of_a_batch_are_drawn_before_what_transforms_draw(samples: list[tuple[str, int]]) -> None:
    crop = DecodeRandomResizedCrop(16)
    images = DecodedImages(samples, crop, lambda image: (image, torch.rand(1)), target_transform=lambda target: -target)
    torch.manual_seed(0)
    batch = images.__getitems__([3, 1])
    torch.manual_seed(0)
    expected = crop.batch([samples[3][0], samples[1][0]])
    for ((image, drawn), target), whole, number in zip(batch, expected, (3, 1), strict=True):
        assert torch.equal(image, whole)
        assert torch.equal(drawn, torch.rand(1))
        assert target == -number


def test_images_are_decoded_into_memory_that_a_loader_lends(samples: list[tuple[str, int]]) -> None:
    lent: list[Any] = []

    def lend(nbytes: int) -> Any:
        lent.append(np.empty(nbytes, np.uint8))
        return lent[-1]

    crop = DecodeRandomResizedCrop(16)
    images = DecodedImages(samples, crop)
    images.fill_images(lend)
    torch.manual_seed(0)
    (image, _), _ = images.__getitems__([3, 1])
    torch.manual_seed(0)
    assert torch.equal(image, crop.batch([samples[3][0], samples[1][0]])[0])
    assert image.data_ptr() == lent[0].ctypes.data
    for other in (DecodedImages(samples, crop, lambda image: image), DecodedImages(samples, DecodeCenterCrop(16, 16))):
        other.fill_images(lend)
        other.__getitems__([3])
    assert len(lent) == 1


def test_a_loader_that_lends_memory_gives_the_same_batches(samples: list[tuple[str, int]]) -> None:
    images = DecodedImages(samples, DecodeRandomResizedCrop(128))
    epochs = []
    for collate in (collate_channels_last, lambda samples: collate_channels_last(samples)):
        torch.manual_seed(0)
        epochs.append([*DPFlowDataLoader(images, batch_size=5, num_workers=2, collate_fn=collate)])
    for (one, labels), (other, same) in zip(*epochs, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert torch.equal(labels, same)


@pytest.mark.parametrize("decode", [DecodeRandomResizedCrop(24), DecodeCenterCrop(24, 32)])
def test_batches_do_not_depend_on_the_number_of_workers(
    samples: list[tuple[str, int]], decode: Callable[[Any], Any]
) -> None:
    images = DecodedImages(samples, decode, lambda image: image + torch.randint(2, (1,), dtype=torch.uint8))
    epochs = [
        list(
            DPFlowDataLoader(
                images,
                batch_size=5,
                shuffle=True,
                num_workers=workers,
                collate_fn=collate_channels_last,
                generator=torch.Generator().manual_seed(0),
            )
        )
        for workers in (1, 2)
    ]
    assert [len(targets) for _, targets in epochs[0]] == [5, 5, 2]
    for (one, targets), (other, same) in zip(*epochs, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(targets, same)
    assert sum(len(targets) for _, targets in DataLoader(images, batch_size=5)) == 12


@pytest.mark.parametrize("decoder", ["simplejpeg", "pillow"])
def test_a_broken_file_fails_its_batch_as_it_fails_alone_and_leaves_no_file_open(
    samples: list[tuple[str, int]], decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if decoder == "pillow":
        monkeypatch.setattr(encoded, "simplejpeg", None)
    images = DecodedImages(samples, DecodeRandomResizedCrop(24))
    Path(samples[7][0]).write_bytes(encode(7)[:500])
    failed = []
    for read in (lambda: images[7], lambda: images.__getitems__(range(12))):
        with pytest.raises(OSError) as raised:
            read()
        failed.append((type(raised.value), str(raised.value)))
    assert failed[0] == failed[1]
    assert samples[7][0] in failed[0][1]
    Path(samples[2][0]).unlink()
    with pytest.raises(FileNotFoundError, match=samples[2][0]):
        images.__getitems__(range(12))


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_any_step_name_the_file(samples: list[tuple[str, int]], workers: int) -> None:
    def fails(what: Any) -> Any:
        raise LookupError("no such colour")

    crop = DecodeRandomResizedCrop(24)
    for images in (
        DecodedImages(samples, fails),
        DecodedImages(samples, crop, transform=fails),
        DecodedImages(samples, crop, target_transform=fails),
    ):
        with pytest.raises(LookupError, match=f"{samples[0][0]}: no such colour"):
            next(iter(DPFlowDataLoader(images, batch_size=2, num_workers=workers)))
        with pytest.raises(LookupError, match=f"{samples[3][0]}: no such colour"):
            images[3]


def test_arguments_are_checked(samples: list[tuple[str, int]]) -> None:
    crop = DecodeRandomResizedCrop(24)
    for make in (
        lambda: DecodedImages(iter(samples), crop),  # type: ignore[arg-type]
        lambda: DecodedImages(samples, "crop"),  # type: ignore[arg-type]
        lambda: DecodedImages(samples, crop, transform=3),  # type: ignore[arg-type]
    ):
        with pytest.raises(OptionTypeError):
            make()
