"""Writes one variant of a version: metadata shards, packs, and the import's progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from torch_dpflow.datasets.annotations import encode_annotations
from torch_dpflow.datasets.describing import Describer, ShardPacks
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.import_progress import DraftRecord, ImportedShard, ImportProgress
from torch_dpflow.datasets.importers.base import Importer, Item
from torch_dpflow.datasets.spec import (
    DatasetRef,
    DatasetShardMeta,
    SampleMeta,
    ShardEntry,
    ShardIdentity,
    Variant,
    decode_shard,
    encode_file,
    sha256_of,
    shard_path,
)
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.errors import SourceError

#: Called with the number of samples of the source that are written, first with those of an earlier run.
ProgressCallback = Callable[[int], None]


class VariantWriter:
    """Imports one source into one variant, continuing an earlier run that was killed.

    A shard is written after its samples' data, and recorded after it is written; so a kill at any time
    leaves complete shards and at most one that is not recorded, which the next run writes again.

    Args:
        files: the dataset's directory.
        ref: dataset, version and variant.
        record: what is imported, and how.
        base: the variant of the version that is appended to, if there is one.
    """

    def __init__(
        self, files: Files, ref: DatasetRef, record: DraftRecord, base: StoredDataset | None = None
    ) -> None:
        assert ref.version is not None
        assert ref.variant is not None
        self._files = files
        self._id, self._version, self._variant = ref.id, ref.version, ref.variant
        self._record = record
        self._base = base
        self._progress = ImportProgress(files, ref.version, ref.variant)

    def write(self, importer: Importer, describer: Describer, progress: ProgressCallback) -> Variant:
        """Import the missing samples, and return the whole variant.

        Raises:
            OptionError: an import of something else is unfinished.
            SourceError: the source is not laid out as it should be, is empty, or has changed since.
        """
        self._progress.begin(self._record)
        finished = self._progress.finished()
        if finished is not None:
            progress(finished.samples - self._base_samples)
            return finished
        variant = self._write_rest(importer, describer, progress)
        self._progress.finish(variant)
        return variant

    @property
    def _base_samples(self) -> int:
        return 0 if self._base is None else len(self._base)

    def _write_rest(self, importer: Importer, describer: Describer, progress: ProgressCallback) -> Variant:
        size = self._record.shard_size
        kept = self._base_samples // size
        noted = self._progress.shards(kept)
        entries = [*self._base_entries(kept), *(shard.entry for shard in noted)]
        count = kept * size + sum(shard.samples for shard in noted)
        carried = [] if noted else self._carried(kept)
        items = self._drawn(noted, count - self._base_samples, importer, describer)
        progress(max(0, count - self._base_samples))
        while samples := self._describe(items, size - len(carried), len(entries), describer):
            if count % size:
                raise self._changed(f"it had {count - self._base_samples} samples and has more now")
            entries.append(self._write_shard(len(entries), [*carried, *samples]))
            count += len(carried) + len(samples)
            carried = []
            progress(count - self._base_samples)
        if count <= self._base_samples:
            raise SourceError(f"there is nothing to import from {describe_source(importer)}")
        info = msgspec.json.decode(encode_annotations(importer.info(), "all samples (`info`)"))
        return Variant(
            data=self._record.data,
            samples=count,
            shard_size=size,
            shards=entries,
            info={**({} if self._base is None else self._base.variant.info), **info},
            source=self._record.source,
        )

    def _describe(
        self, items: Iterator[Item], count: int, shard: int, describer: Describer
    ) -> list[SampleMeta]:
        packs = ShardPacks(self._files, f"data/{self._version}/{self._variant}", shard)
        samples = describer.describe(islice(items, count), packs)
        packs.flush()
        return samples

    def _base_entries(self, kept: int) -> list[ShardEntry]:
        return [] if self._base is None else self._base.variant.shards[:kept]

    def _carried(self, kept: int) -> list[SampleMeta]:
        """The samples of the base's last shard if that is not full: the first new shard begins with them."""
        if self._base is None or kept == len(self._base.variant.shards):
            return []
        return self._base.shard(kept).samples

    def _drawn(
        self, noted: list[ImportedShard], start: int, importer: Importer, describer: Describer
    ) -> Iterator[Item]:
        """The rest of the source. A missing file of the source is a SourceError, unlike one of the store."""
        try:
            yield from self._items_after(noted, start, importer, describer)
        except (FileNotFoundError, FileExistsError) as error:
            raise SourceError(
                f"{describe_source(importer)} cannot be read further: {type(error).__name__}: {error}; repair the "
                "source and import it again, which continues this import"
            ) from error

    def _items_after(
        self, noted: list[ImportedShard], start: int, importer: Importer, describer: Describer
    ) -> Iterator[Item]:
        """The items that are not written yet; the last written sample must come just before them."""
        if not noted:
            return importer.items()
        items = importer.items(start - 1)
        last = self._read_shard(noted[-1]).samples[-1]
        item = next(items, None)
        if item is None or not _is_same(item, last, describer):
            raise self._changed(f"sample {start - 1} was {last.path} with {bytes(last.meta).decode()}")
        return items

    def _changed(self, how: str) -> SourceError:
        return SourceError(
            f"the source of {self._id}:{self._version}:{self._variant} has changed since its import was "
            f"interrupted: {how}; discard what was imported (--restart) and import it anew"
        )

    def _write_shard(self, number: int, samples: list[SampleMeta]) -> ShardEntry:
        shard = DatasetShardMeta(
            format=1 if all(sample.revision is None for sample in samples) else 2,
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


def describe_source(importer: Importer) -> str:
    """The source in one line."""
    return ", ".join(f"{key}={value!r}" for key, value in importer.source.items())


def _is_same(item: Item, sample: SampleMeta, describer: Describer) -> bool:
    """Whether an item was written as this sample."""
    if encode_annotations(item.meta, sample.path) != sample.meta:
        return False
    if item.data is not None:
        return (len(item.data), describer.checksum(item.data)) == (sample.length, sample.checksum)
    described = describer.found(item)
    return (described.path, described.offset) == (sample.path, sample.offset)
