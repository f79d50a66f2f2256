"""UDR gives every sample by number, alike on every storage, and says what is wrong where something is."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import fsspec
import pytest
from torch.utils.data import DataLoader

from tests.datasets.samples_source import Numbered, despite_time_outs, numbers, publish
from tests.datasets.storage.servers import BUCKET, S3_KEYS
from tests.support.oss_server import Fault, OSSServer
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.errors import (
    AccessDeniedError,
    ChecksumError,
    DamagedStoreError,
    DPFlowError,
    NewerFormatError,
    ObjectMissingError,
    OptionError,
    OptionTypeError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedObjectError,
)

COUNT = 22
_stores = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def servers_first(s3_endpoint: str) -> None:
    """What lives as long as the session is not left behind by the test that first asks for it."""


@pytest.fixture(params=["file", "memory", "oss", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DatasetStore]:
    """An empty store on each kind of storage."""
    if request.param == "file":
        yield DatasetStore.create(str(tmp_path / "datasets"))
        return
    number = next(_stores)
    if request.param == "memory":
        yield DatasetStore.create(f"memory://reader-{number}/datasets")
        fsspec.filesystem("memory").rm(f"/reader-{number}", recursive=True)
    elif request.param == "oss":
        server: OSSServer = request.getfixturevalue("oss")
        store = DatasetStore.create(f"oss://{BUCKET}/datasets", **server.storage_options())
        yield store
        store.files.close()
        store.files.filesystem._session.session.close()
    else:
        endpoint = request.getfixturevalue("s3_endpoint")
        options = {**S3_KEYS, "endpoint_url": endpoint}
        store = DatasetStore.create(f"s3://{BUCKET}/datasets-{number}", **options)
        yield store
        files = store.files.filesystem
        files.close_session(files.loop, files._s3)
        type(files).clear_instance_cache()


@pytest.fixture
def stored(any_store: DatasetStore) -> Iterator[StoredDataset]:
    """Samples in packs, several in an object."""
    stored = publish(any_store, Numbered(COUNT))
    yield stored
    stored.files.close()


@pytest.fixture
def images(tmp_path: Path) -> StoredDataset:
    """Samples that are files of their own, outside the store."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.jpg").write_bytes(bytes([number]) * 100)
    items = [Item(path=f"{n}.jpg", length=100, meta={"number": n}) for n in range(6)]
    store = DatasetStore.create(str(tmp_path / "datasets"))
    draft = Draft(store, "core/images", "v1")
    draft.add("train", IterableImporter(items, root=f"file://{folder}"), shard_size=2)
    draft.publish()
    return store.open("core/images")


def test_gives_every_sample_by_number(stored: StoredDataset) -> None:
    reader = DatasetReader(stored, check=True)
    expected = numbers(COUNT)
    assert len(reader) == COUNT
    assert [reader[index] for index in range(COUNT)] == expected
    assert reader[-1] == expected[-1]
    order = [5, 21, 0, 5, 13, 8]
    assert reader.__getitems__(order) == [expected[index] for index in order]
    reader.close()


def test_a_loader_of_torch_reads_it(images: StoredDataset) -> None:
    reader = DatasetReader(images)
    for workers in (0, 2):
        batches = list(DataLoader(reader, batch_size=4, num_workers=workers, collate_fn=list))
        assert [fields["number"] for batch in batches for _, fields in batch] == [*range(6)]
    reader.close()


def test_there_is_no_sample_beyond_the_last(stored: StoredDataset) -> None:
    reader = DatasetReader(stored)
    for index in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=f"sample {index} is out of range"):
            reader[index]
    reader.close()


def test_annotations_are_fresh_each_time(images: StoredDataset) -> None:
    reader = DatasetReader(images)
    reader[0][1]["number"] = "overwritten"
    assert reader[0][1]["number"] == 0
    reader.close()


def test_a_sample_costs_at_most_one_metadata_shard(images: StoredDataset, metadata_reads: list[int]) -> None:
    reader = DatasetReader(images)
    for reads, index in enumerate([0, 4, 2], start=1):
        reader[index]
        reader[index + 1]
        assert len(metadata_reads) == reads
    reader.__getitems__([*range(6)])
    assert len(metadata_reads) == 3
    reader.close()


def test_a_local_sample_takes_few_calls(images: StoredDataset) -> None:
    """They are most of what a sample costs that the page cache holds."""
    with closing(DatasetReader(images)) as reader:
        reader.__getitems__([*range(6)])
        assert calls_of(lambda: reader[3]) < 110


