"""Decoding, cropping and resizing in one step, as in torchvision's recipes, and a dataset of such images."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch.utils.data import Dataset

from torch_dpflow._core.checks import check_int, check_number, check_type, working
from torch_dpflow._core.stage_clock import stage
from torch_dpflow._core.torch_private import antialiased
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.vision.encoded import EncodedImage, Pixels, Source, naming, open_image, resized_part

Interpolation = Literal["bilinear", "bicubic"]
Size: TypeAlias = "int | tuple[int, int]"
Range: TypeAlias = tuple[float, float]
#: Top, left, height and width, in pixels.
Box: TypeAlias = tuple[int, int, int, int]

#: Function of a number of bytes that returns memory of this size, or None.
Lend: TypeAlias = "Callable[[int], Pixels | None]"

#: torchvision's defaults.
SCALE: Range = (0.08, 1.0)
RATIO: Range = (3 / 4, 4 / 3)
#: An image is decoded at reduced size only if the crop then still has this many times the output's pixels along both
#: sides. With fewer, the decoder's averages over squares would be visible.
_GAP = 2
_TRIES = 10
#: Images whose files are in memory at a time.
_GROUP = 32


class _Drawn:
    """One thread's tensors for a drawn number and a drawn position, and numpy views of their memory.

    Between two images each call of torch takes tens of microseconds, because the decoder's pixels have evicted its code
    from the processor's caches. Without this class, half of the calls would only make tensors and read their items.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):  # tensors made in inference mode cannot be changed outside
            self.number = torch.empty(1, dtype=dtype, device="cpu")
            self.place = torch.empty(1, dtype=torch.int64, device="cpu")
        # numpy has no bfloat16. A tensor's item is the same, but takes longer.
        in_numpy = dtype in (torch.float32, torch.float64)
        self.number_here: Any = self.number.numpy() if in_numpy else self.number
        self.place_here = self.place.numpy()


_HERE = threading.local()


def _drawn() -> _Drawn:
    """Return this thread's tensors, in the default dtype, in which torchvision draws."""
    dtype = torch.get_default_dtype()
    drawn: _Drawn | None = getattr(_HERE, "drawn", None)
    if drawn is None or drawn.number.dtype is not dtype:
        drawn = _HERE.drawn = _Drawn(dtype)
    return drawn


def random_resized_crop_params(height: int, width: int, scale: Range = SCALE, ratio: Range = RATIO) -> Box:
    """Draw a crop (top, left, height, width), with the same random numbers as torchvision's `RandomResizedCrop`.

    Args:
        height, width: size of the image, in pixels.
        scale: the crop's share of the image's area, minimum and maximum.
        ratio: the crop's width over its height, minimum and maximum.
    """
    area = height * width
    drawn = _drawn()
    log_ratio = _logarithms(ratio, drawn.number.dtype)
    number, place, number_here, place_here = drawn.number, drawn.place, drawn.number_here, drawn.place_here
    for _ in range(_TRIES):
        number.uniform_(*scale)
        target = area * float(number_here[0])
        number.uniform_(*log_ratio).exp_()
        aspect = float(number_here[0])
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            place.random_(0, height - h + 1)
            top = int(place_here[0])
            place.random_(0, width - w + 1)
            return top, int(place_here[0]), h, w
    w, h = width, height
    if width / height < min(ratio):
        h = round(w / min(ratio))
    elif width / height > max(ratio):
        w = round(h * max(ratio))
    return (height - h) // 2, (width - w) // 2, h, w


@dataclass(frozen=True)
class DecodeRandomResizedCrop:
    """Function that decodes a random crop of an image and resizes it, for ImageFolder's `loader` or a flow's stage.

    The result is uint8 RGB, (3, height, width), resized with antialiasing. The channels of a pixel are next to each
    other in memory, as from `load_rgb`. The draws from torch's generator are those of torchvision's
    `RandomResizedCrop`. JPEGs whose crop is much larger than the output are decoded at a half, a quarter or an
    eighth of their size. simplejpeg does not decode rows well below the crop.

    Args:
        size: size of the output: a side in pixels, or (height, width).
        scale, ratio: as in `random_resized_crop_params`.
        interpolation: "bilinear" or "bicubic".

    Raises:
        OptionError, OptionTypeError: an argument is not allowed.
    """

    size: Size
    scale: Range = SCALE
    ratio: Range = RATIO
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        _check_size(self.size)
        _check_range("scale", self.scale)
        _check_range("ratio", self.ratio)
        _check_interpolation(self.interpolation)

    def __call__(self, source: Source) -> torch.Tensor:
        """Decode a crop of one image: the path of a file, or its bytes. Raises the errors of `load_rgb`."""
        return self.batch([source])[0]

    def batch(self, sources: Sequence[Source], *, lend: Lend | None = None) -> torch.Tensor:
        """Decode a crop of each image to one tensor (images, 3, height, width), in `torch.channels_last`.

        The crops equal those of a separate call for each image, and take less processor time. Up to 32 files are opened
        and their crops drawn before the first of them is decoded.

        lend: function that returns memory for the result, given its size in bytes. Without it, or if it returns None,
            memory is allocated.
        """
        crops = _empty(len(sources), _pair(self.size), lend)
        for first in range(0, len(sources), _GROUP):
            with stage("decode"), ExitStack() as stack:
                group = []
                for source in sources[first : first + _GROUP]:
                    group.append(open_image(source))
                    stack.callback(group[-1].close)
                boxes = [random_resized_crop_params(one.height, one.width, self.scale, self.ratio) for one in group]
                _crop_into(crops[first : first + len(group)], group, boxes, self.interpolation)
        return crops


