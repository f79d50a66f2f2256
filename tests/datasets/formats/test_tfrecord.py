"""TFRecord files are read in place without TensorFlow; what is damaged, cut or compressed is refused by name."""

from __future__ import annotations

import gzip
import random
import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpflow.datasets import open_dataset
from torch_dpflow.datasets.importers import tfrecord
from torch_dpflow.datasets.importers.tfrecord import masked_crc32c, parse_example
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.errors import ChecksumError, MissingExtraError, OptionError, SourceError

INTEGERS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20)
TEXTS = st.lists(st.binary(max_size=200), min_size=1, max_size=5)


def slow_crc32c(data: bytes) -> int:
    """The checksum bit by bit, as RFC 3720 defines it."""
    crc = 0xFFFFFFFF
    for octet in data:
        crc ^= octet
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = slow_crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(features: Mapping[str, Sequence[Any]], *, packed: bool = True) -> bytes:
    """Encode a `tf.train.Example`, as its schema says."""
    entries = b""
    for name, values in features.items():
        if isinstance(values[0], bytes):
            kind, body = 1, b"".join(field(1, value) for value in values)
        elif isinstance(values[0], float):
            kind = 2
            each = [struct.pack("<f", value) for value in values]
            body = field(1, b"".join(each)) if packed else b"".join(b"\x0d" + one for one in each)
        else:
            kind = 3
            each = [varint(value) for value in values]
            body = field(1, b"".join(each)) if packed else b"".join(b"\x08" + one for one in each)
        entries += field(1, field(1, name.encode()) + field(2, field(kind, body)))
    return field(1, entries)


