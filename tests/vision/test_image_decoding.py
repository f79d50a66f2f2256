"""Images as tensors: the pixels that Pillow gives, its errors, and torchvision's crops."""

from __future__ import annotations

import importlib
import io
import pickle
import random
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import default_collate

from tests.later import Later
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.errors import MissingExtraError, OptionError, OptionTypeError
from torch_dpflow.vision import (
    DECODER,
    DecodeCenterCrop,
    DecodeRandomResizedCrop,
    collate_channels_last,
    encoded,
    load_rgb,
    random_resized_crop_params,
)
from torch_dpflow.vision.encoded import read_frame

transforms: Any = Later("torchvision.transforms")
datasets: Any = Later("torchvision.datasets")
v2: Any = Later("torchvision.transforms.v2")

#: What a crop may differ by from torchvision's on Pillow's image, of 255, on average.
TOLERANCE = 2.0


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coarse and fine structure in colour, as a photograph has it."""
    rng = np.random.default_rng(seed)
    layers = [
        np.asarray(
            Image.fromarray(rng.integers(0, 256, (max(2, height // k), max(2, width // k), 3), np.uint8)).resize(
                (width, height), Image.Resampling.BICUBIC
            ),
            np.float32,
        )
        * weight
        for k, weight in ((60, 0.55), (20, 0.25), (6, 0.15), (2, 0.05))
    ]
    return Image.fromarray(np.clip(sum(layers), 0, 255).astype(np.uint8))


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def subsampled(image: Image.Image, sampling: str) -> bytes:
    """The JPEG with a subsampling that Pillow does not write: 4:4:0, 4:1:1 or 4:4:1.

    simplejpeg does not write 4:4:1 either. Four blocks beside each other in a file of 4:1:1 become four in a column.
    """
    pixels = np.asarray(image.convert("RGB"))
    if sampling != "4:4:1":
        return bytes(simplejpeg.encode_jpeg(pixels, 92, colorsubsampling=sampling.replace(":", "")))
    height, width = pixels.shape[:2]
    down, across = -(-height // 32), -(-width // 8)
    padded = np.pad(pixels, ((0, 32 * down - height), (0, 8 * across - width), (0, 0)), "edge")
    tiles = padded.reshape(down, 4, 8, across, 8, 3).transpose(0, 3, 2, 1, 4, 5)
    strip = np.ascontiguousarray(tiles.reshape(down * across * 8, 32, 3))
    data = bytearray(simplejpeg.encode_jpeg(strip, 92, colorsubsampling="411"))
    frame = read_frame(data)
    assert frame is not None
    data[frame.height_at : frame.height_at + 4] = struct.pack(">HH", height, width)
    assert data[frame.height_at + 6] == 0x41
    data[frame.height_at + 6] = 0x14
    return bytes(data)


def jpeg(image: Image.Image, kind: str) -> bytes:
    if kind == "grey":
        return encode(image.convert("L"))
    return subsampled(image, kind) if kind in UNUSUAL else encode(image, **JPEGS[kind])


def by_pillow(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def off(ours: torch.Tensor, theirs: Any) -> float:
    """The mean difference of a tensor from an image or tensor."""
    other = theirs if isinstance(theirs, torch.Tensor) else torch.from_numpy(np.array(theirs)).permute(2, 0, 1)
    assert (ours.dtype, ours.shape) == (torch.uint8, other.shape)
    return float((ours.int() - other.int()).abs().float().mean())


JPEGS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "progressive 4:4:4": {"progressive": True, "subsampling": 0},
    "restarts": {"restart_marker_rows": 1},
    "progressive with restarts": {"progressive": True, "restart_marker_blocks": 7},
    "not YCbCr": {"keep_rgb": True},
    "coarse": {"quality": 10},
}


UNUSUAL = ("4:4:0", "4:1:1", "4:4:1")


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of decoding in turn."""
    if request.param == "pillow":
        monkeypatch.setattr(encoded, "simplejpeg", None)
    else:
        assert DECODER == "simplejpeg"
    return str(request.param)


@pytest.mark.parametrize("kind", [*JPEGS, *UNUSUAL, "grey"])
def test_pixels_of_jpegs_are_pillow_s_in_the_whole_and_from_the_top(kind: str, decoder: str) -> None:
    for width, height in ((97, 131), (160, 96), (17, 9), (1, 1)):
        data = jpeg(photograph(width, height), kind)
        expected = by_pillow(data)
        assert np.array_equal(load_rgb(data).permute(1, 2, 0).numpy(), expected)
        for rows in {1, 7, 8, 15, 16, 17, 31, 32, 33, 95, 96, height} - set(range(height + 1, 200)):
            assert np.array_equal(encoded.open_image(data).pixels(rows)[:rows], expected[:rows]), rows


