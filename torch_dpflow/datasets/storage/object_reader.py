"""ObjectReader, which reads the bytes of any object by its URL."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, overload

from torch_dpflow._core.processes import PerProcess
from torch_dpflow.datasets.storage.base import (
    ByteRange,
    ObjectState,
    ReadOptions,
    Storage,
    check_directory,
    is_settled,
    matches,
    read_options_of,
)
from torch_dpflow.datasets.storage.batch_reads import (
    LOCAL_MERGE_GAP,
    MAX_MERGED,
    MAX_MERGED_LOCALLY,
    MAX_VIEWED_LOCALLY,
    Overlap,
    Read,
    plan_reads,
)
from torch_dpflow.datasets.storage.credentials import options_to_pickle
from torch_dpflow.datasets.storage.disk_cache import DiskCache
from torch_dpflow.datasets.storage.failures import with_retries
from torch_dpflow.datasets.storage.file_systems import FsspecStorage
from torch_dpflow.datasets.storage.http_storage import HttpStorage, Service
from torch_dpflow.datasets.storage.local import LocalStorage
from torch_dpflow.datasets.storage.object_stores import OSS_OPTIONS, S3_OPTIONS, OSSService, S3Service, needs_vendor
from torch_dpflow.datasets.storage.urls import check_url, file_system_of, printable_url, split_login, stored_url
from torch_dpflow.datasets.storage.web_service import WebService
from torch_dpflow.errors import (
    AccessDeniedError,
    DPFlowError,
    ObjectMissingError,
    StorageTimeoutError,
    StorageUnavailableError,
)
from torch_dpflow.log import DATASETS

#: Errors of merged ranges that each of the ranges would have too.
_FAIL_ALIKE = (AccessDeniedError, ObjectMissingError, StorageTimeoutError, StorageUnavailableError)
#: URLs of which a process remembers where they are read.
_MAX_PLACES = 4096


class ObjectReader:
    """Reader of objects of every storage: paths, `file://`, `s3://`, `oss://`, and all schemes of fsspec.

    Local files are read by `LocalStorage`, S3, OSS and web servers by `HttpStorage`, all other storages through fsspec.
    S3 and OSS are read through fsspec too if `storage_options` contains options that only the vendor's client supports,
    or if only botocore can name the bucket's server.

    Thread-safe. A forked child makes separate connections and threads. A pickle contains only the options, with or
    without the keys in them, see `options_to_pickle`.

    Args:
        storage_options: fsspec's options for the scheme: `key`, `secret`, `token`, `endpoint`, ...
        options: timeouts, retries, concurrency.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None = None, *, options: ReadOptions | None = None) -> None:
        self._storage_options = dict(storage_options or {})
        self.options = read_options_of(options)
        self._opened = PerProcess(partial(_Opened, self._storage_options, self.options))

    def read(self, url: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes `start` to `stop` (excluded; None: the end) of one object.

        Raises:
            StorageError: the object cannot be read, also after retries if the failure is transient.
            UsageError: the URL, the range or an option is not allowed, or a package is missing.
        """
        return self.read_many([ByteRange(url, start, stop)])[0]

    def read_many(self, spans: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of every range, in the order of `spans`. The reads overlap. Raises the first error."""
        results = self.read_each(spans)
        for result in results:
            if isinstance(result, DPFlowError):
                raise result
        return results  # type: ignore[return-value]

    @overload
    def read_each(self, spans: Sequence[ByteRange]) -> list[bytes | DPFlowError]: ...

    @overload
    def read_each(self, spans: Sequence[ByteRange], *, views: bool) -> list[bytes | memoryview | DPFlowError]: ...

    def read_each(self, spans: Sequence[ByteRange], *, views: bool = False) -> Any:
        """Return the bytes of every range, or its error, in the order of `spans`. The reads overlap.

        On remote storage, reads that have not begun fail if no read of the batch succeeds for `ReadOptions.deadline_s`.

        Args:
            views: allow memoryviews in place of bytes for ranges of local files, for callers that copy the bytes.
        """
        return _ReadBatch(self._opened.get(), spans, self.options).read(views)

    def look_each(self, spans: Sequence[ByteRange]) -> list[ObjectState | DPFlowError]:
        """Return size and state of the object of each range, or the error of its request. The requests overlap.

        A size or state that differs from the one that its range expects is an error.
        """
        opened = self._opened.get()
        results: list[ObjectState | DPFlowError] = [ObjectState(None, None)] * len(spans)

        def look(position: int) -> None:
            try:
                storage = opened.place(spans[position].url).storage
                attempt = partial(storage.look, spans[position])
                results[position] = with_retries(attempt, self.options, is_remote=storage.is_remote)
            except DPFlowError as error:
                results[position] = error

        is_remote = any("://" in span.url and not span.url.startswith(("file:", "local:")) for span in spans)
        opened.overlap.run(look, range(len(spans)), is_remote=is_remote)
        return results

    def node_of(self, url: str) -> str:
        """Return the server of an object, see `Storage.node`. Different endpoints are different servers."""
        return self._opened.get().place(url).node

    @property
    def has_cache(self) -> bool:
        """Whether there is a disk cache, which keeps ranges of remote objects."""
        return self._opened.get().cache is not None

    def keep(self, span: ByteRange, data: bytes) -> None:
        """Put `data`, the bytes of the range `span`, into the disk cache.

        Does nothing for local files or without a cache, if the checksum is wrong, or if `span` has neither a checksum
        nor a state for which `is_settled` is true.
        """
        opened = self._opened.get()
        key = opened.place(span.url).cache_key(span)
        if key is not None:
            opened.keep(key, span, data)

    def close(self) -> None:
        """Close this process's connections and end its threads. The reader can be used again."""
        opened = self._opened.drop()
        if opened is not None:
            opened.close()

    def __enter__(self) -> ObjectReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ObjectReader, options=self.options), (options_to_pickle(self._storage_options),)


