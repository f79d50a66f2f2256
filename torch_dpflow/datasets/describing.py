"""Conversion of an importer's items to metadata of samples. Items given as bytes are written to `ShardPacks`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from torch_dpflow.datasets.annotations import encode_annotations
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.base import Importer, Item
from torch_dpflow.datasets.spec import SampleMeta, data_url
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.base import ChecksumAlgorithm, checksum_of, is_local
from torch_dpflow.datasets.storage.urls import check_url, join_url, printable_url
from torch_dpflow.errors import DatasetError, DPFlowError, ObjectMissingError, OptionError, SourceError
from torch_dpflow.log import DATASETS

T = TypeVar("T")

#: Samples whose bytes are in memory at a time, and entries that are requested at a time.
_TOGETHER = 32


def by_groups(read: Callable[[Sequence[ByteRange]], Sequence[T]], spans: Sequence[ByteRange]) -> Iterator[T]:
    """Call `read` with a few of the `spans` at a time, to save memory, and yield its results in the same order."""
    for first in range(0, len(spans), _TOGETHER):
        yield from read(spans[first : first + _TOGETHER])


def span_of(url: str, sample: SampleMeta) -> ByteRange:
    """Return the byte range of a sample in its object, which is at `url`."""
    if sample.offset is None or sample.length is None:
        return ByteRange(url, size=sample.length, state=sample.revision)
    return ByteRange(url, sample.offset, sample.offset + sample.length, state=sample.revision)


#: Maximum bytes of a pack, unless a single sample is larger. A pack is in memory until it is written.
PACK_BYTES = 64 * 2**20
_PACK_NAME = re.compile(r"pack-\d+-\d+\.bin")
_ONE_ATTEMPT = ReadOptions(attempts=1)


class ShardPacks:
    """Writer of one metadata shard's packs: files that hold the bytes of many samples, one after the other.

    Packs are named `<folder>/pack-<shard>-<k>.bin`. Each is written once, as a whole.

    Args:
        write: called with a file's path, relative to the dataset's directory, and the file's bytes.
        folder: the folder of the packs, relative to the dataset's directory.
        shard: number of the metadata shard.
    """

    def __init__(self, write: Callable[[str, bytes], None], folder: str, shard: int) -> None:
        self._write = write
        self.folder = folder
        self._shard = shard
        self._packs = 0
        #: Number of samples in the pending pack.
        self._samples = 0
        self._pending = bytearray()

    def add(self, data: bytes) -> tuple[str, int]:
        """Append a sample's bytes. Returns the pack's name and the sample's offset in the pack."""
        if self._pending and len(self._pending) + len(data) > PACK_BYTES:
            self.flush()
        place = (self._name(), len(self._pending))
        self._pending += data
        self._samples += 1
        return place

    def flush(self) -> None:
        """Write the pending pack. Its samples can be read only afterwards."""
        if self._samples:
            self._write(f"{self.folder}/{self._name()}", bytes(self._pending))
            self._packs += 1
            self._samples = 0
            self._pending.clear()

    def _name(self) -> str:
        return f"pack-{self._shard}-{self._packs}.bin"


def is_pack(path: str) -> bool:
    return _PACK_NAME.fullmatch(path.rpartition("/")[2]) is not None


def packs_of(files: Files, folder: str) -> list[str]:
    """Return the paths of the packs in `folder`, relative to `files`."""
    return [f"{folder}/{child.name}" for child in files.children(folder) if is_pack(child.name)]