def test_rows_that_are_not_needed_are_not_decoded() -> None:
    assert encoded.open_image(encode(photograph(64, 640), subsampling=2)).pixels(100).shape == (112, 64, 3)


def others() -> dict[str, bytes]:
    image = photograph(40, 30)
    turned = Image.Exif()
    turned[0x0112] = 6
    deep = Image.fromarray((np.arange(1200, dtype=np.uint16) % 256).reshape(30, 40))
    palette = image.convert("P")
    return {
        "PNG": encode(image, "PNG"),
        "WebP": encode(image, "WEBP"),
        "GIF": encode(palette, "GIF"),
        "palette, one colour clear": encode(palette, "PNG", transparency=3),
        "alpha": encode(image.convert("RGBA"), "PNG"),
        "grey and alpha": encode(image.convert("LA"), "PNG"),
        "16 bit, values of 8": encode(deep, "PNG"),
        "one bit": encode(image.convert("1"), "PNG"),
        "CMYK": encode(image.convert("CMYK")),
        "turned by EXIF": encode(image, exif=turned),
        "bytes behind the end": encode(image) + bytes(50),
        "two in one file": encode(image, "MPO", save_all=True, append_images=[photograph(40, 30, 1)]),
        "TIFF with JPEG inside": encode(image, "TIFF", compression="jpeg"),
    }


def test_other_files_give_what_pillow_gives(decoder: str, tmp_path: Path) -> None:
    for name, data in others().items():
        path = tmp_path / "image"
        path.write_bytes(data)
        for source in (data, bytearray(data), memoryview(data), path, str(path)):
            assert np.array_equal(load_rgb(source).permute(1, 2, 0).numpy(), by_pillow(data)), name
        crop = DecodeCenterCrop(20, 24)(data)
        assert off(crop, transforms.CenterCrop(20)(transforms.Resize(24)(Image.fromarray(by_pillow(data))))) < 0.5


@pytest.mark.parametrize(("dtype", "kind"), [(np.uint16, "PNG"), (np.int32, "TIFF"), (np.float32, "TIFF")])
def test_values_that_pillow_would_clip_are_refused(decoder: str, dtype: Any, kind: str) -> None:
    values = np.arange(1200) / (1200 if dtype is np.float32 else 1)
    data = encode(Image.fromarray(values.astype(dtype).reshape(30, 40)), kind)
    assert by_pillow(data).max() in (0, 255)  # clipped
    for decode in (load_rgb, DecodeCenterCrop(20, 24)):
        with pytest.raises(ValueError, match=r"its values, 0 to .* do not fit the 8 bits of RGB"):
            decode(data)


def outcome(decode: Callable[[bytes], Any], data: bytes) -> Any:
    """The pixels, or the type of the error."""
    try:
        return decode(data).tolist()
    except Exception as error:
        return type(error)


