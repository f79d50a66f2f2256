"""Encoded images: their size first, then as much of their pixels as is needed."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from torch_dpflow.errors import MissingExtraError
from torch_dpflow.vision.jpeg_frame import JpegFrame, read_frame, unevenness

try:
    from PIL import Image
except ModuleNotFoundError as missing:
    raise MissingExtraError(
        "torch_dpflow.vision needs Pillow; install it with: pip install 'torch_dpflow[vision]'"
    ) from missing
try:
    import simplejpeg
except ModuleNotFoundError:
    simplejpeg = None

#: What decodes JPEGs here: "simplejpeg", or "pillow" where that is not installed. Both give the same pixels, bit for
#: bit, where they have the same release of libjpeg-turbo.
DECODER = "pillow" if simplejpeg is None else "simplejpeg"

#: libjpeg's warning of what follows the last row, after which all rows are there.
_MORE_FOLLOWS = "extraneous bytes before marker"

#: The path of a file, or what it holds.
Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview"
Pixels: TypeAlias = npt.NDArray[np.uint8]


class EncodedImage(Protocol):
    """An image whose size is known."""

    height: int
    width: int
    #: How much more its colours are subsampled along one side than along the other; None: `pixels` cannot be asked for
    #: a half, a quarter or an eighth.
    unevenness: int | None

    def pixels(self, rows: int | None = None, *, reduce: int = 1) -> Pixels:
        """RGB of shape (height, width, 3), writable; raises what Pillow raises for a file that is broken.

        Args:
            rows: as many from the top are needed, in those of the whole image; more may come.
            reduce: 2, 4 and 8 give one row for so many, and one column.
        """

    def close(self) -> None:
        """Close the file where it is open still, as `pixels` does."""


@contextmanager
def naming(source: Any) -> Iterator[None]:
    """Have an error raised inside name the file, if `source` is the path of one. Its type stays the same."""
    try:
        yield
    except Exception as error:
        if isinstance(source, str | os.PathLike) and (name := os.fsdecode(source)) not in str(error):
            if isinstance(error, OSError) and error.errno is not None:
                error.filename = name
            elif isinstance(error, SyntaxError):
                error.msg = f"{name}: {error.msg}"
            else:
                error.args = (f"{name}: {error}", *error.args[1:])
        raise


def open_image(source: Source) -> EncodedImage:
    """The image of a file, or of its content. Raises what Pillow raises where there is none."""
    if simplejpeg is not None:
        data: Any = source
        if isinstance(source, str | os.PathLike):
            with naming(source), open(source, "rb", buffering=0) as file:
                data = file.read()
        frame = read_frame(data)
        # Of more pixels than this Pillow warns, or refuses them.
        if frame and frame.height * frame.width <= (Image.MAX_IMAGE_PIXELS or float("inf")):
            return _TurboJpeg(source, data, frame)
    return _PillowImage(source)


def load_rgb(source: Source) -> torch.Tensor:
    """Decode an image: uint8 RGB of shape (3, height, width). A `loader` for torchvision's ImageFolder.

    The pixels are those of Pillow's `Image.open(source).convert("RGB")`, which leaves an orientation in EXIF as it is.
    In memory they lie pixel by pixel, as torchvision's own decoders leave them.

    Args:
        source: the path of a file, or its bytes.

    Raises:
        What Pillow raises: OSError, of which UnidentifiedImageError is one; SyntaxError; DecompressionBombError. The
            message names the file.
    """
    return torch.from_numpy(open_image(source).pixels()).permute(2, 0, 1)


def load_image(source: Source) -> Any:
    """The same as an image of Pillow's."""
    return Image.fromarray(open_image(source).pixels())


def resized_part(
    pixels: Pixels, edges: tuple[float, float, float, float], size: tuple[int, int], mode: str
) -> Pixels:
    """What lies between `edges` (left, top, right, bottom), as an image of size (height, width)."""
    return np.array(Image.fromarray(pixels).resize(size[::-1], Image.Resampling[mode.upper()], edges))


class _TurboJpeg:
    unevenness: int | None

    def __init__(self, source: Source, data: Any, frame: JpegFrame) -> None:
        self.height, self.width, self.unevenness = frame.height, frame.width, frame.unevenness
        self._source, self._data, self._frame = source, data, frame

    def pixels(self, rows: int | None = None, *, reduce: int = 1) -> Pixels:
        height = self.height if rows is None else self._frame.rows_to_decode(rows)
        pixels = self._decoded(height, reduce)
        return _PillowImage(self._source).pixels(reduce=reduce) if pixels is None else pixels

    def close(self) -> None:
        """Nothing is open."""

    def _decoded(self, height: int, reduce: int) -> Pixels | None:
        """None for a file that is damaged or in unusual colours: what comes of it is for Pillow to say."""
        data = self._of_height(height)
        size = -(-height // reduce), -(-self.width // reduce)
        least = {"min_height": size[0], "min_width": size[1]}
        pixels = np.empty((*size, 3), np.uint8)
        try:
            if simplejpeg.decode_jpeg_header(data, **least)[:2] != size:
                return None
            simplejpeg.decode_jpeg(data, "RGB", buffer=pixels, **least)
        except Exception as error:  # KeyError for 4:4:1
            if height == self.height or _MORE_FOLLOWS not in str(error):
                return None
        return pixels

    def _of_height(self, height: int) -> Any:
        """The same file, saying that it is lower: the decoder ends with the last row that is needed.

        Entropy decoding is most of a decoder's work; no binding with wheels can be asked to end it early.
        """
        if height == self.height:
            return self._data
        lower = bytearray(self._data)
        lower[self._frame.height_at : self._frame.height_at + 2] = height.to_bytes(2, "big")
        return lower


class _PillowImage:
    unevenness: int | None = None

    def __init__(self, source: Source) -> None:
        self._source = source
        with naming(source):
            file = source if isinstance(source, str | os.PathLike) else io.BytesIO(source)
            self._image: Any = Image.open(file)
            if self._image.format == "JPEG":
                with suppress(ValueError):  # what Pillow does not say is not reduced
                    layers = getattr(self._image, "layer", ())
                    self.unevenness = unevenness([(across, down) for _, across, down, _ in layers])
            else:  # some formats know their size only then
                with self._image as image:
                    self._image = image.convert("RGB")
            self.width, self.height = self._image.size

    def pixels(self, rows: int | None = None, *, reduce: int = 1) -> Pixels:
        with naming(self._source), self._image as image:
            if reduce > 1:
                image.draft("RGB", (max(1, self.width // reduce), max(1, self.height // reduce)))
            return np.array(image.convert("RGB"))

    def close(self) -> None:
        self._image.close()
