"""Decoding images in a stage."""

from __future__ import annotations

import io
import pickle
import sys

import pytest
from PIL import Image, UnidentifiedImageError

from torch_dpflow.errors import MissingExtraError
from torch_dpflow.flows import ImagePilDecode


def _encoded(kind: str, mode: str = "RGB") -> bytes:
    data = io.BytesIO()
    Image.effect_noise((40, 30), 50).convert(mode).save(data, kind)
    return data.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP"])
def test_images_are_decoded(kind: str) -> None:
    for mode, decode in (
        ("RGB", ImagePilDecode()),
        ("L", ImagePilDecode("L")),
        ("RGB", ImagePilDecode(None)),
    ):
        image = pickle.loads(pickle.dumps(decode))(_encoded(kind))
        assert (image.size, image.mode) == ((40, 30), mode)
        assert image.getpixel((39, 29)) is not None


def test_an_image_that_was_cut_short_is_no_image() -> None:
    data = _encoded("JPEG")
    for length in range(0, len(data) - 2, 29):
        with pytest.raises((OSError, SyntaxError)):
            ImagePilDecode()(data[:length])
    with pytest.raises(UnidentifiedImageError):
        ImagePilDecode()(b"no image at all")


def test_without_pillow_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torch_dpflow\[vision\]'"):
        ImagePilDecode()
