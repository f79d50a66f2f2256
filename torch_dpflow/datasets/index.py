"""Index files: the metadata of samples as rows of one width, which all processes of a host map into memory.

A part holds the samples of one object, or of one metadata shard. Positions in it count from its start, so that parts
are joined by appending them::

    rows      one of `_ROW` for each sample
    objects   one of `_OBJECT` for each object of the part
    texts     checksum and annotations of each sample; path and state of each object, and after a line break its size

Each row and object has a CRC-32 of itself and its texts, which reads compare (0.2 µs). This detects parts that are
damaged, or that are not written yet.

An index of `open_dataset` has one file for each object of the source, and a joined file that readers map::

    <directory>/parts/<settings>/<object>      the samples of one object, by its URL, size, state, and the settings
    <directory>/packs/<settings>/<object>/     samples that were copied out of a compressed object
    <directory>/joined/<source>                all parts of a source in order
    <directory>/stored/<version>               rows of a stored dataset that were read

Files appear whole and never change (except those in `stored`, which readers fill), and their names identify their
content. Processes that build the same index therefore share the work without locks: each begins at a random object, and
skips objects whose part is written already. A build that was killed leaves the parts that it has written.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import accumulate, islice, repeat
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from torch_dpflow._core.decoding import json_decoder
from torch_dpflow._core.processes import PerProcess
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.spec import Dataset, DatasetRef, SampleMeta, url_below
from torch_dpflow.datasets.storage import ByteRange, ObjectReader
from torch_dpflow.datasets.storage.base import sha256_of
from torch_dpflow.datasets.storage.local import written
from torch_dpflow.datasets.storage.urls import join_url, printable_url
from torch_dpflow.errors import (
    ChecksumError,
    DamagedStoreError,
    DPFlowError,
    ObjectMissingError,
    StorageError,
    TruncatedObjectError,
)

#: Locks of a process, of which each is for some of the metadata shards, and shards that are read together.
_LOCKS, _TOGETHER = 64, 32


def index_directory(*, is_local: bool = False) -> str:
    """Return the directory of indexes: `DPFLOW_INDEX_DIR`, or one in the user's cache directory.

    is_local: ignore the variable if it names a URL, so that the directory is on this host.
    """
    given = os.environ.get("DPFLOW_INDEX_DIR", "").removeprefix("file://")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    is_given = given and not (is_local and "://" in given)
    return given if is_given else os.path.join(cache, "torch_dpflow", "index")


def map_file(path: str) -> mmap.mmap:
    """Map a file to read it. Raises FileNotFoundError if it is missing or empty, StorageError if mapping fails."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise FileNotFoundError(f"{path} is missing or empty") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error


