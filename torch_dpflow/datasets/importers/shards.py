"""Importers of objects that hold many samples each: they are scanned in parallel, and yield samples in order."""

from __future__ import annotations

import queue
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice
from typing import Any, ClassVar

from torch_dpflow.datasets.importers.base import Item
from torch_dpflow.datasets.importers.sources import Source, SourceFile, SourceFiles, find_sources
from torch_dpflow.datasets.storage import ByteRange, ObjectReader
from torch_dpflow.datasets.storage.urls import stored_url
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.errors import SourceError

#: Objects that are scanned at a time.
_SCANNERS = 8
#: Samples that a scan passes on at a time, and how many such batches it may be ahead.
_BATCH, _BATCHES = 500, 4
#: Bytes of a block, and blocks that are read ahead. With 8 scans that is 96 MiB at most.
_REMOTE_BLOCK, _REMOTE_AHEAD = 4 << 20, 2
#: Blocks of one object that are held for the samples in them, at most.
_MAX_HELD = 4
#: Objects up to which an index names each, so that a later one reads only new ones.
_MAX_NAMED = 50_000
#: Seconds after which a scan whose samples are not read looks whether it should end.
_POLL_S = 0.2


class ForwardReader:
    """Bytes of one object by position, mostly forward, in blocks of which the next are read ahead.

    Args:
        fetch: takes start and stop of a block; returns its bytes, or a future of them.
        size: bytes of the object.
        block: bytes of a block.
        ahead: blocks that are requested before they are needed, if blocks are read one after the other.
    """

    def __init__(self, fetch: Callable[[int, int], bytes | Future[bytes]], size: int, block: int, ahead: int) -> None:
        self._fetch = fetch
        self.size = size
        self._block = block
        self._ahead = ahead
        self._blocks: dict[int, bytes | Future[bytes]] = {}
        self._last = -1
        #: Position from which on blocks are held for `held`, as far as `_MAX_HELD` allows.
        self.held_from: int | None = None

    def at(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start` on; fewer at the end of the object."""
        stop = min(start + length, self.size)
        if stop <= start:
            return b""
        first = start // self._block
        if first != self._last:
            self._advance(first)
        return self._cut(start, stop)

    def held(self, start: int, length: int) -> bytes | None:
        """Return bytes that are in memory; None if a part of them is not."""
        blocks = range(start // self._block, -(-(start + length) // self._block))
        return self._cut(start, start + length) if all(number in self._blocks for number in blocks) else None

    def _cut(self, start: int, stop: int) -> bytes:
        first, last = start // self._block, (stop - 1) // self._block
        data = self._bytes(first) if last == first else b"".join(map(self._bytes, range(first, last + 1)))
        return data[start - first * self._block : stop - first * self._block]

    def _advance(self, first: int) -> None:
        """Drop the blocks before `first` that are not held, and read ahead if it is the next one."""
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


class ShardImporter:
    """Base of importers of objects that hold many samples each. A subclass has `name` and `scan`.

    Args:
        source: a path, URL, pattern or list, see `find_sources`; or what that has returned.
        options: fsspec's options for it.
        split: the split to read of a directory that has several, such as "train".

    Raises:
        OptionError, OptionTypeError: the source is malformed, or has no such split.
        SourceError: there are no such objects, or they are of several splits.
    """

    #: the importer's name
    name: ClassVar[str]
    #: names of objects of the format; others in a directory are ignored
    names: ClassVar[re.Pattern[str]]
    #: whether samples may be copied, so that they have no place in an object
    may_copy = False
    #: whether files of a directory may be of several splits, as no index of the format lists them
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
            self.files = self.files.of_split(split)
        self._split = split
        #: Whether samples become an index of `open_dataset`, which names each object.
        self.is_in_place = False
        #: An earlier index, places of its objects in it, and the number of samples that are not described again.
        self._earlier: StoredDataset | None = None
        self._places: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._passed = 0
        #: samples of each object that was described here, by its number
        self._counts: dict[int, int] = {}
        self._objects: list[list[Any]] = []
        self.options = self.files.options
        #: Given URLs of objects by the URLs that samples get, where the two differ
        self.given_urls = self.files.given_urls()
        #: Whether samples that an index pass reads go into the disk cache, where readers find them.
        self.fills_cache = False
        self.root: str | None = self.files.root

    @classmethod
    def finds(cls, files: SourceFiles) -> bool:
        """Return whether objects are of this format by their names."""
        return bool(files.only(cls.names).files) and all(map(cls.names.fullmatch, files.only(cls.names).names))

    @staticmethod
    def begins(head: bytes) -> bool:
        """Return whether the first KiB of an object is one of this format."""
        return False

    def state(self) -> str:
        """Return a digest of the objects that changes when one of them is written."""
        return self.files.state()

    @property
    def has_states(self) -> bool:
        """Whether all objects have a state."""
        return all(file.state is not None for file in self.files.files)

    @property
    def source(self) -> Mapping[str, Any]:
        """See `Importer`. `state` changes with every object's size and time of change."""
        chosen = {} if self._split is None else {"split": self._split}
        described = {"importer": self.name, "source": stored_url(self.files.given), **chosen, **self.settings()}
        count = len(self.files.files)
        if self.is_in_place and count <= _MAX_NAMED:
            self._objects = self._objects or [[*self._object(file)] for file in self.files.files]
            return {**described, "objects": self._objects}
        return {**described, "files": count, "state": self.state()}

    def _object(self, file: SourceFile) -> tuple[Any, ...]:
        """Return what identifies the state of an object: path, size, state."""
        return self.files.path_of(file), file.size, file.state

    def reuse(self, stored: StoredDataset, multiple: int) -> int:
        """Take the samples of unchanged objects from an earlier index of the same root and settings.

        Returns:
            The number of first samples that the earlier index contains, a multiple of `multiple`. They are left out.
        """
        before = [tuple(one) for one in stored.variant.source["objects"]]
        if len({path for path, *_ in before}) < len(before):
            return 0  # a sample's path would not say of which of them it is
        counts = stored.variant.info.get("counts")
        if counts is None:  # it was continued after a kill
            by_path = Counter(sample.path for sample in stored.samples())
            counts = [by_path[path] for path, *_ in before]
        self._places = {}
        first = same = 0
        is_same = True
        files = self.files.files
        for number, (one, count) in enumerate(zip(before, counts, strict=True)):
            is_same = is_same and number < len(files) and self._object(files[number]) == one and one[2] is not None
            if one[2] is not None:
                self._places[one] = first, count
            first += count
            same += count if is_same else 0
        self._earlier = stored
        self._passed = max(0, same - 1) // multiple * multiple  # one stays, as no import may be empty
        return self._passed

    def settings(self) -> Mapping[str, Any]:
        """Return the settings that decide what the samples are."""
        return {}

    def scan(self, file: SourceFile, data: ForwardReader) -> Iterator[Item]:
        """Yield the samples of one object, from its first on.

        Raises:
            SourceError: it is damaged, cut short, or of another format.
        """
        raise NotImplementedError

    def ranges(self, item: Item) -> list[tuple[int, int]]:
        """Return start and length of each part of a sample that is read by itself."""
        return [] if item.offset is None or item.length is None else [(item.offset, item.length)]

    def extend(self, info: Mapping[str, Any]) -> None:
        """Do nothing: samples of this kind do not depend on those before them."""

    def items(self, start: int = 0) -> Iterator[Item]:
        first, start = 0, start + self._passed
        for file in self.files.files:
            count = self._places.get(self._object(file), (0, start + 1))[1]
            if count > start:
                break
            first, start = first + 1, start - count
        return islice(self._scanned(first), start, None)

    def items_at(self, path: str, offset: int | None) -> Iterator[Item] | None:
        """Yield the samples from that one on which begins at `offset` of `path`; none if there is no such sample.

        An import that was killed scans the object with its last sample again, and none before. None: a place does not
        say which sample it was, as the source names the object twice, or samples are copied.
        """
        numbers = [number for number, file in enumerate(self.files.files) if self.files.path_of(file) == path]
        if len(numbers) > 1 or self.may_copy:
            return None
        items = self._scanned(numbers[0]) if numbers else iter(())
        found = next((item for item in items if item.offset == offset), None)
        return iter(()) if found is None else chain([found], items)

    def total(self) -> int | None:
        return None

    def info(self) -> Mapping[str, Any]:
        """Return of an index the samples of each object; None if some were described before a kill."""
        if not self.is_in_place or len(self.files.files) > _MAX_NAMED:
            return {}
        known = [self._places.get(self._object(file), (0, None))[1] for file in self.files.files]
        counts = [self._counts.get(number, count) for number, count in enumerate(known)]
        return {"counts": None if None in counts else counts}

    def _counted(self, number: int, items: Iterator[Item]) -> Iterator[Item]:
        self._counts[number] = 0
        for item in items:
            self._counts[number] += 1
            yield item

    def _scanned(self, first: int) -> Iterator[Item]:
        """Yield the samples of all objects from number `first` on, scanned in threads, in order."""
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
            waiting: deque[Iterator[Item]] = deque()
            try:
                for number, file in enumerate(self.files.files[first:], first):
                    place = self._places.get(self._object(file))
                    if place is None:
                        batches: _Batches = queue.Queue(_BATCHES)
                        scanners.submit(self._scan_into, batches, file, reader, blocks, stop)
                    items = _taken(batches) if place is None else self._taken_before(*place)
                    waiting.append(self._counted(number, items))
                    if len(waiting) > _SCANNERS:
                        yield from waiting.popleft()
                while waiting:
                    yield from waiting.popleft()
            finally:
                stop.set()
                blocks.shutdown(wait=False, cancel_futures=True)

    def _taken_before(self, first: int, count: int) -> Iterator[Item]:
        """Yield samples of the earlier index."""
        assert self._earlier is not None
        for sample in self._earlier.part(first, first + count):
            yield Item(
                path=sample.path,
                offset=sample.offset,
                length=sample.length,
                checksum=sample.checksum,
                revision=sample.revision,
                meta=sample.fields(),
            )

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

        is_local = file.url.startswith("file://")
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
            self.files.check_unchanged(file)
            _put(batches, None, stop)
        except BaseException as error:
            _put(batches, error, stop)

    def _kept(
        self, items: Iterator[Item], file: SourceFile, data: ForwardReader, reader: ObjectReader
    ) -> Iterator[Item]:
        """Yield the items, and put the ones that the scan has read into the disk cache."""
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


_Batches = queue.Queue[list[Item] | BaseException | None]


def _put(batches: _Batches, batch: list[Item] | BaseException | None, stop: threading.Event) -> bool:
    """Pass on a batch. Return False if the reader has gone meanwhile."""
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
