"""Values of a sample: none is lost because another has its name, and none stays encoded in silence."""

from __future__ import annotations

import contextlib
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.datasets.formats.tars import write_tar
from tests.datasets.formats.test_packed import _LEAF, picture, words, write_litdata, write_mds
from tests.later import Later
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.datasets import DatasetStore, Draft, open_dataset
from torch_dpflow.datasets.importers.columns import _LIT_SIMPLE, _SIMPLE, lit_sample, mds_decoder, mds_sample
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.importers.webdataset import PARTS
from torch_dpflow.datasets.reader import OpenedDataset
from torch_dpflow.datasets.tables import TableDataset
from torch_dpflow.datasets.views import Decoder
from torch_dpflow.errors import DamagedStoreError, OptionError, SourceError

PIL = Later("PIL.Image")
V2 = Later("torchvision.transforms.v2")


def _arrow(path: Path, table: Any, *, stream: bool) -> None:
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("number", "name"),
    [(0, "a"), (1, r"a\.x"), (2, r"a\[\]\.x")],
    ids=["columns", "struct", "list"],
)
@pytest.mark.parametrize("ending", ["parquet", "arrow", "stream.arrow"])
def test_columns_of_one_name_are_refused(tmp_path: Path, number: int, name: str, ending: str) -> None:
    numbers = pa.array([1, 2])
    struct = pa.StructArray.from_arrays([numbers, numbers], names=["x", "x"])
    columns = [
        [("a", numbers), ("b", numbers), ("a", numbers)],
        [("a", struct)],
        [("a", pa.ListArray.from_arrays([0, 1, 2], struct))],
    ][number]
    table = pa.Table.from_arrays([column for _, column in columns], names=[name for name, _ in columns])
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        _arrow(path, table, stream=ending.startswith("stream"))
    with pytest.raises(SourceError, match=rf"several columns of the name \['{name}'\]"):
        TableDataset(path)


def test_values_of_one_name_in_an_index_are_refused(tmp_path: Path) -> None:
    twice = {"column_names": ["a", "a"], "column_encodings": ["int", "int"], "column_sizes": [8, 8]}
    write_mds(tmp_path / "mds", **twice)
    tree = {"type": "builtins.dict", "context": json.dumps(["a", "a"]), "children_spec": [_LEAF] * 2}
    write_litdata(tmp_path / "lit", data_spec=json.dumps([1, tree]), data_format=["int", "int"])
    for folder in ("mds", "lit"):
        with pytest.raises(SourceError, match="it has 'a' twice"):
            open_dataset(tmp_path / folder)


@pytest.mark.parametrize("image", [{"bytes": None, "path": "cats/0.jpg"}, {"bytes": None, "path": None}])
def test_an_image_that_is_stored_as_a_path_is_an_error(tmp_path: Path, image: dict[str, Any]) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [image, {"bytes": picture(0), "path": None}, None]
    pq.write_table(pa.table({"image": pa.array(rows, kind)}), tmp_path / "a.parquet")
    dataset: Any = open_dataset(tmp_path / "a.parquet", decode="torch")
    with pytest.raises(SourceError, match=f"'image' is stored as the path {image['path']!r}"):
        dataset[0]
    assert dataset[1]["image"].shape[0] == 3
    assert dataset[2]["image"] is None  # a null, as HuggingFace has it
    assert open_dataset(tmp_path / "a.parquet")[0]["image"] == image


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA"])
def test_images_that_are_stored_as_pixels_are_decoded_too(tmp_path: Path, mode: str) -> None:
    """As MDS and LitData store images of Pillow."""
    image = PIL.fromarray(np.random.default_rng(0).integers(0, 255, (5, 4, 3), np.uint8)).convert(mode)
    stored = words(*image.size, len(mode)) + mode.encode() + image.tobytes()
    sample = words(len(stored)) + stored
    (tmp_path / "mds").mkdir()
    shard = words(1, 12, 12 + len(sample)) + sample
    (tmp_path / "mds" / "shard.00000.mds").write_bytes(shard)
    entry = {"format": "mds", "version": 2, "compression": None, "samples": 1, "zip_data": None}
    raw = {"basename": "shard.00000.mds", "bytes": len(shard), "hashes": {}}
    columns = {"column_names": ["x"], "column_encodings": ["pil"], "column_sizes": [None]}
    (tmp_path / "mds" / "index.json").write_text(json.dumps({"shards": [{**entry, "raw_data": raw, **columns}]}))
    expected = np.array(PIL.frombytes(mode, image.size, image.tobytes()).convert("RGB"))
    found = {decode: open_dataset(tmp_path / "mds", decode=decode)[0]["x"] for decode in ("pil", "rgb", "torch")}
    assert found["pil"].mode == "RGB"
    assert np.array_equal(np.array(found["pil"]), expected)
    assert np.array_equal(found["rgb"], expected)
    assert torch.equal(found["torch"], torch.from_numpy(expected).permute(2, 0, 1))


