"""UDR, the unified dataset reader: any sample of a stored dataset by number (thesis, algorithm 3.1)."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from torch_dpflow._core.checks import check_int, check_type
from torch_dpflow._core.processes import PerProcess
from torch_dpflow.datasets.shard_cache import CompactShards, LoadedShard, ShardCache, shard_cost
from torch_dpflow.datasets.spec import SampleMeta, SamplePlace, url_below
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.base import matches
from torch_dpflow.datasets.storage.credentials import options_to_pickle
from torch_dpflow.datasets.storage.urls import join_url
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.errors import (
    ChecksumError,
    DamagedStoreError,
    DPFlowError,
    ObjectMissingError,
    OptionError,
    OptionTypeError,
    TruncatedObjectError,
)
from torch_dpflow.log import DATASETS

#: A sample: its bytes as they are in the storage, and its annotations.
Sample = tuple[bytes, dict[str, Any]]
OnError = Literal["raise", "skip"]

#: Attributes that a pickle does not carry.
_OF_PROCESS = ("_opened", "_compact")


def check_storage_options(options: object) -> None:
    """Raise OptionTypeError unless `options` is None, or a mapping of names."""
    if options is not None:
        allowed = "a dict of fsspec's options, or None"
        check_type("storage_options", options, Mapping, allowed)
        if not all(isinstance(name, str) for name in options):  # type: ignore[attr-defined]
            raise OptionTypeError(f"storage_options={options!r:.80} has keys that are no strings; give {allowed}")


def check_how_to_read(storage_options: object, read_options: object, metadata_cache: object, check: object) -> None:
    """Check the arguments of readers of stored datasets. Raises OptionError, OptionTypeError."""
    check_storage_options(storage_options)
    if read_options is not None:
        check_type("read_options", read_options, ReadOptions, "a ReadOptions, or None")
    check_int("metadata_cache", metadata_cache, minimum=1)
    if check is not None:
        check_type("check", check, bool, "True, False or None")


@runtime_checkable
class Through(Protocol):
    """A source of samples of a stored dataset that is nearer than its storage.

    It has compared the samples with their checksums. Its pickle can be used in other processes.
    """

    def read(self, numbers: Sequence[int], lengths: Sequence[int | None]) -> Sequence[bytes | None]:
        """Return the bytes of these samples; None for those that the source does not have.

        Args:
            lengths: bytes of each sample; None if unknown.
        """

    def is_of(self, stored: StoredDataset) -> bool:
        """Return whether the source has samples of this dataset."""

    def close(self) -> None:
        """Close what this process has opened. The source may be used again."""


class SampleReader:
    """`DatasetReader` without torch, for processes that read samples and make no batches of them."""

    def __init__(
        self,
        stored: StoredDataset,
        *,
        storage_options: Mapping[str, Any] | None = None,
        read_options: ReadOptions | None = None,
        metadata_cache: int = 64 << 20,
        check: bool | None = None,
        on_error: OnError = "raise",
        through: Through | None = None,
    ) -> None:
        check_type("stored", stored, StoredDataset, "the result of DatasetStore.open")
        check_how_to_read(storage_options, read_options, metadata_cache, check)
        if on_error not in get_args(OnError):
            raise OptionError(f"on_error={on_error!r}: give one of {get_args(OnError)}")
        if through is not None:
            check_type("through", through, Through, "the result of DataClient.samples(stored)")
            if not through.is_of(stored):
                raise OptionError(
                    f"through= has samples of another dataset than {stored.ref}; give DataClient.samples of this one"
                )
        self.stored = stored
        self._storage_options = None if storage_options is None else dict(storage_options)
        self._read_options = read_options if read_options is not None else ReadOptions()
        self._metadata_cache = metadata_cache
        self._check = check
        self._on_error = on_error
        self._through = through
        #: Given URLs of objects by their URLs in the metadata, where the two differ
        self._given_urls: dict[str, str] = {}
        self._prepare()

    def __len__(self) -> int:
        return self.stored.variant.samples

    def __getitem__(self, index: int) -> Sample:
        return self.read(index)

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples of a batch, in order. `on_error` decides about those that cannot be read."""
        samples: list[Sample] = []
        failure: DPFlowError | None = None
        for index, sample in zip(indices, self.read_each(indices), strict=True):
            if not isinstance(sample, DPFlowError):
                samples.append(sample)
                continue
            if self._on_error == "raise":
                raise sample
            failure = sample
            self._opened.get().skip(self.stored, index, sample)
        if failure is not None and not samples:
            raise failure
        return samples

    def read(self, index: int) -> Sample:
        """Return sample `index`; a negative one counts from the end.

        Raises:
            IndexError: there is no such sample.
            DatasetError: its metadata is damaged.
            StorageError: its object cannot be read, or does not match the metadata.
        """
        (sample,) = self.read_each([index])
        if isinstance(sample, DPFlowError):
            raise sample
        return sample

    def read_each(self, indices: Sequence[int]) -> list[Sample | DPFlowError]:
        """Return each sample, or its error. Raises IndexError."""
        opened = self._opened.get()
        numbers = self._wrapped(indices)
        described = self._describe(opened, numbers)
        wanted = [(number, what.span) for number, what in zip(numbers, described) if isinstance(what, Described)]
        contents = iter(self._contents(opened.data, wanted))
        return [what.sample(*next(contents)) if isinstance(what, Described) else what for what in described]

    def _contents(
        self, data: ObjectReader, wanted: Sequence[tuple[int, ByteRange]]
    ) -> list[tuple[bytes | DPFlowError, bool]]:
        """Return the bytes of these samples, or the error of each, and whether they need no further check."""
        if self._through is None:
            return [(one, False) for one in data.read_each([span for _, span in wanted])]
        found = self._through.read([number for number, _ in wanted], [span.length for _, span in wanted])
        missing = [span for content, (_, span) in zip(found, wanted) if content is None]
        rest = iter(data.read_each(missing) if missing else ())
        # The source has compared them with their checksums when they came from storage.
        is_checked = not self._check
        return [(next(rest), False) if content is None else (content, is_checked) for content in found]

    @property
    def skipped(self) -> dict[str, int]:
        """The number of samples that this process has left out, by the error's class."""
        return dict(self._opened.get().skipped)

    def close(self) -> None:
        """Close this process's connections and end its threads. The reader may be used again."""
        if self._through is not None:
            self._through.close()
        opened = self._opened.drop()
        if opened is not None:
            opened.close()

    def _wrapped(self, indices: Sequence[int]) -> list[int]:
        count = self.stored.variant.samples
        numbers = [operator.index(index) for index in indices]
        for number in numbers:
            if not -count <= number < count:
                raise IndexError(f"sample {number} is out of range; {self.stored.ref} has {count} samples")
        return [number % count for number in numbers]

    def _describe(self, opened: _OpenedVariant, indices: Sequence[int]) -> list[Described | DPFlowError]:
        """Describe each sample. Each shard is looked up once."""
        locate = self.stored.variant.locate
        places = [locate(index) for index in indices]
        described: list[Described | DPFlowError | None] = [None] * len(indices)
        for position, meta in opened.metas(places):
            described[position] = self._described(opened, meta)
        return [what for what in described if what is not None]

    def _described(self, opened: _OpenedVariant, meta: SampleMeta | DPFlowError) -> Described | DPFlowError:
        if isinstance(meta, DPFlowError):
            return meta
        try:
            url = opened.data_url(meta)
            span = _span(self._given_urls.get(url, url), meta, is_checked=self._check is not False)
            # A CRC of 100 kB takes 35 µs, a hundredth of decoding such an image; few disks have checksums of their own.
            checksum = None if self._check is False else meta.checksum
            return Described(span, meta.length, checksum, meta.fields())
        except DPFlowError as error:
            return error

    def _open(self) -> _OpenedVariant:
        return _OpenedVariant(
            self.stored, self._storage_options, self._read_options, self._metadata_cache, self._compact
        )

    def _prepare(self) -> None:
        self._opened = PerProcess(self._open)
        shards = self.stored.variant.shards
        # Not on first use, so that forked children share it.
        self._compact = CompactShards(len(shards), min(self._metadata_cache, sum(shard.bytes for shard in shards)))

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_PROCESS}
        options = self._storage_options
        return {**state, "_storage_options": None if options is None else options_to_pickle(options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.stored.ref}, {len(self)} samples)"


