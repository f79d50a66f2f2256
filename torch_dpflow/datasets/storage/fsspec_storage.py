"""Every storage that fsspec knows: `memory://`, `hdfs://`, and `s3://` or `oss://` with unusual options."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.dirfs import DirFileSystem

from torch_dpflow.datasets.storage.base import ByteRange
from torch_dpflow.datasets.storage.deadlines import ask
from torch_dpflow.datasets.storage.failures import storage_error
from torch_dpflow.datasets.storage.fsspec_options import fsspec_options
from torch_dpflow.errors import MissingExtraError, OptionError, StorageError, TruncatedObjectError

_EXTRAS = {"s3": "s3", "s3a": "s3", "oss": "oss", "http": "http", "https": "http"}


class FsspecStorage:
    """Reads through one fsspec file system; `options` are its own.

    The length of a whole object is looked at when it is there: most file systems tell it only then, or at the
    price of another request.
    """

    is_remote = True

    def __init__(self, scheme: str, options: Mapping[str, Any], longest: int) -> None:
        self._scheme = scheme
        self._longest = longest
        self._files = _file_system(scheme, options)

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
        if span.length is None or len(data) == span.length:
            return data
        if self._scheme == "oss":  # ossfs counts the last byte in
            return data[: span.length]
        raise StorageError(
            f"{span}: the file system gave {len(data)} bytes where {span.length} were asked for"
        )

    def _cat(self, span: ByteRange, deadline: float) -> bytes:
        path = self._files._strip_protocol(span.url)
        extent = {} if span.is_whole else {"start": span.start, "end": span.stop}
        left = deadline - time.monotonic()
        if isinstance(self._files, AsyncFileSystem) and not isinstance(self._files, DirFileSystem):
            reading = asyncio.wait_for(self._files._cat_file(path, **extent), max(left, 0.0))
            return bytes(asyncio.run_coroutine_threadsafe(reading, self._files.loop).result())
        return bytes(ask(self._files, left, lambda: self._files.cat_file(path, **extent)))

    def node(self, url: str) -> str:
        return self._scheme + "://" + url.partition("://")[2].partition("/")[0]

    def close(self) -> None:
        """Connections belong to fsspec, which shares its file systems among all who ask for them."""


def _file_system(scheme: str, options: Mapping[str, Any]) -> Any:
    try:
        return fsspec.filesystem(scheme, **fsspec_options(scheme, options))
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        how = f"pip install 'torch_dpflow[{extra}]'" if extra else "install the package that it names"
        raise MissingExtraError(f"{scheme}:// needs a package that is not there: {error}; {how}") from error
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"{scheme}:// is no storage that fsspec knows or can set up: {error}") from error
