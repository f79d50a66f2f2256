"""Writing one variant of a version: metadata shards, packs, and the import's progress.

An unfinished import has these files under `drafts/<version>/<variant>/` in the dataset's directory::

    draft.json      DraftRecord: what is being imported; written first
    ms-<n>.json     ImportedShard: shard n is written, with all data of its samples
    done.json       ImportedVariant: all shards are written; publishing needs nothing else

So a kill costs the work of one shard at most. When the version is published, these files are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice, takewhile
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec

from torch_dpflow.datasets.annotations import encode_annotations
from torch_dpflow.datasets.describing import Describer, ShardPacks
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.base import Importer, Item
from torch_dpflow.datasets.spec import (
    Dataset,
    DatasetRef,
    DatasetShardMeta,
    Label,
    Location,
    SampleMeta,
    ShardEntry,
    ShardIdentity,
    SpecStruct,
    StoreRecord,
    Variant,
    WholeNumber,
    decode_file,
    decode_shard,
    encode_file,
    shard_format,
    shard_path,
)
from torch_dpflow.datasets.storage.base import ChecksumAlgorithm, sha256_of
from torch_dpflow.datasets.storage.urls import printable_url
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.errors import DamagedStoreError, OptionError, SourceError

#: The file that is written first.
RECORD = "draft.json"
#: Files that are read concurrently, as there may be thousands, each with a round trip.
_READ_THREADS = 16


class DraftRecord(SpecStruct, frozen=True, kw_only=True, tag_field="kind", tag="dataset-draft"):
    """Source and settings of an import. An import is continued only with the same source and settings."""

    format: Literal[1]
    data: Location
    shard_size: Annotated[int, msgspec.Meta(ge=1)]
    source: dict[str, Any]
    checksum: str | None = None
    parent: Label | None = None


class ImportedShard(SpecStruct, frozen=True, kw_only=True, tag_field="kind", tag="dataset-draft-shard"):
    """Record of one shard that is written."""

    format: Literal[1]
    shard: WholeNumber
    samples: WholeNumber
    entry: ShardEntry


class ImportedVariant(SpecStruct, frozen=True, kw_only=True, tag_field="kind", tag="dataset-draft-done"):
    """Record of a whole variant that is written."""

    format: Literal[1]
    variant: Variant


_Note = TypeVar("_Note", DraftRecord, ImportedShard, ImportedVariant)


class ImportProgress:
    """Progress of the import of one variant, kept in the store itself. `files` is the dataset's directory."""

    def __init__(self, files: Files, version: str, variant: str) -> None:
        self._files = files
        self._folder = f"drafts/{version}/{variant}"

    def begin(self, record: DraftRecord) -> None:
        """Record source and settings of an import. Replaces a different record whose import has recorded no shard.

        Raises OptionError: an import with another source or other settings is unfinished.
        """
        path = f"{self._folder}/{RECORD}"
        try:
            self._files.create(path, encode_file(record))
        except FileExistsError:
            noted = self._decode(self._files.read(path), DraftRecord, RECORD)
            if noted == record:
                return
            if len(self._files.children(self._folder)) > 1:
                raise OptionError(
                    f"an unfinished import is in the way: it has {_differences(noted, record)}; "
                    "give the same to continue it, or discard it (--restart)"
                ) from None
            self._files.write(path, encode_file(record))  # the other import has written no shard

    def shards(self, first: int) -> list[ImportedShard]:
        """Return the records of shard `first` and the next ones, up to the first shard that has no record."""
        present = {child.name for child in self._files.children(self._folder)}
        names = list(takewhile(present.__contains__, (f"ms-{number}.json" for number in count(first))))
        with ThreadPoolExecutor(_READ_THREADS, "dpflow-progress") as threads:
            notes = threads.map(self._files.read, [f"{self._folder}/{name}" for name in names])
            return [self._decode(note, ImportedShard, name) for name, note in zip(names, notes)]

    def note_shard(self, shard: ImportedShard) -> None:
        self._files.write(f"{self._folder}/ms-{shard.shard}.json", encode_file(shard))

    def record(self) -> DraftRecord | None:
        """Return the record of source and settings; None if nothing is being imported, or the import was discarded."""
        return self._noted(RECORD, DraftRecord)

    def finished(self) -> Variant | None:
        """Return the variant if all of it is written; None if it is not, or if the import was discarded."""
        done = self._noted("done.json", ImportedVariant)
        return None if done is None or self.record() is None else done.variant

    def finish(self, variant: Variant) -> None:
        """Record that the whole variant is written."""
        self._files.write(f"{self._folder}/done.json", encode_file(ImportedVariant(format=1, variant=variant)))

    def _noted(self, file: str, kind: type[_Note]) -> _Note | None:
        try:
            return self._decode(self._files.read(f"{self._folder}/{file}"), kind, file)
        except FileNotFoundError:
            return None

    def _decode(self, data: bytes, kind: type[_Note], file: str) -> _Note:
        try:
            return decode_file(data, kind, f"{self._files.url}/{self._folder}/{file}")
        except DamagedStoreError as error:
            raise DamagedStoreError(f"{error}; discard the unfinished import (--restart)") from error