@dataclass(slots=True)
class Described:
    """A sample's place, expected length and checksum, and annotations. It refers to no shard."""

    span: ByteRange
    length: int | None
    #: None: not checked
    checksum: str | None
    fields: dict[str, Any]

    def sample(self, content: bytes | DPFlowError, is_checked: bool) -> Sample | DPFlowError:
        """Return the sample with these bytes, or their error. `is_checked`: they match the checksum."""
        if isinstance(content, DPFlowError):
            return content
        if self.length is not None and len(content) != self.length:
            text = f"{self.span}: the object has {len(content)} bytes, its dataset says {self.length}"
            kind = TruncatedObjectError if len(content) < self.length else ChecksumError
            return kind(f"{text}; it was replaced or cut short: restore it, or publish a new version")
        if self.checksum is not None and not is_checked and not matches(content, self.checksum):
            return ChecksumError(f"{self.span}: the bytes do not match {self.checksum}; the object was altered")
        return content, self.fields


def _sample_of(shard: LoadedShard, offset: int) -> SampleMeta | DPFlowError:
    return shard if isinstance(shard, DPFlowError) else shard.samples[offset]


def _span(url: str, meta: SampleMeta, *, is_checked: bool) -> ByteRange:
    state = meta.revision if is_checked else None
    if meta.offset is None:
        return ByteRange(url, size=meta.length, state=state, checksum=meta.checksum)
    assert meta.length is not None
    return ByteRange(url, meta.offset, meta.offset + meta.length, state=state, checksum=meta.checksum)


