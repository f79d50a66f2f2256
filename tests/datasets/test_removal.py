"""Deleting versions and datasets, and removing what nobody names: what others name can be read all the while."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.samples_source import Numbered, contents, numbers, publish
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset, verify
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.versions import delete, prune
from torch_dpflow.errors import DamagedStoreError, DatasetNotFoundError, OptionError


def _append(store: DatasetStore, parent: str, version: str, first: int, count: int) -> StoredDataset:
    return publish(store, Numbered(count, first=first), version=version, parent=parent)


def _files(store: DatasetStore, folder: str = "") -> set[str]:
    """All files below a folder of the store."""
    found = set()
    for child in store.files.children(folder):
        path = f"{folder}/{child.name}".lstrip("/")
        found |= _files(store, path) if child.is_directory else {path}
    return found


def test_a_version_is_deleted_whole(store: DatasetStore) -> None:
    publish(store, Numbered(5))
    publish(store, Numbered(7), version="v2")
    publish(store, Numbered(6), name="core/others")
    before = _files(store)
    assert delete(store, "core/numbers", "v2") == ["v2"]
    assert store.versions("core/numbers") == ["v1"]
    assert {path for path in before if "/v2" not in path} == _files(store)
    assert contents(store.open("core/numbers")) == numbers(5)
    with pytest.raises(DatasetNotFoundError, match=r"has versions \['v1'\]"):
        delete(store, "core/numbers", "v2")


@pytest.mark.parametrize("order", [("v1", "v2"), ("v2", "v1")])
def test_what_later_versions_name_stays(store: DatasetStore, order: tuple[str, str]) -> None:
    """Of v1 its full shard and the pack of the other one, whose metadata v2 wrote anew."""
    publish(store, Numbered(6))
    _append(store, "v1", "v2", 6, 3)
    last = _append(store, "v2", "v3", 9, 4)
    for version in order:
        delete(store, "core/numbers", version)
        assert contents(last) == numbers(13)
    assert "core/numbers/meta/v1/train/ms-1.json" not in _files(store)
    delete(store, "core/numbers", "v3")
    assert _files(store) == {"store.json"}


def test_a_dataset_is_deleted_with_its_imports(store: DatasetStore) -> None:
    publish(store, Numbered(5))
    _append(store, "v1", "v2", 5, 3)
    Draft(store, "core/numbers", "v3").add("train", IterableImporter(Numbered(3)))
    own = {
        "core/numbers/data/mine/x.bin",
        "core/numbers/data/v1/train/x.jpg",
        "core/numbers/meta/v1/train/notes",
    }
    for path in own:
        store.files.write(path, b"x")
    assert delete(store, "core/numbers") == ["v1", "v2"]
    assert _files(store) == {"store.json", *own}
    with pytest.raises(DatasetNotFoundError, match=r"core/numbers in .* has no published version"):
        delete(store, "core/numbers")


def test_nothing_is_left_of_directories_on_a_disk(local_store: DatasetStore, tmp_path: Path) -> None:
    publish(local_store, Numbered(5))
    left = tmp_path / "datasets/core/numbers/meta/v1/train/.ms-9.json.1234.unfinished"
    left.touch()
    delete(local_store, "core/numbers")
    assert [path.name for path in (tmp_path / "datasets").rglob("*")] == ["store.json"]
    assert local_store.ids() == []


def test_what_an_unfinished_import_continues_is_not_deleted(store: DatasetStore) -> None:
    publish(store, Numbered(6))
    draft = Draft(store, "core/numbers", "v2", parent="v1")
    draft.add("train", IterableImporter(Numbered(3)))
    with pytest.raises(OptionError, match=r"import core/numbers:v2 continues core/numbers:v1; let it end"):
        delete(store, "core/numbers", "v1")
    assert contents(store.open("core/numbers")) == numbers(6)
    store.files.remove("core/numbers/versions/v1.json")  # by who looked just before the import began
    with pytest.raises(DatasetNotFoundError, match="v1, which core/numbers:v2 continues, was deleted"):
        draft.publish()


def test_imports_of_other_versions_go_on(store: DatasetStore) -> None:
    publish(store, Numbered(6))
    draft = Draft(store, "core/numbers", "v2")

    def items() -> Iterator[tuple[bytes, dict[str, Any]]]:
        for number, item in enumerate(numbers(9)):
            if number == 6:
                delete(store, "core/numbers", "v1")
            yield item

    draft.add("train", IterableImporter(items()), shard_size=4)
    draft.publish()
    assert contents(store.open("core/numbers")) == numbers(9)


def test_an_import_that_is_pruned_while_it_runs_is_not_published(store: DatasetStore) -> None:
    draft = Draft(store, "core/numbers", "v1")

    def items() -> Iterator[tuple[bytes, dict[str, Any]]]:
        for number, item in enumerate(numbers(9)):
            if number == 6:
                assert prune(store, "core/numbers") == 2
            yield item

    draft.add("train", IterableImporter(items()), shard_size=4)
    with pytest.raises(OptionError, match=r"v1:train has not ended, or was discarded meanwhile"):
        draft.publish()
    draft.discard()
    draft.add("train", IterableImporter(Numbered(3)), shard_size=4)
    draft.add("val", IterableImporter(Numbered(3)), shard_size=4)
    store.files.remove("core/numbers/drafts/v1/val")
    with pytest.raises(OptionError, match=r"v1:val has not ended, or was discarded meanwhile"):
        draft.publish()
    assert store.versions("core/numbers") == []
    prune(store, "core/numbers")
    assert _files(store) == {"store.json"}


def test_at_no_moment_can_half_a_version_be_read(local_store: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(local_store, Numbered(6))
    _append(local_store, "v1", "v2", 6, 7)
    published = {"v1": 6, "v2": 13}
    remove, looked = Files.remove, []

    def watched(files: Files, path: str) -> None:
        remove(files, path)
        for version in local_store.versions("core/numbers"):
            stored = local_store.open(f"core/numbers:{version}")
            assert contents(stored) == numbers(published[version])
            looked.append((path, version))

    monkeypatch.setattr(Files, "remove", watched)
    delete(local_store, "core/numbers", "v1")
    assert len(looked) >= 4
    delete(local_store, "core/numbers")


def test_prune_removes_what_killed_deletes_and_imports_left(store: DatasetStore) -> None:
    stored = publish(store, Numbered(6))
    before = _files(store)
    _append(store, "v1", "v2", 6, 3)
    publish(store, Numbered(3), version="v3")
    Draft(store, "core/numbers", "v4").add("train", IterableImporter(Numbered(3)))
    for version in ("v2", "v3"):
        store.files.remove(f"core/numbers/versions/{version}.json")
    store.files.write("core/numbers/data/v3/train/mine.bin", b"x")
    assert prune(store, "core/numbers") == 8
    assert _files(store) == before | {"core/numbers/data/v3/train/mine.bin"}
    assert prune(store, "core/numbers") == 0
    assert contents(stored) == numbers(6)


def test_nothing_is_pruned_where_a_version_cannot_be_read(store: DatasetStore) -> None:
    publish(store, Numbered(6))
    publish(store, Numbered(3), version="v2")
    store.files.write("core/numbers/meta/v1/train/ms-0.json", b"{")
    before = _files(store)
    with pytest.raises(DamagedStoreError, match=r"ms-0.json has 1 bytes"):
        delete(store, "core/numbers", "v2")
    assert before - _files(store) == {"core/numbers/versions/v2.json"}
    delete(store, "core/numbers")
    assert _files(store) == {"store.json"}


def test_packs_that_are_named_by_a_url_stay(local_store: DatasetStore, tmp_path: Path) -> None:
    """Of an import from a folder, some of whose samples bring their bytes; read by another address of the store."""
    (tmp_path / "a.bin").write_bytes(b"a")
    draft = Draft(local_store, "core/x", "v1")
    draft.add("train", IterableImporter([Item(path="a.bin"), Item(data=b"b")], root=f"file://{tmp_path}"))
    draft.publish()
    (tmp_path / "link").symlink_to(tmp_path / "datasets")
    prune(DatasetStore(tmp_path / "link"), "core/x")
    assert list(verify(local_store.open("core/x"), data=True)) == []
