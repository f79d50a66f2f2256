"""Samples as users see them: dicts from the bytes and annotations of stored samples, with decoded values."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from torch_dpflow.datasets.importers.columns import Columns, lit_sample, mds_sample
from torch_dpflow.datasets.importers.tfrecord import parse_example
from torch_dpflow.datasets.importers.webdataset import KEY, MAIN, PARTS
from torch_dpflow.errors import OptionError, SourceError

#: What `open_dataset(decode=)` accepts: a name, or a function of a sample, mostly a dict.
Decode = Literal["pil", "rgb", "torch"] | Callable[[dict[str, Any]], Any]
#: Function of a sample's bytes, its annotations, and the bytes of its further parts by name. Returns the sample.
View = Callable[[bytes, dict[str, Any], Mapping[str, bytes]], dict[str, Any]]
#: Importers whose views also accept a sample's bytes as a memoryview, because they copy the values out of it.
COPYING = frozenset({"mds", "litdata"})

_IMAGES = re.compile(
    "jpe?g?|jfif|png|p[pgbn]m|bmp|gif|tiff?|webp|avif|hei[cf]|jp[2x]|j2k|jxl|ico|tga|pcx|dds|sgi|qoi|svg|exr|hdr|psd|image"
)
#: The first bytes of JPEG, PNG, GIF, TIFF, WebP, BMP, JPEG 2000, JPEG XL, AVIF and HEIC files.
_SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8|II[*+]\0|MM\0[*+]|RIFF.{4}WEBP|BM.{4}\0{4}"
    rb"|\0\0\0\x0c(jP  |JXL )\r\n\x87\n|.{4}ftyp(avi[fs]|hei[cfx]|mif1)",
    re.DOTALL,
)
_NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_TEXTS = frozenset({"txt", "text", "transcript"})
_JSON = frozenset({"json", "jsn"})
#: Audio, video, and what webdataset decodes by unpickling or with further packages.
_NOT_DECODED = re.compile(
    "flac|wav|mp[34]|og[gv]|opus|m4[av]|aac|avi|mov|mkv|webm|mpe?g|pkl|pickle|pyd|pth?|mp|msg|msgpack|cbor|ten|tb"
)


def view_of(importer: str | None, info: Mapping[str, Any]) -> View:
    """Return the `View` that makes samples of an importer (None: unknown). `info` is the dataset's `info`."""
    if importer == "mds":
        return partial(_mds, tuple(tuple(column) for column in info["columns"]))
    if importer == "litdata":
        return partial(_litdata, tuple(info["formats"]), info["spec"])
    return _VIEWS.get(importer or "", _plain)