@pytest.mark.parametrize("size", [0, 1, 9, 65_537])
def test_the_checksum_is_that_of_the_definition(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert struct.pack("<I", masked_crc32c(data)) == masked(data)


def test_without_its_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tfrecord").write_bytes(record(b"x"))
    (tmp_path / "b").write_bytes(record(b"x"))
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    tfrecord._extend.cache_clear()
    with pytest.raises(MissingExtraError, match=r"google-crc32c; .*'torch_dpflow\[datasets\]'"):
        open_dataset(tmp_path / "a.tfrecord", index_dir=tmp_path / "index")
    with pytest.raises(OptionError, match="has no format that is known"):
        open_dataset(tmp_path / "b", index_dir=tmp_path / "index")


@given(st.dictionaries(st.text(max_size=9), st.one_of(INTEGERS, FLOATS, TEXTS), max_size=5), st.booleans())
def test_examples_are_decoded(features: dict[str, list[Any]], packed: bool) -> None:
    found = parse_example(example(features, packed=packed))
    assert found.keys() == features.keys()
    for name, values in features.items():
        if isinstance(values[0], bytes):
            assert found[name] == values
        else:
            kind = np.float32 if isinstance(values[0], float) else np.int64
            assert found[name].dtype == kind
            assert found[name].tolist() == values


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_bytes_of_any_kind_are_decoded_or_refused(data: bytes) -> None:
    found = None
    with suppress(SourceError):
        found = parse_example(data)
    assert found is None or all(isinstance(value, list | np.ndarray) for value in found.values())


@settings(max_examples=100)
@given(st.data())
def test_a_cut_example_is_refused(data: st.DataObject) -> None:
    whole = example({"a": [1, 300, -1], "b": [b"xyz"], "c": [1.5]})
    with pytest.raises(SourceError):
        parse_example(whole[: data.draw(st.integers(1, len(whole) - 1))])


def test_what_protobuf_allows_is_decoded_as_protobuf_does() -> None:
    """Unknown fields, packed or in groups; messages in parts; repeated entries and kinds, of which the last counts."""
    unknown = (
        field(9, b"x") + varint(10 << 3) + varint(300) + varint(11 << 3 | 5) + bytes(4) + varint(12 << 3 | 1) + bytes(8)
    )
    group = (
        varint(13 << 3 | 3)
        + varint(1 << 3)
        + varint(7)
        + varint(14 << 3 | 3)
        + varint(14 << 3 | 4)
        + varint(13 << 3 | 4)
    )
    integers = field(3, field(1, varint(7)))
    floats = field(2, field(1, struct.pack("<f", 1.5)))

    def entry(name: bytes, *features: bytes) -> bytes:
        return field(1, unknown + field(1, name) + b"".join(field(2, one) for one in features) + group)

    record_of = field(1, entry(b"a", integers, integers + group) + unknown) + unknown
    record_of += field(
        1, entry(b"b", integers, floats, floats) + entry(b"c", floats) + entry(b"c", integers) + entry(b"d")
    )
    found = parse_example(record_of)
    assert {name: list(values) for name, values in found.items()} == {"a": [7, 7], "b": [1.5, 1.5], "c": [7], "d": []}
    assert (found["b"].dtype, found["c"].dtype) == (np.float32, np.int64)
    assert parse_example(b"") == {}
    for wrong in (unknown, record_of + field(2, b""), record_of + group[:-1], record_of + varint(13 << 3 | 4)):
        with pytest.raises(SourceError, match=r"no tf\.train\.Example"):
            parse_example(wrong)


def write(path: Path, count: int = 20) -> list[dict[str, list[Any]]]:
    features: list[dict[str, list[Any]]] = [
        {"id": [number, -number], "image/encoded": [b"\x01%d" % number * number], "w": [number / 4]}
        for number in range(count)
    ]
    path.write_bytes(b"".join(record(example(one)) for one in features))
    return features


def test_files_are_read_in_place(tmp_path: Path) -> None:
    features = write(tmp_path / "a.tfrecord-00000-of-00002") + write(tmp_path / "a.tfrecord-00001-of-00002", 5)
    dataset = open_dataset(f"{tmp_path}/a.tfrecord-0000{{0..1}}-of-00002")
    assert len(dataset) == 25
    for number, one in enumerate(features):
        found = dataset[number]
        assert {name: list(values) for name, values in found.items()} == one
    assert DatasetReader(dataset.stored)[3][0] == example(features[3])


def test_a_format_is_found_by_first_bytes(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00001")
    (tmp_path / "README.md").write_text("not a record")
    for source in (tmp_path / "train-00000-of-00001", tmp_path):
        assert len(open_dataset(source)) == 20
    with pytest.raises(SourceError, match="no tar archive"):
        open_dataset(tmp_path / "train-00000-of-00001", format="webdataset")
    with pytest.raises(OptionError, match="give one of imagefolder"):
        open_dataset(tmp_path / "train-00000-of-00001", format="tf")


def test_an_empty_file_does_not_hide_the_format(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-00002").touch()
    write(tmp_path / "train-00001-of-00002")
    (tmp_path / "_SUCCESS").touch()
    assert len(open_dataset(tmp_path)) == 20
    (tmp_path / "spark").mkdir()
    (tmp_path / "spark" / "_SUCCESS").touch()
    write(tmp_path / "spark" / "part-r-00000")
    with pytest.raises(SourceError, match=r"has no files of tfrecord; give .* a pattern"):
        open_dataset(tmp_path / "spark")
    assert len(open_dataset(f"{tmp_path}/spark/part-r-*")) == 20


def test_a_large_record(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(9 * 2**20)
    length = struct.pack("<Q", len(data))
    footer = struct.pack("<I", masked_crc32c(data))
    (tmp_path / "a.tfrecord").write_bytes(length + masked(length) + data + footer)
    assert DatasetReader(open_dataset(tmp_path / "a.tfrecord").stored)[0][0] == data


REFUSED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "gzip": (gzip.compress, "compressed with gzip.*gunzip"),
    "zlib": (zlib.compress, "compressed with ZLIB"),
    "foreign": (lambda data: b"\x89PNG" * 100, "no TFRecord file"),
    "cut in a record": (lambda data: data[:-7], "was cut short"),
    "cut in a header": (lambda data: data + data[:5], "was cut short: no record begins at byte"),
    "damaged data": (lambda data: data[:-6] + b"!" + data[-5:], "does not match its checksum"),
    "damaged length": (lambda data: data[:4] + b"!" + data[5:], "no TFRecord file"),
    "nothing": (lambda data: b"", "there is nothing to import"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    change, message = REFUSED[kind]
    path = tmp_path / "bad.tfrecord"
    write(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(SourceError, match=message) as refused:
        open_dataset(path)
    assert "bad.tfrecord" in str(refused.value)


def test_a_record_that_was_altered_later_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write(path)
    dataset = open_dataset(path)
    data = path.read_bytes()
    path.write_bytes(data[:-6] + b"!" + data[-5:])
    with pytest.raises(ChecksumError, match=r"a\.tfrecord"):
        dataset[19]


def test_records_of_other_messages_are_refused_when_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(record(field(1, b"") + field(2, b"")))
    with pytest.raises(SourceError, match=r"a\.tfrecord.*is no tf\.train\.Example"):
        open_dataset(path)[0]


def test_files_of_tensorflow_are_equal(tmp_path: Path) -> None:
    tensorflow = pytest.importorskip("tensorflow")
    train = tensorflow.train
    path = tmp_path / "a.tfrecord"
    with tensorflow.io.TFRecordWriter(str(path)) as writer:
        for number in range(10):
            feature = {
                "n": train.Feature(int64_list=train.Int64List(value=[number, -number])),
                "f": train.Feature(float_list=train.FloatList(value=[number / 3])),
                "b": train.Feature(bytes_list=train.BytesList(value=[b"x" * number])),
            }
            writer.write(train.Example(features=train.Features(feature=feature)).SerializeToString())
    dataset = open_dataset(path)
    theirs = [train.Example.FromString(one.numpy()) for one in tensorflow.data.TFRecordDataset(str(path))]
    for ours, one in zip([dataset[number] for number in range(10)], theirs, strict=True):
        assert ours["n"].tolist() == list(one.features.feature["n"].int64_list.value)
        assert ours["f"].tolist() == list(one.features.feature["f"].float_list.value)
        assert ours["b"] == list(one.features.feature["b"].bytes_list.value)
