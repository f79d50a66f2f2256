"""Copying a version to another store: the same there, verified before anybody can read it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.datasets.samples_source import Numbered, contents, numbers, publish
from torch_dpflow.datasets import DatasetStore, Draft, verify
from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.folders import ImageFolderImporter
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.versions import Compared, copy, delete
from torch_dpflow.errors import (
    DamagedStoreError,
    DatasetNotFoundError,
    ObjectMissingError,
    OptionError,
    OptionTypeError,
    PublishedError,
    SourceError,
)


@pytest.fixture
def other(tmp_path: Path) -> DatasetStore:
    return DatasetStore.create(tmp_path / "other")


def test_a_copy_is_the_same(store: DatasetStore, other: DatasetStore) -> None:
    """With what it names of versions before it, and without the original."""
    publish(store, Numbered(6))
    publish(store, Numbered(7, first=6), version="v2", parent="v1")
    copied, compared = [], Compared()
    dataset = copy(store, "core/numbers", None, other, progress=lambda *done: copied.append(done), compared=compared)
    assert dataset == other.load("core/numbers") == store.load("core/numbers", "v2")
    assert copied == [("train", 4), ("train", 8), ("train", 12), ("train", 13)]
    assert compared == Compared(checksums=13)
    delete(store, "core/numbers")
    assert contents(other.open("core/numbers")) == numbers(13)
    assert (other.versions("core/numbers"), other.drafts("core/numbers")) == (["v2"], [])


def test_data_of_ones_own_is_copied_and_data_elsewhere_stays(
    local_store: DatasetStore, other: DatasetStore, tmp_path: Path
) -> None:
    own = Path(tmp_path / "datasets/core/pets/data/images")
    elsewhere = tmp_path / "pets"
    for folder in (own, elsewhere):
        for number in range(5):
            (folder / "cat").mkdir(parents=True, exist_ok=True)
            (folder / f"cat/{number}.jpg").write_bytes(b"%d" % number)
    draft = Draft(local_store, "core/pets", "v1")
    draft.add("own", ImageFolderImporter(own))
    draft.add("elsewhere", ImageFolderImporter(elsewhere))
    draft.publish()
    compared = Compared()
    copy(local_store, "core/pets", "v1", other, compared=compared)
    assert compared == Compared(sizes=5)
    for name, folder in (("own", tmp_path / "other/core/pets/data/images"), ("elsewhere", elsewhere)):
        stored = other.open(f"core/pets:v1:{name}")
        assert list(verify(stored, data=True)) == []
        assert {stored.data_url(sample) for sample in stored.samples()} == {
            f"file://{folder}/cat/{number}.jpg" for number in range(5)
        }


def test_a_copy_of_a_damaged_version_is_not_published(
    local_store: DatasetStore, other: DatasetStore, tmp_path: Path
) -> None:
    publish(local_store, Numbered(6))
    pack = tmp_path / "datasets/core/numbers/data/v1/train/pack-1-0.bin"
    right = pack.read_bytes()
    pack.write_bytes(right[:-1] + b"?")
    with pytest.raises(DamagedStoreError, match=r"core/numbers:v1:train is not published, as sample 5 .*crc32"):
        copy(local_store, "core/numbers", "v1", other)
    assert (other.versions("core/numbers"), other.drafts("core/numbers")) == ([], ["v1"])
    pack.write_bytes(right)
    with pytest.raises(OptionError, match=r"pack-1-0\.bin exists already, and has other bytes; .*discard"):
        copy(local_store, "core/numbers", "v1", other)
    Draft(other, "core/numbers", "v1").discard()
    copy(local_store, "core/numbers", "v1", other)
    assert contents(other.open("core/numbers")) == numbers(6)


def test_a_copy_that_fails_before_it_has_written_anything_leaves_nothing(
    local_store: DatasetStore, other: DatasetStore, tmp_path: Path
) -> None:
    publish(local_store, Numbered(6))
    pack = tmp_path / "datasets/core/numbers/data/v1/train/pack-0-0.bin"
    pack.rename(tmp_path / "pack")
    with pytest.raises(ObjectMissingError, match=r"pack-0-0\.bin"):
        copy(local_store, "core/numbers", "v1", other)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["store.json"]
    publish(other, Numbered(3), version="v0")
    with pytest.raises(ObjectMissingError, match=r"pack-0-0\.bin"):
        copy(local_store, "core/numbers", "v1", other)
    assert (other.versions("core/numbers"), other.drafts("core/numbers")) == (["v0"], [])
    (tmp_path / "pack").rename(pack)
    copy(local_store, "core/numbers", "v1", other)
    assert contents(other.open("core/numbers:v1")) == numbers(6)


def test_a_copy_that_was_interrupted_goes_on(local_store: DatasetStore, other: DatasetStore) -> None:
    publish(local_store, Numbered(9))

    def interrupt(variant: str, samples: int) -> None:
        if samples == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(local_store, "core/numbers", "v1", other, progress=interrupt)
    assert other.versions("core/numbers") == []
    with pytest.raises(SourceError, match="was written by another import at the same time"):
        Draft(other, "core/numbers", "v1").add("train", IterableImporter(Numbered(9), name="numbered"))
    copy(local_store, "core/numbers", "v1", other)
    assert contents(other.open("core/numbers")) == numbers(9)


def test_a_copy_that_is_discarded_while_it_runs_is_not_published(
    local_store: DatasetStore, other: DatasetStore
) -> None:
    publish(local_store, Numbered(6))

    def discard(variant: str, samples: int) -> None:
        other.files.remove("core/numbers/drafts/v1")

    with pytest.raises(OptionError, match="core/numbers:v1:train was discarded meanwhile"):
        copy(local_store, "core/numbers", "v1", other, progress=discard)
    assert other.versions("core/numbers") == []


def test_what_cannot_be_copied_is_told(local_store: DatasetStore, other: DatasetStore) -> None:
    publish(local_store, Numbered(6))
    with pytest.raises(OptionError, match="is the store that contains core/numbers:v1"):
        copy(local_store, "core/numbers", "v1", DatasetStore(local_store.url))
    with pytest.raises(OptionTypeError, match=r"target='/x' is of type str; give a DatasetStore"):
        copy(local_store, "core/numbers", "v1", "/x")  # type: ignore[arg-type]
    with pytest.raises(DatasetNotFoundError, match=r"has versions \['v1'\]"):
        copy(local_store, "core/numbers", "v2", other)
    first = copy(local_store, "core/numbers", "v1", other)
    assert copy(local_store, "core/numbers", "v1", other) == first
    delete(other, "core/numbers")
    publish(other, Numbered(3))
    with pytest.raises(PublishedError, match=r"has another core/numbers:v1, and a published version"):
        copy(local_store, "core/numbers", "v1", other)


def test_a_copy_out_of_an_archive(local_store: DatasetStore, other: DatasetStore, tmp_path: Path) -> None:
    draft = Draft(local_store, "core/x", "v1")
    draft.add("train", IterableImporter([Item(data=b"a"), Item(data=b"b")]))
    draft.publish()
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in (tmp_path / "datasets").rglob("*"):
            archive.write(path, path.relative_to(tmp_path))
    copy(DatasetStore(f"zip://datasets::file://{tmp_path}/all.zip"), "core/x", "v1", other)
    assert list(verify(other.open("core/x"), data=True)) == []