def calls_of(work: Callable[[], object]) -> int:
    """How many functions, Python's and built-in ones, this thread calls in it."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_threads_that_want_the_same_shard_read_it_once(images: StoredDataset, metadata_reads: list[int]) -> None:
    reader = DatasetReader(images)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda turn: reader[turn % 6][1]["number"], range(200)))
    assert found == [turn % 6 for turn in range(200)]
    assert len(metadata_reads) == 3
    reader.close()


def test_a_pickle_reads_the_same(images: StoredDataset) -> None:
    reader = DatasetReader(images, check=True)
    expected = reader[3]
    copy = pickle.loads(pickle.dumps(reader))
    assert copy[3] == expected
    assert len(pickle.dumps(reader)) < 10_000
    reader.close()
    copy.close()


def test_a_forked_child_reads_the_same(images: StoredDataset) -> None:
    reader = DatasetReader(images)
    expected = reader.__getitems__([*range(6)])
    child = os.fork()
    if child == 0:
        try:
            right = reader.__getitems__([*range(6)]) == expected
        finally:
            os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reader.close()


def damage(images: StoredDataset, how: str) -> type[DPFlowError]:
    """Damage sample 2 (in the second shard of two samples) and say what a read of it should raise."""
    sample = Path(images.variant.data.removeprefix("file://")) / "2.jpg"
    shard = Path(images.url.removeprefix("file://")) / images.dataset.shard_path(images.variant_name, 1)
    if how == "missing":
        sample.unlink()
        return ObjectMissingError
    if how == "cut short":
        sample.write_bytes(sample.read_bytes()[:50])
        return TruncatedObjectError
    if how == "too long":
        sample.write_bytes(sample.read_bytes() * 2)
        return ChecksumError
    if how == "no shard":
        shard.unlink()
    elif how == "half a shard":
        shard.write_bytes(shard.read_bytes()[:-20])
    else:
        shard.write_bytes(shard.read_bytes().replace(b"number", b"nubmer"))
    return DamagedStoreError


OBJECTS = ["missing", "cut short", "too long"]
SHARDS = ["no shard", "half a shard", "altered shard"]


@pytest.mark.parametrize("how", OBJECTS + SHARDS)
def test_damage_is_named(images: StoredDataset, how: str) -> None:
    kind = damage(images, how)
    reader = DatasetReader(images)
    with pytest.raises(kind, match=r"2\.jpg|ms-1\.json"):
        reader[2]
    with pytest.raises(kind):
        reader.__getitems__([0, 1, 2])
    assert reader[0][0] == b"\0" * 100
    reader.close()


@pytest.mark.parametrize(("how", "left"), [("missing", [0, 1, 3, 4, 5]), ("no shard", [0, 1, 4, 5])])
def test_damage_is_left_out_and_counted_when_asked(
    images: StoredDataset, how: str, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    kind = damage(images, how)
    reader = DatasetReader(images, on_error="skip")
    with caplog.at_level(logging.WARNING, "torch_dpflow.datasets"):
        batch = reader.__getitems__([*range(6)])
    assert [fields["number"] for _, fields in batch] == left
    assert reader.skipped == {kind.__name__: 6 - len(left)}
    assert f"core/images:v1:train, sample 2 is left out: {kind.__name__}" in caplog.text
    with pytest.raises(kind):
        reader.__getitems__([2])  # nothing is left
    with pytest.raises(kind):
        reader[2]
    reader.close()


def test_a_checksum_is_compared_unless_that_is_turned_off(any_store: DatasetStore) -> None:
    stored = publish(any_store, Numbered(COUNT))
    pack = next(iter(stored.samples())).path
    path = stored.data_url(next(iter(stored.samples()))).removeprefix(stored.url + "/")
    data = stored.files.read(path)
    stored.files.write(path, data.replace(b"1-", b"7-", 1))
    unchecked, checked = DatasetReader(stored, check=False), DatasetReader(stored, check=True)
    assert unchecked[1][0] != numbers(2)[1][0]
    with closing(DatasetReader(stored)) as usual, pytest.raises(ChecksumError):
        usual[1]
    with pytest.raises(ChecksumError, match=pack.rpartition("/")[2]):
        checked[1]
    assert checked[0] == numbers(1)[0]
    unchecked.close()
    checked.close()


def test_a_store_of_a_newer_format_is_named(images: StoredDataset) -> None:
    version = Path(images.url.removeprefix("file://")) / "versions/v1.json"
    version.write_bytes(version.read_bytes().replace(b'"format":1', b'"format":9', 1))
    store = DatasetStore(str(version.parents[3]))
    with pytest.raises(NewerFormatError, match="format 9"):
        store.open("core/images")


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault.FORBIDDEN, AccessDeniedError),
        (Fault.HANG, StorageTimeoutError),
        (Fault.RESET, StorageUnavailableError),
        (Fault.TRUNCATE, StorageUnavailableError),
        (Fault.CORRUPT, ChecksumError),
    ],
)
def test_a_fault_of_the_server_ends_in_an_error(
    oss: OSSServer, impatient: ReadOptions, patient: ReadOptions, fault: Fault, kind: type[DPFlowError]
) -> None:
    store = DatasetStore.create(f"oss://{BUCKET}/datasets", **oss.storage_options())
    stored = publish(store, Numbered(8))
    reader = DatasetReader(stored, read_options=impatient if fault is Fault.HANG else patient)
    assert despite_time_outs(lambda: reader[0]) == numbers(1)[0]
    oss.faults.add(fault)
    with pytest.raises(kind, match=f"{BUCKET}/datasets/core/numbers/data/"):
        reader[0]
    oss.faults.clear()
    assert despite_time_outs(lambda: reader.__getitems__([3, 1])) == [numbers(4)[3], numbers(4)[1]]
    reader.close()
    store.files.filesystem._session.session.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_error": "ignore"},
        {"check": "no"},
        {"storage_options": 5},
        {"read_options": 5},
        {"stored": "core/images"},
    ],
)
def test_options_that_are_none_are_refused(images: StoredDataset, wrong: dict[str, Any]) -> None:
    with pytest.raises((OptionError, OptionTypeError), match=next(iter(wrong))):
        DatasetReader(**{"stored": images, **wrong})
