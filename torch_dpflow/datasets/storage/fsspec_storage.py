"""Every storage that fsspec supports: `memory://`, `hdfs://`, and `s3://` or `oss://` with unusual options."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.dirfs import DirFileSystem

from torch_dpflow.datasets.storage.base import ByteRange
from torch_dpflow.datasets.storage.deadlines import call_with_deadline
from torch_dpflow.datasets.storage.failures import storage_error
from torch_dpflow.datasets.storage.file_systems import open_file_system, path_of
from torch_dpflow.datasets.storage.options import ReadOptions
from torch_dpflow.datasets.storage.urls import split_chain
from torch_dpflow.errors import StorageError, TruncatedObjectError


class FsspecStorage:
    """Reads through the fsspec file system of `address`, which gets `options`.

    The length of a whole object is checked after reading: before, most file systems need another request for it.
    """

    is_remote = True

    def __init__(self, address: str, options: Mapping[str, Any], limits: ReadOptions) -> None:
        self._scheme = address.partition("://")[0]
        self._longest = limits.longest
        self._files = open_file_system(address, options, limits.deadline_s)[0]

    def fetch(self, span: ByteRange, deadline: float) -> bytes:
        if span.length is not None and span.length > self._longest:
            raise StorageError(f"{span}: {span.length} bytes are above the limit of {self._longest}")
        try:
            data = self._cat(span, deadline)
        except Exception as error:
            raise storage_error(span, error) from error
        if span.length is not None and len(data) < span.length:
            raise TruncatedObjectError(f"{span}: the object gave only {len(data)} bytes of {span.length}")
        if len(data) > self._longest:
            raise StorageError(f"{span}: {len(data)} bytes are above the limit of {self._longest}")
        if span.is_whole:
            span.check_size(len(data))
        if span.length is None or len(data) == span.length:
            return data
        if self._scheme == "oss":  # ossfs includes the byte at `end`
            return data[: span.length]
        raise StorageError(
            f"{span}: the file system gave {len(data)} bytes where {span.length} were asked for"
        )

    def _cat(self, span: ByteRange, deadline: float) -> bytes:
        path = path_of(self._files, span.url)
        extent = {} if span.is_whole else {"start": span.start, "end": span.stop}
        left = deadline - time.monotonic()
        if isinstance(self._files, AsyncFileSystem) and not isinstance(self._files, DirFileSystem):
            reading = asyncio.wait_for(self._files._cat_file(path, **extent), max(left, 0.0))
            return bytes(asyncio.run_coroutine_threadsafe(reading, self._files.loop).result())
        return bytes(call_with_deadline(self._files, left, lambda: self._files.cat_file(path, **extent)))

    def node(self, url: str) -> str:
        inner, outer = split_chain(url)
        return outer or "/".join(inner.split("/", 3)[:3])

    def close(self) -> None:
        """Does nothing: connections belong to fsspec, which shares its file systems between callers."""
