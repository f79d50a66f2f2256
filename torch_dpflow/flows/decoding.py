"""Functions for stages that decode."""

from __future__ import annotations

import io
from typing import Any

from torch_dpflow.errors import MissingExtraError


class ImagePilDecode:
    """Decodes an image of any format that Pillow supports. Truncated ones raise an error.

    Args:
        mode: Pillow's mode of the result, "RGB" or "L" for example; None: that of the file.

    Raises:
        MissingExtraError: Pillow is not installed.
    """

    def __init__(self, mode: str | None = "RGB") -> None:
        try:
            from PIL import Image
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                "ImagePilDecode needs Pillow; install it with: pip install 'torch_dpflow[vision]'"
            ) from error
        self._open = Image.open
        self._mode = mode

    def __call__(self, data: bytes) -> Any:
        with self._open(io.BytesIO(data)) as image:
            if self._mode is None:
                image.load()
                return image.copy()
            return image.convert(self._mode)
