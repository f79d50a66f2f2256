"""MosaicML's MDS and LitData: every sample equal to what their own libraries write, and damage refused by name."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import struct
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from torch_dpflow import DPFlowDataLoader, open_dataset
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers.packed import LitDataImporter, MDSImporter
from torch_dpflow.errors import SourceError

COUNT, SHARD = 50, 20


@lru_cache(COUNT)
def picture(number: int) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (8, 9, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def pixels(number: int) -> Any:
    return np.asarray(Image.open(io.BytesIO(picture(number))))


def words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


#: By column of the MDS dataset: encoding, fixed size, value of a sample, and its bytes, as MDS's page describes them.
COLUMNS: dict[str, tuple[str, int | None, Callable[[int], Any], Callable[[int], bytes]]] = {
    "array": ("ndarray:float32:3", 12, lambda n: np.full(3, n, "f4"), lambda n: np.full(3, n, "f4").tobytes()),
    "big": ("str_int", None, lambda n: n * 10**20, lambda n: str(n * 10**20).encode()),
    "class": ("int", 8, lambda n: n, lambda n: struct.pack("<q", n)),
    "free": (
        "ndarray",
        None,
        lambda n: np.arange(n + 1, dtype="i2").reshape(1, -1),
        lambda n: bytes([17, 2 << 2, 1, n + 1]) + np.arange(n + 1, dtype="i2").tobytes(),
    ),
    "half": ("float16", 2, lambda n: np.float16(n / 2), lambda n: np.float16(n / 2).tobytes()),
    "image": ("png", None, picture, picture),
    "list": (
        "list[png]",
        None,
        lambda n: [picture(n)] * (n % 3),
        lambda n: words(0, n % 3, *[len(picture(n))] * (n % 3)) + picture(n) * (n % 3),
    ),
    "nested": ("json", None, lambda n: {"a": [n]}, lambda n: json.dumps({"a": [n]}).encode()),
    "price": ("str_decimal", None, lambda n: Decimal(n) / 10, lambda n: str(Decimal(n) / 10).encode()),
    "raw": ("bytes", None, lambda n: b"x" * n, lambda n: b"x" * n),
    "text": ("str", None, lambda n: f"é{n}", lambda n: f"é{n}".encode()),
}


def with_offsets(samples: list[bytes], between: bytes = b"") -> bytes:
    """A shard of either format: count, offsets, then the samples."""
    offsets = np.cumsum([0, *map(len, samples)]) + 4 * (len(samples) + 2) + len(between)
    return words(len(samples), *offsets.tolist()) + between + b"".join(samples)


@lru_cache(COUNT)
def mds_sample(number: int) -> bytes:
    values = [(size, encode(number)) for _, size, _, encode in COLUMNS.values()]
    sizes = words(*[len(value) for size, value in values if size is None])
    return sizes + b"".join(value for _, value in values)


def write_mds(folder: Path, compression: str | None = None, compress: Any = None, **changes: Any) -> None:
    folder.mkdir(parents=True)
    shards = []
    for number, first in enumerate(range(0, COUNT, SHARD)):
        samples = [mds_sample(n) for n in range(first, min(first + SHARD, COUNT))]
        raw = with_offsets(samples, b'{"of": "the writer"}')
        name = f"shard.{number:05}.mds"
        described = {"raw_data": {"basename": name, "bytes": len(raw), "hashes": {}}, "zip_data": None}
        if compress is not None:
            raw, name = compress(raw), f"{name}.{str(compression).partition(':')[0]}"
            described["zip_data"] = {"basename": name, "bytes": len(raw), "hashes": {}}
        (folder / name).write_bytes(raw)
        columns: dict[str, list[Any]] = {"column_names": [*COLUMNS], "column_encodings": [], "column_sizes": []}
        for encoding, size, _, _ in COLUMNS.values():
            columns["column_encodings"].append(encoding)
            columns["column_sizes"].append(size)
        entry = {"format": "mds", "version": 2, "compression": compression, "samples": len(samples), **described}
        shards.append({**entry, **columns, **changes})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def mds_expected(number: int) -> dict[str, Any]:
    return {name: value(number) for name, (_, _, value, _) in COLUMNS.items()}


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert_equal(found[name], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


def nested(number: int) -> tuple[bytes, Any]:
    """A list in LitData's own form, as bytes and as value: a dict of texts, numbers and records."""
    text = f"t{number}".encode()
    data = b"\5" + words(3)
    data += words(1) + b"a" + b"\1" + words(2) + (words(len(text)) + text) * 2
    data += words(1) + b"n" + b"\2" + words(1) + struct.pack("<q", -number)
    data += words(1) + b"r" + b"\6" + words(1, 2) + words(1) + b"x" + words(1) + b"y" + b"\x10" + b"\x14\1"
    return data, {"a": [text.decode()] * 2, "n": [-number], "r": [{"x": None, "y": True}]}


