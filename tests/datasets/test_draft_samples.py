"""What samples of a draft can be, and where their bytes may lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.datasets.samples_source import Numbered, contents, publish
from torch_dpflow._core.depth import MAX_DEPTH
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets import packing as packing_module
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
    with pytest.raises(
        SourceError, match="of a sample cannot be kept: it is nested deeper than 100 levels"
    ):
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
def test_numbers_that_json_cannot_hold_are_named(
    store: DatasetStore, meta: dict[str, Any], told: str
) -> None:
    with pytest.raises(SourceError, match=told):
        publish(store, [(b"", {}), (b"", meta)])


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


def test_data_inside_the_dataset_is_named_by_relative_paths(
    local_store: DatasetStore, tmp_path: Path
) -> None:
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
        ({"path": "a", "offset": -5, "length": 2}, "offset=-5"),
        ({"path": "a", "offset": 5}, "offset=5 without a length"),
        ({"path": "a", "checksum": "crc32:0"}, "checksum='crc32:0'"),
        ({"path": "a", "checksum": 5}, "checksum=5"),
    ],
)
def test_an_item_that_could_not_be_read_again_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(SourceError, match=told):
        Item(**fields)


def test_an_item_may_bring_numpy_numbers(store: DatasetStore) -> None:
    draft = Draft(store, "core/x", "v1")
    item = Item(path="a", offset=np.int64(3), length=np.uint8(4))  # type: ignore[arg-type]
    draft.add("train", IterableImporter([item], root="memory://elsewhere"))
    draft.publish()
    sample = store.open("core/x").sample(0)
    assert (sample.offset, sample.length) == (3, 4)
