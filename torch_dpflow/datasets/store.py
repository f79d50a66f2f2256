"""DatasetStore: a directory of datasets on any storage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.index import Rows, stored_rows
from torch_dpflow.datasets.spec import (
    Dataset,
    DatasetRef,
    DatasetShardMeta,
    SampleMeta,
    StoreRecord,
    Variant,
    data_url,
    decode_dataset,
    decode_file,
    encode_file,
    version_order,
)
from torch_dpflow.datasets.storage import ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.urls import join_url
from torch_dpflow.errors import AccessDeniedError, DamagedStoreError, DatasetNotFoundError

#: The file that marks a store.
RECORD = "store.json"


class DatasetStore:
    """Store of datasets by name in one directory, by convention called `datasets`.

    The constructor reads one small file, and `open` the file of a version. Nothing is cached, so newly published
    versions are seen at once. Thread-safe, picklable, and usable after a fork.

    Args:
        url: the directory: a local path or any URL of fsspec, such as "oss://bucket/datasets".
        read_options: timeouts and retries of reading metadata.
        storage_options: fsspec's options for the directory; for S3 and OSS alike `key`, `secret`, `token`, `endpoint`.

    Raises:
        DatasetNotFoundError: there is no store; `DatasetStore.create` makes one.
        DamagedStoreError, NewerFormatError: the store's file is damaged, or a later release wrote it.
        StorageError, UsageError: the storage cannot be read; an argument is not allowed, or a package is missing.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        read_options: ReadOptions | None = None,
        **storage_options: Any,
    ) -> None:
        self.files = Files(url, storage_options, read_options)
        try:
            data = self.files.read(RECORD)
        except FileNotFoundError as error:
            raise DatasetNotFoundError(
                f"there is no dataset store at {self.files.url} ({error}); check the address, or make one "
                f"with DatasetStore.create({self.files.url!r})"
            ) from error
        self.record = decode_file(data, StoreRecord, join_url(self.files.url, RECORD))

    @classmethod
    def create(
        cls,
        url: str | os.PathLike[str],
        *,
        read_options: ReadOptions | None = None,
        **storage_options: Any,
    ) -> DatasetStore:
        """Open a store, or make an empty one if there is none. Raises the errors of `DatasetStore`."""
        files = Files(url, storage_options, read_options)
        if not files.exists(RECORD):
            with suppress(FileExistsError):  # another process may be faster
                files.create(RECORD, encode_file(StoreRecord(format=1, created=now())))
        return cls(url, read_options=read_options, **storage_options)

    @property
    def url(self) -> str:
        """The directory's URL."""
        return self.files.url

    def ids(self) -> list[str]:
        """Return the ids of all datasets, sorted, including datasets without a published version.

        Raises:
            AccessDeniedError: the credentials do not allow listing the store.
        """
        namespaces = self.files.children()
        if not namespaces:  # not even the store's own file: some storages do this if listing is not allowed
            raise AccessDeniedError(
                f"{self.url} cannot be listed, though {RECORD} in it can be read; ask for the right to list it"
            )
        return [
            f"{namespace.name}/{dataset.name}"
            for namespace in namespaces
            if namespace.is_directory
            for dataset in self.files.children(namespace.name)
            if dataset.is_directory
        ]

    def versions(self, dataset_id: str) -> list[str]:
        """Return the published versions of a dataset, v2 before v10; [] if there is no such dataset."""
        files = self.files.children(f"{DatasetRef(dataset_id).id}/versions")
        names = [
            file.name.removesuffix(".json") for file in files if file.name.endswith(".json") and not file.is_directory
        ]
        return sorted(names, key=version_order)

    def drafts(self, dataset_id: str) -> list[str]:
        """Return the versions whose import is unfinished, v2 before v10."""
        found = {file.name for file in self.files.children(f"{DatasetRef(dataset_id).id}/drafts")}
        return sorted(found - set(self.versions(dataset_id)), key=version_order)

    def load(self, dataset_id: str, version: str | None = None) -> Dataset:
        """Return the description of a published version; None: of the last one in `versions`.

        Raises:
            DatasetNotFoundError: no such dataset or version is published.
            DamagedStoreError, NewerFormatError: its file is damaged, or a later release wrote it.
        """
        if version is None:
            versions = self.versions(dataset_id)
            if not versions:
                raise self.not_found(DatasetRef(dataset_id))
            version = versions[-1]
        ref = DatasetRef(dataset_id, version)
        path = f"{ref.id}/versions/{ref.version}.json"
        try:
            data = self.files.read(path)
        except FileNotFoundError as error:
            raise self.not_found(ref) from error
        name = join_url(self.url, path)
        dataset = decode_dataset(data, name)
        if (dataset.id, dataset.version) != (ref.id, ref.version):
            raise DamagedStoreError(f"{name} describes {dataset.id}:{dataset.version}; it was put in a wrong place")
        return dataset

    def open(self, ref: DatasetRef | str) -> StoredDataset:
        """Open a variant to read, such as "core/mscoco:v1:train2017"; by default the only variant of the last version.

        Raises:
            DatasetNotFoundError: there is no such variant; or the version has several variants and none is named.
            DamagedStoreError, NewerFormatError: the version's file is damaged, or a later release wrote it.
            OptionError, OptionTypeError: the name is not allowed.
        """
        ref = ref if isinstance(ref, DatasetRef) else DatasetRef.parse(ref)
        dataset = self.load(ref.id, ref.version)
        dataset.variant(ref.variant)  # raises if there is none, or several and no name
        name = ref.variant or next(iter(dataset.variants))
        return StoredDataset(files=self.files.at(ref.id), dataset=dataset, variant_name=name)

    def not_found(self, ref: DatasetRef) -> DatasetNotFoundError:
        """Return the error for a dataset or version that is not published. Its message says what there is instead."""
        versions, drafts = self.versions(ref.id), self.drafts(ref.id)
        if ref.version in drafts or (ref.version is None and drafts):
            which = ref.version or drafts[-1]
            return DatasetNotFoundError(
                f"{ref.id}:{which} in {self.url} is unfinished: its import has begun and not ended; "
                "run the same import again, which continues it"
            )
        if versions:
            return DatasetNotFoundError(f"there is no {ref} in {self.url}; {ref.id} has versions {versions}")
        try:
            found: list[str] | None = self.ids()
        except AccessDeniedError:
            found = None
        if found and ref.id in found:
            unfinished = f"; unfinished are {drafts}" if drafts else ""
            return DatasetNotFoundError(f"{ref.id} in {self.url} has no published version{unfinished}")
        has = "none that these credentials may list" if found is None else found
        return DatasetNotFoundError(f"there is no dataset {ref.id} in {self.url}; it has {has}")

    def __repr__(self) -> str:
        return f"DatasetStore({self.url!r})"