@pytest.mark.parametrize("decode", ["pil", "rgb", "torch"])
def test_pixels_beyond_8_bits_are_refused(decode: Any) -> None:
    file = io.BytesIO()
    deep = PIL.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40))
    deep.save(file, "PNG")
    for value in (file.getvalue(), deep):  # MDS and LitData also store pixels
        with pytest.raises(
            SourceError, match=r"'png' cannot be decoded: .*its values, 0 to 1199 \(mode I;16\), do not fit"
        ):
            Decoder(decode)({"png": value})


@pytest.mark.parametrize("kind", ["flac", "mp4", "MP4", "x.mkv", "pkl", "pyd", "pth", "msgpack", "cbor", "ten"])
def test_what_is_not_decoded_is_an_error_by_name(kind: str) -> None:
    with pytest.raises(
        SourceError, match=f"'{kind}' cannot be decoded: .*'torch' does not decode {kind.lower().rpartition('.')[2]}"
    ):
        Decoder("torch")({kind: b"..."})


def test_arrays_of_an_npz_are_decoded_and_none_is_unpickled() -> None:
    file, objects = io.BytesIO(), io.BytesIO()
    np.savez(file, a=np.arange(3), b=np.ones((2, 1)))
    np.savez(objects, a=np.array([None]))
    found = Decoder("rgb")({"npz": file.getvalue()})["npz"]
    assert {name: array.tolist() for name, array in found.items()} == {"a": [0, 1, 2], "b": [[1.0], [1.0]]}
    with pytest.raises(SourceError, match=r"'npz' cannot be decoded: .*allow_pickle"):
        Decoder("rgb")({"npz": objects.getvalue()})


@pytest.mark.parametrize("value", [{"bytes": b"fLaC...", "path": "a.flac"}, {"bytes": b"fLaC...", "path": None}])
def test_sounds_of_huggingface_are_an_error_by_name(value: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match=r"'(a\.flac|x)' cannot be decoded: .*give decode= a function"):
        Decoder("torch")({"x": [value]})


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP", "AVIF", "JPEG2000"])
def test_an_image_is_found_by_its_first_bytes_at_any_depth(format: str) -> None:
    file = io.BytesIO()
    PIL.fromarray(np.full((4, 6, 3), 80, np.uint8)).save(file, format)
    for value in (file.getvalue(), [file.getvalue()], {"of": (file.getvalue(),)}):
        found = Decoder("rgb")({"x": value})["x"]
        while not isinstance(found, np.ndarray):
            found = next(iter(found.values() if isinstance(found, dict) else found))
        assert found.shape == (4, 6, 3)


def _damaged() -> dict[str, bytes]:
    png, tiff = io.BytesIO(), io.BytesIO()
    noise = PIL.fromarray(np.random.default_rng(0).integers(0, 255, (90, 90, 3), np.uint8))
    noise.save(png, "PNG")
    noise.save(tiff, "TIFF")
    whole = png.getvalue()
    second = whole.index(b"IDAT", whole.index(b"IDAT") + 4) if whole.count(b"IDAT") > 1 else whole.index(b"IDAT")
    large = bytearray(whole)
    large[16:24] = (60_000).to_bytes(4, "big") * 2
    large[29:33] = zlib.crc32(bytes(large[12:29])).to_bytes(4, "big")
    return {
        "cut": whole[:-200],
        "type": whole[:second] + b"I\xffAT" + whole[second + 4 :],
        "bomb": bytes(large),
        "tiff": tiff.getvalue()[:40],
        "garbage": b"\x89PNG\r\n\x1a\n" + bytes(30),
    }


@pytest.mark.parametrize("decode", ["pil", "rgb", "torch"])
@pytest.mark.parametrize("kind", ["cut", "type", "bomb", "tiff", "garbage"])
def test_every_kind_of_damage_is_skipped_by_name(tmp_path: Path, decode: Any, kind: str) -> None:
    members = [("0.png", picture(0)), ("1.png", _damaged()[kind]), ("2.png", picture(2))]
    dataset = open_dataset(write_tar(tmp_path / "a.tar", members), decode=decode, on_error="skip")
    assert [sample["__key__"] for sample in dataset.__getitems__([0, 1, 2])] == ["0", "2"]
    with pytest.raises(SourceError, match=r"a\.tar.*'png' cannot be decoded"):
        dataset[1]