def _differences(noted: DraftRecord, given: DraftRecord) -> str:
    before, now = msgspec.to_builtins(noted), msgspec.to_builtins(given)
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    return ", ".join(f"{key}={before.get(key)!r} instead of {now.get(key)!r}" for key in keys)


_KINDS: tuple[type[SpecStruct], ...] = (
    *(StoreRecord, Dataset, DatasetShardMeta),
    *(DraftRecord, ImportedShard, ImportedVariant),
)


def json_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schema (draft 2020-12) by kind of file: published files, then files of unfinished imports."""
    return {str(kind.__struct_config__.tag): msgspec.json.schema(kind) for kind in _KINDS}


#: Called with the number of the source's samples written so far. The first call has the number from an earlier run.
ProgressCallback = Callable[[int], None]


class VariantWriter:
    """Writer of one source's samples to one variant. It continues an earlier run that was killed.

    A shard is written after its samples' data, and recorded after it is written. A kill at any time therefore leaves
    complete shards and at most one that is not recorded, which the next run writes again.

    Args:
        files: the dataset's directory.
        ref: dataset, version and variant.
        record: source and settings of the import.
        base: the parent's variant, whose samples come before the source's; None: there is none.
        importer: the importer of the source.
        progress: see `ProgressCallback`.
    """

    def __init__(
        self,
        files: Files,
        ref: DatasetRef,
        record: DraftRecord,
        base: StoredDataset | None,
        importer: Importer,
        progress: ProgressCallback,
    ) -> None:
        assert ref.version is not None
        assert ref.variant is not None
        self._files = files
        self._id, self._version, self._variant = ref.id, ref.version, ref.variant
        self._record = record
        self._base = base
        self._base_samples = 0 if base is None else len(base)
        self._importer = importer
        self._report = progress
        self._progress = ImportProgress(files, ref.version, ref.variant)
        self._describer = Describer(
            importer,
            dataset_url=files.url,
            data=record.data,
            checksum=cast("ChecksumAlgorithm | None", record.checksum),
        )

    def write(self) -> Variant:
        """Import the missing samples, and return the whole variant.

        Raises:
            OptionError: an import with another source or other settings is unfinished.
            SourceError: the source does not have the expected layout, is empty, or has changed since an earlier run.
        """
        self._progress.begin(self._record)
        finished = self._progress.finished()
        if finished is not None:
            self._report(finished.samples - self._base_samples)
            return finished
        variant = self._write_rest()
        self._progress.finish(variant)
        return variant

    def _write_rest(self) -> Variant:
        size, base = self._record.shard_size, self._base
        kept = self._base_samples // size
        noted = self._progress.shards(kept)
        entries = [*(() if base is None else base.variant.shards[:kept]), *(shard.entry for shard in noted)]
        count = kept * size + sum(shard.samples for shard in noted)
        carried: list[SampleMeta] = []
        if not noted and base is not None and kept < len(base.variant.shards):
            # The base's last shard is not full: the first new one begins with its samples.
            carried = base.shard(kept).samples
        items = self._items(noted, count - self._base_samples)
        self._report(max(0, count - self._base_samples))
        while samples := self._describe(items, size - len(carried), len(entries)):
            if count % size:
                raise self._changed(f"it had {count - self._base_samples} samples and has more now")
            entries.append(self._write_shard(len(entries), [*carried, *samples]))
            count += len(carried) + len(samples)
            carried = []
            self._report(count - self._base_samples)
        if count <= self._base_samples:
            given = self._importer.source.get("source") or self._importer.root or self._source
            shown = printable_url(str(given))
            raise SourceError(f"there is nothing to import from {shown}: it has no samples; check what wrote it")
        info = msgspec.json.decode(encode_annotations(self._importer.info(), "all samples (`info`)"))
        return Variant(
            data=self._record.data,
            samples=count,
            shard_size=size,
            shards=entries,
            info={**({} if base is None else base.variant.info), **info},
            source=self._record.source,
        )

    def _describe(self, items: Iterator[Item], count: int, shard: int) -> list[SampleMeta]:
        packs = ShardPacks(self._files.ensure, f"data/{self._version}/{self._variant}", shard)
        samples = self._describer.describe(islice(items, count), packs)
        packs.flush()
        return samples

    def _items(self, noted: list[ImportedShard], start: int) -> Iterator[Item]:
        """Yield the items of the source that are not written yet. A missing file of the source is a SourceError."""
        try:
            yield from self._items_after(noted, start)
        except (FileNotFoundError, FileExistsError) as error:
            raise SourceError(
                f"{self._source} cannot be read further: {type(error).__name__}: {error}; repair the "
                "source and import it again, which continues this import"
            ) from error

    def _items_after(self, noted: list[ImportedShard], start: int) -> Iterator[Item]:
        """Return the items that are not written yet. The last written sample must be the item just before them."""
        if not noted:
            return self._importer.items()
        last = self._read_shard(noted[-1]).samples[-1]
        # Importers that have to read all that comes before a number can find a place at once.
        items_at = getattr(self._importer, "items_at", lambda path, offset: None)
        items = items_at(last.path, last.offset) or self._importer.items(start - 1)
        item = next(items, None)
        if item is None or not self._is_same(item, last):
            raise self._changed(f"sample {start - 1} was {last.path} with {bytes(last.meta).decode()}")
        return items

    def _is_same(self, item: Item, sample: SampleMeta) -> bool:
        if encode_annotations(item.meta, sample.path) != sample.meta:
            return False
        if item.data is not None:
            found = (len(item.data), self._describer.checksum(item.data))
            return found == (sample.length, sample.checksum)
        described = self._describer.found(item)
        return (described.path, described.offset) == (sample.path, sample.offset)

    @property
    def _source(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self._record.source.items() if key != "state")

    def _changed(self, how: str) -> SourceError:
        return SourceError(
            f"the source of {self._id}:{self._version}:{self._variant} has changed since its import was "
            f"interrupted: {how}; discard what was imported (--restart) and import it again"
        )

    def _write_shard(self, number: int, samples: list[SampleMeta]) -> ShardEntry:
        shard = DatasetShardMeta(
            format=shard_format(samples),
            dataset=self._id,
            version=self._version,
            variant=self._variant,
            shard=number,
            samples=samples,
        )
        data = encode_file(shard)
        self._files.ensure(shard_path(self._version, self._variant, number), data)
        entry = ShardEntry(version=self._version, bytes=len(data), sha256=sha256_of(data))
        self._progress.note_shard(ImportedShard(format=1, shard=number, samples=len(samples), entry=entry))
        return entry

    def _read_shard(self, noted: ImportedShard) -> DatasetShardMeta:
        path = shard_path(self._version, self._variant, noted.shard)
        return decode_shard(
            self._files.read(path),
            f"{self._files.url}/{path}",
            noted.entry,
            ShardIdentity(self._id, self._version, self._variant, noted.shard, noted.samples),
        )
