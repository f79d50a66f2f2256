"""DatasetStore: finding what is published, on disk and in memory alike."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.datasets.samples_source import Numbered, contents, numbers, publish
from tests.new_process import in_fork
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.errors import (
    AccessDeniedError,
    DamagedStoreError,
    DatasetNotFoundError,
    NewerFormatError,
    OptionError,
    PublishedError,
    StorageError,
)
from torch_dpflow.flows import DataLoadFlow, LocalDataLoadFlowReader


class CountingFiles(Files):
    """Notes what is read."""

    def __init__(self, url: str, options: object = None) -> None:
        super().__init__(url)
        self.reads: list[str] = []

    def read(self, path: str) -> bytes:
        self.reads.append(path)
        return super().read(path)


def test_a_store_is_made_once(store_url: str) -> None:
    with pytest.raises(DatasetNotFoundError, match="no dataset store at"):
        DatasetStore(store_url)
    made = DatasetStore.create(store_url)
    assert DatasetStore.create(store_url).record == DatasetStore(store_url).record == made.record
    assert made.ids() == []


def test_datasets_are_found_by_name(store: DatasetStore) -> None:
    for name, version in [("core/b", "v10"), ("core/b", "v2"), ("core/a", "v1"), ("lab/a", "v1")]:
        publish(store, Numbered(3), name=name, version=version)
    assert store.ids() == ["core/a", "core/b", "lab/a"]
    assert store.versions("core/b") == ["v2", "v10"]
    assert store.versions("core/none") == []
    assert store.open("core/b").ref == store.open("core/b:v10:train").ref
    assert len(store.open("core/b:v2")) == 3


def test_what_there_is_instead_is_told(store: DatasetStore) -> None:
    publish(store, Numbered(3))
    with pytest.raises(DatasetNotFoundError, match=r"no dataset core/none in .*; it has \['core/numbers'\]"):
        store.open("core/none:v1")
    with pytest.raises(DatasetNotFoundError, match=r"no core/numbers:v2 in .* has versions \['v1'\]"):
        store.open("core/numbers:v2")
    with pytest.raises(DatasetNotFoundError, match=r"no variant 'val' of .*\['train'\]"):
        store.open("core/numbers:v1:val")
    with pytest.raises(DatasetNotFoundError, match="no dataset core/none"):
        store.load("core/none")
    Draft(store, "core/begun", "v1").add("train", IterableImporter(Numbered(3)))
    with pytest.raises(DatasetNotFoundError, match=r"begun in .* no published version; unfinished are \['v1'\]"):
        store.open("core/begun:v2")


@pytest.mark.parametrize("url", ["\0", "ü\ud800"])
def test_what_is_no_path_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match=r"which no path has|no path has that character"):
        DatasetStore(url)


def test_a_directory_is_no_version(local_store: DatasetStore) -> None:
    publish(local_store, Numbered(3))
    Path(local_store.url.removeprefix("file://"), "core/numbers/versions/v2.json").mkdir()
    assert local_store.versions("core/numbers") == ["v1"]
    assert local_store.open("core/numbers").ref.version == "v1"


def test_an_unfinished_import_is_named_and_not_read(store: DatasetStore) -> None:
    Draft(store, "core/numbers", "v1").add("train", IterableImporter(Numbered(3)))
    assert store.ids() == ["core/numbers"]
    assert store.versions("core/numbers") == []
    assert store.drafts("core/numbers") == ["v1"]
    for name in ("core/numbers:v1", "core/numbers"):
        with pytest.raises(DatasetNotFoundError, match=r"v1 in .* is unfinished.*run the same import again"):
            store.open(name)


def test_opening_reads_one_file_and_a_sample_one_shard(store: DatasetStore) -> None:
    publish(store, Numbered(50))
    counting = DatasetStore(store.url)
    counting.files = CountingFiles(store.url)
    stored = counting.open("core/numbers:v1:train")
    assert counting.files.reads == ["core/numbers/versions/v1.json"]

    files = CountingFiles(stored.url)
    stored = StoredDataset(files=files, dataset=stored.dataset, variant_name="train")
    assert stored.sample(37).fields() == {"number": 37}
    assert files.reads == ["meta/v1/train/ms-9.json"]


def test_a_published_version_never_changes(store: DatasetStore) -> None:
    publish(store, Numbered(9))
    with pytest.raises(PublishedError, match=r"core/numbers:v1 is published in .* never changes"):
        Draft(store, "core/numbers", "v1")
    assert contents(store.open("core/numbers:v1")) == numbers(9)


def test_of_two_who_publish_one_version_one_is_told(store: DatasetStore) -> None:
    drafts = [Draft(store, "core/numbers", "v1") for _ in range(2)]
    for draft in drafts:
        draft.add("train", IterableImporter(Numbered(9)))
    drafts[0].publish()
    with pytest.raises(PublishedError):
        drafts[1].publish()
    with pytest.raises(PublishedError):
        drafts[1].discard()
    assert contents(store.open("core/numbers:v1")) == numbers(9)


def test_of_many_who_create_a_file_at_once_one_succeeds(store: DatasetStore) -> None:
    together = threading.Barrier(8)
    won: list[int] = []

    def create(number: int) -> None:
        together.wait()
        try:
            store.files.create("race", b"%d" % number * 1000)
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.files.read("race") == b"%d" % won[0] * 1000
    assert [child.name for child in store.files.children()] == ["race", "store.json"]


def test_a_store_travels_by_pickle_and_by_fork(store: DatasetStore) -> None:
    stored = publish(store, Numbered(9))
    copy = pickle.loads(pickle.dumps(stored))
    assert contents(copy) == numbers(9)
    assert pickle.loads(pickle.dumps(store)).ids() == ["core/numbers"]
    assert in_fork(contents, stored) == numbers(9)


def test_damage_is_named(local_store: DatasetStore) -> None:
    stored = publish(local_store, Numbered(9))
    folder = Path(stored.url.removeprefix("file://"))
    shard = folder / "meta/v1/train/ms-1.json"
    whole = shard.read_bytes()
    for damaged in (b"", whole[:-1], whole.replace(b"4", b"5", 1), whole + b" "):
        shard.write_bytes(damaged)
        with pytest.raises(DamagedStoreError, match=r"core/numbers/meta/v1/train/ms-1\.json"):
            stored.sample(4)
        assert stored.sample(3).fields() == {"number": 3}
    shard.unlink()
    with pytest.raises(DamagedStoreError, match=r"meta/v1/train/ms-1\.json is missing"):
        stored.sample(4)


def test_a_version_in_a_wrong_place_is_named(local_store: DatasetStore) -> None:
    stored = publish(local_store, Numbered(3))
    versions = Path(stored.url.removeprefix("file://")) / "versions"
    (versions / "v2.json").write_bytes((versions / "v1.json").read_bytes())
    with pytest.raises(DamagedStoreError, match=r"v2\.json describes core/numbers:v1; it was put in a wrong place"):
        local_store.open("core/numbers:v2")


def test_a_store_of_a_newer_format_is_named(local_store: DatasetStore) -> None:
    record = Path(local_store.url.removeprefix("file://")) / "store.json"
    record.write_bytes(record.read_bytes().replace(b'"format":1', b'"format":7'))
    with pytest.raises(NewerFormatError, match=r"store\.json has format 7"):
        DatasetStore(local_store.url)


@pytest.mark.parametrize("url", ["", "s3://"])
def test_an_address_of_nothing_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match=f"'{url}' names no directory; give a path"):
        DatasetStore.create(url)


def test_a_storage_that_cannot_be_opened_is_named() -> None:
    with pytest.raises(OptionError, match=r"nothing://x.*cannot be opened"):
        DatasetStore("nothing://x")


class Forbidding(MemoryFileSystem):
    """A storage that knows us and says no, or whose connection fails."""

    protocol = "forbidding"
    error: OSError = PermissionError("403")

    def cat_file(self, path: str, *range_: object, **options: object) -> bytes:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [(PermissionError("403"), AccessDeniedError), (ConnectionResetError("reset"), StorageError)],
)
def test_what_a_storage_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, error: OSError, kind: type[StorageError]
) -> None:
    fsspec.register_implementation("forbidding", Forbidding, clobber=True)
    monkeypatch.setattr(Forbidding, "error", error)
    with pytest.raises(kind, match=rf"forbidding://.*bucket/store\.json: .*{error}"):
        DatasetStore("forbidding://bucket", read_options=ReadOptions(attempts=1))


def test_a_place_for_no_store_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(StorageError, match=r"file is a file, where|Not a directory"):
            DatasetStore.create(str(place))
    with pytest.raises(StorageError, match=r"file:///proc/nothing/store\.json cannot be written"):
        DatasetStore.create("/proc/nothing")


def test_a_damaged_shard_is_named_with_its_store(local_store: DatasetStore) -> None:
    stored = publish(local_store, Numbered(3))
    stored.files.write("meta/v1/train/ms-0.json", b"{}")
    with pytest.raises(
        DamagedStoreError, match=rf"{local_store.url}/core/numbers/meta/v1/train/ms-0\.json has 2 bytes"
    ):
        stored.sample(0)


def test_a_directory_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "store.json").mkdir()
    with pytest.raises(DatasetNotFoundError, match=r"store\.json: this is a directory, not a file"):
        DatasetStore(str(tmp_path))


def test_options_of_the_storage_are_kept_out_of_the_store(tmp_path: Path) -> None:
    store = DatasetStore.create(f"file://{tmp_path}", auto_mkdir=True)
    stored = publish(store, Numbered(9))
    assert stored.options == {"auto_mkdir": True}
    assert all(b"auto_mkdir" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_plain_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert DatasetStore.create("datasets").url == f"file://{tmp_path}/datasets"


def test_a_path_names_a_store(tmp_path: Path) -> None:
    made = DatasetStore.create(tmp_path / "datasets")
    publish(made, Numbered(3))
    assert DatasetStore(tmp_path / "datasets").url == made.url
    flow = DataLoadFlow("a/b", 1).dataset(made.ids()[0])
    assert len(flow.prepare_read(LocalDataLoadFlowReader(tmp_path / "datasets"))) == 3


def test_writers_outlive_whoever_removes_empty_directories(tmp_path: Path) -> None:
    files, over = Files(tmp_path), threading.Event()

    def remove() -> None:
        while not over.is_set():
            files.remove_empty("a/b")
            files.remove_empty("a")

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for _ in range(200):
            files.write("a/b/file", b"whole")
            assert files.read("a/b/file") == b"whole"
            files.remove("a/b/file")
    finally:
        over.set()
        remover.join()


def test_the_error_names_the_removal_of_a_directory_that_is_removed_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, make = itertools.count(), os.makedirs

    def make_and_lose(path: str, exist_ok: bool) -> None:
        make(path, exist_ok=exist_ok)
        os.rmdir(path)  # as another process would

    monkeypatch.setattr("torch_dpflow.datasets.storage.local.time.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(os, "makedirs", make_and_lose)
    with pytest.raises(StorageError, match=r"/a/b: another process removed this directory for 30 s"):
        Files(tmp_path).write("a/b/file", b"whole")
    assert next(clock) > 30


class _Interrupted(MemoryFileSystem):
    protocol = "interrupted"

    def info(self, path: str, **kwargs: object) -> dict[str, object]:
        raise KeyboardInterrupt


def test_a_file_that_cannot_be_looked_at_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match="loop: OSError"):
        Files(str(tmp_path)).exists("loop")


def test_control_c_is_no_missing_file() -> None:
    fsspec.register_implementation("interrupted", _Interrupted)
    with pytest.raises(KeyboardInterrupt):
        Files("interrupted://store").exists("file")
