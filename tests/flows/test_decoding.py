"""Decoding images in a stage."""

from __future__ import annotations

import io
import pickle
import sys

import pytest
from PIL import Image, UnidentifiedImageError

from torch_dpflow.errors import MissingExtraError, OptionError
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
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torch_dpflow\[vision\]'"):
        ImagePilDecode()


def test_the_fast_decoder_gives_the_same_image_and_is_part_of_the_pickle() -> None:
    fast, plain = ImagePilDecode(decoder="simplejpeg"), ImagePilDecode()
    for kind in ("JPEG", "PNG"):
        data = _encoded(kind)
        image, expected = pickle.loads(pickle.dumps(fast))(data), plain(data)
        assert (image.mode, image.size, image.tobytes()) == ("RGB", (40, 30), expected.tobytes())
    with pytest.raises(OSError):
        fast(_encoded("JPEG")[:300])
    assert pickle.dumps(fast) != pickle.dumps(plain)
    assert b"decoder" not in pickle.dumps(plain)  # a flow that asks for nothing is what it was
    for wrong in ({"decoder": "turbo"}, {"mode": "L", "decoder": "simplejpeg"}):
        with pytest.raises(OptionError, match="'simplejpeg' with mode 'RGB'"):
            ImagePilDecode(**wrong)  # type: ignore[arg-type]


def test_a_fast_decoder_that_is_missing_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torch_dpflow\[vision\]'"):
        ImagePilDecode(decoder="simplejpeg")
