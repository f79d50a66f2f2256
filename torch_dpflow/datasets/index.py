"""Indexes of `open_dataset`: versions in a store of indexes, named after the objects that they were built from."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from torch_dpflow._core.checks import check_path
from torch_dpflow.datasets.draft import SHARD_SIZE, Draft, OvertakenError
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.shards import ShardImporter
from torch_dpflow.datasets.spec import Dataset, DatasetRef, SampleMeta, StoreRecord, encode_file
from torch_dpflow.datasets.storage.base import ChecksumAlgorithm, sha256_of
from torch_dpflow.datasets.storage.urls import stored_url
from torch_dpflow.datasets.store import RECORD, DatasetStore, StoredDataset, now
from torch_dpflow.datasets.versions import delete
from torch_dpflow.datasets.writer import ProgressCallback
from torch_dpflow.errors import (
    DamagedStoreError,
    DatasetError,
    DatasetNotFoundError,
    OptionError,
    PublishedError,
    SourceError,
    StorageError,
)

#: The number of what importers write into an index. A release that writes something else builds indexes again.
_INDEX = 2
_VARIANT = "all"
#: Seconds between updates of the line on a terminal.
_UPDATE_S = 0.2
#: Seconds after its last opening when an index may be removed.
_UNUSED_S = 30 * 24 * 3600.0
#: Builds of one index that other processes may disturb, where the storage has no locks.
_ATTEMPTS = 5


def index_directory() -> str:
    """Return the directory of indexes on this host, by the environment."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("DPFLOW_INDEX_DIR") or os.path.join(cache, "torch_dpflow", "index")


