"""Functions for stages that decode."""

from __future__ import annotations

import io
from typing import Any, Literal, get_args

from torch_dpflow.errors import MissingExtraError, OptionError

#: What decodes JPEGs: Pillow, or libjpeg-turbo by simplejpeg.
JpegDecoder = Literal["pillow", "simplejpeg"]


class ImagePilDecode:
    """Decodes an image of any format that Pillow supports. Truncated ones raise an error.

    Args:
        mode: Pillow's mode of the result, "RGB" or "L" for example; None: that of the file.
        decoder: "simplejpeg" decodes JPEGs in three quarters of the time, to the same pixels unless Pillow was built
            with another release of libjpeg-turbo. For mode "RGB" only. Part of the flow, as any argument.

    Raises:
        MissingExtraError: Pillow, or the decoder that is asked for, is not installed.
        OptionError: there is no such decoder, or not for this mode.
    """

    _decoder: JpegDecoder = "pillow"

    def __init__(self, mode: str | None = "RGB", *, decoder: JpegDecoder = "pillow") -> None:
        if decoder not in get_args(JpegDecoder) or (decoder != "pillow" and mode != "RGB"):
            raise OptionError(
                f"decoder={decoder!r} with mode={mode!r}: give 'pillow', or 'simplejpeg' with mode 'RGB'"
            )
        try:
            from PIL import Image
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                "ImagePilDecode needs Pillow; install it with: pip install 'torch_dpflow[vision]'"
            ) from error
        self._open = Image.open
        self._mode = mode
        if decoder == "simplejpeg":
            _check_simplejpeg()
            self._decoder = decoder  # where nobody asks for it, the pickle is that of flows of before

    def __call__(self, data: bytes) -> Any:
        if self._decoder == "simplejpeg":
            from torch_dpflow.vision.encoded import load_image

            return load_image(data)
        with self._open(io.BytesIO(data)) as image:
            if self._mode is None:
                image.load()
                return image.copy()
            return image.convert(self._mode)


def _check_simplejpeg() -> None:
    from torch_dpflow.vision import DECODER

    if DECODER != "simplejpeg":
        raise MissingExtraError(
            "decoder='simplejpeg' needs simplejpeg; install it with: pip install 'torch_dpflow[vision]'"
        )
