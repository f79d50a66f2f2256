"""Reader of encoded images: a JPEG's size without decoding it, then its pixels, if possible without unneeded rows."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from torch_dpflow._core.stage_clock import stage
from torch_dpflow.errors import MissingExtraError

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

#: The decoder of JPEGs: "simplejpeg", or "pillow" if that is not installed. With the same release of libjpeg-turbo both
#: give the same pixels, bit for bit.
DECODER = "pillow" if simplejpeg is None else "simplejpeg"

#: libjpeg's warning about bytes after the last row, when all rows are decoded.
_MORE_FOLLOWS = "extraneous bytes before marker"

#: The path of a file, or its contents.
Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview"
Pixels: TypeAlias = npt.NDArray[np.uint8]


class EncodedImage(Protocol):
    """Interface of an encoded image, whose size is known before `pixels` is called."""

    height: int
    width: int
    #: By what factor colours are subsampled more along one side than along the other; None: `pixels` cannot reduce.
    unevenness: int | None

    def rows_to_decode(self, rows: int) -> int:
        """Return the number of rows that `pixels(rows)` returns; for an unusual file, `pixels` may return more."""

    def pixels(self, rows: int | None = None, *, reduce: int = 1, out: Pixels | None = None) -> Pixels:
        """Decode to a writable RGB array of shape (height, width, 3). Raises Pillow's errors for a broken file.

        Args:
            rows: number of rows needed from the top, counted before reduction; the result may have more.
            reduce: 2, 4 or 8: the factor by which rows and columns are reduced.
            out: memory of the result's shape, given only if `reduce` is 1; the result may still be in other memory.
        """

    def close(self) -> None:
        """Close the file if it is open. `pixels` closes it too."""


@contextmanager
def naming(source: Any) -> Iterator[None]:
    """Add the file's name to errors of the `with` block, if `source` is a path. The type of an error stays the same."""
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
    """Open an image, given its path or its bytes. Raises the errors of `load_rgb`."""
    if simplejpeg is not None:
        data: Any = _contents(source) if isinstance(source, str | os.PathLike) else source
        frame = read_frame(data)
        # Pillow warns about more pixels than this, or refuses them.
        if frame and frame.height * frame.width <= (Image.MAX_IMAGE_PIXELS or float("inf")):
            return _TurboJpeg(source, data, frame, is_own=data is not source)
    return _PillowImage(source)


def _contents(path: str | os.PathLike[str]) -> bytearray:
    """Read a file with half of the system calls that Python's files make. Raises OSError that names it."""
    with stage("read"):
        return _read(path)


def _read(path: str | os.PathLike[str]) -> bytearray:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = bytearray(os.fstat(descriptor).st_size)
        if data and os.readv(descriptor, [data]) == len(data):
            return data
    except OSError as error:
        error.filename = os.fsdecode(path)
        raise
    finally:
        os.close(descriptor)
    with naming(path), open(path, "rb") as file:  # a pipe, or a file that changes
        return bytearray(file.read())


def to_rgb(image: Any) -> Any:
    """Convert a Pillow image to RGB. Raises ValueError for grey values beyond 8 bits, which Pillow would clip."""
    found = image.convert("RGB")
    if image.mode[0] in "IF" and not np.array_equal(np.asarray(image), np.asarray(found)[..., 0]):
        low, high = image.getextrema()
        raise ValueError(
            f"its values, {low:g} to {high:g} (mode {image.mode}), do not fit the 8 bits of RGB; read it with a "
            "function that scales them"
        )
    return found


def load_rgb(source: Source) -> torch.Tensor:
    """Decode an image to a uint8 RGB tensor of shape (3, height, width). A `loader` for torchvision's ImageFolder.

    The pixels are those of Pillow's `Image.open(source).convert("RGB")`, which ignores the orientation in EXIF. The
    channels of a pixel are next to each other in memory, as from torchvision's own decoders.

    Args:
        source: the path of a file, or its bytes.

    Raises:
        OSError (with UnidentifiedImageError), SyntaxError, DecompressionBombError: from Pillow; the message names the
            file.
        ValueError: the values of a grey image have more than 8 bits.
    """
    with stage("decode"):
        return torch.from_numpy(open_image(source).pixels()).permute(2, 0, 1)


def load_image(source: Source) -> Any:
    """Decode an image file, given its path or its bytes, to an RGB image of Pillow."""
    with stage("decode"):
        return Image.fromarray(open_image(source).pixels())


def resized_part(pixels: Pixels, edges: tuple[float, float, float, float], size: tuple[int, int], mode: str) -> Pixels:
    """Resize the part between `edges` (left, top, right, bottom) to an image of size (height, width)."""
    return np.array(Image.fromarray(pixels).resize(size[::-1], Image.Resampling[mode.upper()], edges))


