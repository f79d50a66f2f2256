"""Files of rows on this host, which its processes map, and the rows of stored datasets, which are read when needed."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from typing import IO

from torch_dpflow._core.processes import PerProcess
from torch_dpflow.datasets.rows import OBJECT, ROW, PartRows, Rows
from torch_dpflow.datasets.spec import Dataset, url_below
from torch_dpflow.datasets.storage import ByteRange, ObjectReader
from torch_dpflow.datasets.storage.base import sha256_of
from torch_dpflow.datasets.storage.local import beside_name, opened_new
from torch_dpflow.datasets.storage.urls import join_url
from torch_dpflow.errors import DamagedStoreError, DPFlowError, ObjectMissingError, StorageError

#: Locks of a process, of which each is for some of the metadata shards, and shards that are read together.
_LOCKS, _TOGETHER = 64, 32


def index_directory(*, is_local: bool = False) -> str:
    """Return the directory of indexes by the environment, or one on this host if that is a URL of another storage."""
    given = os.environ.get("DPFLOW_INDEX_DIR", "").removeprefix("file://")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    is_given = given and not (is_local and "://" in given)
    return given if is_given else os.path.join(cache, "torch_dpflow", "index")


def map_file(path: str) -> mmap.mmap:
    """Map a file to read it. Raises FileNotFoundError if there is none, or an empty one; StorageError."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise FileNotFoundError(f"{path} is missing or empty") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error


@contextmanager
def written(path: str) -> Iterator[IO[bytes]]:
    """Open a file that appears under this path, in place of another one, when it is complete.

    Raises StorageError if there can be no file, or no directory for it.
    """
    beside = beside_name(path)
    try:
        opened = opened_new(beside)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error
    try:
        with opened as file:
            yield file
        os.replace(beside, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def stored_rows(
    url: str, dataset: Dataset, variant_name: str, reader: ObjectReader, given_urls: Mapping[str, str]
) -> Rows:
    """Return the rows of a stored dataset, whose directory is `url`.

    A metadata shard is read when one of its samples is first needed.

    The rows go into a file that all processes of this host map, whose name says what is in it. Two processes that
    write the same part write the same bytes, so they need no lock. Without space on a disk for it, the rows are in
    memory that forked processes share.
    """
    variant = dataset.variants[variant_name]
    size, count = variant.shard_size, len(variant.shards)
    spaces = [one.bytes + variant.shard_samples(n) * (ROW + OBJECT) for n, one in enumerate(variant.shards)]
    bases = [0, *accumulate(spaces)]
    name = sha256_of("".join(one.sha256 for one in variant.shards).encode())[:32]
    data = _shared(f"{index_directory(is_local=True)}/stored/{name}", bases[-1])
    load = _ShardLoad(url, dataset, variant_name, reader, data, bases)
    firsts = [*range(0, size * count, size), variant.samples]
    return Rows(data, firsts, bases, url_below(url, variant.data), given_urls, load)


def _shared(path: str, size: int) -> mmap.mmap:
    """Map a file to read and write it, or memory if there can be no such file."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a write to the mapping would end the process on a full disk
            os.utime(file.fileno())
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except OSError:
        return mmap.mmap(-1, max(1, size))


class _ShardLoad:
    """Reads metadata shards into rows."""

    def __init__(
        self,
        url: str,
        dataset: Dataset,
        variant_name: str,
        reader: ObjectReader,
        data: mmap.mmap,
        bases: Sequence[int],
    ) -> None:
        self._root, self._dataset, self._variant_name = url, dataset, variant_name
        self._reader = reader
        self._data = data
        self._bases = bases
        # A thread of the parent could hold them at the moment of a fork.
        self._locks = PerProcess(_new_locks)
        #: Parts that this process has kept.
        self._kept: set[int] = set()

    def __call__(self, parts: Sequence[int]) -> dict[int, DPFlowError]:
        errors: dict[int, DPFlowError] = {}
        for first in range(0, len(parts), _TOGETHER):
            group = parts[first : first + _TOGETHER]
            with ExitStack() as held:
                for number in sorted({part % _LOCKS for part in group}):
                    held.enter_context(self._locks.get()[number])
                missing = [part for part in group if part not in self._kept]  # by another thread meanwhile
                spans = [ByteRange(self._url(part)) for part in missing]
                for part, content in zip(missing, self._reader.read_each(spans)):
                    try:
                        self._keep(part, content)
                    except DPFlowError as error:
                        errors[part] = error
        return errors

    def _url(self, part: int) -> str:
        return join_url(self._root, self._dataset.shard_path(self._variant_name, part))

    def _keep(self, part: int, content: bytes | DPFlowError) -> None:
        url = self._url(part)
        if isinstance(content, ObjectMissingError):
            raise DamagedStoreError(f"{url} is missing; restore it from a copy")
        if isinstance(content, DPFlowError):
            raise content
        shard = self._dataset.decode_shard(self._variant_name, part, content, url=url)
        rows, base = PartRows().add(shard.samples).encoded(), self._bases[part]
        self._data[base : base + len(rows)] = rows
        self._kept.add(part)


def _new_locks() -> list[threading.Lock]:
    return [threading.Lock() for _ in range(_LOCKS)]
