"""Building of the indexes of `open_dataset`, whose files the module `index` describes."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import accumulate, islice
from typing import Any

import msgspec

from torch_dpflow._core.checks import check_path
from torch_dpflow.datasets.annotations import encode_annotations
from torch_dpflow.datasets.describing import Describer, ShardPacks
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.shards import ShardImporter
from torch_dpflow.datasets.index import (
    HEAD_BYTES,
    Description,
    Index,
    PartRows,
    index_directory,
    joined_head,
    joined_path,
    keys_in,
    local_path,
    map_file,
)
from torch_dpflow.datasets.storage import ObjectReader
from torch_dpflow.datasets.storage.base import ChecksumAlgorithm, is_tag, sha256_of
from torch_dpflow.datasets.storage.local import UNFINISHED, written
from torch_dpflow.datasets.storage.urls import printable_url, stored_url
from torch_dpflow.datasets.writer import ProgressCallback
from torch_dpflow.errors import DamagedStoreError, SourceError, StorageError

#: The number of what importers write into an index. A release that writes something else builds indexes again.
_INDEX = 5
#: Begin of a part's file: number of samples, CRC-32 of this number and the rows.
_PART = struct.Struct("<8sI")
#: Samples that are described at a time, parts that are read at a time, and attempts to join parts.
_BATCH, _READ_THREADS, _ATTEMPTS = 1000, 8, 5
#: Bytes up to which an index is uploaded in one request.
_PIECE = 64 << 20
#: Seconds between updates of the line on a terminal, and after its last opening when a file may be removed.
_UPDATE_S, _UNUSED_S = 0.2, 30 * 24 * 3600.0
#: Directories of indexes of releases before 0.5.
_OLD = ("imagefolder", "litdata", "mds", "tfrecord", "webdataset")


def open_index(
    folder: str | os.PathLike[str] | None,
    importer: Any,
    checksum: ChecksumAlgorithm | None,
    progress: ProgressCallback | None,
) -> Index:
    """Return the index of a source. Builds the index if there is none, or if it is damaged.

    Objects without a state (see `storage.base`) are scanned at each call: nothing shows whether they were rewritten.

    Args:
        folder: a path or URL of the directory of indexes; None: the result of `index_directory`.
        importer: the importer of the source.
        checksum: see `Describer`.
        progress: called with the number of samples that this call has indexed; None: shown on stderr, on a terminal.

    Raises:
        SourceError: the source cannot be indexed, or has no samples.
        StorageError: the source cannot be read, or the index cannot be written.
    """
    path = index_directory() if folder is None else check_path("index_dir", folder)
    files = Files(path)
    builder = _Builder(files, importer, checksum)
    index: Index | None = None
    if builder.name is not None:
        with suppress(DamagedStoreError):
            index = Index.open(files, builder.name)
    if index is None:
        with _shown(importer, progress) as report:
            index = builder.build(report)
        _remove_unused(local_path(files) or index_directory(is_local=True))
    with suppress(OSError):
        os.utime(joined_path(files, index.name))
    return index


class _LostPartsError(Exception):
    """Parts of an index are missing or damaged, and have to be written."""


class _Builder:
    """Writer of the index of one source."""

    def __init__(self, files: Files, importer: Any, checksum: ChecksumAlgorithm | None) -> None:
        self._files = files
        self._importer = importer
        self._name, settings = importer.name, dict(importer.settings())
        self._root = stored_url(importer.root or "")
        objects = importer.objects()
        given = [_INDEX, self._name, self._root, settings, checksum, *_servers(importer, [one[0] for one in objects])]
        self._folder = _digest(given)
        self._describer = Describer(importer, dataset_url=files.url, data=self._root, checksum=checksum)
        #: Names of the parts by number; None for objects without a state.
        self._keys = [None if one[0] is None else _digest([self._folder, one]) for one in objects]
        #: Name of the index; None if an object has no state.
        self.name = None if None in self._keys else _digest([*given, self._keys])
        self._given = given

    def build(self, report: ProgressCallback) -> Index:
        """Write the missing parts, join all parts, and return the index. Raises SourceError."""
        for _ in range(_ATTEMPTS):
            keys = self._write_parts(report)
            name = self.name or _digest([*self._given, keys])
            with suppress(_LostPartsError, FileNotFoundError):  # another process has removed one, or it was damaged
                self._join(name, keys)
                return Index.open(self._files, name)
        raise DamagedStoreError(f"{self._files.url} loses what is written there; give another index_dir=")

    def _write_parts(self, report: ProgressCallback) -> list[str]:
        """Write the missing parts. Returns the names of all parts."""
        with self._hints():
            present = {child.name for child in self._files.children(f"parts/{self._folder}")}
        missing = [number for number, key in enumerate(self._keys) if key not in present]
        start = random.Random(os.urandom(8)).randrange(max(1, len(missing)))
        keys = dict(enumerate(self._keys))
        # An object that is named twice has one part.
        once = {keys[number] or number: number for number in [*missing[start:], *missing[:start]]}.values()
        wanted = (number for number in once if not self._is_written(keys[number]))
        samples = 0
        with closing(self._importer.scanned(wanted)) as scanned:
            for number, items in scanned:
                keys[number], indexed = self._write_part(keys[number], items, self._importer.size_of(number))
                samples += indexed
                report(samples)
        return [str(keys[number]) for number in range(len(keys))]

    def _is_written(self, key: str | None) -> bool:
        """Return whether another process has written a part meanwhile."""
        return key is not None and self._files.exists(f"parts/{self._folder}/{key}")

    def _write_part(self, key: str | None, items: Iterator[Item], size: int | None) -> tuple[str, int]:
        """Write a part, named by its content if `key` is None. Returns its name and number of samples.

        Args:
            size: bytes of the object; None: not compared when samples are read.
        """
        if key is None:
            held = list(items)
            items = iter(held)
            copied = [sha256_of(item.data) for item in held if item.data is not None]
            key = _digest([self._folder, copied]) if copied else None
        packs = ShardPacks(self._put, f"packs/{self._folder}/{key}", 0)
        part = PartRows(size)
        while batch := list(islice(items, _BATCH)):
            part.add(self._describer.describe(batch, packs))
        packs.flush()
        rows = part.encoded()
        key = key or sha256_of(rows)[:32]
        count = len(part).to_bytes(8, "little")
        self._put(f"parts/{self._folder}/{key}", _PART.pack(count, zlib.crc32(count + rows)) + rows)
        return key, len(part)

    def _put(self, path: str, content: Any) -> None:
        local = local_path(self._files)
        with self._hints():
            if local is None:
                self._files.write(path, content)
            else:  # its checksum shows whether all of it is on the disk
                with written(f"{local}/{path}") as file:
                    file.write(content)

    def _parts(self, keys: Sequence[str]) -> Iterator[tuple[int, bytes]]:
        """Yield number of samples and rows of each part.

        All parts are read also after a damaged one, so that the next attempt finds every part that it has to write.

        Raises _LostPartsError: parts are missing or damaged.
        """
        paths = [f"parts/{self._folder}/{key}" for key in keys]
        lost = 0
        with ThreadPoolExecutor(_READ_THREADS, "dpflow-parts") as threads:
            for first in range(0, len(paths), _READ_THREADS):
                for part in threads.map(self._part, paths[first : first + _READ_THREADS]):
                    if part is None:
                        lost += 1
                    elif not lost:
                        yield part
        if lost:
            raise _LostPartsError(f"{lost} parts are missing or damaged")

    def _part(self, path: str) -> tuple[int, bytes] | None:
        """Return number of samples and rows of a part; None if it is missing, or damaged and removed here."""
        try:
            content = self._files.read(path)
        except FileNotFoundError:
            return None
        count, crc = _PART.unpack_from(content) if len(content) >= _PART.size else (b"", -1)
        rows = content[_PART.size :]
        if zlib.crc32(count + rows) == crc:
            return int.from_bytes(count, "little"), rows
        self._files.remove(path)
        return None

    def _join(self, name: str, keys: Sequence[str]) -> None:
        """Join the parts in a file on a local disk, and upload it if the directory of indexes is elsewhere."""
        path = joined_path(self._files, name)
        counts, bases = [0], []
        with self._hints(), written(path) as file:
            file.write(bytes(HEAD_BYTES))
            for samples, rows in self._parts(keys):
                counts.append(samples)
                bases.append(file.tell())
                file.write(rows)
            if not sum(counts):
                given = printable_url(str(self._importer.source.get("source") or self._importer.root))
                raise SourceError(f"there is nothing to import from {given}: it has no samples; check what wrote it")
            info = msgspec.json.decode(encode_annotations(self._importer.info(), "all samples (`info`)"))
            description = msgspec.json.encode(Description(self._name, self._root, info))
            tables = struct.pack(f"<{len(counts) + len(bases)}q", *accumulate(counts), *bases)
            tables += b"".join(map(bytes.fromhex, keys)) + description
            at = file.tell()
            file.write(tables)
            head = joined_head(file.tell(), at, len(bases), len(description), tables)
            file.seek(0)
            file.write(head)
        if local_path(self._files) is None:
            joined = map_file(path)
            self._put(f"joined/{name}", joined[:] if len(joined) <= _PIECE else joined)

    @contextmanager
    def _hints(self) -> Iterator[None]:
        """Add the name of the directory of indexes to its errors, and how to choose another directory."""
        try:
            yield
        except OSError as error:  # StorageError is one
            raise StorageError(
                f"{error}; indexes are written to {printable_url(self._files.url)}: give index_dir=, or set "
                "DPFLOW_INDEX_DIR, to a directory that has space and that you can write to"
            ) from error


def _digest(value: Any) -> str:
    return sha256_of(json.dumps(value, sort_keys=True, default=str).encode(errors="surrogatepass"))[:32]


def _servers(importer: Any, states: Sequence[str | None]) -> list[str]:
    """Return the servers of objects whose state is no ETag: on another server, the same names are other objects."""
    if not isinstance(importer, ShardImporter) or all(state is not None and is_tag(state) for state in states):
        return []  # an index of a folder contains no more than the names
    first = importer.files.files[0]
    if first.local_path is not None:
        return []
    with ObjectReader(importer.options) as reader:
        return [reader.node_of(first.url)]


@contextmanager
def _shown(importer: Any, progress: ProgressCallback | None) -> Iterator[ProgressCallback]:
    """Return a function that reports the number of samples: the one given, or a line on a terminal."""
    if progress is not None:
        yield progress
        return
    if not sys.stderr.isatty():
        yield lambda samples: None
        return
    given = importer.source.get("source", importer.root)
    shown = 0.0

    def report(samples: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > _UPDATE_S:
            shown = time.monotonic()
            sys.stderr.write(f"\rIndexing {given}: {samples} samples")
            sys.stderr.flush()

    try:
        yield report
    finally:
        if shown:
            sys.stderr.write("\n")


def _remove_unused(folder: str) -> None:
    """Remove files of a local directory of indexes that were not opened for long, or that earlier releases wrote."""
    used: set[str] = set()
    for kind in ("joined", "copies/joined", "stored"):
        for path in _files(f"{folder}/{kind}"):
            if _is_unused(path):
                with suppress(OSError):
                    os.unlink(path)
            elif kind == "joined" and not path.endswith(UNFINISHED):
                used |= {*keys_in(path)}
    for kind in ("parts", "packs"):
        for group in _files(f"{folder}/{kind}"):
            for path in _files(group):
                if os.path.basename(path) not in used and _is_unused(path):
                    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
            if _is_unused(group):  # a new one may be about to be written to
                with suppress(OSError):
                    os.rmdir(group)
    for kind in _OLD:
        for path in _files(f"{folder}/{kind}"):
            if all(map(_is_unused, _files(f"{path}/versions"))):
                shutil.rmtree(path, ignore_errors=True)


def _files(folder: str) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:
        return []


def _is_unused(path: str) -> bool:
    try:
        return time.time() - os.stat(path).st_mtime > _UNUSED_S
    except OSError:
        return False
