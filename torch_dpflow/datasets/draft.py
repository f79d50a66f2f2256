"""Draft: a version of a dataset that is not published yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import get_args

from torch_dpflow._core.checks import check_int, check_type
from torch_dpflow.datasets.describing import packs_of
from torch_dpflow.datasets.importers.base import Importer
from torch_dpflow.datasets.spec import Dataset, DatasetRef, Variant, encode_file, sealed
from torch_dpflow.datasets.storage.base import ChecksumAlgorithm
from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.datasets.store import DatasetStore, StoredDataset, now
from torch_dpflow.datasets.versions import forget, remove_empty, tidy_up
from torch_dpflow.datasets.writer import DraftRecord, ImportProgress, ProgressCallback, VariantWriter
from torch_dpflow.errors import (
    DatasetError,
    DatasetNotFoundError,
    OptionError,
    OptionTypeError,
    PublishedError,
    SourceError,
    StorageError,
)

#: Samples in a metadata shard: about 100 to 300 kB, which take 0.7 ms to read, check and decode. With shards of 40 MB
#: one random sample would cost a second.
SHARD_SIZE = 1000
#: Maximum shard size. JSON readers that use floats would round larger integers in the version's file.
MAX_SHARD_SIZE = 2**53

_IMPORTER = ("root", "options", "source", "extend", "items", "total", "info")


class Draft:
    """Unpublished version of a dataset: add variants, then publish it. It can be read only when it is published.

    All progress is kept in the store. To continue after the process was killed, make a draft of the same version and
    add the same variants, on any machine.

    Args:
        store: the store to publish it in.
        dataset_id: "namespace/name".
        version: a version that is not published.
        parent: a published version to append to: its samples come first, then the added samples.
        description: a line or two for display.

    Raises:
        PublishedError: the version is published.
        DatasetNotFoundError: the parent is not published.
        OptionError, OptionTypeError: the name of the dataset or version is not allowed; `store` is not a DatasetStore.
    """

    def __init__(
        self,
        store: DatasetStore,
        dataset_id: str,
        version: str,
        *,
        parent: str | None = None,
        description: str = "",
    ) -> None:
        if not isinstance(store, DatasetStore):
            raise OptionTypeError(f"store={store!r:.80}: give a DatasetStore")
        self._ref = DatasetRef(dataset_id, version)
        check_type("version", version, str, "a name, such as 'v1'")
        self._store = store
        self._files = store.files.at(self._ref.id)
        #: The description of the parent; None: there is none.
        self.parent = None if parent is None else store.load(dataset_id, parent)
        self._description = description
        self._version = version
        self._folder = f"drafts/{version}"
        self._manifest = f"versions/{version}.json"
        self._added: set[str] = set()
        self._check_unpublished()

    def add(
        self,
        variant: str,
        importer: Importer,
        *,
        shard_size: int | None = None,
        checksum: ChecksumAlgorithm | None = None,
        progress: ProgressCallback = lambda samples: None,
    ) -> Variant:
        """Import a source into a variant, and return its description. Continues an earlier run that was killed.

        Args:
            variant: the variant's name, such as "train".
            importer: reads the source.
            shard_size: number of samples in a metadata shard, 1000 by default; a parent's variant keeps its number.
            checksum: "crc32" or "sha256", for items with data, and for items without a checksum, whose bytes are read
                for it. None: only items with data, or with a checksum from the importer, have one.
            progress: see `ProgressCallback`; called after every shard.

        Raises:
            OptionError: an import with another source or settings is unfinished; or an argument is not allowed.
            OptionTypeError: an argument is of the wrong type.
            SourceError: the source is malformed or empty, or has changed; or another import has written this variant.
            PublishedError: the version was published meanwhile.
        """
        check_type("variant", variant, str, "a name, such as 'train'")
        missing = [name for name in _IMPORTER if not hasattr(importer, name)]
        if missing:
            raise OptionTypeError(
                f"importer={importer!r:.80} has no {missing}; give an importer, such as IterableImporter([...])"
            )
        check_type("progress", progress, Callable, "a function of a number of samples")
        if shard_size is not None:
            shard_size = check_int("shard_size", shard_size, minimum=1, maximum=MAX_SHARD_SIZE)
        if checksum is not None and checksum not in get_args(ChecksumAlgorithm):
            raise OptionError(f"checksum={checksum!r}: give one of {get_args(ChecksumAlgorithm)}, or None")
        base = None
        if self.parent is not None and variant in self.parent.variants:
            base = StoredDataset(files=self._files, dataset=self.parent, variant_name=variant)
            importer.extend(base.variant.info)
        record = self._record(importer, base, shard_size, checksum)
        ref = DatasetRef(self._ref.id, self._version, variant)
        is_new = not self._files.children(f"{self._folder}/{variant}")
        try:
            written = VariantWriter(self._files, ref, record, base, importer, progress).write()
        except Exception as error:
            if is_new:
                with suppress(OSError, StorageError):  # the import's own error counts
                    forget(self._store, self._ref.id, self._version, variant)
            if isinstance(error, FileNotFoundError | FileExistsError):
                raise self._overtaken(ref, error) from error
            raise
        self._added.add(variant)
        return written

    def check_variants(self, names: Iterable[str]) -> None:
        """Check that `names` includes all variants of this version that have an unpublished import.

        Raises:
            OptionError: another variant has an unpublished import, of an earlier run or a run in progress.
        """
        others = sorted({child.name for child in self._files.children(self._folder)} - set(names))
        if others:
            raise OptionError(
                f"{self._ref} has imports of other variants that are not published: {others}; name all of its "
                "variants in one import, or discard what was imported (--restart) if none of them is still running"
            )

    def publish(self) -> Dataset:
        """Publish the version, and return its description. Added variants and the parent's become readable together.

        Raises:
            PublishedError: the version is published already.
            OptionError: nothing was added; the import of a variant has not ended, or was discarded meanwhile; or an
                earlier or simultaneous run has added a variant that this run has not added.
            DatasetNotFoundError: the parent was deleted meanwhile.
        """
        self._check_unpublished()
        parent = None if self.parent is None else self.parent.version
        if parent is not None and not self._files.exists(f"versions/{parent}.json"):
            raise DatasetNotFoundError(
                f"{self._ref.id}:{parent}, which {self._ref} continues, was deleted meanwhile; discard this import"
            )
        variants = {} if self.parent is None else dict(self.parent.variants)
        added = self._finished()
        self.check_variants(self._added)
        if not added:
            raise OptionError(f"there is nothing to publish as {self._ref}; add a variant first")
        dataset = sealed(
            Dataset(
                format=1,
                id=self._ref.id,
                version=self._version,
                created=now(),
                variants={**variants, **added},
                parent=parent,
                description=self._description,
            )
        )
        try:
            self._files.create(self._manifest, encode_file(dataset))
        except FileExistsError as error:
            raise self._published() from error
        with suppress(OSError):  # the version is published, and files left over do no harm
            for folder in (f"{kind}/{self._version}/{name}" for kind in ("meta", "data") for name in added):
                self._files.sweep(folder)
            self._files.remove(self._folder)
        return dataset

    def discard(self) -> None:
        """Remove everything that imports wrote for this version. Raises PublishedError if the version is published."""
        self._check_unpublished()
        for variant in self._files.children(f"data/{self._version}"):
            for pack in packs_of(self._files, f"data/{self._version}/{variant.name}"):
                self._files.remove(pack)
            tidy_up(self._files, self._version, variant.name)
        self._files.remove(f"meta/{self._version}")
        self._files.remove(self._folder)
        remove_empty(self._store, self._ref.id)

    def _record(
        self,
        importer: Importer,
        base: StoredDataset | None,
        shard_size: int | None,
        checksum: ChecksumAlgorithm | None,
    ) -> DraftRecord:
        root = "data" if importer.root is None else without_login(importer.root)
        if base is not None:
            shard_size, root = base.variant.shard_size, base.variant.data
        return DraftRecord(
            format=1,
            data=root.removeprefix(f"{self._files.url}/"),
            shard_size=shard_size or SHARD_SIZE,
            source=dict(importer.source),
            checksum=checksum,
            parent=None if self.parent is None else self.parent.version,
        )

    def _finished(self) -> dict[str, Variant]:
        found = {}
        for name in sorted(self._added | {child.name for child in self._files.children(self._folder)}):
            variant = ImportProgress(self._files, self._version, name).finished()
            if variant is None:
                raise OptionError(
                    f"the import of {self._ref}:{name} has not ended, or was discarded meanwhile; add it again to "
                    "continue it, or discard the draft"
                )
            found[name] = variant
        return found

    def _overtaken(self, ref: DatasetRef, error: OSError) -> DatasetError:
        """Return the error for a file of this draft that is missing or exists already."""
        if self._files.exists(self._manifest):
            return self._published()
        return SourceError(
            f"{ref} was written by another import at the same time, or by an earlier one of other samples: {error}; "
            "let one import run at a time, and discard what is left of an earlier one (--restart)"
        )

    def _check_unpublished(self) -> None:
        if self._files.exists(self._manifest):
            raise self._published()

    def _published(self) -> PublishedError:
        return PublishedError(
            f"{self._ref} is published in {self._files.url}, and a published version never changes; publish "
            "the next one, by appending to this one or by importing again"
        )
