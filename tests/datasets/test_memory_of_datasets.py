"""What stores and importers keep in memory does not grow with the number of samples."""

from __future__ import annotations

import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.coco import CocoImporter
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


def test_annotations_are_streamed(tmp_path: Path) -> None:
    """The file is larger than what is in memory while it is read."""
    path = tmp_path / "instances.json"
    outline = ",".join(f"{n}.25" for n in range(1000))
    with path.open("w") as file:
        file.write('{"annotations": [')
        for number in range(600):
            comma = "," if number else ""
            record = f'"id": {number}, "image_id": {number % 500}, "category_id": 1, "bbox": [1, 2, 3, 4]'
            file.write(f'{comma}{{{record}, "segmentation": [[{outline}]]}}')
        images = ",".join(f'{{"id": {n}, "file_name": "{n}.jpg"}}' for n in range(500))
        file.write(f'], "images": [{images}], "categories": [{{"id": 1}}]}}')
    assert path.stat().st_size > 3 * MIB
    importer = CocoImporter(str(path), images=str(tmp_path))
    assert _peak(lambda: deque(importer.items(), maxlen=0)) < 1.5 * MIB
    assert importer.total() == 500