class Describer:
    """Converter of one importer's items to the metadata of samples of one variant.

    Args:
        importer: the source of the items.
        dataset_url: the dataset's directory.
        data: the variant's data root. Paths below it are stored relative to it, other paths as URLs.
        checksum: algorithm for items with `data`, and for items without a checksum, whose bytes are read for it. None:
            items with data get a CRC-32; other items have a checksum only if the importer gives it.
    """

    def __init__(self, importer: Importer, *, dataset_url: str, data: str, checksum: ChecksumAlgorithm | None) -> None:
        self._options = importer.options
        self._dataset_url = dataset_url
        self._root = data_url(dataset_url, data, "")
        self._own_root = data if importer.root is None else importer.root
        self._checksum = checksum
        #: Whether the samples are an index of objects that stay where they are, and not a dataset that is copied with
        #: its objects.
        self._is_in_place = getattr(importer, "is_in_place", False)
        self._has_looked = self._is_in_place
        self._given_urls: Mapping[str, str] = getattr(importer, "given_urls", {})

    def describe(self, items: Iterable[Item], packs: ShardPacks) -> list[SampleMeta]:
        """Return the metadata of a shard's items. Items with data are added to the packs.

        Raises SourceError, among others, for an item whose path is malformed or leads out of its root, whose
        annotations JSON cannot hold, or whose object cannot be read for a checksum.
        """
        samples = [self.found(item) if item.data is None else self._packed(item, packs) for item in items]
        return samples if self._checksum is None else self._checked(samples, self._checksum)

    def found(self, item: Item) -> SampleMeta:
        """Return the metadata of an item with a path. The first call may log a warning that its object is missing."""
        assert isinstance(item.path, str)
        try:
            url = data_url(self._dataset_url, self._own_root, self._below_root(item.path))
            check_url(url)
        except (DatasetError, OptionError) as error:
            raise SourceError(str(error)) from error
        if not self._has_looked:
            self._has_looked = True
            if item.length is None or item.offset is not None:  # not from a listing of a directory
                self._warn_if_missing(self._given_urls.get(url, url))
        # An object in the dataset's directory, or a local file, may be copied, and then has a different state.
        is_own = url.startswith(f"{self._dataset_url}/")
        is_local_copy = item.revision is not None and is_local(item.revision) and not self._is_in_place
        return self._sample(
            item,
            url,
            offset=item.offset,
            length=item.length,
            checksum=item.checksum,
            revision=None if is_own or is_local_copy or item.checksum is not None else item.revision,
        )

    def checksum(self, data: bytes) -> str:
        return checksum_of(data, self._checksum or "crc32")

    def _warn_if_missing(self, url: str) -> None:
        """Warn if the first object that the source names is missing: with a wrong root, all objects are missing.

        This is not an error, because objects may be written later than their descriptions.
        """
        with ObjectReader(self._options, options=_ONE_ATTEMPT) as reader:
            try:
                reader.read(url, 0, 1)
            except ObjectMissingError:
                DATASETS.warning(
                    "%s, the first object that the source names, is missing, and its sample cannot be read; check the "
                    "root and the column of paths. `dpflow dataset verify --data` names all that are missing",
                    printable_url(url),
                )
            except DPFlowError:
                pass  # it may be readable elsewhere, with other credentials

    def _below_root(self, path: str) -> str:
        """Make an absolute path below a local root relative to it; return other paths as they are."""
        root = self._own_root.removeprefix("file://").rstrip("/") + "/"
        is_below = self._own_root.startswith("file:///") and path.startswith(root)
        return path.removeprefix(root).lstrip("/") if is_below else path

    def _packed(self, item: Item, packs: ShardPacks) -> SampleMeta:
        assert item.data is not None
        pack, offset = packs.add(item.data)
        url = f"{self._dataset_url}/{packs.folder}/{pack}"
        return self._sample(item, url, offset=offset, length=len(item.data), checksum=self.checksum(item.data))

    def _sample(self, item: Item, url: str, **fields: Any) -> SampleMeta:
        path = url.removeprefix(self._root)
        if ".." in path or join_url(self._root, path) != url:  # as for "//" after the root
            path = url
        meta = encode_annotations(item.meta, path)
        try:
            return SampleMeta(path=path, meta=meta, **fields)
        except ValueError as error:
            raise SourceError(f"{path}: {error}") from error

    def _checked(self, samples: list[SampleMeta], algorithm: ChecksumAlgorithm) -> list[SampleMeta]:
        """Add checksums and lengths to the samples without checksums."""
        unknown = [position for position, sample in enumerate(samples) if sample.checksum is None]
        urls = [data_url(self._dataset_url, self._root, samples[position].path) for position in unknown]
        spans = [span_of(self._given_urls.get(url, url), samples[at]) for url, at in zip(urls, unknown)]
        with ObjectReader(self._options) as reader:
            for position, span, content in zip(unknown, spans, by_groups(reader.read_each, spans)):
                if isinstance(content, DPFlowError):
                    raise SourceError(f"{printable_url(span.url)} cannot be read: {type(content).__name__}: {content}")
                samples[position] = msgspec.structs.replace(
                    samples[position], length=len(content), checksum=checksum_of(content, algorithm), revision=None
                )
        return samples
