"""Base of importers of objects that hold many samples each. Objects are scanned in parallel; samples stay in order."""

from __future__ import annotations

import json
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice
from typing import Any, ClassVar

from torch_dpflow.datasets.importers.base import BaseImporter, Item
from torch_dpflow.datasets.importers.sources import Source, SourceFile, SourceFiles, find_sources, is_changed
from torch_dpflow.datasets.importers.splits import check_no_split_folders
from torch_dpflow.datasets.storage import ByteRange, ObjectReader
from torch_dpflow.datasets.storage.base import sha256_of
from torch_dpflow.datasets.storage.urls import stored_url
from torch_dpflow.errors import DPFlowError, SourceError
from torch_dpflow.log import DATASETS

#: Objects that are scanned at a time.
_SCANNERS = 8
#: Samples that a scan passes on at a time, and how many such batches it may be ahead.
_BATCH, _BATCHES = 500, 4
#: Bytes of a block, and blocks that are read ahead. With 8 scans that is 96 MiB at most.
_REMOTE_BLOCK, _REMOTE_AHEAD = 4 << 20, 2
#: Blocks of one object that are held for the samples in them, at most.
_MAX_HELD = 4
#: Seconds after which a scan whose samples are not read looks whether it should end.
_POLL_S = 0.2