class _ObjectPlace(NamedTuple):
    """Where the object of a URL is read, and how its ranges are named in the disk cache."""

    storage: Storage
    node: str
    #: The begin of the names; None if the ranges are not kept there
    cache_name: str | None

    def cache_key(self, span: ByteRange) -> str | None:
        """Return the name of a range in the disk cache; None if it is not kept there."""
        identity = span.checksum or span.state
        if self.cache_name is None or identity is None:
            return None
        return f"{self.cache_name}\n{span.start}\n{span.stop}\n{identity}"


class _Opened:
    """The storages and threads of one process."""

    def __init__(self, storage_options: Mapping[str, Any], options: ReadOptions) -> None:
        #: By the storage's address, see `_address_of`.
        self._storages: dict[str, Storage] = {}
        self.overlap = Overlap(options.concurrency)
        self.cache = disk_cache(options)
        opening = partial(_place, self._storages, storage_options, options, self.cache is not None)
        #: Returns the place where an object is read. Raises the errors of `open_storage`.
        self.place = functools.lru_cache(_MAX_PLACES)(opening)

    def keep(self, key: str, span: ByteRange, data: bytes | memoryview) -> None:
        """Put bytes from the storage into the disk cache if they match their checksum, or have a settled state."""
        is_fixed = is_settled(span.state or "") if span.checksum is None else matches(data, span.checksum)
        if is_fixed and self.cache is not None:
            self.cache.put(key, data)

    def close(self) -> None:
        self.overlap.close()
        for storage in self._storages.values():
            storage.close()


def _place(
    storages: dict[str, Storage], storage_options: Mapping[str, Any], options: ReadOptions, has_cache: bool, url: str
) -> _ObjectPlace:
    address = _address_of(url)
    storage = storages.get(address)
    if storage is None:
        check_url(url)  # before connecting; later URLs are checked by their storages
        storage = storages.setdefault(address, open_storage(address, storage_options, options))
    node = storage.node(url)
    return _ObjectPlace(storage, node, f"{node}\n{stored_url(url)}" if has_cache and storage.is_remote else None)


def _address_of(url: str) -> str:
    """Return the identity of a URL's storage: `file_system_of`, and more if users or buckets need separate storages."""
    address = file_system_of(url)
    if "@" in url:
        clean, login = split_login(url)
        return "/".join(url.split("/", 3)[:3]) if login and "::" not in clean else address
    if ("-s3/" in url or "://arn:" in url) and address in ("s3", "s3a"):
        bucket = url.partition("://")[2].partition("/")[0]
        return f"{address}://{bucket}" if needs_vendor(bucket) else address
    return address