def test_a_transform_that_leaves_images_encoded_is_an_error(tmp_path: Path) -> None:
    members = [(f"{n}.{ending}", data) for n in range(4) for ending, data in (("png", picture(n)), ("cls", b"1"))]
    path = write_tar(tmp_path / "a.tar", members)
    resize = V2.Resize((8, 8))
    with pytest.raises(OptionError, match="left 'png' encoded"):
        open_dataset(path, decode=resize)[0]
    images = Decoder("torch")
    dataset: Any = open_dataset(path, decode=lambda sample: resize(images(sample)))
    for batch in DPFlowDataLoader(dataset, batch_size=4, shuffle=True):
        assert batch["png"].shape == (4, 3, 8, 8)
        assert batch["cls"].tolist() == [1] * 4
    raw: Any = open_dataset(path, decode=lambda sample: sample["png"])  # to be decoded elsewhere
    assert raw[2] == picture(2)


@pytest.mark.parametrize("parts", [3, {"a": 3}, {"a": [1]}, {"a": [-5, 2]}, {"a": ["x", 1]}])
def test_a_sample_with_damaged_metadata_does_not_fail_its_batch(local_store: DatasetStore, parts: Any) -> None:
    draft = Draft(local_store, "core/x", "v1")
    items = [(bytes([number]), {PARTS: parts} if number == 1 else {}) for number in range(3)]
    draft.add("train", IterableImporter(items))
    draft.publish()
    dataset = OpenedDataset(local_store.open("core/x:v1:train"), on_error="skip")
    assert [sample["data"] for sample in dataset.__getitems__([0, 1, 2])] == [b"\0", b"\2"]
    with pytest.raises(DamagedStoreError, match="are no parts"):
        dataset[1]


ENCODINGS = [*_SIMPLE, "uint16", "ndarray", "ndarray:int32", "ndarray:int32:2,2", "list[str]", "jpeg_array"]
pixels = st.builds(
    lambda width, height, mode, data: words(width, height, len(mode)) + mode.encode() + data,
    *[st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))] * 2,
    st.sampled_from(["1", "L", "RGB", "RGBA", "I;16", "F", "no mode"]),
    st.binary(max_size=64),
)


@given(st.sampled_from(ENCODINGS), st.one_of(st.binary(max_size=40), pixels))
def test_a_damaged_value_of_mds_raises_nothing_else(encoding: str, value: bytes) -> None:
    with contextlib.suppress(SourceError):
        assert [*mds_sample(words(len(value)) + value, (("a", encoding, None),))] == ["a"]


@given(st.sampled_from([*_LIT_SIMPLE, "no_header_tensor:3", "no_header_numpy:9"]), st.one_of(st.binary(), pixels))
def test_a_damaged_value_of_litdata_raises_nothing_else(name: str, value: bytes) -> None:
    with contextlib.suppress(SourceError):
        lit_sample(words(len(value)) + value, (name,), "*")


@pytest.mark.parametrize("size", [(2**31, 1), (2**22, 2**22), (2, 1)])
def test_a_damaged_size_of_an_image_is_an_error_before_memory_is_allocated(size: tuple[int, int]) -> None:
    value = words(*size, 1) + b"Lp"
    damaged = f"the value of 'a' is damaged: ValueError: 1 bytes are no L image of {size[0]} x {size[1]} pixels"
    with pytest.raises(SourceError, match=damaged):
        mds_sample(words(len(value)) + value, (("a", "pil", None),))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16"])
def test_pixels_of_each_mode_are_read(mode: str) -> None:
    image = PIL.new(mode, (13, 3))
    stored = words(13, 3, len(mode)) + mode.encode() + image.tobytes()
    (found,) = mds_sample(words(len(stored)) + stored, (("image", "pil", None),)).values()
    assert (found.mode, found.size, found.tobytes()) == (mode, (13, 3), image.tobytes())


@pytest.mark.parametrize(
    "options", ["uint8:a", "uint8:1:2", "uint8:-1", "uint8:1,,2", "uint8:1.5", "no_type", "uint8:2,"]
)
def test_parameters_of_arrays_that_are_not_understood_are_refused(options: str) -> None:
    with pytest.raises(SourceError, match="its encoding"):
        mds_decoder(f"ndarray:{options}")
