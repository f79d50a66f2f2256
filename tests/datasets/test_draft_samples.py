"""What samples of a draft can be, and where their bytes may lie."""

from __future__ import annotations

import dataclasses
import enum
import math
from datetime import datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from tests.datasets.samples_source import Numbered, contents, publish
from torch_dpflow._core.checks import MAX_DEPTH
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets import describing as packing_module
from torch_dpflow.datasets.annotations import encode_annotations
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.spec import SampleMeta, StoreRecord, decode_file
from torch_dpflow.errors import DamagedStoreError, SourceError


def test_annotations_may_hold_numpy_and_torch(store: DatasetStore) -> None:
    meta = {"label": np.int64(3), "box": np.array([0.5, 2]), "mask": torch.tensor([1, 0]), "name": "é"}
    stored = publish(store, [(b"x", meta)])
    assert stored.sample(0).fields() == {"label": 3, "box": [0.5, 2], "mask": [1, 0], "name": "é"}


@pytest.mark.parametrize("meta", [{"x": object()}, {"x": {1, 2j}}])
def test_annotations_that_are_no_json_are_named(store: DatasetStore, meta: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match=r"annotations of .*pack-0-0.bin cannot be written as JSON"):
        publish(store, [(b"x", meta)])


@pytest.mark.parametrize("inner", [1, None, np.ones((2, 2))])
@pytest.mark.parametrize("levels", [MAX_DEPTH, 500, 5_000, 200_000])
def test_annotations_that_are_nested_too_deep_are_told(inner: Any, levels: int) -> None:
    meta: Any = inner
    for _ in range(levels):
        meta = [meta]
    with pytest.raises(SourceError, match="of a sample cannot be kept: it is nested deeper than 100 levels"):
        encode_annotations({"x": meta}, "a sample")


def test_annotations_of_a_store_that_are_nested_too_deep_are_told() -> None:
    for levels, is_read in ((MAX_DEPTH - 1, True), (MAX_DEPTH, False), (500, False)):
        meta = msgspec.Raw(b'{"x":' + b"[" * levels + b"]" * levels + b"}")
        sample = SampleMeta(path="a", meta=meta)
        if is_read:
            assert [*sample.fields()] == ["x"]
        else:
            with pytest.raises(DamagedStoreError, match="nested deeper than 100 levels"):
                sample.fields()
    text = b'{"format":1,"kind":"dataset-store","created":"x","more":' + b"[" * 300 + b"]" * 300 + b"}"
    with pytest.raises(DamagedStoreError, match="nested deeper than 100 levels"):
        decode_file(text, StoreRecord, "store.json")


@pytest.mark.parametrize(
    ("meta", "told"),
    [
        ({"score": float("nan")}, "score=nan, which JSON cannot hold; give a finite number or None"),
        ({"boxes": [{"area": None}, {"area": float("inf")}]}, r"boxes\[1\]\.area=inf"),
        ({"weights": np.array([[1.0, -np.inf]])}, r"weights\[0\]\[1\]=-inf"),
        ({"weight": np.float32("nan")}, "weight=nan"),
    ],
)
def test_numbers_that_json_cannot_hold_are_named(store: DatasetStore, meta: dict[str, Any], told: str) -> None:
    with pytest.raises(SourceError, match=told):
        publish(store, [(b"", {}), (b"", meta)])


@dataclasses.dataclass
class _Box:
    area: Any


class _Record(msgspec.Struct):
    area: Any


class _Pair(NamedTuple):
    area: Any


#: Local mean time.
_PARIS_1900 = timezone(timedelta(minutes=9, seconds=21))


