"""What stores and importers keep in memory does not grow with the number of samples."""

from __future__ import annotations

import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter

MIB = 2**20


def _peak(work: Callable[[], Any]) -> int:
    """Most bytes that Python held at once because of `work`."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _items(count: int) -> Iterator[Item]:
    for number in range(count):
        meta = {"label": number % 1000, "class": f"n{number % 1000:08d}"}
        yield Item(path=f"{number // 1000:04d}/{number:08d}.jpg", length=100_000, meta=meta)


def test_importing_and_reading_stay_flat(local_store: DatasetStore) -> None:
    """20,000 samples are about 15 MB when they are all in memory."""
    importer = IterableImporter(_items(20_000), root="s3://bucket/images")
    draft = Draft(local_store, "core/x", "v1")
    assert _peak(lambda: draft.add("train", importer)) < 3 * MIB
    draft.publish()
    stored = local_store.open("core/x")
    assert _peak(lambda: local_store.open("core/x")) < MIB / 4
    assert _peak(lambda: deque(stored.samples(), maxlen=0)) < 2 * MIB
