"""Sources of cached datasets: their identity, and what a server needs to read them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import check_type
from torch_dpflow.datasets.sample_reader import Sample, SampleReader
from torch_dpflow.datasets.spec import SampleMeta, ShardEntry
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.datasets.store import DatasetStore, StoredDataset
from torch_dpflow.errors import (
    DamagedStoreError,
    DPFlowError,
    ObjectMissingError,
    OptionError,
    OptionTypeError,
)
from torch_dpflow.pool.array_files import ArrayReader, array_identity, array_layout
from torch_dpflow.pool.messages import AnySource, ArraySource, DatasetSource
from torch_dpflow.pool.planning.layout import SampleLayout, identity

#: Metadata shards read at the same time.
_READ_THREADS = 16
#: Samples of a dataset that a server reads at the same time.
_CONCURRENCY = 64
#: Attempts of a read before its samples count as failed and are read again later.
_ATTEMPTS = 5
_SOURCES: msgspec.msgpack.Decoder[AnySource] = msgspec.msgpack.Decoder(AnySource)


class RecordReader(Protocol):
    """Reads records of a dataset; those of arrays are blocks of rows."""

    def read_each(self, indices: Sequence[int]) -> Sequence[Sample | DPFlowError]:
        """Return each record, or its error."""

    def close(self) -> None:
        """Close what was opened."""


class StripePart(NamedTuple):
    """Stripe of a stored dataset: its metadata shard, and where its samples lie."""

    dataset: str
    data: str
    shard: ShardEntry


class OpenedSource(NamedTuple):
    """An opened source: layout and reader, as a server needs them."""

    url: str
    records: SampleLayout
    #: Whether each record's length is known.
    known: npt.NDArray[np.bool_]
    #: None if clients push the records.
    reader: RecordReader | None
    #: Parts of stripes that versions may share: equal parts hold the same objects.
    parts: Sequence[StripePart] = ()


def identity_of(stored: StoredDataset | ArraySource) -> bytes:
    """Return the identity of a variant, which never changes once published, or of an array."""
    _check_kind(stored)
    if isinstance(stored, ArraySource):
        return array_identity(stored)
    return identity("files", {"url": stored.url, "digest": stored.dataset.digest, "variant": stored.variant_name})


def source_of(stored: StoredDataset | ArraySource, data_options: Mapping[str, Any] | None) -> AnySource:
    """Return what a server needs to read it.

    Raises OptionTypeError for options that are not text, numbers or lists of such.
    """
    _check_kind(stored)
    source: AnySource = (
        stored
        if isinstance(stored, ArraySource)
        else DatasetSource(
            store=stored.url.removesuffix(f"/{stored.dataset.id}"),
            options=stored.options,
            ref=str(stored.ref),
            data_options=None if data_options is None else dict(data_options),
        )
    )
    try:
        return _SOURCES.decode(msgspec.msgpack.encode(source))
    except (TypeError, msgspec.MsgspecError) as error:
        raise OptionTypeError(
            f"options of a storage that a server of the pool reads have to be text, numbers or lists of such: {error}"
        ) from None


def open_source(source: AnySource, wanted: bytes) -> OpenedSource:
    """Open a source for reading. Raises DatasetError, StorageError, or OptionError if it is not valid."""
    if isinstance(source, ArraySource):
        blocks = array_layout(source).blocks()
        _check_name(array_identity(source), wanted, source.ref)
        known = np.ones(blocks.records, dtype=bool)
        where = "memory of a client" if source.is_pushed else without_login(source.url)
        return OpenedSource(where, blocks, known, None if source.is_pushed else ArrayReader(source))
    stored = DatasetStore(source.store, **source.options).open(source.ref)
    _check_name(identity_of(stored), wanted, f"{source.ref} in {source.store}")
    records, known = sample_layout(stored)
    # Waiting clients read from storage themselves, up to their deadline, if it does not answer.
    limits = ReadOptions(concurrency=_CONCURRENCY, attempts=_ATTEMPTS)
    reader = SampleReader(stored, storage_options=source.data_options, read_options=limits)
    variant = stored.variant
    parts = [StripePart(stored.url, variant.data, one) for one in variant.shards]
    return OpenedSource(stored.url, records, known, reader, parts)


def samples_in(source: AnySource, records: int) -> int:
    """Return the number of samples in this number of records, for display: a record of an array is a block of rows."""
    if isinstance(source, ArraySource):
        return min(records * array_layout(source).per_block, source.shape[0])
    return records


def _check_kind(stored: object) -> None:
    allowed = "what DatasetStore.open, open_array or DataClient.push has returned"
    check_type("stored", stored, (StoredDataset, ArraySource), allowed)


def _check_name(found: bytes, wanted: bytes, what: str) -> None:
    if found != wanted:
        raise DamagedStoreError(f"{what} is another version than the requested one; open it again")


def all_samples(stored: StoredDataset) -> Iterator[SampleMeta]:
    """Yield as `StoredDataset.samples`, reading several metadata shards at the same time."""
    with ThreadPoolExecutor(_READ_THREADS, "dpflow-read") as threads:
        for shard in threads.map(stored.shard, range(len(stored.variant.shards))):
            yield from shard.samples


def sample_layout(stored: StoredDataset) -> tuple[SampleLayout, npt.NDArray[np.bool_]]:
    """Return the layout of the samples, and whether each length is known.

    Reads all metadata; raises as `StoredDataset.shard`.
    """
    lengths = [-1 if one.length is None else one.length for one in all_samples(stored)]
    known = np.array(lengths, dtype=np.int64)
    return SampleLayout(identity_of(stored), np.maximum(known, 0), stored.variant.shard_size), known >= 0


class RecordPaths:
    """Record numbers by path, as in the dataset's metadata: 16 bytes per record.

    Reads all metadata when it is made. Raises as `StoredDataset.shard`.
    """

    def __init__(self, stored: StoredDataset) -> None:
        self._stored = stored
        digests = np.fromiter((_digest(one.path) for one in all_samples(stored)), np.uint64, len(stored))
        self._order = np.argsort(digests, kind="stable")
        self._digests = digests[self._order]

    def number(self, path: str) -> int:
        """Return the number of the record at this path. Reads its metadata again, so no digest is trusted.

        Raises ObjectMissingError if there is none, OptionError if several lie there.
        """
        first, last = (np.searchsorted(self._digests, np.uint64(_digest(path)), side) for side in ("left", "right"))
        if last - first > 1:
            raise OptionError(
                f"{last - first} records of {self._stored.ref} lie at {path!r}; read them by number, the first is "
                f"{self._order[first]}"
            )
        if last == first or self._stored.sample(int(self._order[first])).path != path:
            raise ObjectMissingError(
                f"no record of {self._stored.ref} lies at {path!r}; give the path that its metadata has, as "
                f"{self._stored.sample(0).path!r}, or a number"
            )
        return int(self._order[first])


def _digest(path: str) -> int:
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")