class _Kind(enum.Enum):
    CAT = "cat"
    NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        *[
            (holder(wrong), rf"{field}={shown}, which JSON cannot hold")
            for holder, field in (
                (_Box, r"x\.area"),
                (_Record, r"x\.area"),
                (_Pair, r"x\[0\]"),
                (lambda value: [{"boxes": (_Box(value),)}], r"x\[0\]\.boxes\[0\]\.area"),
                (lambda value: {1: [value, "a"]}, r"x\.1\[0\]"),
            )
            for wrong, shown in (
                (float("nan"), "nan"),
                (-math.inf, "-inf"),
                (np.float32("inf"), "inf"),
                (torch.tensor(float("nan")), "nan"),
                (Decimal("NaN"), r"Decimal\('NaN'\)"),
                (Decimal("-Infinity"), r"Decimal\('-Infinity'\)"),
            )
        ],
        (_Kind.NAN, "x=nan"),
        ({float("nan")}, r"x\[0\]=nan"),
        ({float("inf"): 1}, "the key x=inf"),
        (np.array([np.nan], object), r"x\[0\]=nan"),
        (np.array([(np.nan, 1)], [("a", "f4"), ("b", "i4")]), r"x\[0\]\.a=nan"),
        (b"cat", "x=b'cat', and JSON holds no bytes; give text"),
        (_Box([bytearray(b"cat")]), r"x\.area\[0\]=b'cat'"),
        (np.array([b"cat"]), r"x\[0\]=b'cat'"),
        ({b"cat": 1}, "the key x=b'cat'"),
        ({1: "a", "1": "b"}, "with keys that are the same text in JSON"),
        (_Box({2: "a", "2": "b"}), "with keys that are the same text in JSON"),
        (
            datetime(1900, 1, 1, tzinfo=_PARIS_1900),
            r"x=1900-01-01T00:00:00\+00:09:21, whose offset from UTC has seconds",
        ),
        ([{"a": time(1, tzinfo=_PARIS_1900)}], r"x\[0\]\.a=01:00:00\+00:09:21, whose offset"),
        ({datetime(1900, 1, 1, tzinfo=_PARIS_1900): 1}, "the key x=1900-01-01.*, whose offset"),
        (_Box(datetime(1900, 1, 1, tzinfo=timezone(-timedelta(microseconds=1)))), r"x\.area=.*, whose offset"),
        (np.datetime64("NaT", "s"), "NaT is no time"),
        (np.array(["2024-01-01", "NaT"], "M8[ns]"), "NaT is no time"),
        (np.timedelta64("NaT", "s"), "NaT is no time"),
        (np.timedelta64(5, "Y"), "a duration in units of 'Y' has no equal"),
        (np.frombuffer(bytes(8), "m8")[0], "a duration in units of 'generic' has no equal"),
        (np.timedelta64(5, "ps"), "a duration in units of 'ps' has no equal"),
        (np.timedelta64(2**60, "s"), "a duration in units of 's' has no equal"),
        (np.ma.masked_array(np.zeros(2, "M8[ns]"), [True, False]), "times behind a mask"),
        (np.zeros(1, [("at", "m8[Y]")]), "a duration in units of 'Y' has no equal"),
        (np.longdouble("0.1"), "a longdouble is no JSON value"),
        (torch.ones(2, device="meta"), "a sample cannot be written as JSON: .*meta tensor"),
        (torch.eye(2).to_sparse(), "a sample cannot be written as JSON: "),
        (msgspec.Raw(b'{"a": NaN}'), "JSON is malformed"),
    ],
)
def test_no_value_becomes_another_without_a_word(value: Any, told: str) -> None:
    with pytest.raises(SourceError, match=told):
        encode_annotations({"x": value}, "a sample")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.datetime64("2024-01-01T00:00:00.123456789"), "2024-01-01T00:00:00.123456789"),
        (np.datetime64("2024-01-01T00:00:00.000001000"), "2024-01-01T00:00:00.000001"),
        (np.datetime64(0, "ns"), "1970-01-01T00:00:00"),
        (np.datetime64("2024-01-01", "D"), "2024-01-01"),
        (np.datetime64("1969-12-31T23:59:59.999999999"), "1969-12-31T23:59:59.999999999"),
        (np.datetime64("1970-01-01T00:00:00.000000000001"), "1970-01-01T00:00:00.000000000001"),
        (np.datetime64("12024-01-01T00:00:00"), "12024-01-01T00:00:00"),
        (
            np.array([["2024-01-01"], ["2024-01-02"]], "M8[ns]"),
            [["2024-01-01T00:00:00"], ["2024-01-02T00:00:00"]],
        ),
        (np.array([], "M8[ns]"), []),
        ([np.datetime64(1, "ns")], ["1970-01-01T00:00:00.000000001"]),
        (np.array([np.datetime64(1, "ns")], object), ["1970-01-01T00:00:00.000000001"]),
        (_Box(np.datetime64(1, "ns")), {"area": "1970-01-01T00:00:00.000000001"}),
        (np.timedelta64(5, "s"), "PT5S"),
        (np.timedelta64(5_000_000_000, "ns"), "PT5S"),
        (np.timedelta64(-1_500_000_001, "ns"), "-PT1.500000001S"),
        (np.array([[1, 2]], "m8[ns]"), [["PT0.000000001S", "PT0.000000002S"]]),
        (np.array([3], "m8[2ns]"), ["PT0.000000006S"]),
        (timedelta(seconds=5), "PT5S"),
        (datetime(2024, 1, 1, tzinfo=timezone.utc), "2024-01-01T00:00:00Z"),
        (datetime(1900, 1, 1, tzinfo=timezone(timedelta(minutes=9))), "1900-01-01T00:00:00+00:09"),
        (Decimal("1.10"), "1.10"),
        (_Kind.CAT, "cat"),
        (_Box(_Pair((1, {2}))), {"area": [[1, [2]]]}),
        ({1: "a", 2: None}, {"1": "a", "2": None}),
        (2**64, 2**64),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.ma.masked_array([1, 2], [True, False]), [None, 2]),
        (np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]), [{"a": 1, "b": 2.5}]),
        (np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")])[0], {"a": 1, "b": 2.5}),
        (np.array((1, (2, 3)), [("a", ">u8"), ("b", [("c", "i1"), ("d", "i1")])]), {"a": 1, "b": {"c": 2, "d": 3}}),
        (np.rec.array([[(1, [2, 3])]], [("a", "i4"), ("b", "i4", 2)]), [[{"a": 1, "b": [2, 3]}]]),
        (np.ma.masked_array([(1, 2)], [(True, False)], [("a", "i4"), ("b", "i4")]), [{"a": None, "b": 2}]),
        (np.zeros(1, [("at", "M8[ns]")]), [{"at": "1970-01-01T00:00:00"}]),
        (msgspec.Raw(b'{"a": null}'), {"a": None}),
    ],
)
def test_values_of_other_types_are_written_exactly(value: Any, expected: Any) -> None:
    encoded = encode_annotations({"x": value}, "a sample")
    assert msgspec.json.decode(encoded) == {"x": expected}


