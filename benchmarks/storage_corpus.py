"""What `benchmarks.storage` reads: one bucket with the same JPEGs as objects, as a stored dataset and as shards."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path

from examples.natural_images import Specification, generate
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter

IMAGES = Path("demo_data/benchmark")
SPECIFICATION = Specification(classes=4, train=1024, val=4, seed=1)
BUCKET_FOLDER = Path("demo_data/storage")

SAMPLES = 1024
DATASET = "core/jpegs"
#: Where the JPEGs lie in the bucket.
OBJECTS = f"datasets/{DATASET}/data"
TAR_SHARDS = 8
LITDATA = "litdata"


def prepare() -> Path:
    """The folder that is the bucket; made on first use."""
    done = BUCKET_FOLDER / "done"
    if done.exists():
        return BUCKET_FOLDER
    shutil.rmtree(BUCKET_FOLDER, ignore_errors=True)
    generate(IMAGES, SPECIFICATION)
    images = [path.read_bytes() for path in sorted(IMAGES.glob("train/*/*.jpg"))]
    _write_objects(images)
    _write_tars(images)
    _write_litdata(images)
    done.touch()
    return BUCKET_FOLDER


def object_name(index: int) -> str:
    return f"{OBJECTS}/{index:06d}.jpg"


def tar_name(shard: int) -> str:
    return f"tar/jpegs-{shard:06d}.tar"


def _write_objects(images: list[bytes]) -> None:
    for index, image in enumerate(images):
        path = BUCKET_FOLDER / object_name(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    items = [Item(path=f"{n:06d}.jpg", length=len(image), meta={}) for n, image in enumerate(images)]
    store = DatasetStore.create(str(BUCKET_FOLDER / "datasets"))
    draft = Draft(store, DATASET, "v1")
    draft.add("train", IterableImporter(items, root="data"))
    draft.publish()


def _write_tars(images: list[bytes]) -> None:
    per_shard = len(images) // TAR_SHARDS
    for shard in range(TAR_SHARDS):
        path = BUCKET_FOLDER / tar_name(shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for index in range(shard * per_shard, (shard + 1) * per_shard):
                member = tarfile.TarInfo(f"{index:06d}.jpg")
                member.size = len(images[index])
                tar.addfile(member, io.BytesIO(images[index]))


def _write_litdata(images: list[bytes]) -> None:
    try:
        from litdata.streaming.writer import BinaryWriter
    except ImportError:
        return  # that side is left out then
    folder = BUCKET_FOLDER / LITDATA
    folder.mkdir(parents=True)
    writer = BinaryWriter(str(folder), chunk_bytes="16MB")
    for index, image in enumerate(images):
        writer.add_item(index, image)
    writer.done()
    writer.merge(1)