@dataclass(frozen=True)
class DecodeCenterCrop:
    """Function that decodes an image, resizes its shorter side and crops its centre; see `DecodeRandomResizedCrop`.

    The result is uint8 RGB, (3, height, width), as from torchvision's `Resize(resize)` and `CenterCrop(size)`.

    Args:
        size, interpolation: as in `DecodeRandomResizedCrop`.
        resize: pixels of the shorter side; at least `size`.

    Raises:
        OptionError, OptionTypeError: an argument is not allowed.
    """

    size: Size
    resize: int
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        _check_size(self.size)
        check_int("resize", self.resize, minimum=max(_pair(self.size)))
        _check_interpolation(self.interpolation)

    def __call__(self, source: Source) -> torch.Tensor:
        """Decode the crop of an image: the path of a file, or its bytes. Raises the errors of `load_rgb`."""
        with stage("decode"):
            image = open_image(source)
            shorter = min(image.height, image.width)
            whole = int(self.resize * image.height / shorter), int(self.resize * image.width / shorter)
            resized = _empty(1, whole)
            _crop_into(resized, [image], [(0, 0, image.height, image.width)], self.interpolation)
        height, width = _pair(self.size)
        top, left = round((whole[0] - height) / 2), round((whole[1] - width) / 2)
        part = resized[0, :, top : top + height, left : left + width]
        return part.permute(1, 2, 0).contiguous().permute(2, 0, 1)


@lru_cache(maxsize=16)
def _logarithms(ratio: Range, dtype: torch.dtype) -> list[float]:
    logarithms: list[float] = torch.log(torch.tensor(ratio, dtype=dtype)).tolist()
    return logarithms


def _empty(images: int, size: tuple[int, int], lend: Lend | None = None) -> torch.Tensor:
    shape = images, *size, 3
    memory = None if lend is None else lend(math.prod(shape))
    if memory is None:
        return torch.empty(shape, dtype=torch.uint8, device="cpu").permute(0, 3, 1, 2)
    return torch.from_numpy(memory).view(shape).permute(0, 3, 1, 2)


class _Crop:
    """A box of an image, to be decoded and resized into its place.

    Making it does all that needs no pixels. Between a decoder and a resize the same steps take up to ten times as long,
    because the decoder's pixels have evicted their code from the processor's caches.

    Args:
        out: the place, a batch of one in `torch.channels_last`.
        memory: for the decoder's pixels, until the crop is in its place.
    """

    def __init__(self, out: torch.Tensor, image: EncodedImage, box: Box, mode: Interpolation, memory: Pixels) -> None:
        top, _, height, width = box
        self._out, self._image, self._box, self._mode = out, image, box, mode
        self._size = (out.shape[2], out.shape[3])
        self._reduce = _reduction(min(height / self._size[0], width / self._size[1]), image.unevenness)
        shape = image.rows_to_decode(top + height), image.width, 3
        self._pixels = memory[: math.prod(shape)].reshape(shape)
        self._part = self._part_of(self._pixels)

    def fill(self) -> None:
        top, left, height, width = self._box
        if self._reduce > 1:
            pixels = self._image.pixels(top + height, reduce=self._reduce)
            # The crop's edges are between pixels of the smaller image, where only Pillow can begin.
            by = self._reduce
            edges = (left / by, top / by, (left + width) / by, (top + height) / by)
            resized = resized_part(pixels, edges, self._size, self._mode)
            self._out.copy_(torch.from_numpy(resized).permute(2, 0, 1))
            return
        pixels = self._image.pixels(top + height, out=self._pixels)
        part = self._part if pixels is self._pixels else self._part_of(pixels)
        if (height, width) == self._size:
            self._out.copy_(part)
        else:
            antialiased[self._mode](part, self._size, False, None, out=self._out)

    def _part_of(self, pixels: Pixels) -> torch.Tensor:
        # Cut out with a batch axis in front, by numpy, which is quicker. torch then keeps the pixels side by side and
        # does not sort them into planes.
        top, left, height, width = self._box
        part = pixels.reshape(1, *pixels.shape)[:, top : top + height, left : left + width]
        return torch.from_numpy(part.transpose(0, 3, 1, 2))