class _OpenedVariant:
    """A reader's connections and caches in one process."""

    def __init__(
        self,
        stored: StoredDataset,
        storage_options: Mapping[str, Any] | None,
        read_options: ReadOptions,
        metadata_cache: int,
        compact: CompactShards,
    ) -> None:
        self._stored = stored
        self._compact = compact
        self._metadata = ObjectReader(stored.options, options=read_options)
        is_same = storage_options is None or storage_options == stored.options
        self.data = self._metadata if is_same else ObjectReader(storage_options, options=read_options)
        self.shards = ShardCache(self._load, lambda number: shard_cost(stored.variant, number), metadata_cache)
        self.skipped: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._root: str | None = None

    def metas(self, places: Sequence[SamplePlace]) -> Iterator[tuple[int, SampleMeta | DPFlowError]]:
        """Yield the metadata of the sample at each place, with the place's position."""
        if len(places) == 1:
            decoded = self.shards.kept(places[0].shard)
            if decoded is not None:
                yield 0, decoded.samples[places[0].offset]
                return
        by_shard: dict[int, list[int]] = {}
        for position, place in enumerate(places):
            by_shard.setdefault(place.shard, []).append(position)
        for number in [number for number in by_shard if number not in self.shards]:
            kept = self._compact.get(number, [places[position].offset for position in by_shard[number]])
            if kept is not None:
                yield from zip(by_shard.pop(number), kept, strict=True)
        for portion in self.shards.portions(list(by_shard)):
            for number, shard in portion.items():
                for position in by_shard[number]:
                    yield position, _sample_of(shard, places[position].offset)

    def data_url(self, meta: SampleMeta) -> str:
        """Like `StoredDataset.data_url`, but several times as fast. Raises DamagedStoreError."""
        if self._root is None:
            self._root = url_below(self._stored.url, self._stored.variant.data)
        return url_below(self._root, meta.path)

    def _load(self, numbers: Sequence[int]) -> list[LoadedShard]:
        dataset, name = self._stored.dataset, self._stored.variant_name
        urls = [join_url(self._stored.url, dataset.shard_path(name, number)) for number in numbers]
        entries = [self._stored.variant.shards[number] for number in numbers]
        contents = self._metadata.read_each(
            [ByteRange(url, checksum=f"sha256:{entry.sha256}") for url, entry in zip(urls, entries, strict=True)]
        )
        return [self._decode(number, url, data) for number, url, data in zip(numbers, urls, contents)]

    def _decode(self, number: int, url: str, data: bytes | DPFlowError) -> LoadedShard:
        if isinstance(data, ObjectMissingError):
            return DamagedStoreError(f"{url} is missing; restore it from a copy")
        if isinstance(data, DPFlowError):
            return data
        try:
            shard = self._stored.dataset.decode_shard(self._stored.variant_name, number, data, url=url)
        except DPFlowError as error:
            return error
        self._compact.put(number, shard.samples)
        return shard

    def skip(self, stored: StoredDataset, index: int, error: DPFlowError) -> None:
        with self._lock:
            self.skipped[type(error).__name__] += 1
        # As text, because a handler that keeps records would keep the frames of the error alive.
        DATASETS.warning("%s, sample %d is left out: %s: %s", stored.ref, index, type(error).__name__, str(error))

    def close(self) -> None:
        self.data.close()
        self._metadata.close()