def test_none_is_no_number(store: DatasetStore) -> None:
    stored = publish(store, [(b"", {"x": None, "text": "null", "y": [1.5, None]})])
    assert stored.sample(0).fields() == {"x": None, "text": "null", "y": [1.5, None]}


def test_info_that_is_no_json_is_named(store: DatasetStore) -> None:
    draft = Draft(store, "core/x", "v1")
    with pytest.raises(SourceError, match=r"all samples \(`info`\) have mean=nan"):
        draft.add("train", IterableImporter(Numbered(1), info={"mean": float("nan")}))


def test_packs_are_bounded(store: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "PACK_BYTES", 10)
    source = [(b"x" * size, {}) for size in (4, 4, 4, 30, 0, 10, 1)]
    stored = publish(store, source, shard_size=7)
    assert [data for data, _ in contents(stored)] == [data for data, _ in source]
    sizes = {child.name: child.size for child in store.files.children("core/numbers/data/v1/train")}
    assert sizes == {
        "pack-0-0.bin": 8,
        "pack-0-1.bin": 4,
        "pack-0-2.bin": 30,
        "pack-0-3.bin": 10,
        "pack-0-4.bin": 1,
    }


def test_samples_without_any_bytes_have_a_pack(store: DatasetStore) -> None:
    assert contents(publish(store, [(b"", {}), (b"", {})])) == [(b"", {}), (b"", {})]


def test_data_inside_the_dataset_is_named_by_relative_paths(local_store: DatasetStore, tmp_path: Path) -> None:
    """So the whole directory can be copied elsewhere and read there."""
    folder = tmp_path / "datasets/core/files/data/images"
    folder.mkdir(parents=True)
    (folder / "a.jpg").write_bytes(b"a")
    importer = IterableImporter([Item(path="a.jpg", length=1)], root=f"file://{folder}")
    draft = Draft(local_store, "core/files", "v1")
    draft.add("train", importer, checksum="crc32")
    variant = draft.publish().variants["train"]
    assert variant.data == "data/images"
    (tmp_path / "datasets").rename(tmp_path / "moved")
    assert contents(DatasetStore(str(tmp_path / "moved")).open("core/files")) == [(b"a", {})]