def stored_rows(
    url: str, dataset: Dataset, variant_name: str, reader: ObjectReader, given_urls: Mapping[str, str]
) -> Rows:
    """Return the metadata rows of a variant of the stored dataset in the directory `url`.

    `reader` reads a metadata shard when one of its samples is first needed. For `given_urls` see `Rows`. The rows are
    in a file that all processes of this host map and fill together. If this file cannot be made, for example on a full
    disk, they are in memory that only forked processes share.
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


@dataclass(frozen=True)
class _ShardLoad:
    """Reader of metadata shards into rows."""

    root: str
    dataset: Dataset
    variant_name: str
    reader: ObjectReader
    data: mmap.mmap
    bases: Sequence[int]
    # A thread of the parent could hold them at the moment of a fork.
    locks: PerProcess[list[threading.Lock]] = field(default_factory=lambda: PerProcess(_new_locks))
    #: Parts that this process has kept.
    kept: set[int] = field(default_factory=set)

    def __call__(self, parts: Sequence[int]) -> dict[int, DPFlowError]:
        errors: dict[int, DPFlowError] = {}
        for first in range(0, len(parts), _TOGETHER):
            group = parts[first : first + _TOGETHER]
            with ExitStack() as held:
                for number in sorted({part % _LOCKS for part in group}):
                    held.enter_context(self.locks.get()[number])
                missing = [part for part in group if part not in self.kept]  # by another thread meanwhile
                spans = [ByteRange(self._url(part)) for part in missing]
                for part, content in zip(missing, self.reader.read_each(spans)):
                    try:
                        self._keep(part, content)
                    except DPFlowError as error:
                        errors[part] = error
        return errors

    def _url(self, part: int) -> str:
        return join_url(self.root, self.dataset.shard_path(self.variant_name, part))

    def _keep(self, part: int, content: bytes | DPFlowError) -> None:
        url = self._url(part)
        if isinstance(content, ObjectMissingError):
            raise DamagedStoreError(f"{url} is missing; restore it from a copy")
        if isinstance(content, DPFlowError):
            raise content
        shard = self.dataset.decode_shard(self.variant_name, part, content, url=url)
        rows, base = PartRows().add(shard.samples).encoded(), self.bases[part]
        self.data[base : base + len(rows)] = rows
        self.kept.add(part)


def _new_locks() -> list[threading.Lock]:
    return [threading.Lock() for _ in range(_LOCKS)]


#: Object, bytes of the annotations, offset and length (-1: None), bytes of the checksum, CRC, and where the texts begin
#: in the part. The CRC covers the fields before it, and the texts.
_ROW = struct.Struct("<IIqqIIQ")
#: Bytes of path, and of state and size, CRC, and where the texts begin in the part.
_OBJECT = struct.Struct("<IIIQ")
_ROW_HEAD, _OBJECT_HEAD = struct.Struct("<IIqqI"), struct.Struct("<II")
ROW, OBJECT = _ROW.size, _OBJECT.size
_LENGTHS = np.dtype({"names": ["length"], "formats": ["<i8"], "offsets": [16], "itemsize": ROW})
#: Objects of which URL, state and size are kept decoded.
_KEPT_OBJECTS = 4096

#: Byte range of a sample, and its annotations as encoded JSON.
Place = tuple[ByteRange, bytes]


class PartRows:
    """Encoder of the metadata of a part's samples, which it keeps in memory.

    Args:
        size: size of the object that contains the samples, bytes; None if unknown.
    """

    def __init__(self, size: int | None = None) -> None:
        self._size = "" if size is None else f"\n{size}"
        self._rows = bytearray()
        self._texts = bytearray()
        self._objects: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._rows) // ROW

    def add(self, samples: Iterable[SampleMeta]) -> PartRows:
        for one in samples:
            named = self._objects.setdefault((one.path, (one.revision or "") + self._size), len(self._objects))
            checksum, meta = (one.checksum or "").encode(), bytes(one.meta)
            offset, length = (-1 if value is None else value for value in (one.offset, one.length))
            head = _ROW_HEAD.pack(named, len(meta), offset, length, len(checksum))
            self._rows += self._record(head, checksum + meta)
        return self

    def encoded(self) -> bytes:
        """Return the encoded part. Do not call `add` afterwards."""
        objects = bytearray()
        for path, state in [(path.encode(), state.encode()) for path, state in self._objects]:
            objects += self._record(_OBJECT_HEAD.pack(len(path), len(state)), path + state)
        start = len(self._rows) + len(objects)
        for table, width in ((self._rows, ROW), (objects, OBJECT)):
            places = np.dtype({"names": ["at"], "formats": ["<u8"], "offsets": [width - 8], "itemsize": width})
            np.frombuffer(table, places)["at"] += np.uint64(start)
        return b"".join([self._rows, objects, self._texts])

    def _record(self, head: bytes, texts: bytes) -> bytes:
        at = len(self._texts)
        self._texts += texts
        return head + zlib.crc32(head + texts).to_bytes(4, "little") + at.to_bytes(8, "little")


class Rows:
    """Metadata of a dataset's samples by number, read from mapped parts.

    Thread-safe, and usable after a fork.

    Args:
        data: the mapped parts.
        firsts: number of the first sample of each part, followed by the number of all samples.
        bases: offset of each part in `data`.
        root: URL that paths of objects are relative to.
        given_urls: URLs to read objects at, by the URLs in the rows, where the two differ (see `stored_url`).
        load: called with the numbers of missing or damaged parts. Writes these parts into `data`; returns, by number,
            the errors of the parts for which this fails.
    """

    def __init__(
        self,
        data: mmap.mmap,
        firsts: Sequence[int],
        bases: Sequence[int],
        root: str,
        given_urls: Mapping[str, str],
        load: Callable[[Sequence[int]], Mapping[int, DPFlowError]],
    ) -> None:
        self._data = data
        self._firsts = firsts
        self._bases = bases
        self._root = root
        self._load = load
        self._kept = functools.lru_cache(_KEPT_OBJECTS)(functools.partial(_object, data, root, given_urls))

    def places(self, numbers: Sequence[int], *, is_checked: bool = True) -> list[Place | DPFlowError]:
        """Return byte range and annotations of each sample, or its error.

        is_checked: whether the ranges contain the sample's checksum and the object's state, for reads to compare.
        """
        found = [*map(self._place, numbers, repeat(is_checked))]
        if None not in found:
            return found  # type: ignore[return-value]
        parts = {bisect_right(self._firsts, number) - 1 for number, place in zip(numbers, found) if place is None}
        errors = self._load(sorted(parts))
        damaged = DamagedStoreError(f"the metadata of a sample in {printable_url(self._root)} is damaged on this disk")
        return [
            place or self._place(number, is_checked) or errors.get(bisect_right(self._firsts, number) - 1, damaged)
            for number, place in zip(numbers, found)
        ]

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the length of each sample, bytes; -1 if unknown. All parts must be present."""
        parts = zip(self._bases, self._firsts, islice(self._firsts, 1, None))
        columns = [np.frombuffer(self._data, _LENGTHS, stop - first, base)["length"] for base, first, stop in parts]
        return np.concatenate(columns)

    def _place(self, number: int, is_checked: bool) -> Place | DPFlowError | None:
        """Return range and annotations of a sample; None if they are damaged or missing."""
        data, part = self._data, bisect_right(self._firsts, number) - 1
        first, base = self._firsts[part], self._bases[part]
        start = base + ROW * (number - first)
        named, meta_bytes, offset, length, digits, crc, at = _ROW.unpack_from(data, start)
        at += base
        texts = data[at : at + digits + meta_bytes]
        if zlib.crc32(data[start : start + _ROW_HEAD.size] + texts) != crc:
            return None
        try:
            url, state, size = self._kept(base, self._firsts[part + 1] - first, named)
        except DPFlowError as error:  # the path leads out of its root
            return error
        except _Incomplete:
            return None
        checksum = texts[:digits].decode() if digits else None
        if not is_checked:
            checksum = state = size = None
        if offset < 0:
            return ByteRange(url, 0, None, None if length < 0 else length, state, checksum), texts[digits:]
        return ByteRange(url, offset, offset + length, size, state, checksum), texts[digits:]


