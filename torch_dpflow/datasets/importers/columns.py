"""Decoding of samples of MosaicML's MDS and of LitData. A damaged value, or an unknown encoding, is a SourceError.

Nothing is unpickled. Encoded images stay bytes, which `decode=` of `open_dataset` decodes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

import numpy as np

from torch_dpflow._core.checks import MAX_DEPTH, TOO_DEEP, load_json
from torch_dpflow.errors import SourceError

_Decode = Callable[[bytes], Any]
_UINT32 = np.dtype("<u4")
_INT64, _FLOAT64 = struct.Struct("<q"), struct.Struct("<d")
#: Types of arrays in MDS, by the number in the data.
_MDS_TYPES = {
    8: "u1",
    9: "i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}
_MDS_NAMES = {np.dtype(code).name: code for code in _MDS_TYPES.values()}
_MDS_SHAPES = ("u1", "<u2", "<u4", "<u8")
#: Types of tensors in LitData, by the number in the data; some have several.
_LIT_TENSORS = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128"),
    *("float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64"),
    *("bool", "uint16"),
)
#: Types of arrays in LitData, by the number in the data.
_LIT_ARRAYS = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
)


#: Name, encoding and size in bytes of each column of an MDS dataset. The size is None if it differs between samples.
Columns = tuple[tuple[str, str, int | None], ...]


def mds_sample(content: bytes | memoryview, columns: Columns) -> dict[str, Any]:
    """Return a sample of an MDS shard.

    Args:
        content: the sample's bytes: sizes of the values whose size varies, then all values.

    Raises:
        SourceError: the bytes do not match the columns, or an encoding is not supported.
    """
    loose, named = _layout(columns)
    sizes = iter(_words(content, loose))
    lengths = [next(sizes) if size is None else size for _, _, size in columns]
    return dict(_decoded(named, _cut(content, 4 * loose, lengths)))


@lru_cache(maxsize=64)
def _layout(columns: Columns) -> tuple[int, list[tuple[str, _Decode]]]:
    """Return the number of sizes in each sample, and the decoder of each column."""
    named = [(name, mds_decoder(encoding)) for name, encoding, _ in columns]
    return sum(size is None for _, _, size in columns), named


@lru_cache(maxsize=1024)
def mds_decoder(encoding: str) -> _Decode:
    """Return the function that decodes values of this encoding. Raises SourceError for an unsupported encoding."""
    name, _, options = encoding.partition(":")
    if encoding in _SIMPLE:
        return _SIMPLE[encoding]
    if name in _MDS_NAMES and not options:
        return partial(_scalar, np.dtype(_MDS_NAMES[name]))
    if name == "ndarray":
        return _mds_array(encoding, *options.split(":"))
    if encoding in ("jpeg_array", "jpegarray"):
        return partial(_list, bytes, 0)
    if name.startswith("list[") and name.endswith("]"):
        return partial(_list, mds_decoder(name[5:-1]), 4)
    if name == "pkl":
        raise SourceError(
            "its encoding is pkl: unpickling runs code of the dataset's author; write it as json or bytes"
        )
    raise SourceError(f"its encoding {encoding!r} is not known")


def lit_sample(content: bytes | memoryview, formats: tuple[str, ...], spec: Any) -> Any:
    """Return a sample of a LitData chunk.

    Args:
        content: the sample's bytes: sizes of all values, then the values.
        formats: the format of each value.
        spec: how values nest: "*" is a value; a list is a list of specs; a dict has "tuple", a list of specs, or
            "dict", pairs of a name and a spec.

    Raises:
        SourceError: the bytes do not match the formats, or a format is not supported.
    """
    values = _cut(content, 4 * len(formats), _words(content, len(formats)))
    return _nested(spec, iter([value for _, value in _decoded(_lit_decoders(formats), values)]))


@lru_cache(maxsize=64)
def _lit_decoders(formats: tuple[str, ...]) -> list[tuple[str, _Decode]]:
    return [(name, lit_decoder(name)) for name in formats]


@lru_cache(maxsize=1024)
def lit_decoder(name: str) -> _Decode:
    """Return the function that decodes values of this format. Raises SourceError for an unsupported format."""
    kind, _, number = name.partition(":")
    if kind in ("no_header_tensor", "no_header_numpy"):
        types = _LIT_TENSORS if kind == "no_header_tensor" else _LIT_ARRAYS
        if not number.isdecimal() or int(number) >= len(types):
            raise SourceError(f"its format {name!r} names no type")
        return partial(_flat, types[int(number)], kind == "no_header_tensor")
    if kind in _LIT_SIMPLE:
        return _LIT_SIMPLE[kind]
    if kind == "pickle":
        raise SourceError("its format is pickle: unpickling runs code of the dataset's author; write arrays or texts")
    raise SourceError(f"its format {name!r} is not known")


def _nested(spec: Any, values: Any) -> Any:
    if spec == "*":
        return next(values)
    if isinstance(spec, list):
        return [_nested(child, values) for child in spec]
    if "tuple" in spec:
        return tuple(_nested(child, values) for child in spec["tuple"])
    return {name: _nested(child, values) for name, child in spec["dict"]}


def _decoded(named: Sequence[tuple[str, _Decode]], values: Sequence[bytes]) -> list[tuple[str, Any]]:
    """Decode each value; return it with its name. Raises SourceError, which names the value, if it is damaged."""
    decoded = []
    for (name, decode), value in zip(named, values, strict=True):
        try:
            decoded.append((name, decode(value)))
        except (ValueError, ArithmeticError, struct.error, RecursionError, LookupError) as error:
            raise SourceError(f"the value of {name!r} is damaged: {type(error).__name__}: {error}") from error
    return decoded


def _cut(content: bytes | memoryview, start: int, lengths: Sequence[int]) -> list[bytes]:
    """Cut values of these lengths out of a sample. Raises SourceError unless they fill it."""
    if start + sum(lengths) != len(content):
        raise SourceError(f"a sample of {len(content)} bytes has values of {sum(lengths)} after {start}; it is damaged")
    values = []
    for length in lengths:
        values.append(bytes(content[start : start + length]))
        start += length
    return values


def _words(data: bytes | memoryview, count: int) -> tuple[int, ...]:
    """Return the first `count` numbers of 32 bits. For a few numbers, numpy takes several times as long."""
    if len(data) < 4 * count:
        raise SourceError(f"{len(data)} bytes have no {count} sizes; the sample is damaged")
    return struct.unpack_from(f"<{count}I", data)


def _array(data: bytes, dtype: np.dtype[Any], count: int) -> Any:
    if len(data) != count * dtype.itemsize:
        raise SourceError(f"{len(data)} bytes are no {count} numbers of {dtype.itemsize}; the sample is damaged")
    return np.frombuffer(data, dtype)


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    return _array(data, dtype, 1)[0]


def _integer(data: bytes) -> int:
    return int(_INT64.unpack(data)[0])


def _number(data: bytes) -> float:
    return float(_FLOAT64.unpack(data)[0])


def _flag(data: bytes) -> bool:
    if data not in (b"\0", b"\1"):
        raise ValueError(f"{data!r:.20} is no flag")
    return data == b"\1"


def _lit_json(data: bytes) -> Any:
    """Return a list or dict, which LitData writes as JSON or in a separate form."""
    if data[:1] > b"\x20":
        return load_json(data)
    nested = _NestedValue(data)
    value = nested.value(0)
    if not nested.is_at_end:
        raise ValueError("bytes are left over")
    return value


class _NestedValue:
    """A reader of LitData's form of nested values: tags, counts and values in turn."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._data)

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        tag = self._byte()
        if tag == 0:
            return load_json(self._bytes(self._count()))
        if tag == 5:
            return {self._text(): self.value(depth + 1) for _ in range(self._count())}
        if tag == 6:
            rows, names = self._count(), self._count()
            keys = [self._text() for _ in range(names)]
            return [{key: self._simple(self._byte() - 0x10) for key in keys} for _ in range(rows)]
        if tag in (1, 2, 3, 4):
            return [self._simple(tag) for _ in range(self._count())]
        return self._simple({7: 1, 8: 2, 9: 3, 10: 4, 11: 0}[tag])

    def _simple(self, kind: int) -> Any:
        """Return a value of this kind: none, a text, an integer, a float, a flag."""
        if kind == 0:
            return None
        if kind == 1:
            return self._text()
        if kind == 4:
            return _flag(self._bytes(1))
        return {2: _integer, 3: _number}[kind](self._bytes(8))

    def _text(self) -> str:
        return self._bytes(self._count()).decode()

    def _count(self) -> int:
        count = _integer_at(self._bytes(4), 0)
        if count > len(self._data):  # each value takes a byte at least
            raise ValueError(f"{count} values are more than {len(self._data)} bytes hold")
        return count

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise ValueError("it was cut short")
        return self._data[start : self._at]