def test_appended_data_may_lie_elsewhere(local_store: DatasetStore, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jpg").write_bytes(folder.encode())
    for version, folder, parent in (("v1", "one", None), ("v2", "two", "v1"), ("v3", "one", "v2")):
        importer = IterableImporter([Item(path="a.jpg")], root=f"file://{tmp_path}/{folder}")
        draft = Draft(local_store, "core/files", version, parent=parent)
        draft.add("train", importer, checksum="sha256")
        draft.publish()
    samples = list(local_store.open("core/files").samples())
    assert [sample.path for sample in samples] == ["a.jpg", f"file://{tmp_path}/two/a.jpg", "a.jpg"]
    assert [sample.length for sample in samples] == [3, 3, 3]
    assert samples[0].checksum == samples[2].checksum != samples[1].checksum


def test_a_checksum_of_what_is_missing_is_refused(local_store: DatasetStore, tmp_path: Path) -> None:
    importer = IterableImporter([Item(path="gone.jpg")], root=f"file://{tmp_path}")
    with pytest.raises(SourceError, match=r"gone\.jpg cannot be read: ObjectMissingError"):
        Draft(local_store, "core/files", "v1").add("train", importer, checksum="crc32")


@pytest.mark.parametrize("path", ["../out.jpg", "/etc/passwd"])
def test_a_path_out_of_its_root_is_refused(local_store: DatasetStore, tmp_path: Path, path: str) -> None:
    importer = IterableImporter([Item(path=path)], root=f"file://{tmp_path}")
    with pytest.raises(SourceError, match="leads out of"):
        Draft(local_store, "core/files", "v1").add("train", importer)


def test_an_item_has_either_a_path_or_bytes() -> None:
    for wrong in ({}, {"path": "a", "data": b"a"}):
        with pytest.raises(ValueError, match="either `path` or `data`"):
            Item(**wrong)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"path": ""}, "path=''"),
        ({"path": 5}, "path=5: give a path"),
        ({"path": "\udcff"}, "no text in UTF-8"),
        ({"data": "text"}, "data='text': give bytes"),
        ({"path": "a", "length": -5}, "length=-5: give a whole number of bytes"),
        ({"path": "a", "length": "5"}, "length='5'"),
        ({"path": "a", "length": 2**63}, "length=9223372036854775808"),
        ({"path": "a", "length": True}, "length=True"),
        ({"path": "a", "length": np.True_}, "length=(np.)?True"),
        ({"path": "a", "offset": -5, "length": 2}, "offset=-5"),
        ({"path": "a", "offset": 5}, "offset=5 without a length"),
        ({"path": "a", "checksum": "crc32:0"}, "checksum='crc32:0'"),
        ({"path": "a", "checksum": 5}, "checksum=5"),
        ({"data": b"abc", "length": 2}, "length=2 of data of 3 bytes"),
        ({"data": b"abc", "offset": 0, "length": 3}, "offset=0, length=3 of data of 3 bytes"),
        ({"data": b"abc", "checksum": "crc32:00000000"}, "is not that of the data"),
    ],
)
def test_an_item_that_could_not_be_read_again_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(SourceError, match=told):
        Item(**fields)


def test_information_for_all_samples_may_hold_numpy(store: DatasetStore) -> None:
    draft = Draft(store, "core/x", "v1")
    draft.add("train", IterableImporter(Numbered(1), info={"mean": np.array([0.5]), "names": {0: "cat"}}))
    assert draft.publish().variants["train"].info == {"mean": [0.5], "names": {"0": "cat"}}


def test_an_item_may_bring_numpy_numbers(store: DatasetStore) -> None:
    draft = Draft(store, "core/x", "v1")
    item = Item(path="a", offset=np.int64(3), length=np.uint8(4))  # type: ignore[arg-type]
    draft.add("train", IterableImporter([item], root="memory://elsewhere"))
    draft.publish()
    sample = store.open("core/x").sample(0)
    assert (sample.offset, sample.length) == (3, 4)
