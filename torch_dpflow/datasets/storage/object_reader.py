"""ObjectReader: bytes of any object, by URL."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch_dpflow._core.processes import PerProcess
from torch_dpflow.datasets.storage.base import (
    ByteRange,
    ReadOptions,
    Storage,
    check_directory,
    matches,
)
from torch_dpflow.datasets.storage.batch_reads import (
    LOCAL_MERGE_GAP,
    MAX_MERGED,
    MAX_MERGED_LOCALLY,
    MAX_VIEWED_LOCALLY,
    BatchDeadline,
    Overlap,
    Read,
    plan_reads,
)
from torch_dpflow.datasets.storage.credentials import options_to_pickle
from torch_dpflow.datasets.storage.disk_cache import DiskCache
from torch_dpflow.datasets.storage.failures import fetch_with_retries, with_retries
from torch_dpflow.datasets.storage.file_systems import FsspecStorage
from torch_dpflow.datasets.storage.http_storage import HttpStorage, Service
from torch_dpflow.datasets.storage.local import LocalStorage
from torch_dpflow.datasets.storage.object_stores import OSS_OPTIONS, S3_OPTIONS, OSSService, S3Service, needs_vendor
from torch_dpflow.datasets.storage.states import ObjectState, is_settled
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


class ObjectReader:
    """Reads objects of every storage: paths, `file://`, `s3://`, `oss://`, and all schemes of fsspec.

    S3, OSS and web servers are read by `HttpStorage`. All other storages are read through fsspec, and so are S3 and
    OSS if `storage_options` has options that only the vendor's client supports, and buckets of S3 whose servers only
    botocore can name.

    Thread-safe. A forked child makes its own connections and threads. A pickle has only the options, including keys
    in them.

    Args:
        storage_options: fsspec's options for the scheme: `key`, `secret`, `token`, `endpoint`, ...
        options: timeouts, retries, concurrency.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None = None, *, options: ReadOptions | None = None) -> None:
        self._storage_options = dict(storage_options or {})
        self.options = options if options is not None else ReadOptions()
        self._opened = PerProcess(self._open)

    def read(self, url: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes `start` to `stop` (excluded; None: the end) of one object.

        Raises:
            StorageError: a subclass for the cause; the message names the object. Transient failures have been retried.
        """
        return self._read(ByteRange(url, start, stop))

    def read_many(self, spans: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of every range, in their order. The reads overlap. Raises the first StorageError."""
        results = self.read_each(spans)
        for result in results:
            if isinstance(result, DPFlowError):
                raise result
        return results  # type: ignore[return-value]

    def read_each(self, spans: Sequence[ByteRange]) -> list[bytes | DPFlowError]:
        """Return the bytes of every range, or its error. The reads overlap.

        If no read of the batch succeeds for `deadline_s`, the reads that have not begun fail too.
        """
        return self._read_each(spans, views=False)  # type: ignore[return-value]

    def view_each(self, spans: Sequence[ByteRange]) -> Sequence[bytes | memoryview | DPFlowError]:
        """As `read_each`, for callers that copy: ranges of a local file can be views of one read, which they keep."""
        return self._read_each(spans, views=True)

    def _read_each(self, spans: Sequence[ByteRange], *, views: bool) -> Sequence[bytes | memoryview | DPFlowError]:
        if len(spans) == 1:
            return [self._result(spans[0])]
        opened = self._opened.get()
        results: list[bytes | memoryview | DPFlowError] = [b""] * len(spans)
        wanted = [position for position, span in enumerate(spans) if span.start != span.stop]
        wanted = self._take_cached(opened, spans, wanted, results)
        is_remote = any(opened.storage(url).is_remote for url in {spans[position].url for position in wanted})
        views = views and not is_remote
        reads = plan_reads(
            [spans[position] for position in wanted],
            node=opened.node,
            merge_gap=self.options.merge_gap if is_remote else min(self.options.merge_gap, LOCAL_MERGE_GAP),
            max_merged=MAX_MERGED if is_remote else MAX_VIEWED_LOCALLY if views else MAX_MERGED_LOCALLY,
        )
        limit = BatchDeadline(self.options.deadline_s)

        def store(read: Read) -> None:
            targets = [(wanted[n], spans[wanted[n]]) for n in read.positions]
            self._store(opened, read, targets, results, limit, views=views)

        opened.overlap.run([partial(store, read) for read in reads], is_remote=is_remote)
        return results

    def look_each(self, spans: Sequence[ByteRange]) -> list[ObjectState | DPFlowError]:
        """Return size and state of the object of each range, or the error of its request. The requests overlap.

        An object is looked up at the address at which it is read. Another size or state than expected is an error.
        """
        opened = self._opened.get()
        results: list[ObjectState | DPFlowError] = [ObjectState(None, None)] * len(spans)

        def look(position: int, span: ByteRange) -> None:
            try:
                storage = opened.storage(span.url)
                results[position] = with_retries(
                    lambda deadline: storage.look(span, deadline), self.options, is_remote=storage.is_remote
                )
            except DPFlowError as error:
                results[position] = error

        is_remote = any(file_system_of(span.url) not in ("file", "local") for span in spans)
        opened.overlap.run([partial(look, *one) for one in enumerate(spans)], is_remote=is_remote)
        return results

    @property
    def has_cache(self) -> bool:
        """Whether samples are kept on a disk."""
        return self._opened.get().cache is not None

    def keep(self, span: ByteRange, data: bytes) -> None:
        """Put the bytes of a range into the disk cache, after they were read as a part of another one."""
        opened = self._opened.get()
        opened.keep(opened.cache_key(span), span, data)

    def _read(self, span: ByteRange) -> bytes:
        if span.start == span.stop:
            return b""
        opened = self._opened.get()
        if opened.cache is None:
            return fetch_with_retries(opened.storage(span.url), span, self.options)
        key = opened.cache_key(span)
        cached = opened.cached(key)
        if cached is not None:
            return cached
        data = fetch_with_retries(opened.storage(span.url), span, self.options)
        opened.keep(key, span, data)
        return data

    def _result(self, span: ByteRange) -> bytes | DPFlowError:
        try:
            return self._read(span)
        except DPFlowError as error:
            return error

    def _take_cached(
        self,
        opened: _Opened,
        spans: Sequence[ByteRange],
        wanted: list[int],
        results: list[bytes | memoryview | DPFlowError],
    ) -> list[int]:
        """Store what the disk cache has in `results`, and return the positions that it does not have."""
        if opened.cache is None:
            return wanted
        missing: list[int] = []

        def look(position: int) -> None:
            cached = opened.cached(opened.cache_key(spans[position]))
            if cached is None:
                missing.append(position)
            else:
                results[position] = cached

        opened.overlap.run([partial(look, position) for position in wanted], is_remote=False)
        return sorted(missing)

    def _store(
        self,
        opened: _Opened,
        read: Read,
        targets: Sequence[tuple[int, ByteRange]],
        results: list[bytes | memoryview | DPFlowError],
        limit: BatchDeadline,
        *,
        views: bool,
    ) -> None:
        """Store the parts of one read in `results`. If merged ranges fail, read each by itself."""
        try:
            data: bytes | memoryview = self._fetch(opened, read.span, limit)
        except DPFlowError as error:
            if len(targets) == 1 or isinstance(error, _FAIL_ALIKE):
                for position, _ in targets:
                    results[position] = error
                return
            for position, span in targets:
                self._store(opened, Read(span), [(position, span)], results, limit, views=views)
            return
        if views and len(targets) > 1:
            data = memoryview(data)
        for position, span in targets:
            results[position] = content = read.cut(span, data)
            if opened.cache is not None and isinstance(content, bytes):
                opened.keep(opened.cache_key(span), span, content)

    def _fetch(self, opened: _Opened, span: ByteRange, limit: BatchDeadline) -> bytes:
        storage = opened.storage(span.url)
        if storage.is_remote and limit.has_passed:
            raise StorageTimeoutError(
                f"{span}: the storage returned nothing of this batch within deadline_s={self.options.deadline_s:g}, "
                "so the rest of it was not requested"
            )
        data = fetch_with_retries(storage, span, self.options, deadline=limit.deadline)
        limit.renew()
        return data

    def close(self) -> None:
        """Close this process's connections and end its threads. The reader may be used again."""
        opened = self._opened.drop()
        if opened is not None:
            opened.close()

    def __enter__(self) -> ObjectReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (options_to_pickle(self._storage_options), self.options)

    def _open(self) -> _Opened:
        return _Opened(self._storage_options, self.options)


def _rebuild(storage_options: Mapping[str, Any], options: ReadOptions) -> ObjectReader:
    return ObjectReader(storage_options, options=options)


class _Opened:
    """The storages and threads of one process."""

    def __init__(self, storage_options: Mapping[str, Any], options: ReadOptions) -> None:
        self._storage_options = storage_options
        self._options = options
        self._storages: dict[str, Storage] = {}
        self.overlap = Overlap(options.concurrency)
        self.cache = disk_cache(options)

    def storage(self, url: str) -> Storage:
        address = file_system_of(url)
        if "@" in url:
            clean, login = split_login(url)
            if login and "::" not in clean:  # each user has a storage of his own
                address = "/".join(url.split("/", 3)[:3])
        elif ("-s3/" in url or "://arn:" in url) and address in ("s3", "s3a"):
            bucket = url.partition("://")[2].partition("/")[0]
            address = f"{address}://{bucket}" if needs_vendor(bucket) else address
        try:
            return self._storages[address]
        except KeyError:
            check_url(url)  # before connecting; later URLs are checked by their storages
            return self._storages.setdefault(address, open_storage(address, self._storage_options, self._options))

    def node(self, url: str) -> str:
        return self.storage(url).node(url)

    def cache_key(self, span: ByteRange) -> str | None:
        """Return the name of a range in the disk cache; None if it is not kept there."""
        identity = span.checksum or span.state
        if self.cache is None or identity is None:
            return None
        storage = self.storage(span.url)
        if not storage.is_remote:
            return None
        return "\n".join([storage.node(span.url), stored_url(span.url), str(span.start), str(span.stop), identity])

    def cached(self, key: str | None) -> bytes | None:
        return None if self.cache is None or key is None else self.cache.get(key)

    def keep(self, key: str | None, span: ByteRange, data: bytes) -> None:
        """Put bytes from the storage into the disk cache if they match their checksum, or have a settled state."""
        if self.cache is None or key is None:
            return
        is_fixed = is_settled(span.state or "") if span.checksum is None else matches(data, span.checksum)
        if is_fixed:
            self.cache.put(key, data)

    def close(self) -> None:
        self.overlap.close()
        for storage in self._storages.values():
            storage.close()


def disk_cache(options: ReadOptions) -> DiskCache | None:
    """Return the cache of this process, which the environment may name. Raises OptionError for what it names."""
    directory = options.cache_dir or os.environ.get("DPFLOW_CACHE_DIR")
    if not directory:
        return None
    assert not isinstance(options.cache_bytes, str)
    return DiskCache(check_directory("DPFLOW_CACHE_DIR", directory), options.cache_bytes)


@functools.lru_cache(maxsize=64)
def _warn_without_state(storage: str) -> None:
    DATASETS.warning(
        "%s reports no state of its objects, neither an ETag nor a time of change: an object that is replaced while it "
        "is read is noticed by its size only; read it with checksum=, or serve it by a storage that reports one",
        storage,
    )


def warn_without_state(url: str) -> None:
    """Log once for each storage that its objects have no state."""
    _warn_without_state("/".join(printable_url(url).split("/", 3)[:3]))


def open_storage(address: str, storage_options: Mapping[str, Any], options: ReadOptions) -> Storage:
    """Return the storage for a URL, or for a result of `file_system_of` such as "s3".

    Raises:
        OptionError, MissingExtraError: there is none.
        StorageError: it cannot be reached.
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
    """Return the service that `HttpStorage` reads for a result of `file_system_of`; None if fsspec reads it.

    Raises OptionError for options that the service does not have.
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