@dataclass(frozen=True)
class StoredDataset:
    """A variant of a published version. Metadata of samples is read when needed. Thread-safe and picklable."""

    files: Files
    dataset: Dataset
    variant_name: str

    @property
    def ref(self) -> DatasetRef:
        """The full name: dataset, version and variant."""
        return DatasetRef(self.dataset.id, self.dataset.version, self.variant_name)

    @property
    def variant(self) -> Variant:
        """The description of the variant."""
        return self.dataset.variants[self.variant_name]

    @property
    def importer(self) -> str | None:
        """The name of the importer that has described the samples; None if unknown."""
        return self.variant.source.get("importer")

    @property
    def info(self) -> dict[str, Any]:
        """Information for all samples, such as the names of classes."""
        return self.variant.info

    @property
    def url(self) -> str:
        """The URL of the dataset's directory."""
        return self.files.url

    @property
    def options(self) -> dict[str, Any]:
        """fsspec's options for the store."""
        return self.files.options

    def __len__(self) -> int:
        return self.variant.samples

    def shard(self, number: int) -> DatasetShardMeta:
        """Read one metadata shard; nothing is cached. Raises DamagedStoreError if it is missing or altered."""
        path = self.dataset.shard_path(self.variant_name, number)
        try:
            data = self.files.read(path)
        except FileNotFoundError as error:
            raise DamagedStoreError(f"{join_url(self.url, path)} is missing; restore it from a copy") from error
        return self.dataset.decode_shard(self.variant_name, number, data, url=join_url(self.url, path))

    def sample(self, index: int) -> SampleMeta:
        """Read the metadata of one sample, with its shard. Raises IndexError, or the errors of `shard`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is out of range; there are {len(self)}, from 0")
        return next(self.part(index, index + 1))

    def samples(self) -> Iterator[SampleMeta]:
        """Yield the metadata of all samples, in order. One shard is in memory at a time."""
        return self.part(0, len(self))

    def part(self, start: int, stop: int) -> Iterator[SampleMeta]:
        """Yield the metadata of samples `start` to `stop` (excluded), in order. One shard is in memory at a time."""
        while start < stop:
            shard, offset = divmod(start, self.variant.shard_size)
            samples = self.shard(shard).samples[offset : offset + stop - start]
            yield from samples
            start += len(samples)

    def open_rows(self, reader: ObjectReader, given_urls: Mapping[str, str]) -> Rows:
        """Return the metadata rows of the samples. `reader` reads them when they are needed, see `stored_rows`."""
        return stored_rows(self.url, self.dataset, self.variant_name, reader, given_urls)

    def data_url(self, sample: SampleMeta) -> str:
        """Return the URL of a sample's object. Raises DamagedStoreError if its path leads out of the data's root."""
        return data_url(self.url, self.variant.data, sample.path)

    def own_path(self, sample: SampleMeta) -> str | None:
        """Return the path of a sample's object in the dataset's directory; None if a URL names the object."""
        if "://" in self.variant.data or "://" in sample.path:
            return None
        return f"{self.variant.data}/{sample.path}"

    def __repr__(self) -> str:
        return f"StoredDataset({self.ref}, {len(self)} samples, {self.url!r})"


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
