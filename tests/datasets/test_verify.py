"""Verifying: what is damaged is found and named, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.datasets.samples_source import Numbered, publish
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset, verify
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.versions import Compared
from torch_dpflow.errors import OptionTypeError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for number in range(9):
        (tmp_path / f"images/{number}.jpg").write_bytes(b"x" * (10 + number))
    return tmp_path / "images"


def _publish(store: DatasetStore, folder: Path, *, checksum: bool) -> StoredDataset:
    items = [Item(path=f"{n}.jpg", length=10 + n, meta={"n": n}) for n in range(9)]
    draft = Draft(store, "core/files", "v1")
    importer = IterableImporter(items, root=f"file://{folder}")
    draft.add("train", importer, shard_size=4, checksum="crc32" if checksum else None)
    draft.publish()
    return store.open("core/files:v1:train")


@pytest.mark.parametrize("data", [False, True])
def test_nothing_is_found_where_all_is_well(store: DatasetStore, data: bool) -> None:
    seen: list[int] = []
    stored = publish(store, Numbered(10))
    assert list(verify(stored, data=data, progress=seen.append)) == []
    assert seen == [4, 8, 10]


@pytest.mark.parametrize("switch", ["data", "own"])
def test_a_word_switches_nothing_on(local_store: DatasetStore, switch: str) -> None:
    with pytest.raises(OptionTypeError, match=f"{switch}='no' is of type str; give True or False"):
        verify(publish(local_store, Numbered(1)), **{switch: "no"})  # type: ignore[arg-type]


def test_missing_and_damaged_shards_are_found(local_store: DatasetStore) -> None:
    stored = publish(local_store, Numbered(14))
    meta = Path(stored.url.removeprefix("file://")) / "meta/v1/train"
    (meta / "ms-1.json").unlink()
    (meta / "ms-3.json").write_bytes((meta / "ms-3.json").read_bytes()[:-1])
    found = list(verify(stored, data=True))
    assert [(problem.sample, problem.samples) for problem in found] == [(4, 4), (12, 2)]
    assert "ms-1.json is missing" in found[0].what
    assert "cut short" in found[1].what


@pytest.mark.parametrize("checksum", [False, True])
def test_missing_and_cut_objects_are_found(local_store: DatasetStore, folder: Path, checksum: bool) -> None:
    stored = _publish(local_store, folder, checksum=checksum)
    (folder / "2.jpg").unlink()
    (folder / "5.jpg").write_bytes(b"x" * 14)
    (folder / "6.jpg").unlink()
    (folder / "6.jpg").mkdir()
    assert list(verify(stored)) == []
    found = list(verify(stored, data=True))
    assert [(problem.sample, problem.samples) for problem in found] == [(2, 1), (5, 1), (6, 1)]
    assert f"file://{folder}/2.jpg: there is no such" in found[0].what
    assert f"file://{folder}/5.jpg" in found[1].what


@pytest.mark.parametrize("checksum", [False, True])
def test_what_was_compared_is_counted(local_store: DatasetStore, folder: Path, checksum: bool) -> None:
    stored = _publish(local_store, folder, checksum=checksum)
    (folder / "2.jpg").unlink()
    compared = Compared()
    assert [problem.sample for problem in verify(stored, data=True, compared=compared)] == [2]
    well = len(stored) - 1
    assert compared == (Compared(checksums=well) if checksum else Compared(sizes=well))


def test_other_bytes_of_the_same_size_are_found_by_checksum(local_store: DatasetStore, folder: Path) -> None:
    stored = _publish(local_store, folder, checksum=True)
    (folder / "3.jpg").write_bytes(b"y" * 13)
    found = list(verify(stored, data=True))
    assert [problem.sample for problem in found] == [3]
    assert "does not match crc32:" in found[0].what


def test_a_cut_pack_is_found(local_store: DatasetStore) -> None:
    stored = publish(local_store, [(b"abc", {}), (b"defg", {})])
    pack = Path(stored.url.removeprefix("file://")) / "data/v1/train/pack-0-0.bin"
    pack.write_bytes(pack.read_bytes()[:-1])
    found = list(verify(stored, data=True))
    assert [problem.sample for problem in found] == [1]
    assert "pack-0-0.bin (bytes 3 to 7): the file has only 6 bytes" in found[0].what