def _crop_into(out: torch.Tensor, images: Sequence[EncodedImage], boxes: Sequence[Box], mode: Interpolation) -> None:
    """Fill `out`, a batch in `torch.channels_last`, with the contents of each image's box."""
    rows = [image.rows_to_decode(top + height) for image, (top, _, height, _) in zip(images, boxes, strict=True)]
    memory = np.empty(max(3 * height * image.width for height, image in zip(rows, images, strict=True)), np.uint8)
    places = zip(out.split(1) if len(images) > 1 else (out,), images, boxes, strict=True)
    for crop in [_Crop(place, image, box, mode, memory) for place, image, box in places]:
        crop.fill()


def _reduction(times: float, unevenness: int | None) -> int:
    """Return the decoder's largest useful reduction, from the ratio of the crop's size to the output's."""
    if unevenness is None:
        return 1
    # The decoder reduces colours along both sides equally, also along one where they are subsampled already.
    return next((k for k in (8, 4, 2) if times >= _GAP * unevenness * k), 1)


def _pair(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _check_size(size: Size) -> None:
    check_type("size", size, (int, tuple), "a side in pixels, or (height, width)")
    sides = _pair(size)
    if len(sides) != 2:
        raise OptionError(f"size={size!r} has {len(sides)} numbers; give a side in pixels, or (height, width)")
    for side in sides:
        check_int("size", side, minimum=1)


def _check_range(name: str, given: Range) -> None:
    check_type(name, given, tuple, "(minimum, maximum)")
    if len(given) != 2 or given[0] > given[1]:
        raise OptionError(f"{name}={given!r}: give (minimum, maximum)")
    for number in given:
        check_number(name, number, exclusive=True)


def _check_interpolation(mode: str) -> None:
    if mode not in get_args(Interpolation):
        raise OptionError(f"interpolation={mode!r} is not one of {get_args(Interpolation)}")


class DecodedImages(Dataset[tuple[Any, Any]]):
    """Dataset of images and their targets, like torchvision's `ImageFolder`, that decodes a batch at a time.

    Each sample is (image, target). Loaders fetch a batch by `__getitems__`::

        DecodedImages(ImageFolder(root).samples, DecodeRandomResizedCrop(224), transform=...)

    An error of an image names its file. For a batch, the crops of all its images are drawn first, then the random
    numbers of the transforms, image after image.

    Args:
        samples: (path, target) of each image. The bytes of the file may replace its path.
        decode: function that decodes one image. If it has a method `batch`, as `DecodeRandomResizedCrop` has, that
            method decodes batches.
        transform, target_transform: functions that are applied to an image and to a target, as in ImageFolder.

    Raises:
        OptionTypeError: an argument is not allowed.
    """

    def __init__(
        self,
        samples: Sequence[tuple[Source, Any]],
        decode: Callable[[Source], Any],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        check_type("samples", samples, Sequence, "a sequence of (path, target)")
        for name, function in (
            ("decode", decode),
            ("transform", transform),
            ("target_transform", target_transform),
        ):
            if not callable(function) and (name == "decode" or function is not None):
                raise OptionTypeError(f"{name} is {function!r}; give a function of one argument")
        self.samples = samples
        self._decode = decode
        self._transform = transform
        self._target_transform = target_transform
        self._lend: Lend | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        source, target = self.samples[index]
        with naming(source):
            return self._transformed(self._decode(source), target)

    def fill_images(self, lend: Lend) -> None:
        """Decode later batches into memory that `lend` returns (see `DecodeRandomResizedCrop.batch`).

        This takes effect only if `decode` is a `DecodeRandomResizedCrop`, and there is no `transform`.
        """
        if self._transform is None and type(self._decode) is DecodeRandomResizedCrop:
            self._lend = lend

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        samples = [self.samples[index] for index in indices]
        images = self._decoded([source for source, _ in samples])
        if self._transform is None and self._target_transform is None:
            return [(image, target) for image, (_, target) in zip(images, samples, strict=True)]
        found = []
        for image, (source, target) in zip(images, samples, strict=True):
            with naming(source):
                found.append(self._transformed(image, target))
        return found

    def _decoded(self, sources: list[Source]) -> Any:
        if self._lend is not None:
            return self._decode.batch(sources, lend=self._lend).unbind()  # type: ignore[attr-defined]
        batch = working(self._decode, "batch")
        if batch is not None:
            return batch(sources).unbind()
        images = []
        for source in sources:
            with naming(source):
                images.append(self._decode(source))
        return images

    def _transformed(self, image: Any, target: Any) -> tuple[Any, Any]:
        return (
            image if self._transform is None else self._transform(image),
            target if self._target_transform is None else self._target_transform(target),
        )