def _list(decode: _Decode, placeholder: int, data: bytes) -> list[Any]:
    count = _integer_at(data, placeholder)
    start = placeholder + 4
    sizes = _array(data[start : start + 4 * count], _UINT32, count).tolist()
    return [decode(value) for value in _cut(data, start + 4 * count, sizes)]


def _integer_at(data: bytes, start: int) -> int:
    return int(_scalar(_UINT32, data[start : start + 4]))


def _picture(data: bytes) -> Any:
    """Return an image of Pillow that was stored as its pixels."""
    from PIL import Image, ImageMode

    width, height, length = _array(data[:12], _UINT32, 3).tolist()
    name, pixels = data[12 : 12 + length].decode(), data[12 + length :]
    mode = ImageMode.getmode(name)
    row = (width + 7) // 8 if name == "1" else width * len(mode.bands) * np.dtype(mode.typestr).itemsize
    if row * height != len(pixels):  # Pillow would allocate an image of any size first
        raise ValueError(f"{len(pixels)} bytes are no {name} image of {width} x {height} pixels")
    return Image.frombytes(name, (width, height), pixels)


def _mds_array(encoding: str, dtype: str, *shapes: str) -> _Decode:
    fixed_type = _MDS_NAMES.get(dtype)
    if dtype and fixed_type is None:
        raise SourceError(f"its encoding is an array of {dtype!r}, which is not known")
    sizes = shapes[0].split(",") if shapes and shapes[0] else []
    if len(shapes) > 1 or not all(size.isdecimal() for size in sizes):
        raise SourceError(f"its encoding {encoding!r} is not known: give ndarray:DTYPE:SIZE,SIZE,...")
    return partial(_array_of_mds, fixed_type, tuple(map(int, sizes)) if sizes else None)


