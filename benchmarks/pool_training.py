"""JPEGs for training: from the pool, from files in the page cache, from an object store with 10 ms to each answer.

    python -m benchmarks.pool_training [--json | --markdown] [--rounds N] [--quick]

The images of `benchmarks.loader`, random crops of 224x224 in batches of 64, a `DPFlowDataLoader` with two workers,
which live through all rounds; each round is an epoch, and the training loop does nothing, so what is measured is
loading. The pool's server (`dpflow pool serve`) and the store (a double of OSS) are separate processes on
the same processors. From the object store once as loaders read it, a batch at a time with overlapping requests, and
once image after image, as datasets do that have `__getitem__` alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.loader import IMAGES, SPECIFICATION
from benchmarks.peers import FEW
from benchmarks.pool import PER_STRIPE
from benchmarks.read_batch import pool_server
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from examples.natural_images import generate
from tests.support.oss_server import OSSServer
from torch_dpflow import DPFlowDataLoader, PooledDataset
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.pool import DataClient
from torch_dpflow.vision import DecodeRandomResizedCrop, collate_channels_last

BATCH, WORKERS, SIZE, LATENCY_S = 64, 2, 224, 0.010
METRICS = [
    Metric(name="images_per_s", label="images/s", spec=",.0f"),
    Metric(name="first_batch_s", label="first batch, s", higher_is_better=False, spec=".2f"),
]


class Crops(Dataset[Any]):
    """Crops of a stored dataset's images, a batch at a time."""

    def __init__(self, images: DatasetReader) -> None:
        self.images, self._decode = images, DecodeRandomResizedCrop(SIZE)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._decode(self.images[index][0])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self._decode.batch([content for content, _ in self.images.__getitems__(indices)]).unbind()


class SingleCrops(Crops):
    """The same, whose images are read one after the other."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self._decode.batch([self.images[index][0] for index in indices]).unbind()


def contents(images: Path) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Every image, and its class."""
    for path in sorted(images.glob("train/*/*.jpg")):
        yield path.read_bytes(), {"class": path.parent.name}


def publish_images(store: DatasetStore, images: Path) -> StoredDataset:
    draft = Draft(store, "core/images", "v1")
    draft.add("train", IterableImporter(contents(images), name="images"), shard_size=PER_STRIPE)
    draft.publish()
    return store.open("core/images:v1:train")


def serve_objects(images: Path, pipe: Connection) -> None:
    """The object store, until it hears something."""
    with OSSServer() as oss:
        oss.buckets.create("bucket")
        publish_images(DatasetStore.create("oss://bucket/datasets", **oss.storage_options()), images)
        oss.latency_s = LATENCY_S
        pipe.send(oss.storage_options())
        pipe.recv()


def epoch(loader: DPFlowDataLoader[Any]) -> Figures:
    begun, first_s, read = time.perf_counter(), 0.0, 0
    for batch in loader:
        first_s = first_s or time.perf_counter() - begun
        read += len(batch)
    return {"images_per_s": read / (time.perf_counter() - begun), "first_batch_s": first_s}


def opened(stack: ExitStack, images: Path, folder: Path) -> dict[str, Dataset[Any]]:
    """What is compared: the page cache first."""
    files = publish_images(DatasetStore.create(str(folder / "datasets")), images)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    store = context.Process(target=serve_objects, args=(images, other), daemon=True)
    store.start()
    stack.callback(store.join)
    stack.callback(pipe.send, None)
    objects = DatasetStore("oss://bucket/datasets", **pipe.recv()).open("core/images:v1:train")
    size = sum(len(content) + 64 for content, _ in contents(images))
    stack.enter_context(pool_server(folder / "pool", 2 * size))
    DataClient(folder / "pool").preload(objects)
    pooled = PooledDataset(objects, folder / "pool", copy=False)
    readers = DatasetReader(files), pooled, DatasetReader(objects)
    for one in readers:
        stack.enter_context(closing(one))
    assert readers[0][1] == (bytes(pooled[1][0]), pooled[1][1]) == readers[2][1]
    return {
        "files in the page cache": Crops(readers[0]),
        "pool": Crops(readers[1]),
        "object store, 10 ms": Crops(readers[2]),
        "object store, image after image": SingleCrops(readers[2]),
    }


def run(images: Path, rounds: int) -> Comparison:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loaders = {
            name: DPFlowDataLoader(
                dataset,
                BATCH,
                shuffle=True,
                num_workers=WORKERS,
                persistent_workers=True,
                collate_fn=collate_channels_last,
            )
            for name, dataset in opened(stack, images, folder).items()
        }
        for loader in loaders.values():
            epoch(loader)
        sides = {name: partial(epoch, loader) for name, loader in loaders.items()}
        return alternate("pool_training", "JPEG crops", sides, rounds=rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool_training", description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    images, specification = FEW if arguments.quick else (IMAGES, SPECIFICATION)
    generate(images, specification)
    publish([run(images, 1 if arguments.quick else arguments.rounds)], METRICS, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