class _Incomplete(Exception):
    """An object of a part is damaged, or another process still writes the part. As an error, it is not kept."""


def _object(
    data: mmap.mmap, root: str, given_urls: Mapping[str, str], base: int, rows: int, number: int
) -> tuple[str, str | None, int | None]:
    """Return URL, state and size of an object of a part. Raises _Incomplete, and DamagedStoreError for its path."""
    start = base + ROW * rows + OBJECT * number
    path_bytes, state_bytes, crc, at = _OBJECT.unpack_from(data, start)
    at += base
    texts = data[at : at + path_bytes + state_bytes]
    if zlib.crc32(data[start : start + _OBJECT_HEAD.size] + texts) != crc:
        raise _Incomplete
    url = url_below(root, texts[:path_bytes].decode())
    state, _, size = texts[path_bytes:].decode().partition("\n")
    return given_urls.get(url, url), state or None, int(size) if size else None


#: Begin of a joined file: kind, its bytes, where the tables begin, parts, bytes of the description. A CRC-32 follows.
_HEAD = struct.Struct("<8sQQQI")
HEAD_BYTES = _HEAD.size + 4
_KIND = b"DPFIDX4\n"
#: Bytes that are copied at a time.
_PIECE = 64 << 20


class Description(msgspec.Struct, frozen=True):
    """Properties that an index stores once for all samples: importer, root URL and `info`."""

    importer: str
    root: str
    info: dict[str, Any]