def _array_of_mds(fixed_type: str | None, fixed_shape: tuple[int, ...] | None, data: bytes) -> Any:
    start = 0
    code = fixed_type
    if code is None:
        code, start = _MDS_TYPES[data[0]], 1
    shape = fixed_shape
    if shape is None:
        kind = np.dtype(_MDS_SHAPES[data[start] & 3])
        count, start = data[start] >> 2, start + 1
        shape = tuple(_array(data[start : start + count * kind.itemsize], kind, count).tolist())
        start += count * kind.itemsize
    return np.frombuffer(data, np.dtype(code), offset=start).reshape(shape).copy()


def _flat(name: str, is_tensor: bool, data: bytes) -> Any:
    return _shaped(name, data, None) if is_tensor else np.frombuffer(data, np.dtype(name)).copy()


def _shaped(name: str, data: bytes, shape: Sequence[int] | None) -> Any:
    import torch

    dtype = getattr(torch, name)
    if len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no tensor of {name}")
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    if shape is None:
        return flat
    if math.prod(shape) != len(flat):
        raise ValueError(f"{len(flat)} values are no tensor of the shape {tuple(shape)}")
    return flat.reshape(tuple(shape))


def _lit_tensor(data: bytes) -> Any:
    number, rank = struct.unpack_from(">II", data)
    shape = struct.unpack_from(f">{rank}I", data, 8)
    return _shaped(_LIT_TENSORS[number], data[8 + 4 * rank :], shape)


def _lit_array(data: bytes) -> Any:
    number, rank = _array(data[:8], _UINT32, 2).tolist()
    shape = _array(data[8 : 8 + 4 * rank], _UINT32, rank).tolist()
    return np.frombuffer(data, np.dtype(_LIT_ARRAYS[number]), offset=8 + 4 * rank).reshape(shape).copy()


def _text_to(kind: Callable[[str], Any]) -> _Decode:
    return lambda data: kind(data.decode())


#: Encodings of MDS without parameters.
_SIMPLE: dict[str, _Decode] = {
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "pil": _picture,
    "json": load_json,
    "str": bytes.decode,
    "int": _integer,
    "str_int": _text_to(int),
    "str_float": _text_to(float),
    "str_decimal": _text_to(Decimal),
}
#: Formats of LitData without parameters.
_LIT_SIMPLE: dict[str, _Decode] = {
    "bytes": bytes,
    "jpeg": bytes,
    "image": bytes,
    "tifffile": bytes,
    "pil": _picture,
    "json": _lit_json,
    "str": bytes.decode,
    "string": bytes.decode,
    "text": bytes.decode,
    "int": _integer,
    "float": _number,
    "bool": _flag,
    "tensor": _lit_tensor,
    "numpy": _lit_array,
}