def lit_values(number: int) -> list[tuple[str, bytes, Any]]:
    """Format, bytes and value of each leaf of a LitData sample."""
    array, tensor = np.full((2, number + 1), number, "f4"), torch.full((number % 3 + 1,), number)
    matrix = torch.arange(4, dtype=torch.float32).reshape(2, 2)
    return [
        ("bytes", b"x" * number, b"x" * number),
        ("bool", bytes([number % 2]), bool(number % 2)),
        ("str", f"é{number}".encode(), f"é{number}"),
        ("float", struct.pack("<d", number / 3), number / 3),
        ("numpy", words(9, 2, *array.shape) + array.tobytes(), array),
        ("no_header_tensor:18", tensor.numpy().tobytes(), tensor),
        ("tensor", struct.pack(">4I", 0, 2, 2, 2) + matrix.numpy().tobytes(), matrix),
        ("jpeg", picture(number), picture(number)),
        ("json", *nested(number)),
        ("json", b'[1, "a"]', [1, "a"]),
    ]


_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
_NAMES = ["z", "a"]


def _tree() -> str:
    """A dict of a list and a tuple; its names are not sorted."""
    inner = [
        {"type": "builtins.list", "context": "null", "children_spec": [_LEAF] * 4},
        {"type": "builtins.tuple", "context": "null", "children_spec": [_LEAF] * 6},
    ]
    return json.dumps([1, {"type": "builtins.dict", "context": json.dumps(_NAMES), "children_spec": inner}])


def lit_expected(number: int) -> dict[str, Any]:
    values = [value for _, _, value in lit_values(number)]
    return {"z": values[:4], "a": tuple(values[4:])}


def write_litdata(folder: Path, **changes: Any) -> None:
    folder.mkdir(parents=True)
    chunks = []
    for number, first in enumerate(range(0, COUNT, SHARD)):
        samples = []
        for n in range(first, min(first + SHARD, COUNT)):
            values = [data for _, data, _ in lit_values(n)]
            samples.append(words(*map(len, values)) + b"".join(values))
        raw = with_offsets(samples)
        (folder / f"chunk-0-{number}.bin").write_bytes(raw)
        chunks.append({"filename": f"chunk-0-{number}.bin", "chunk_bytes": len(raw), "chunk_size": len(samples)})
    formats = [name for name, _, _ in lit_values(0)]
    config = {"data_format": formats, "data_spec": _tree(), "compression": None, "item_loader": "PyTreeLoader"}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": {**config, **changes}}))


@pytest.mark.parametrize(("write", "expected"), [(write_mds, mds_expected), (write_litdata, lit_expected)])
def test_every_sample_is_read_in_any_order(tmp_path: Path, write: Any, expected: Any) -> None:
    write(tmp_path / "data")
    dataset = open_dataset(tmp_path / "data")
    assert len(dataset) == COUNT
    for order in (random.Random(0).sample(range(COUNT), COUNT), range(COUNT)):  # ranges by themselves, and joined
        for number, sample in zip(order, dataset.__getitems__(order), strict=True):
            assert_equal(sample, expected(number))
    assert_equal(dataset[-1], expected(COUNT - 1))