@dataclass(frozen=True)
class Index:
    """Index that `open_dataset` has built for one source; `open_rows` maps its rows. Thread-safe and picklable."""

    files: Files
    name: str
    importer: str
    root: str
    info: dict[str, Any]
    count: int

    @property
    def ref(self) -> DatasetRef:
        """The index's name as that of a dataset, for messages."""
        return DatasetRef(f"index/{self.importer}", self.name)

    @property
    def url(self) -> str:
        return self.files.url

    @property
    def options(self) -> dict[str, Any]:
        """fsspec's options for the directory of indexes."""
        return self.files.options

    def __len__(self) -> int:
        return self.count

    @classmethod
    def open(cls, files: Files, name: str) -> Index:
        """Open the index of this name. Raises DamagedStoreError if there is none, or if its tables are damaged."""
        firsts, _, description = _tables(_mapped(files, name), name)
        return cls(files, name, description.importer, description.root, description.info, firsts[-1])

    def open_rows(self, reader: ObjectReader | None = None, given_urls: Mapping[str, str] | None = None) -> Rows:
        """Map and return the rows. `reader` is not used. Raises DamagedStoreError as `open` does."""
        data = _mapped(self.files, self.name)
        firsts, bases, _ = _tables(data, self.name)
        return Rows(data, firsts, bases, self.root, given_urls or {}, self._damaged)

    def lost(self, span: ByteRange, error: DPFlowError) -> DPFlowError:
        """Return the error to report for a sample whose read of `span` failed with `error`.

        If `span` is in a pack of the index, and damaged or missing there, the part of the pack and the joined file are
        removed, so that the next opening writes them and the pack again.
        """
        packs = f"{self.url}/packs/"
        is_damage = isinstance(error, ChecksumError | ObjectMissingError | TruncatedObjectError)
        if not is_damage or not span.url.startswith(packs):
            return error
        with suppress(OSError, DPFlowError):
            self.files.remove(f"parts/{span.url.removeprefix(packs).rpartition('/')[0]}")
        return self._damaged([0])[0]

    def _damaged(self, parts: Sequence[int]) -> dict[int, DPFlowError]:
        """Remove the index, so that the next opening builds it again; return the error of each part."""
        with suppress(OSError):
            os.unlink(joined_path(self.files, self.name))
        if local_path(self.files) is None:
            with suppress(OSError, DPFlowError):
                self.files.remove(f"joined/{self.name}")
        return dict.fromkeys(parts, _damaged_index(self.name))


def local_path(files: Files) -> str | None:
    """Return the path of a directory on a local disk or a mount; None for other storages."""
    return files.url.removeprefix("file://") if files.url.startswith("file://") else None


def joined_path(files: Files, name: str) -> str:
    """Return the path of a joined file on this host. It is a copy if the directory of indexes is remote."""
    return f"{local_path(files) or f'{index_directory(is_local=True)}/copies'}/joined/{name}"


def _mapped(files: Files, name: str) -> mmap.mmap:
    """Map a joined file, or a copy of it on a local disk."""
    path = joined_path(files, name)
    try:
        if local_path(files) is None and not os.path.exists(path):
            size = _HEAD.unpack(files.read(f"joined/{name}", 0, _HEAD.size))[1]
            with written(path) as file:
                for start in range(0, size, _PIECE):
                    file.write(files.read(f"joined/{name}", start, min(start + _PIECE, size)))
        return map_file(path)
    except (FileNotFoundError, struct.error) as error:
        raise DamagedStoreError(
            f"there is no index {files.url}/joined/{name}; open the data again, or give index_dir= a directory that "
            "all hosts reach"
        ) from error
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error


def joined_head(size: int, at: int, parts: int, described: int, tables: bytes) -> bytes:
    """Return the head of a joined file, with a checksum of the head and the tables.

    Args:
        size: bytes of the file.
        at: where the tables begin.
        parts: number of parts.
        described: bytes of the description at the end of the tables.
        tables: first samples, offsets and names of the parts, and the description.
    """
    head = _HEAD.pack(_KIND, size, at, parts, described)
    return head + zlib.crc32(tables, zlib.crc32(head)).to_bytes(4, "little")


def _layout(data: mmap.mmap, name: str) -> tuple[int, int, int]:
    """Return where the tables of a joined file begin, parts, bytes of the description. Raises DamagedStoreError."""
    if len(data) >= HEAD_BYTES:
        _, _, at, parts, described = _HEAD.unpack_from(data)
        if data[:HEAD_BYTES] == joined_head(len(data), at, parts, described, data[at:]):
            return at, parts, described
    raise _damaged_index(name)


def _tables(data: mmap.mmap, name: str) -> tuple[Sequence[int], Sequence[int], Description]:
    """Return first samples and offsets of the parts of a joined file, and its description. Raises DamagedStoreError."""
    at, parts, described = _layout(data, name)
    view = memoryview(data)
    middle, stop = at + 8 * (parts + 1), at + 8 * (2 * parts + 1)
    description = json_decoder(Description).decode(data[len(data) - described :])
    return view[at:middle].cast("q"), view[middle:stop].cast("q"), description


def keys_in(path: str) -> list[str]:
    """Return the names of the parts of a joined file; [] if the file is missing, unreadable or damaged."""
    with suppress(FileNotFoundError, DPFlowError):
        data = map_file(path)
        at, parts, described = _layout(data, path)
        keys = data[at + 8 * (2 * parts + 1) : len(data) - described]
        return [keys[first : first + 16].hex() for first in range(0, len(keys), 16)]
    return []


def _damaged_index(name: str) -> DamagedStoreError:
    return DamagedStoreError(f"the index {name} is damaged; open the data again, which builds it again")