def test_broken_files_fail_as_pillow_fails_and_what_it_shows_of_them_is_the_same(decoder: str) -> None:
    chance = random.Random(0)
    for options in ({"subsampling": 2}, {"progressive": True}):
        whole = encode(photograph(64, 48), **options)
        broken = [whole[:length] for length in (0, 1, 2, 3, 20, 200, 600, len(whole) // 2, len(whole) - 2)]
        broken += [whole[: len(whole) // 2] + b"\xff\xd9", b"no image", b"\xff\xd8\xff" + bytes(100)]
        for _ in range(60):
            damaged = bytearray(whole)
            for _ in range(chance.randint(1, 3)):
                damaged[chance.randrange(3, len(whole))] = chance.randrange(256)
            broken.append(bytes(damaged))
        failed = 0
        for data in broken:
            expected = outcome(by_pillow, data)
            assert outcome(lambda given: load_rgb(given).permute(1, 2, 0), data) == expected
            failed += isinstance(expected, type)
        assert len(broken) > failed > 9


def test_a_missing_file_and_one_that_is_no_image_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        load_rgb(tmp_path / "missing.jpg")
    (tmp_path / "text.jpg").write_text("text")
    with pytest.raises(OSError, match=r"text\.jpg"):
        load_rgb(tmp_path / "text.jpg")


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [ValueError("a"), KeyError(6), RuntimeError("b"), TypeError("c"), MemoryError(), AssertionError()],
    ids=repr,
)
@pytest.mark.parametrize("function", ["decode_jpeg", "decode_jpeg_header"])
def test_whatever_a_decoder_raises_is_left_to_pillow(
    error: Exception, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(photograph(64, 48))
    monkeypatch.setattr(simplejpeg, function, failing(error))
    assert np.array_equal(load_rgb(data).permute(1, 2, 0).numpy(), by_pillow(data))
    assert DecodeRandomResizedCrop(8)(data).shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError("cut short"), "{path}: cut short"),
        (OSError(5, "Input/output error"), "[Errno 5] Input/output error: '{path}'"),
        (SyntaxError("broken PNG"), "{path}: broken PNG"),
        (Image.DecompressionBombError("large"), "{path}: large"),
        (ValueError(), "{path}: "),
        (KeyError(6), "'{path}: 6'"),
        (ValueError("in {path}"), "in {path}"),
    ],
    ids=repr,
)
def test_errors_name_the_file_and_stay_of_their_kind(
    error: Exception, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(encode(photograph(8, 8), "PNG"))
    if error.args and "{path}" in str(error):
        error.args = (f"in {path}",)
    monkeypatch.setattr(Image.Image, "convert", failing(error))
    for read in (load_rgb, DecodeCenterCrop(4, 4), DecodeRandomResizedCrop(4)):
        with pytest.raises(type(error)) as raised:
            read(path)
        assert str(raised.value) == expected.format(path=path)


def test_what_pillow_refuses_for_its_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(photograph(100, 80))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3_000)
    with pytest.raises(Image.DecompressionBombError):
        load_rgb(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert load_rgb(data).shape == (3, 80, 100)


@pytest.mark.parametrize(
    ("scale", "ratio"),
    [
        ((0.08, 1.0), (3 / 4, 4 / 3)),
        ((0.5, 0.6), (1.0, 1.0)),
        ((0.9, 1.0), (2.0, 2.5)),
        ((0.9, 1.0), (0.2, 0.3)),
    ],
)
def test_boxes_and_draws_are_torchvision_s(scale: tuple[float, float], ratio: tuple[float, float]) -> None:
    for seed in range(60):
        height, width = 1 + seed * 7 % 400, 1 + seed * 13 % 500
        image = torch.empty(3, height, width, dtype=torch.uint8)
        torch.manual_seed(seed)
        theirs = transforms.RandomResizedCrop.get_params(image, list(scale), list(ratio))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert random_resized_crop_params(height, width, scale, ratio) == tuple(theirs)
        assert torch.equal(torch.get_rng_state(), state)


def test_draws_go_on_outside_of_inference_mode() -> None:
    def draw() -> None:
        with torch.inference_mode():
            random_resized_crop_params(30, 40)
        random_resized_crop_params(30, 40)

    with ThreadPoolExecutor(1) as thread:  # it has drawn nothing before
        thread.submit(draw).result()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_draws_are_torchvision_s_in_any_default_dtype(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        test_boxes_and_draws_are_torchvision_s((0.08, 1.0), (3 / 4, 4 / 3))
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("kind", [*JPEGS, *UNUSUAL, "grey"])
def test_random_crops_are_torchvision_s_within_the_tolerance(kind: str, decoder: str) -> None:
    for number, (width, height) in enumerate([(250, 187), (166, 250), (90, 70)]):
        data = jpeg(photograph(width, height, number), kind)
        for size in (64, (96, 48)):
            torch.manual_seed(number)
            ours = DecodeRandomResizedCrop(size)(data)
            torch.manual_seed(number)
            theirs = transforms.RandomResizedCrop(size)(Image.open(io.BytesIO(data)).convert("RGB"))
            assert ours.permute(1, 2, 0).is_contiguous()
            assert off(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("kind", ["4:4:4", "4:2:2", "4:2:0", *UNUSUAL])
def test_crops_of_larger_images_differ_by_less_than_one(kind: str, decoder: str) -> None:
    """Whatever the subsampling: an image is not decoded so small that its colours would show it."""
    for seed, size in enumerate((110, 90, 40, 20)):
        data = jpeg(photograph(640, 640, seed), kind)
        image = Image.open(io.BytesIO(data)).convert("RGB")
        torch.manual_seed(seed)
        ours = DecodeRandomResizedCrop(size, scale=(0.5, 1.0))(data)
        torch.manual_seed(seed)
        assert off(ours, transforms.RandomResizedCrop(size, scale=(0.5, 1.0))(image)) < 1
    assert encoded.open_image(data).unevenness == {"4:2:2": 2, "4:4:0": 2, "4:1:1": 4, "4:4:1": 4}.get(kind, 1)


def test_larger_images_are_decoded_smaller_and_differ_little(decoder: str) -> None:
    data = encode(photograph(1200, 900), quality=92)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    assert [encoded.open_image(data).pixels(reduce=k).shape for k in (1, 2, 8)] == [
        (900, 1200, 3),
        (450, 600, 3),
        (113, 150, 3),
    ]
    for seed, size in enumerate((200, 128, 64, 40)):
        torch.manual_seed(seed)
        ours = DecodeRandomResizedCrop(size, scale=(0.5, 1.0))(data)
        torch.manual_seed(seed)
        assert off(ours, transforms.RandomResizedCrop(size, scale=(0.5, 1.0))(image)) < TOLERANCE
        theirs = transforms.CenterCrop(size)(transforms.Resize(size + 16)(image))
        assert off(DecodeCenterCrop(size, size + 16)(data), theirs) < TOLERANCE


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_center_crops_are_torchvision_s(interpolation: str) -> None:
    mode = transforms.InterpolationMode(interpolation)
    for width, height in ((500, 375), (375, 501), (100, 100)):
        data = encode(photograph(width, height))
        image = Image.open(io.BytesIO(data)).convert("RGB")
        theirs = transforms.CenterCrop((60, 50))(transforms.Resize(77, mode)(image))
        assert off(DecodeCenterCrop((60, 50), 77, interpolation)(data), theirs) < 0.5  # type: ignore[arg-type]


def test_image_folders_read_by_workers_give_what_one_process_gives(tmp_path: Path) -> None:
    for number in range(12):
        folder = tmp_path / f"class_{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encode(photograph(120, 90, number)))
    chain = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.ToDtype(torch.float32, scale=True)])
    dataset = datasets.ImageFolder(tmp_path, loader=DecodeRandomResizedCrop(32), transform=chain)
    batches = [
        list(DPFlowDataLoader(dataset, batch_size=4, num_workers=workers, generator=torch.Generator().manual_seed(0)))
        for workers in (1, 2)
    ]
    for (one, labels), (other, same) in zip(*batches, strict=True):
        assert (one.dtype, one.shape) == (torch.float32, (4, 3, 32, 32))
        assert torch.equal(one, other)
        assert torch.equal(labels, same)
    crops = datasets.ImageFolder(tmp_path, loader=DecodeRandomResizedCrop(160))
    batches = [
        list(
            DPFlowDataLoader(
                crops,
                batch_size=4,
                num_workers=2,
                generator=torch.Generator().manual_seed(0),
                collate_fn=collate_fn,
            )
        )
        for collate_fn in (None, collate_channels_last)
    ]
    for (one, labels), (other, same) in zip(*batches, strict=True):
        assert one.is_contiguous()
        assert other.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(one, other)
        assert torch.equal(labels, same)
    whole = datasets.ImageFolder(tmp_path, loader=load_rgb, transform=v2.RandomResizedCrop(32))
    assert whole[0][0].shape == (3, 32, 32)


def test_channels_stay_last_in_memory_and_all_else_is_collated_as_by_torch() -> None:
    image = load_rgb(encode(photograph(50, 40)))
    batch = collate_channels_last([(image, 1, {"mask": torch.ones(2, 3, 4)})] * 3)
    assert batch[0].is_contiguous(memory_format=torch.channels_last)
    expected = default_collate([(image, 1, {"mask": torch.ones(2, 3, 4)})] * 3)
    for ours, theirs in (
        (batch[0], expected[0]),
        (batch[1], expected[1]),
        (batch[2]["mask"], expected[2]["mask"]),
    ):
        assert torch.equal(ours, theirs)
    assert batch[2]["mask"].is_contiguous()
    for samples in (
        [image, image.contiguous()],
        [image[0], image[1]],
        [torch.tensor(1), torch.tensor(2)],
        [3, 4],
    ):
        ours, theirs = collate_channels_last(samples), default_collate(samples)
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match="equal size"):
        collate_channels_last([image, load_rgb(encode(photograph(40, 50)))])


def test_settings_are_checked_travel_and_tell_one_from_another() -> None:
    crop = DecodeRandomResizedCrop((32, 24), scale=(0.2, 1.0), interpolation="bicubic")
    assert pickle.loads(pickle.dumps(crop)) == crop != DecodeRandomResizedCrop((32, 24))
    assert crop(encode(photograph(50, 40))).shape == (3, 32, 24)
    wrong: list[Callable[[], Any]] = [
        lambda: DecodeRandomResizedCrop(0),
        lambda: DecodeRandomResizedCrop((1, 2, 3)),  # type: ignore[arg-type]
        lambda: DecodeRandomResizedCrop(8, scale=(1.0, 0.5)),
        lambda: DecodeRandomResizedCrop(8, ratio=(0.0, 1.0)),
        lambda: DecodeRandomResizedCrop(8, interpolation="nearest"),  # type: ignore[arg-type]
        lambda: DecodeCenterCrop(224, 200),
    ]
    for make in wrong:
        with pytest.raises(OptionError):
            make()
    with pytest.raises(OptionTypeError):
        DecodeCenterCrop("224", 256)  # type: ignore[arg-type]


def test_without_pillow_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "torch_dpflow.vision.encoded")
    with pytest.raises(MissingExtraError, match=r"pip install 'torch_dpflow\[vision\]'"):
        importlib.import_module("torch_dpflow.vision.encoded")
