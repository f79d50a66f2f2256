"""Sources to import, and stores to import them into."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.importers import Importer, Item
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.errors import StorageTimeoutError

T = TypeVar("T")


class Numbered:
    """A dataset of `count` samples, each with bytes that tell its number. Counts how often it is asked."""

    def __init__(self, count: int, *, first: int = 0) -> None:
        self._count = count
        self._first = first
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[bytes, dict[str, Any]]:
        self.asked.append(index)
        return content(self._first + index), {"number": self._first + index}


def content(number: int) -> bytes:
    """The bytes of a sample, of a length of its own."""
    return (b"%d-" % number) * (1 + number % 5)


def lazily(count: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The same samples, one after the other only."""
    numbered = Numbered(count)
    return (numbered[index] for index in range(count))


def publish(
    store: DatasetStore, source: Any, *, name: str = "core/numbers", version: str = "v1", **how: Any
) -> StoredDataset:
    """Import a source as the variant "train" of a version."""
    parent = how.pop("parent", None)
    draft = Draft(store, name, version, parent=parent)
    draft.add("train", IterableImporter(source, name="numbered"), **{"shard_size": 4, **how})
    draft.publish()
    return store.open(f"{name}:{version}:train")


def contents(stored: StoredDataset) -> list[tuple[bytes, dict[str, Any]]]:
    """All samples, read the plain way and checked."""
    found = []
    for sample in stored.samples():
        path = stored.data_url(sample).removeprefix(stored.url + "/")
        start = sample.offset or 0
        data = stored.files.read(path)[start : start + sample.length]
        assert sample.checksum == f"crc32:{zlib.crc32(data):08x}"
        found.append((data, sample.fields()))
    return found


def numbers(count: int, *, first: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """What `contents` should give."""
    return [(content(number), {"number": number}) for number in range(first, first + count)]


def numbers_for_import() -> list[tuple[bytes, dict[str, Any]]]:
    """An iterable to import by name."""
    return numbers(3)


def check_starts(importer: Importer) -> list[Item]:
    """All items; drawn from each position on they are the same."""
    items = list(importer.items())
    for start in range(len(items) + 1):
        assert list(importer.items(start)) == items[start:]
    return items


def despite_time_outs(read: Callable[[], T]) -> T:
    """What `read` returns, under short time-outs that a busy machine may exceed with any read."""
    while True:
        try:
            return read()
        except StorageTimeoutError:
            pass