@pytest.mark.parametrize(("write", "name"), [(write_mds, "samples"), (write_litdata, "chunk_size")])
def test_another_number_of_samples_in_the_index_is_noticed(tmp_path: Path, write: Any, name: str) -> None:
    write(tmp_path / "data")
    open_dataset(tmp_path / "data").close()
    path = tmp_path / "data" / "index.json"
    index = path.read_text()
    path.write_text(re.sub(rf'"{name}": \d+', f'"{name}": 1', index, count=1))
    with pytest.raises(SourceError, match=r"and the index says 1"):
        open_dataset(tmp_path / "data")
    path.write_text(index)
    open_dataset(tmp_path / "data").close()


@pytest.mark.parametrize(
    ("write", "list_name", "shard"),
    [(write_mds, "shards", "shard.00000.mds"), (write_litdata, "chunks", "chunk-0-0.bin")],
)
def test_a_shard_that_the_index_lists_twice_is_refused(tmp_path: Path, write: Any, list_name: str, shard: str) -> None:
    write(tmp_path / "data")
    path = tmp_path / "data" / "index.json"
    index = json.loads(path.read_text())
    index[list_name].append(index[list_name][0])
    path.write_text(json.dumps(index))
    with pytest.raises(
        SourceError, match=rf"index.json .* it has '{shard}' twice; list each shard once.*ConcatDataset"
    ):
        open_dataset(tmp_path / "data")


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("gz", gzip.compress),
        ("zstd:7", lambda data: pa.compress(data, "zstd", asbytes=True)),
        ("br", lambda data: pa.compress(data, "brotli", asbytes=True)),
    ],
)
def test_compressed_shards_are_copied(tmp_path: Path, name: str, compress: Any) -> None:
    write_mds(tmp_path / "data", name, compress)
    dataset = open_dataset(tmp_path / "data")
    for number in (0, 49, 21):
        assert_equal(dataset[number], mds_expected(number))
    shard = tmp_path / "data" / f"shard.00001.mds.{name.partition(':')[0]}"
    shard.write_bytes(bytes(reversed(shard.read_bytes())))
    with pytest.raises(SourceError, match=r"shard.00001.mds.* cannot be decompressed"):
        open_dataset(tmp_path / "data")


def test_decompressed_shards_are_read_in_place_of_compressed_ones(tmp_path: Path) -> None:
    """As the readers of both libraries leave them: they remove a compressed shard once it is decompressed."""
    write_mds(tmp_path / "mds", "gz", gzip.compress)
    write_litdata(tmp_path / "lit", compression="zstd")
    index = tmp_path / "lit" / "index.json"
    index.write_text(index.read_text().replace(".bin", ".zstd.bin"))
    for packed in (tmp_path / "mds").glob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
        mds: Any = open_dataset(tmp_path / "mds")
        assert_equal(mds.__getitems__([*range(COUNT)]), [mds_expected(number) for number in range(COUNT)])
    lit: Any = open_dataset(tmp_path / "lit")
    assert_equal(lit.__getitems__([*range(COUNT)]), [lit_expected(number) for number in range(COUNT)])
    for folder, name in ((tmp_path / "mds", "shard.00001.mds"), (tmp_path / "lit", "chunk-0-1.bin")):
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
        with pytest.raises(SourceError, match=rf"{name} has \d+ bytes, and the index says \d+; it was cut or replaced"):
            open_dataset(folder)


def test_images_are_decoded(tmp_path: Path) -> None:
    write_mds(tmp_path / "data")
    sample: Any = open_dataset(tmp_path / "data", decode="pil")[3]
    assert np.array_equal(sample["image"], pixels(3))
    assert sample["text"] == "é3"
    write_litdata(tmp_path / "lit")
    decoded: Any = open_dataset(tmp_path / "lit", decode="pil")[3]
    assert np.array_equal(decoded["a"][3], pixels(3))


def test_a_loader_and_a_store_read_them(tmp_path: Path, local_store: DatasetStore) -> None:
    write_mds(tmp_path / "data")
    dataset = open_dataset(tmp_path / "data", decode=lambda sample: sample["class"])
    loader = DPFlowDataLoader(dataset, batch_size=7, shuffle=True, num_workers=2)
    assert sorted(n for batch in loader for n in batch.tolist()) == [*range(COUNT)]
    draft = Draft(local_store, "core/packed", "v1")
    draft.add("train", MDSImporter(tmp_path / "data"))
    draft.publish()
    assert_equal(open_dataset("core/packed:v1:train", store=local_store)[7], mds_expected(7))