class _ReadBatch:
    """Reads of ranges that overlap. It is used once.

    Each read has its own deadline, but reads do not all run at once: if the storage hangs, each later read would wait
    for its own deadline. So the batch has a deadline too. Each successful read extends it: a large batch may take any
    time.
    """

    def __init__(self, opened: _Opened, spans: Sequence[ByteRange], options: ReadOptions) -> None:
        self._opened = opened
        self._spans = spans
        self._options = options
        self._views = False
        self._results: list[bytes | memoryview | DPFlowError] = [b""] * len(spans)
        #: Places of the ranges that have not been found yet, by position.
        self._places: dict[int, _ObjectPlace] = {}
        #: Under which they are kept in the disk cache.
        self._keys: dict[int, str] = {}

    def read(self, views: bool) -> list[bytes | memoryview | DPFlowError]:
        """Return the bytes of every range, or its error, see `ObjectReader.read_each`."""
        spans, places, opened = self._spans, self._places, self._opened
        for position, span in enumerate(spans):
            if span.start != span.stop:
                try:
                    places[position] = opened.place(span.url)
                except DPFlowError as error:
                    self._results[position] = error
        if opened.cache is not None:
            opened.overlap.run(self._take_cached, [*places], is_remote=False)
        if not places:
            return self._results
        is_remote = False
        for place in places.values():
            is_remote = is_remote or place.storage.is_remote
        if len(places) < 2:
            reads = [Read(spans[position], [position]) for position in places]
        else:
            self._views = views and not is_remote
            reads = plan_reads(
                {position: spans[position] for position in places},
                node=lambda url: opened.place(url).node,
                merge_gap=self._options.merge_gap if is_remote else min(self._options.merge_gap, LOCAL_MERGE_GAP),
                max_merged=MAX_MERGED if is_remote else MAX_VIEWED_LOCALLY if self._views else MAX_MERGED_LOCALLY,
            )
        self._limit = monotonic() + self._options.deadline_s
        opened.overlap.run(self._fetch, reads, is_remote=is_remote)
        return self._results

    def _take_cached(self, position: int) -> None:
        key = self._places[position].cache_key(self._spans[position])
        if key is None or self._opened.cache is None:
            return
        found = self._opened.cache.get(key)
        if found is None:
            self._keys[position] = key
        else:
            self._results[position] = found
            del self._places[position]

    def _fetch(self, read: Read) -> None:
        """Store the parts of one read. If merged ranges fail, read each by itself."""
        storage = self._places[read.positions[0]].storage
        try:
            if storage.is_remote and monotonic() >= self._limit:
                raise StorageTimeoutError(
                    f"{read.span}: the storage returned nothing of this batch within "
                    f"deadline_s={self._options.deadline_s:g}, so the rest of it was not requested"
                )
            data: bytes | memoryview = with_retries(
                partial(storage.fetch, read.span),
                self._options,
                is_remote=storage.is_remote,
                deadline=self._limit,
            )
            self._limit = monotonic() + self._options.deadline_s
        except DPFlowError as error:
            for position in read.positions:
                if len(read.positions) == 1 or isinstance(error, _FAIL_ALIKE):
                    self._results[position] = error
                else:
                    self._fetch(Read(self._spans[position], [position]))
            return
        if self._views and len(read.positions) > 1:
            data = memoryview(data)
        for position in read.positions:
            self._results[position] = content = read.cut(self._spans[position], data)
            if position in self._keys:
                self._opened.keep(self._keys[position], self._spans[position], content)


def disk_cache(options: ReadOptions) -> DiskCache | None:
    """Return the disk cache in the directory of the options, else of DPFLOW_CACHE_DIR; None if neither is given.

    Raises OptionError if the directory is a URL.
    """
    directory = options.cache_dir or os.environ.get("DPFLOW_CACHE_DIR")
    if not directory:
        return None
    assert not isinstance(options.cache_bytes, str)
    return DiskCache(check_directory("DPFLOW_CACHE_DIR", directory), options.cache_bytes)


@functools.lru_cache(maxsize=64)
def _warn_without_state(storage: str) -> None:
    DATASETS.warning(
        "%s reports no state of its objects, neither an ETag nor a modification time: an object that is replaced while "
        "it is read is noticed by its size only; read it with checksum=, or serve it by a storage that reports one",
        storage,
    )


def warn_without_state(url: str) -> None:
    """Log a warning that the storage of `url` reports no state of its objects. It is logged once for each storage."""
    _warn_without_state("/".join(printable_url(url).split("/", 3)[:3]))


def open_storage(address: str, storage_options: Mapping[str, Any], options: ReadOptions) -> Storage:
    """Return the storage that reads `address`: a URL, or a result of `file_system_of` such as "s3".

    Raises:
        UsageError: there is no such storage, it does not allow an option, or its package is not installed.
        StorageError: the storage cannot be reached.
    """
    scheme = address.partition("://")[0]
    if scheme in ("file", "local"):
        return LocalStorage(options.longest)
    if scheme in ("http", "https"):
        storage_options = {**storage_options, **split_login(address)[1]}
    service = service_of(address, storage_options)
    if service is not None:
        return HttpStorage(service, options)
    return FsspecStorage(address, storage_options, options)


def service_of(address: str, storage_options: Mapping[str, Any]) -> Service | None:
    """Return the service of `address`, a result of `file_system_of`; None if `HttpStorage` does not read it.

    Raises UsageError, among others for options that the service does not allow.
    """
    scheme, _, bucket = address.partition("://")
    if scheme in ("s3", "s3a") and storage_options.keys() <= S3_OPTIONS and not needs_vendor(bucket):
        service = S3Service(storage_options)
        return None if service.needs_vendor else service
    if scheme == "oss" and storage_options.keys() <= OSS_OPTIONS:
        return OSSService(storage_options)
    if scheme in ("http", "https"):
        # Always: fsspec's own client does not check that a response has the requested range.
        return WebService(storage_options)
    return None