class Index:
    """The index of one source.

    Sources in one directory share an id, so that the samples of unchanged objects are taken from the index of an
    earlier state, or of another pattern, and only new objects are read. Objects without a state are read at each
    opening, as nothing shows whether they were written again.

    Args:
        url: the directory of indexes; None: `index_directory`.
        name: the format.
        importer: describes the samples.
        checksum: of each sample; None: none is taken.
    """

    def __init__(
        self, url: str | os.PathLike[str] | None, name: str, importer: Any, checksum: ChecksumAlgorithm | None
    ) -> None:
        folder = index_directory() if url is None else os.fspath(url)
        check_path("index_dir", folder)
        with _hints():
            self._store = _store_at(folder)
        self._importer = importer
        self._checksum = checksum
        source = dict(importer.source)
        source.pop("source", None)
        #: what changes with each of the objects
        self._objects = source.pop("objects", None)
        state = source.pop("state", None) or (importer.state() if self._objects is None else self._objects)
        digest = _digest([_INDEX, stored_url(importer.root or ""), source, checksum])
        self._id = f"{name}/{digest}"
        self._name = self._version = _digest([digest, state])
        #: Whether all objects have a state, by which an index of them is found again.
        self._is_kept = importer.has_states
        self._path = f"{self._id}/versions/{self._version}.json"

    def open(self, progress: ProgressCallback | None) -> StoredDataset:
        """Return the index, built if there is none. Raises SourceError."""
        found = self._found() if self._is_kept else None
        if found is None:
            with self._alone():
                found = (self._found() if self._is_kept else None) or self._built(progress)
        self._mark_used()
        return found

    def _mark_used(self) -> None:
        if self._local is not None:
            with suppress(OSError):
                os.utime(f"{self._local}/{self._path}")

    @property
    def _local(self) -> str | None:
        """The path of the directory of indexes, if it is on a local disk or a mount."""
        return self._store.url.removeprefix("file://") if self._store.url.startswith("file://") else None

    def _found(self) -> StoredDataset | None:
        """Return the index; None if there is none, or if a part of it is lost."""
        return self._whole(self._version)

    def _whole(self, version: str) -> StoredDataset | None:
        try:
            stored = self._store.open(DatasetRef(self._id, version, _VARIANT))
        except (DatasetNotFoundError, DamagedStoreError):
            return None
        return stored if _is_whole(stored) else None

    def _built(self, progress: ProgressCallback | None) -> StoredDataset:
        if not self._is_kept:
            self._begin_another()
        with _shown(self._importer, progress) as report:
            for attempt in range(_ATTEMPTS):
                try:
                    self._remove_damaged()
                    self._write(report)
                except (DatasetError, OptionError) as error:
                    # Without a lock, as on an object store, another process may have published it.
                    found = self._found()
                    if found is not None:
                        return found
                    is_disturbed = isinstance(error, OvertakenError | PublishedError)
                    if attempt == _ATTEMPTS - 1 or (isinstance(error, SourceError) and not is_disturbed):
                        raise
                    if not is_disturbed:  # what a killed process has left is damaged
                        with suppress(PublishedError):
                            self._draft().discard()
                found = self._found()
                if found is not None:
                    if not self._is_kept:
                        found = self._same(found)
                    self._sweep()
                    return found
        raise DamagedStoreError(f"{self._store.url} loses what is written there; give another index_dir=")

    def _remove_damaged(self) -> None:
        """Remove what is left of a damaged index, but no build that can be continued."""
        if self._store.files.exists(self._path) and self._found() is None:
            self._store.files.remove(self._path)
        if self._version not in self._store.drafts(self._id):
            self._draft().discard()

    def _begin_another(self) -> None:
        """Name a version of objects without a state, by time, and remove builds of such versions that were killed."""
        self._version = f"{self._name}-{time.time_ns():016x}-{uuid.uuid4().hex[:8]}"
        self._path = f"{self._id}/versions/{self._version}.json"
        for version in self._store.drafts(self._id) if self._local is not None else ():
            if "-" in version:
                with suppress(DatasetError):
                    Draft(self._store, self._id, version).discard()

    def _same(self, built: StoredDataset) -> StoredDataset:
        """Return the first of the indexes with the same samples, and remove the built one if it is another.

        So the same content has the same version in all processes, and openings do not fill the disk.
        """
        same = built
        for version in self._store.versions(self._id):
            is_earlier = version.startswith(f"{self._name}-") and version < same.dataset.version
            other = self._whole(version) if is_earlier else None
            if other is not None:
                with suppress(DatasetError):  # it is damaged
                    same = other if _are_equal(other, built) else same
        if same is not built:
            self._version = same.dataset.version
            self._path = f"{self._id}/versions/{self._version}.json"
            self._mark_used()
            with suppress(OSError, DatasetError, OptionError, StorageError):
                delete(self._store, self._id, built.dataset.version)
        return same

    def _draft(self) -> Draft:
        return Draft(self._store, self._id, self._version)

    def _write(self, report: ProgressCallback) -> None:
        draft = self._draft()
        similar = self._similar()
        if similar is not None:
            draft.parent = _beginning(similar, self._importer.reuse(similar, SHARD_SIZE))
        draft.add(_VARIANT, self._importer, checksum=self._checksum, progress=report)
        draft.publish()

    def _similar(self) -> StoredDataset | None:
        """Return the index that has most of the same objects; None if none has any."""
        if not isinstance(self._importer, ShardImporter) or not self._objects or self._importer.may_copy:
            return None
        wanted = {tuple(one) for one in self._objects if one[2] is not None}
        shared: dict[str, int] = {}
        for version in self._store.versions(self._id):
            with suppress(DatasetError):
                source = self._store.load(self._id, version).variants[_VARIANT].source
                shared[version] = sum(tuple(one) in wanted for one in source.get("objects", ()))
        best = max(shared, key=lambda version: (shared[version], version), default=None)
        return None if best is None or not shared[best] else self._whole(best)

    def _sweep(self) -> None:
        """Remove indexes on a local disk that were not opened for long. Parts that others refer to stay."""
        if self._local is None:
            return
        with suppress(OSError, DatasetError, StorageError):
            for dataset_id in self._store.ids():
                for version in self._store.versions(dataset_id):
                    path = f"{self._local}/{dataset_id}/versions/{version}.json"
                    if time.time() - os.stat(path).st_mtime > _UNUSED_S:
                        delete(self._store, dataset_id, version)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes of this host from building the same index meanwhile. A killed process keeps nothing."""
        if self._local is None:
            yield
            return
        import fcntl

        path = os.path.join(self._local, f".{self._id.replace('/', '-')}.lock")
        with _hints():
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # a mount without locks: several processes build, and one publishes
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _store_at(folder: str) -> DatasetStore:
    """Open a store of indexes, or make one. A damaged record is written again, as all of the store can be."""
    try:
        return DatasetStore.create(folder)
    except DamagedStoreError:
        Files(folder).write(RECORD, encode_file(StoreRecord(format=1, created=now())))
        return DatasetStore.create(folder)


def _digest(value: Any) -> str:
    return sha256_of(json.dumps(value, sort_keys=True, default=str).encode(errors="surrogatepass"))[:32]


def _beginning(stored: StoredDataset, samples: int) -> Dataset | None:
    """Return a version cut after its first samples, which fill its shards; None for none."""
    if not samples:
        return None
    shards = stored.variant.shards[: samples // stored.variant.shard_size]
    variant = msgspec.structs.replace(stored.variant, samples=samples, shards=shards)
    return msgspec.structs.replace(stored.dataset, variants={_VARIANT: variant})


def _are_equal(one: StoredDataset, other: StoredDataset) -> bool:
    """Return whether two indexes have the same samples. Raises DamagedStoreError."""
    described = [(index.variant.samples, index.variant.shard_size, index.variant.data) for index in (one, other)]
    return described[0] == described[1] and all(
        _samples(one, number) == _samples(other, number) for number in range(len(one.variant.shards))
    )


def _samples(stored: StoredDataset, number: int) -> list[SampleMeta]:
    """Return the samples of one shard, without the version's name in the paths of copied ones."""
    version = stored.dataset.version
    return [
        msgspec.structs.replace(sample, path=sample.path.replace(version, "")) if version in sample.path else sample
        for sample in stored.shard(number).samples
    ]


def _is_whole(stored: StoredDataset) -> bool:
    """Return whether all files of an index on a local disk are there, by their sizes. A million samples take 5 ms."""
    if not stored.files.url.startswith("file://"):
        return True
    folder = stored.files.url.removeprefix("file://")
    try:
        return all(
            os.stat(f"{folder}/{stored.dataset.shard_path(_VARIANT, number)}").st_size == entry.bytes
            for number, entry in enumerate(stored.variant.shards)
        )
    except FileNotFoundError:
        return False


@contextmanager
def _hints() -> Iterator[None]:
    """Add to errors of the directory of indexes how to give another one."""
    try:
        yield
    except (OSError, StorageError) as error:
        raise StorageError(
            f"{error}; indexes are written there: give index_dir=, or set DPFLOW_INDEX_DIR, to a directory that "
            "you can write to"
        ) from error


@contextmanager
def _shown(importer: Any, progress: ProgressCallback | None) -> Iterator[ProgressCallback]:
    """Return a function that reports the number of samples: the one given, or a line on a terminal."""
    if progress is not None:
        yield progress
        return
    if not sys.stderr.isatty():
        yield lambda samples: None
        return
    given = importer.source.get("source", importer.root)
    shown = 0.0

    def report(samples: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > _UPDATE_S:
            shown = time.monotonic()
            sys.stderr.write(f"\rIndexing {given}: {samples} samples")
            sys.stderr.flush()

    try:
        yield report
    finally:
        if shown:
            sys.stderr.write("\n")
