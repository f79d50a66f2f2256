"""Sources of cached datasets: their identities and descriptions, opening them, comparing cached samples with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import check_type
from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.index import Index
from torch_dpflow.datasets.sample_reader import Sample, SampleReader, SampleTable
from torch_dpflow.datasets.spec import DatasetRef, SampleMeta, ShardEntry
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.datasets.store import DatasetStore, StoredDataset
from torch_dpflow.datasets.versions import Problem
from torch_dpflow.errors import (
    DamagedStoreError,
    DPFlowError,
    ObjectMissingError,
    OptionError,
    OptionTypeError,
    UsageError,
)
from torch_dpflow.pool.array_files import ArrayReader, array_identity, array_layout
from torch_dpflow.pool.messages import AnySource, ArraySource, DatasetSource
from torch_dpflow.pool.planning.layout import SampleLayout, identity
from torch_dpflow.pool.reader.pool_reader import PoolReader
from torch_dpflow.pool.transport.address import AddressLike, find_address
from torch_dpflow.pool.transport.control_connection import PoolConnection

#: Metadata shards read at the same time.
_READ_THREADS = 16
#: Samples of an index in a stripe.
_INDEX_STRIPE = 1000
#: Samples of a dataset that a server reads at the same time.
_CONCURRENCY = 64
#: Attempts of a read before its samples count as failed and are read again later.
_ATTEMPTS = 5
_SOURCES: msgspec.msgpack.Decoder[AnySource] = msgpack_decoder(AnySource)


class RecordReader(Protocol):
    """Reader of records from storage. A record is a sample of a dataset, or a block of rows of an array."""

    def read_each(self, indices: Sequence[int]) -> Sequence[Sample | DPFlowError]:
        """Return (bytes, metadata) for each record, or the error of reading it."""

    def close(self) -> None:
        """Close all connections and files."""


class StripePart(NamedTuple):
    """Key of a stripe of a stored dataset. Stripes with equal keys have the same samples, so versions can share one."""

    dataset: str
    data: str
    shard: ShardEntry


class OpenedSource(NamedTuple):
    """Opened source of a cached dataset: the layout of its records, and a reader that reads them from storage."""

    url: str
    records: SampleLayout
    #: Whether each record's length is known.
    known: npt.NDArray[np.bool_]
    #: None if clients push the records.
    reader: RecordReader | None
    #: Key of each stripe; empty if no other version can share stripes.
    parts: Sequence[StripePart] = ()


def identity_of(stored: SampleTable | ArraySource) -> bytes:
    """Return the identity of a stored dataset or an array: 16 bytes, under which the pool caches it."""
    _check_kind(stored)
    if isinstance(stored, ArraySource):
        return array_identity(stored)
    if isinstance(stored, Index):
        return identity("index", {"name": stored.name})
    return identity("files", {"url": stored.url, "digest": stored.dataset.digest, "variant": stored.variant_name})


def source_of(stored: SampleTable | ArraySource, data_options: Mapping[str, Any] | None) -> AnySource:
    """Return a description by which a server can read the dataset or array.

    data_options: fsspec's options for a dataset's data; None: the options of its store. Not used for an array.

    Raises OptionTypeError if an option cannot be sent to a server, such as an object.
    """
    _check_kind(stored)
    source: AnySource = (
        stored
        if isinstance(stored, ArraySource)
        else DatasetSource(
            store=stored.url.removesuffix(f"/{stored.ref.id}"),
            options=stored.options,
            ref=str(stored.ref),
            is_index=isinstance(stored, Index),
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
    """Open a source for reading. Raises DamagedStoreError if its identity is not `wanted`, and errors of opening it."""
    if isinstance(source, ArraySource):
        blocks = array_layout(source).blocks()
        _check_name(array_identity(source), wanted, source.ref)
        known = np.ones(blocks.records, dtype=bool)
        where = "memory of a client" if source.is_pushed else without_login(source.url)
        return OpenedSource(where, blocks, known, None if source.is_pushed else ArrayReader(source))
    stored = _open_table(source)
    _check_name(identity_of(stored), wanted, f"{source.ref} in {source.store}")
    records, known = sample_layout(stored)
    # Waiting clients read from storage themselves, up to their deadline, if it does not answer.
    limits = ReadOptions(concurrency=_CONCURRENCY, attempts=_ATTEMPTS)
    reader = SampleReader(stored, storage_options=source.data_options, read_options=limits)
    if isinstance(stored, Index):
        return OpenedSource(stored.url, records, known, reader)
    variant = stored.variant
    parts = [StripePart(stored.url, variant.data, one) for one in variant.shards]
    return OpenedSource(stored.url, records, known, reader, parts)


def _open_table(source: DatasetSource) -> SampleTable:
    if not source.is_index:
        return DatasetStore(source.store, **source.options).open(source.ref)
    version = DatasetRef.parse(source.ref).version
    assert version is not None
    return Index.open(Files(source.store, source.options), version)


def samples_in(source: AnySource, records: int) -> int:
    """Convert a number of records to a number of samples, or of rows of an array, for display."""
    if isinstance(source, ArraySource):
        return min(records * array_layout(source).per_block, source.shape[0])
    return records


def _check_kind(stored: object) -> None:
    allowed = "what DatasetStore.open, open_array or DataClient.push has returned"
    check_type("stored", stored, (StoredDataset, Index, ArraySource), allowed)


def _check_name(found: bytes, wanted: bytes, what: str) -> None:
    if found != wanted:
        raise DamagedStoreError(f"{what} is not the requested version; open it again")


def all_samples(stored: StoredDataset) -> Iterator[SampleMeta]:
    """Yield the metadata of every sample like `StoredDataset.samples`, but read several metadata shards in parallel."""
    with ThreadPoolExecutor(_READ_THREADS, "dpflow-read") as threads:
        for shard in threads.map(stored.shard, range(len(stored.variant.shards))):
            yield from shard.samples


def sample_layout(stored: SampleTable) -> tuple[SampleLayout, npt.NDArray[np.bool_]]:
    """Return the layout of the samples, and an array of flags: whether each length is known.

    Reads all metadata of a stored dataset, but only one column of an index. Raises the errors of these reads.
    """
    if isinstance(stored, Index):
        lengths, size = stored.open_rows().lengths(), _INDEX_STRIPE
    else:
        found = [-1 if one.length is None else one.length for one in all_samples(stored)]
        lengths, size = np.array(found, dtype=np.int64), stored.variant.shard_size
    return SampleLayout(identity_of(stored), np.maximum(lengths, 0), size), lengths >= 0


class RecordPaths:
    """Lookup of a record's number by its path in the dataset's metadata. Takes 16 bytes per record.

    The constructor reads all metadata. Raises the errors of `StoredDataset.shard`.
    """

    def __init__(self, stored: StoredDataset) -> None:
        self._stored = stored
        digests = np.fromiter((_digest(one.path) for one in all_samples(stored)), np.uint64, len(stored))
        self._order = np.argsort(digests, kind="stable")
        self._digests = digests[self._order]

    def number(self, path: str) -> int:
        """Return the number of the record with this path. Reads the record's metadata from storage.

        Raises ObjectMissingError if no record has this path, OptionError if several records have it.
        """
        first, last = (np.searchsorted(self._digests, np.uint64(_digest(path)), side) for side in ("left", "right"))
        if last - first > 1:
            raise OptionError(
                f"{last - first} records of {self._stored.ref} have the path {path!r}; read them by number: "
                f"the first is {self._order[first]}"
            )
        if last == first or self._stored.sample(int(self._order[first])).path != path:
            raise ObjectMissingError(
                f"no record of {self._stored.ref} has the path {path!r}; give a path of its metadata, as "
                f"{self._stored.sample(0).path!r}, or a number"
            )
        return int(self._order[first])


def _digest(path: str) -> int:
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")


#: Samples per read; or bytes of rows, but at least one block.
_AT_ONCE, _AT_ONCE_BYTES = 256, 64 << 20
#: A server is not used after this long without an answer, seconds.
_SILENCE_S = 5.0


@dataclass
class PoolComparison:
    """Counts of `verify_pool`: samples that are equal in memory and storage, and samples that are only in storage."""

    equal: int = 0
    in_storage: int = 0


def samples_of(stored: SampleTable | ArraySource) -> int:
    """Return the number of samples of a stored dataset, or of rows of an array."""
    return stored.shape[0] if isinstance(stored, ArraySource) else len(stored)


def verify_pool(
    stored: SampleTable | ArraySource,
    address: AddressLike = "auto",
    *,
    progress: Callable[[int], None] = lambda samples: None,
    compared: PoolComparison | None = None,
) -> Iterator[Problem]:
    """Compare every cached sample, or row of an array, with storage; yield problems: differences, unreadable samples.

    Args:
        progress: called with the number of samples handled so far, including samples that are not in memory.
        compared: counts to increase during the comparison.

    Raises UsageError if `stored` is not cached, OptionError if clients pushed it, PeerLostError if there is no server.
    """
    source, identity = source_of(stored, None), identity_of(stored)
    with PoolConnection(address) as connection:
        if all(one.identity != identity for one in connection.contents().datasets):
            raise UsageError(f"{stored.ref} is not in the pool; `dpflow pool list` shows what is")
    counts, samples = compared if compared is not None else PoolComparison(), samples_of(stored)
    reader, per_record, at_once = _storage_reader(stored)
    with (
        closing(reader) as storage,
        closing(PoolReader(find_address(address), source, identity, _SILENCE_S)) as memory,
    ):
        records = -(-samples // per_record)
        for first in range(0, records, at_once):
            numbers = range(first, min(first + at_once, records))
            for number, held, found in zip(numbers, memory.read(numbers), storage.read_each(numbers)):
                own = range(number * per_record, min((number + 1) * per_record, samples))
                if held is None:
                    counts.in_storage += len(own)
                    continue
                problems = [*_problems(own, held, found)]
                counts.equal += len(own) - sum(one.samples for one in problems)
                yield from problems
            progress(min(numbers.stop * per_record, samples))


def _storage_reader(stored: SampleTable | ArraySource) -> tuple[RecordReader, int, int]:
    """Return a reader of records from storage, and the numbers of samples in a record and of records per read."""
    if not isinstance(stored, ArraySource):
        return SampleReader(stored, check=True), 1, _AT_ONCE
    if stored.is_pushed:
        raise OptionError(f"{stored.ref} was pushed from memory, so there is no storage to compare it with")
    rows = array_layout(stored)
    return ArrayReader(stored), rows.per_block, max(1, _AT_ONCE_BYTES // (rows.per_block * rows.record_bytes))


def _problems(own: range, held: bytes, found: tuple[bytes, object] | DPFlowError) -> Iterator[Problem]:
    """Yield the differences in one record: one sample, or several rows of the same length."""
    if isinstance(found, DPFlowError):
        what = f"is in memory, and cannot be compared: {type(found).__name__}: {found}"
        yield Problem(own.start, len(own), what)
    elif len(held) != len(found[0]):
        yield Problem(own.start, len(own), f"has {len(held)} bytes in memory, and {len(found[0])} in storage")
    elif held != found[0]:
        size = len(held) // len(own)
        for at, sample in enumerate(own):
            mine, other = (one[at * size : (at + 1) * size] for one in (held, found[0]))
            if mine != other:
                yield Problem(sample, 1, _first_difference(mine, other))


def _first_difference(held: bytes, content: bytes) -> str:
    at = next(place for place, (one, other) in enumerate(zip(held, content)) if one != other)
    return f"byte {at} of {len(held)} is {held[at]} in memory, and {content[at]} in storage: unload it, load it again"