def _webdataset(content: bytes, fields: dict[str, Any], parts: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the key and every member's bytes by extension, as webdataset does."""
    sample: dict[str, Any] = {KEY: fields.pop(KEY), fields.pop(MAIN): content}
    fields.pop(PARTS, None)
    for ending, text in fields.items():
        sample[ending] = text.encode()
    sample.update(parts)
    return sample


def _image_folder(content: bytes, fields: dict[str, Any], parts: Mapping[str, bytes]) -> dict[str, Any]:
    return {"image": content, **fields}


def _plain(content: bytes, fields: dict[str, Any], parts: Mapping[str, bytes]) -> dict[str, Any]:
    return {"data": content, "annotations": fields}


def _example(content: bytes, fields: dict[str, Any], parts: Mapping[str, bytes]) -> dict[str, Any]:
    return parse_example(content)


def _mds(columns: Columns, content: bytes, fields: dict[str, Any], parts: Mapping[str, bytes]) -> dict[str, Any]:
    return mds_sample(content, columns)


def _litdata(
    formats: tuple[str, ...], spec: Any, content: bytes, fields: dict[str, Any], parts: Mapping[str, bytes]
) -> Any:
    return lit_sample(content, formats, spec)


_VIEWS: dict[str, View] = {"webdataset": _webdataset, "imagefolder": _image_folder, "tfrecord": _example}


def decoder_of(decode: Decode | None) -> Callable[[dict[str, Any]], Any] | None:
    """Return the function that decodes a sample; None if `decode` is None. Raises OptionError for an unknown name."""
    if decode is None:
        return None
    if callable(decode):
        is_for_images = str(getattr(type(decode), "__module__", "")).startswith("torchvision.")
        return partial(_transformed, decode) if is_for_images else decode
    if decode not in get_args(get_args(Decode)[0]):
        names = ", ".join(get_args(get_args(Decode)[0]))
        raise OptionError(f"decode={decode!r}: give one of {names}, a function of a sample's dict, or None")
    return Decoder(decode)


def _transformed(transform: Callable[[Any], Any], sample: dict[str, Any]) -> Any:
    """Apply a transform of torchvision, which passes bytes on. Raises OptionError for images that it left encoded."""
    result = transform(sample)
    values = result.items() if isinstance(result, dict) else [("", result)]
    encoded = [name for name, value in values if isinstance(value, bytes) and _is_image(name, value)]
    if encoded:
        raise OptionError(
            f"decode={transform!r:.80} left {encoded[0]!r} encoded: transforms of torchvision take decoded images. "
            "Give decode= a function that decodes first: transform(Decoder('torch')(sample))"
        )
    return result


def _kind_of(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _is_image(name: str, value: bytes) -> bool:
    return (_IMAGES.fullmatch(_kind_of(name)) or _SIGNATURE.match(value)) is not None


class Decoder:
    """Decoder of a sample's values by the ends of their names: images, numbers, texts, JSON, numpy arrays.

    Names of audio, video, pickles and other unsupported encodings are an error. Bytes under any other name, such as
    `bin`, are decoded if they begin like an image, else left as they are. Nothing is unpickled.

    Args:
        images: "pil": RGB images of Pillow. "rgb": uint8 arrays of shape (height, width, 3). "torch": uint8 tensors of
            shape (3, height, width).

    Raises MissingExtraError if Pillow, of the extra `vision`, is not installed.
    """

    def __init__(self, images: Literal["pil", "rgb", "torch"]) -> None:
        import torch_dpflow.vision  # noqa: F401  # a missing package is an error now, and not of each sample

        self._images = images

    def __call__(self, sample: Any) -> Any:
        if not isinstance(sample, dict):  # of LitData, which also has tuples and single values
            return self._decoded("", sample)
        return {name: self._decoded(name, value) for name, value in sample.items()}

    def _decoded(self, name: str, value: Any) -> Any:
        """Decode a value. Raises SourceError, which names the value, if that fails."""
        if isinstance(value, list | tuple):
            return type(value)(self._decoded(name, one) for one in value)
        if isinstance(value, dict):
            if value.keys() == {"bytes", "path"}:  # an image of HuggingFace
                return self._embedded(name, value)
            return {inner: self._decoded(inner, one) for inner, one in value.items()}
        try:
            return self._bytes(name, value) if isinstance(value, bytes) else self._other(value)
        except MemoryError:
            raise
        except Exception as error:  # decoders raise errors of any class, Pillow also SyntaxError
            raise SourceError(f"{name!r} cannot be decoded: {type(error).__name__}: {error}") from error

    def _embedded(self, name: str, value: Mapping[str, Any]) -> Any:
        """Decode an image of HuggingFace. Raises SourceError if only its path is stored, or the value is no image."""
        if value["bytes"] is None:
            raise SourceError(
                f"{name!r} is stored as the path {value['path']!r}, and its bytes are not in the table; write the "
                "table with embedded bytes, or give decode= a function that reads the path"
            )
        found = self._decoded(value["path"] or name, value["bytes"])
        if isinstance(found, bytes):
            raise SourceError(f"{name!r} cannot be decoded: its bytes begin like no image; give decode= a function")
        return found

    def _bytes(self, name: str, value: bytes) -> Any:
        kind = _kind_of(name)
        if _is_image(name, value):
            return self._image(value)
        if kind in _NUMBERS:
            return int(value)
        if kind in _TEXTS:
            return value.decode()
        if kind in _JSON:
            return json.loads(value)
        if kind == "npy":
            return np.load(io.BytesIO(value), allow_pickle=False)
        if kind == "npz":
            with np.load(io.BytesIO(value), allow_pickle=False) as arrays:
                return dict(arrays)
        if _NOT_DECODED.fullmatch(kind):
            raise ValueError(f"decode={self._images!r} does not decode {kind}; give decode= a function that does")
        return value

    def _image(self, value: bytes) -> Any:
        if self._images == "pil":
            from PIL import Image

            from torch_dpflow.vision.encoded import to_rgb

            with Image.open(io.BytesIO(value)) as image:
                return to_rgb(image)
        from torch_dpflow.vision import load_rgb

        tensor = load_rgb(value)
        return tensor if self._images == "torch" else tensor.permute(1, 2, 0).numpy()

    def _other(self, value: Any) -> Any:
        """Convert an image of Pillow, which MDS and LitData also store as pixels; return other values as they are."""
        pillow = sys.modules.get("PIL.Image")
        if pillow is None or not isinstance(value, pillow.Image):
            return value
        from torch_dpflow.vision.encoded import to_rgb

        image = to_rgb(value)
        if self._images == "pil":
            return image
        pixels = np.array(image)
        if self._images == "rgb":
            return pixels
        import torch

        return torch.from_numpy(pixels).permute(2, 0, 1)