class _TurboJpeg:
    unevenness: int | None

    def __init__(self, source: Source, data: Any, frame: JpegFrame, *, is_own: bool) -> None:
        self.height, self.width, self.unevenness = frame.height, frame.width, frame.unevenness
        self.rows_to_decode = frame.rows_to_decode
        self._source, self._data, self._frame, self._is_own = source, data, frame, is_own

    def pixels(self, rows: int | None = None, *, reduce: int = 1, out: Pixels | None = None) -> Pixels:
        height = self.height if rows is None else self.rows_to_decode(rows)
        pixels = self._decoded(height, reduce, out)
        return _PillowImage(self._source).pixels(reduce=reduce) if pixels is None else pixels

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _decoded(self, height: int, reduce: int, out: Pixels | None) -> Pixels | None:
        """Decode with simplejpeg. None for a damaged file or unusual colours, which Pillow decodes or refuses."""
        data = self._of_height(height)
        size = -(-height // reduce), -(-self.width // reduce)
        pixels = np.empty((*size, 3), np.uint8) if out is None else out
        try:
            # The frame says which size the decoder gives, except that it may not reduce by just this factor.
            if reduce > 1 and simplejpeg.decode_jpeg_header(data, size[0], size[1])[:2] != size:
                return None
            simplejpeg.decode_jpeg(data, "RGB", min_height=size[0], min_width=size[1], buffer=pixels)
        except Exception as error:  # KeyError for 4:4:1
            if height == self.height or _MORE_FOLLOWS not in str(error):
                return None
        return pixels

    def _of_height(self, height: int) -> Any:
        """Return the file with a smaller height in its header, so that the decoder stops after the last needed row.

        Entropy decoding is most of a decoder's work, and no Python binding can stop it early.
        """
        if height == self.height and not self._is_own:
            return self._data
        lower = self._data if self._is_own else bytearray(self._data)
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
                with suppress(ValueError):  # without factors from Pillow the image is not reduced
                    layers = getattr(self._image, "layer", ())
                    self.unevenness = unevenness([(across, down) for _, across, down, _ in layers])
            else:  # the size of some formats is known only after decoding
                with self._image as image:
                    self._image = to_rgb(image)
            self.width, self.height = self._image.size

    def rows_to_decode(self, rows: int) -> int:
        return int(self.height)

    def pixels(self, rows: int | None = None, *, reduce: int = 1, out: Pixels | None = None) -> Pixels:
        with naming(self._source), self._image as image:
            if reduce > 1:
                image.draft("RGB", (max(1, self.width // reduce), max(1, self.height // reduce)))
            return np.array(image.convert("RGB"))

    def close(self) -> None:
        self._image.close()


SOI, EOI = b"\xff\xd8\xff", b"\xff\xd9"
_SOS = 0xDA
#: Baseline, extended sequential, progressive; all with Huffman codes.
_DCT_FRAMES = (0xC0, 0xC1, 0xC2)
_OTHER_FRAMES = {0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
#: A segment: 0xFF, its marker, its length. A frame: bits, height, width, components.
_SEGMENT, _FRAME = struct.Struct(">BBH").unpack_from, struct.Struct(">BHHB").unpack_from
#: Rows and columns of a block of coefficients.
_BLOCK = 8


class JpegFrame(NamedTuple):
    """Properties from the frame header of a JPEG with one or three components of eight bits."""

    height: int
    width: int
    #: number of rows that are decoded together
    mcu_height: int
    #: offset of the height in the file
    height_at: int
    #: by what factor colours are subsampled more along one side than along the other: 4 for 4:1:1 and 4:4:1
    unevenness: int = 1

    def rows_to_decode(self, rows: int) -> int:
        """Return the height to write into the file so that its first `rows` rows are decoded as in the whole image.

        The height includes at least one more row, if there is one: subsampled colours of a row depend on the next row.
        """
        return min(self.height, -(-(rows + 1) // self.mcu_height) * self.mcu_height)


def read_frame(data: bytes | bytearray | memoryview) -> JpegFrame | None:
    """Return the frame of a JPEG (ITU-T T.81, annex B); None for other formats, and truncated or unusual JPEGs."""
    if bytes(data[:3]) != SOI:
        return None
    frame, at = None, 2
    try:
        prefix, marker, length = _SEGMENT(data, at)
        while marker != _SOS:
            if prefix != 0xFF or not 0xC0 <= marker <= 0xFE or marker in _OTHER_FRAMES:
                return None
            if marker in _DCT_FRAMES:
                if frame is not None:
                    return None
                frame = _frame(data, at)
            at += 2 + length
            prefix, marker, length = _SEGMENT(data, at)
        if frame is None or prefix != 0xFF or not _ends(data, at):
            return None
    except (IndexError, struct.error, ValueError):
        return None
    return frame


def _frame(data: bytes | bytearray | memoryview, at: int) -> JpegFrame:
    """Parse a frame header. Raises ValueError."""
    bits, height, width, components = _FRAME(data, at + 4)
    if bits != 8 or components not in (1, 3) or not height or not width:
        raise ValueError("neither grey nor of three colours")
    factors = [divmod(data[at + 11 + 3 * number], 16) for number in range(components)]
    vertical = [down for _, down in factors]
    return JpegFrame(height, width, _BLOCK * max(1, *vertical), at + 5, unevenness(factors))


def unevenness(factors: Sequence[tuple[int, int]]) -> int:
    """Return `JpegFrame.unevenness` for the sampling factors (across, down) of each component.

    Raises ValueError if there are no components, or a factor is not positive.
    """
    if not factors or not all(across > 0 and down > 0 for across, down in factors):
        raise ValueError("no sampling factors")
    ratios: list[int] = [max(side) // min(side) for side in zip(*factors)]
    return max(ratios) // min(ratios)


def _ends(data: bytes | bytearray | memoryview, start: int) -> bool:
    """Return whether the image has an end mark. A truncated image has none, and Pillow refuses it."""
    return (data if isinstance(data, bytes | bytearray) else bytes(data)).rfind(EOI, start) > 0