class ForwardReader:
    """Reader of one object in blocks, for reads that mostly go forward. The next blocks are read ahead.

    Args:
        fetch: takes start and stop of a block; returns the block's bytes, or a future of them.
        size: size of the object, bytes.
        block: size of a block, bytes.
        ahead: number of blocks that are requested before they are needed, if blocks are read one after the other.
    """

    def __init__(self, fetch: Callable[[int, int], bytes | Future[bytes]], size: int, block: int, ahead: int) -> None:
        self._fetch = fetch
        self.size = size
        self._block = block
        self._ahead = ahead
        self._blocks: dict[int, bytes | Future[bytes]] = {}
        self._last = -1
        #: Start of the bytes that stay in memory for `held`, up to `_MAX_HELD` blocks; None: passed blocks are dropped.
        self.held_from: int | None = None

    def at(self, start: int, length: int) -> bytes:
        """Return `length` bytes starting at `start`; fewer at the end of the object."""
        stop = min(start + length, self.size)
        if stop <= start:
            return b""
        first = start // self._block
        if first != self._last:
            self._advance(first)
        return self._cut(start, stop)

    def held(self, start: int, length: int) -> bytes | None:
        """Return `length` bytes starting at `start`; None if one of their blocks was not requested, or was dropped."""
        blocks = range(start // self._block, -(-(start + length) // self._block))
        return self._cut(start, start + length) if all(number in self._blocks for number in blocks) else None

    def _cut(self, start: int, stop: int) -> bytes:
        first, last = start // self._block, (stop - 1) // self._block
        data = self._bytes(first) if last == first else b"".join(map(self._bytes, range(first, last + 1)))
        return data[start - first * self._block : stop - first * self._block]

    def _advance(self, first: int) -> None:
        """Drop the blocks before `first` that are not held. Read ahead if `first` follows the latest block."""
        oldest = first
        if self.held_from is not None:
            oldest = min(first, max(self.held_from // self._block, first - _MAX_HELD))
        for number in [number for number in self._blocks if number < oldest]:
            del self._blocks[number]
        if first == self._last + 1:
            for number in range(first, min(first + 1 + self._ahead, -(-self.size // self._block))):
                self._request(number)
        self._last = first

    def _request(self, number: int) -> None:
        if number not in self._blocks:
            start = number * self._block
            self._blocks[number] = self._fetch(start, min(start + self._block, self.size))

    def _bytes(self, number: int) -> bytes:
        self._request(number)
        block = self._blocks[number]
        if isinstance(block, Future):
            block = self._blocks[number] = block.result()
        return block


class ShardImporter(BaseImporter):
    """Base of importers of objects that hold many samples each. A subclass defines `name`, `names` and `scan`.

    Args:
        source: a path, URL, directory, pattern such as `train-{000..146}.tar`, or a list of files and patterns, see
            `find_sources`; or a result of that function.
        options: fsspec's options for the source.
        split: the split to read of a directory that has several, such as "train".

    Raises:
        OptionError, OptionTypeError: the source is malformed, or has no such split.
        SourceError: there are no such objects, or they belong to several splits.
    """

    #: the importer's name
    name: ClassVar[str]
    #: names of objects of the format; others in a directory are ignored
    names: ClassVar[re.Pattern[str]]
    #: whether samples may be copies, such as decompressed ones, that are not in the source's objects
    may_copy = False
    #: whether files of a directory may be of several splits; False if the format has an index that lists the files
    has_splits: ClassVar[bool] = True
    #: bytes that are read at a time from a local disk; the page cache reads ahead
    local_block: ClassVar[int] = 16 << 10

    def __init__(
        self, source: Source | SourceFiles, *, options: Mapping[str, Any] | None = None, split: str | None = None
    ) -> None:
        files = source if isinstance(source, SourceFiles) else find_sources(source, options)
        self.files = files.only(self.names)
        if not self.files.files:
            raise SourceError(
                f"{files.given} has no files of {self.name}; give a directory with some, a pattern or a list"
            )
        if self.has_splits:
            check_no_split_folders(self.files.folders, self.files.given)
            self.files = self.files.of_split(split)
            folders = [name for name in self.files.folders if not name.startswith("_")]
            if folders:
                DATASETS.warning("%s: its directories, such as %r, are not read", files.given, folders[0])
        self._split = split
        #: Whether the samples go into an index of `open_dataset`, and not into a dataset in a store.
        self.is_in_place = False
        self.options = self.files.options
        #: URLs to read objects at, by the URLs in the samples' metadata, where the two differ.
        self.given_urls = self.files.given_urls()
        #: Whether a scan puts the samples that it reads into the disk cache, for later readers.
        self.fills_cache = False
        self.root: str | None = self.files.root

    @classmethod
    def finds(cls, files: SourceFiles) -> bool:
        """Return whether file names match this format: at least one in a directory, or all of a list or pattern."""
        return bool(files.only(cls.names).files) and all(map(cls.names.fullmatch, files.only(cls.names).names))

    @staticmethod
    def begins(head: bytes) -> bool:
        """Return whether an object's first KiB shows that the object is of this format. By default it does not."""
        return False

    @property
    def source(self) -> Mapping[str, Any]:
        """See `Importer.source`. The value of `state` changes with the size or state of any object."""
        chosen = {} if self._split is None else {"split": self._split}
        described = {"importer": self.name, "source": stored_url(self.files.given), **chosen, **self.settings()}
        state = sha256_of(json.dumps(self.objects()).encode())
        return {**described, "files": len(self.files.files), "state": state}

    def objects(self) -> list[tuple[Any, ...]]:
        """Return the identity of each object: state (None: unknown), path, size; for some formats also other values."""
        return [(file.state, self.files.path_of(file), file.size) for file in self.files.files]

    def size_of(self, number: int) -> int | None:
        """Return the size, bytes, that object `number` of the source must have at each read; None: not compared."""
        file = self.files.files[number]
        return None if self.may_copy or file.local_path is not None else file.size

    def settings(self) -> Mapping[str, Any]:
        """Return the importer's settings on which the samples depend, by name."""
        return {}

    def scan(self, file: SourceFile, data: ForwardReader) -> Iterator[Item]:
        """Yield the samples of one object, in order. `data` reads the bytes of `file`.

        Raises:
            SourceError: the object is damaged, cut short, or in a different format.
        """
        raise NotImplementedError

    def ranges(self, item: Item) -> list[tuple[int, int]]:
        """Return (start, length) of each range of the object that is read for a sample; [] for a copied sample."""
        return [] if item.offset is None or item.length is None else [(item.offset, item.length)]

    def items(self, start: int = 0) -> Iterator[Item]:
        return islice(self._from(0), start, None)

    def _from(self, first: int) -> Iterator[Item]:
        return chain.from_iterable(items for _, items in self.scanned(range(first, len(self.files.files))))

    def items_at(self, path: str, offset: int | None) -> Iterator[Item] | None:
        """Return an iterator of samples that starts at `offset` in the object `path`; empty if no sample is there.

        Earlier objects are not scanned, so that an import that was killed continues fast. Returns None if an offset
        does not identify a sample: the source names the object twice, or samples may be copied.
        """
        numbers = [number for number, file in enumerate(self.files.files) if self.files.path_of(file) == path]
        if len(numbers) > 1 or self.may_copy:
            return None
        items = self._from(numbers[0]) if numbers else iter(())
        found = next((item for item in items if item.offset == offset), None)
        return iter(()) if found is None else chain([found], items)

    def scanned(self, numbers: Iterable[int]) -> Generator[tuple[int, Iterator[Item]]]:
        """Yield (number, samples) for the objects of `files` with these numbers, in order. Threads scan ahead.

        Raises SourceError for objects with URLs that a store cannot name. The samples raise the errors of `scan`.
        """
        if self.given_urls and not self.is_in_place:
            raise SourceError(
                f"a store would name {next(iter(self.given_urls))!r}, which cannot be read later: links with a "
                "signature expire, and names have to be UTF-8; give other URLs, or rename the file"
            )
        stop = threading.Event()
        with (
            ObjectReader(self.options, options=self.files.read_options) as reader,
            ThreadPoolExecutor(_SCANNERS * (1 + _REMOTE_AHEAD), "dpflow-blocks") as blocks,
            ThreadPoolExecutor(_SCANNERS, "dpflow-scan") as scanners,
        ):
            waiting: deque[tuple[int, _Batches]] = deque()
            try:
                for number in numbers:
                    waiting.append((number, queue.Queue(_BATCHES)))
                    scanners.submit(self._scan_into, waiting[-1][1], self.files.files[number], reader, blocks, stop)
                    if len(waiting) > _SCANNERS:
                        number, batches = waiting.popleft()
                        yield number, _taken(batches)
                while waiting:
                    number, batches = waiting.popleft()
                    yield number, _taken(batches)
            finally:
                stop.set()
                blocks.shutdown(wait=False, cancel_futures=True)

    def _scan_into(
        self,
        batches: _Batches,
        file: SourceFile,
        reader: ObjectReader,
        blocks: ThreadPoolExecutor,
        stop: threading.Event,
    ) -> None:
        """Scan one object into a queue: lists of items, then None; or the error."""

        def fetch(start: int, end: int) -> bytes:
            span = ByteRange(file.url, start, end, size=file.size, state=file.state)
            return reader.read_many([span])[0]

        is_local = file.local_path is not None
        if is_local:
            data = ForwardReader(fetch, file.size, self.local_block, 0)
        else:
            data = ForwardReader(
                lambda start, end: blocks.submit(fetch, start, end), file.size, _REMOTE_BLOCK, _REMOTE_AHEAD
            )
        try:
            scanned = self.scan(file, data)
            if self.fills_cache and reader.has_cache and not is_local:
                scanned = self._kept(scanned, file, data, reader)
            with closing(scanned) as items:  # type: ignore[type-var]
                while batch := list(islice(items, _BATCH)):
                    if not _put(batches, batch, stop):
                        return
            _put(batches, _written(file), stop)
        except DPFlowError as error:  # also of the half of a sample that its writer had written
            _put(batches, _written(file) or error, stop)
        except BaseException as error:
            _put(batches, error, stop)

    def _kept(
        self, items: Iterator[Item], file: SourceFile, data: ForwardReader, reader: ObjectReader
    ) -> Iterator[Item]:
        """Yield the items, and put items whose bytes the scan has read into the disk cache."""
        data.held_from = 0
        for item in items:
            for start, length in self.ranges(item):
                content = data.held(start, length)
                if content:
                    span = ByteRange(
                        file.url, start, start + length, file.size, state=item.revision, checksum=item.checksum
                    )
                    reader.keep(span, content)
                data.held_from = max(data.held_from, start + length)
            yield item


def _written(file: SourceFile) -> SourceError | None:
    """Return the error for a local file that was written since it was listed; other storages compare at each read."""
    if not is_changed(file):
        return None
    return SourceError(f"{file.printable} was written while it was read; open it again when it is complete")


_Batches = queue.Queue[list[Item] | BaseException | None]


def _put(batches: _Batches, batch: list[Item] | BaseException | None, stop: threading.Event) -> bool:
    """Pass on a batch. Return False if the reader has ended meanwhile."""
    while not stop.is_set():
        try:
            batches.put(batch, timeout=_POLL_S)
            return True
        except queue.Full:
            continue
    return False


def _taken(batches: _Batches) -> Iterator[Item]:
    while (batch := batches.get()) is not None:
        if isinstance(batch, BaseException):
            raise batch
        yield from batch