@pytest.mark.parametrize("write", [write_mds, write_litdata])
def test_damage_is_refused_by_name(tmp_path: Path, write: Any) -> None:
    write(tmp_path / "data")
    index = tmp_path / "data" / "index.json"
    shard = next(path for path in sorted((tmp_path / "data").iterdir()) if path != index)
    whole, listed = shard.read_bytes(), index.read_text()
    kind = MDSImporter if write is write_mds else LitDataImporter
    count = struct.unpack_from("<I", whole)[0]
    damages = {
        "cut": (whole[:-1], "was cut or replaced"),
        "count": (words(count + 1) + whole[4:], "samples, and the index says"),
        "offset": (whole[:4] + words(3) + whole[8:], "has offsets that are not those of"),
        "last": (whole[: 4 * (count + 1)] + words(3) + whole[4 * (count + 2) :], "has offsets that are not those of"),
    }
    for damaged, message in damages.values():
        shard.write_bytes(damaged)
        with pytest.raises(SourceError, match=f"{shard.name}.*{message}"):
            [*kind(tmp_path / "data").items()]
    shard.write_bytes(whole)
    for text in ("", "[]", "{}", listed[:-2], "[" * 10_000):
        index.write_text(text)
        with pytest.raises(SourceError, match=r"index\.json"):
            kind(tmp_path / "data")
    index.write_text(listed)
    shard.unlink()
    with pytest.raises(SourceError, match=f"lists {shard.name}, which is not there"):
        kind(tmp_path / "data")


@pytest.mark.parametrize("flip", range(0, 400, 7))
def test_a_damaged_sample_is_an_error_and_no_crash(tmp_path: Path, flip: int) -> None:
    """Sizes and tags of a sample lie in its first bytes."""
    for write, expected in ((write_mds, mds_expected), (write_litdata, lit_expected)):
        folder = tmp_path / write.__name__
        write(folder)
        shard = sorted(path for path in folder.iterdir() if path.name != "index.json")[0]
        data = bytearray(shard.read_bytes())
        start = struct.unpack_from("<I", data, 4)[0]
        data[start + flip] ^= 0x41
        shard.write_bytes(data)
        try:
            sample = open_dataset(folder)[0]
        except SourceError:
            continue
        assert list(sample) == list(expected(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column_encodings": ["pkl"] * 11}, "unpickling runs code of the dataset's author"),
        ({"column_encodings": ["tensor"] * 11}, "'tensor' is not known"),
        ({"format": "json"}, "a shard has the format 'json'"),
        ({"version": 3}, "version 3"),
        ({"samples": -1}, "with -1 samples"),
    ],
)
def test_other_shards_of_mosaicml_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_mds(tmp_path / "data", **changes)
    with pytest.raises(SourceError, match=message):
        MDSImporter(tmp_path / "data")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_format": ["pickle"] * 10}, "unpickling runs code"),
        ({"data_format": ["int"] * 9}, "has 10 values, and data_format 9"),
        ({"encryption": {"algorithm": "fernet"}}, "with encryption"),
        ({"item_loader": "TokensLoader"}, "for the loader TokensLoader"),
        ({"data_format": ["no_header_numpy:99"] * 10}, "names no type"),
    ],
)
def test_other_chunks_of_litdata_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_litdata(tmp_path / "data", **changes)
    with pytest.raises(SourceError, match=message):
        LitDataImporter(tmp_path / "data")


def test_a_table_is_opened_too(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    rows = [{"image": {"bytes": picture(n), "path": f"{n}.png"}, "label": n} for n in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert open_dataset(tmp_path)[3] == rows[3]
    decoded: Any = open_dataset(str(tmp_path / "a.parquet"), decode="pil")[3]
    assert np.array_equal(decoded["image"], pixels(3))
    assert open_dataset(tmp_path, settings={"columns": ["label"]})[2] == {"label": 2}
