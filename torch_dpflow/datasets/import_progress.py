"""Files of an unfinished import, under `drafts/<version>/<variant>/` in a dataset's directory.

::

    draft.json      DraftRecord: what is being imported; written first
    ms-<n>.json     ImportedShard: shard n is written, with all data of its samples
    done.json       ImportedVariant: all shards are written; publishing needs nothing else

They are small and each is written once, so a kill costs one shard of work, and what an import writes is proportional to
its samples. They are removed when the version is published.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count, takewhile
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.spec import (
    Dataset,
    DatasetShardMeta,
    Label,
    Location,
    ShardEntry,
    SpecStruct,
    StoreRecord,
    Variant,
    WholeNumber,
    decode_file,
    encode_file,
)
from torch_dpflow.errors import DamagedStoreError, OptionError

#: The file that is written first.
RECORD = "draft.json"
#: Files that are read concurrently, as there may be thousands, each with a round trip.
_READ_THREADS = 16


class DraftRecord(SpecStruct, frozen=True, kw_only=True, tag_field="kind", tag="dataset-draft"):
    """Source and settings of an import. An import is continued only if all of them are the same."""

    format: Literal[1]
    data: Location
    shard_size: Annotated[int, msgspec.Meta(ge=1)]
    source: dict[str, Any]
    checksum: str | None = None
    parent: Label | None = None


class ImportedShard(SpecStruct, frozen=True, kw_only=True, tag_field="kind", tag="dataset-draft-shard"):
    """One shard is written."""

    format: Literal[1]
    shard: WholeNumber
    samples: WholeNumber
    entry: ShardEntry


class ImportedVariant(SpecStruct, frozen=True, kw_only=True, tag_field="kind", tag="dataset-draft-done"):
    """A whole variant is written."""

    format: Literal[1]
    variant: Variant


_Note = TypeVar("_Note", DraftRecord, ImportedShard, ImportedVariant)


class ImportProgress:
    """Progress of the import of one variant, kept in the store itself. `files` is the dataset's directory."""

    def __init__(self, files: Files, version: str, variant: str) -> None:
        self._files = files
        self._folder = f"drafts/{version}/{variant}"

    def begin(self, record: DraftRecord) -> None:
        """Record what is being imported, or check it against the record.

        Raises:
            OptionError: an import of something else has begun and not ended.
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
        """Return the shards that are written, from number `first` on without a gap."""
        present = {child.name for child in self._files.children(self._folder)}
        names = list(takewhile(present.__contains__, (f"ms-{number}.json" for number in count(first))))
        with ThreadPoolExecutor(_READ_THREADS, "dpflow-progress") as threads:
            notes = threads.map(self._files.read, [f"{self._folder}/{name}" for name in names])
            return [self._decode(note, ImportedShard, name) for name, note in zip(names, notes)]

    def note_shard(self, shard: ImportedShard) -> None:
        """Record that a shard is written."""
        self._files.write(f"{self._folder}/ms-{shard.shard}.json", encode_file(shard))

    def record(self) -> DraftRecord | None:
        """Return the record; None if nothing is being imported, or it was discarded."""
        return self._noted(RECORD, DraftRecord)

    def finished(self) -> Variant | None:
        """Return the whole variant if it is written and was not discarded since."""
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
    """Return the JSON schema (draft 2020-12) of each kind of file: published files, then those of imports."""
    return {str(kind.__struct_config__.tag): msgspec.json.schema(kind) for kind in _KINDS}
