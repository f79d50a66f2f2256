"""The sides of `benchmarks.peers`: the same crops, each as its library's own documentation has it.

A side is a context manager over the files that yields what reads an epoch, batch after batch. Where a library leaves
decoding to its user, Pillow and torchvision decode.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler, default_collate

from benchmarks.meter import Read

BATCH, WORKERS, SIZE = 64, 2, 224
#: How often an epoch reads each file.
REPEATS = 2

Open = Callable[[Path], AbstractContextManager[Read]]


def files_of(images: Path) -> list[str]:
    return sorted(map(str, images.glob("train/*/*.jpg"))) * REPEATS


class PillowCrop:
    """A random crop of a file, or of its bytes, by Pillow and torchvision."""

    def __init__(self) -> None:
        from torchvision import transforms

        self._crop = transforms.Compose([transforms.RandomResizedCrop(SIZE), transforms.PILToTensor()])

    def __call__(self, source: str | bytes | memoryview) -> torch.Tensor:
        from PIL import Image

        with Image.open(source if isinstance(source, str) else io.BytesIO(source)) as image:
            crop: torch.Tensor = self._crop(image.convert("RGB"))
        return crop


def folder(images: Path, *, fast: bool) -> Dataset[Any]:
    """torchvision's ImageFolder, twice over; `fast`: by torch_dpflow.vision."""
    from torchvision import datasets

    found = datasets.ImageFolder(images / "train", loader=PillowCrop())
    if not fast:
        return ConcatDataset([found] * REPEATS)
    from torch_dpflow.vision import DecodedImages, DecodeRandomResizedCrop

    return DecodedImages(found.samples * REPEATS, DecodeRandomResizedCrop(SIZE))


@contextmanager
def torch_loader(images: Path, *, fast: bool = False) -> Iterator[Read]:
    loader = DataLoader(
        folder(images, fast=fast),
        BATCH,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        collate_fn=channels_last() if fast else None,
    )
    yield lambda: (batch[0] for batch in loader)


@contextmanager
def torch_loader_with_vision(images: Path) -> Iterator[Read]:
    with torch_loader(images, fast=True) as read:
        yield read


@contextmanager
def dpflow(images: Path, *, fast: bool = False) -> Iterator[Read]:
    from torch_dpflow import DPFlowDataLoader

    loader = DPFlowDataLoader(
        folder(images, fast=fast),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        collate_fn=channels_last() if fast else None,
    )
    yield lambda: (batch[0] for batch in loader)


def channels_last() -> Callable[[list[Any]], Any]:
    from torch_dpflow.vision import collate_channels_last

    return collate_channels_last


@contextmanager
def dpflow_with_vision(images: Path) -> Iterator[Read]:
    with dpflow(images, fast=True) as read:
        yield read


class LoadBatch:
    """The samples of a batch, collated, as torchdata's guide on migrating has it."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __call__(self, indices: list[int]) -> torch.Tensor:
        batch: torch.Tensor = default_collate([self._dataset[index][0] for index in indices])
        return batch


@contextmanager
def torchdata_nodes(images: Path) -> Iterator[Read]:
    from torchdata import nodes

    dataset = folder(images, fast=False)
    node: Any = nodes.SamplerWrapper(RandomSampler(dataset))  # type: ignore[arg-type]
    node = nodes.Batcher(node, batch_size=BATCH, drop_last=False)
    # Forked from a process with threads one may wait for ever for a lock that a thread had.
    node = nodes.ParallelMapper(
        node,
        map_fn=LoadBatch(dataset),
        num_workers=WORKERS,
        method="process",
        multiprocessing_context="forkserver",
    )
    loader: Any = nodes.Loader(nodes.Prefetcher(node, prefetch_factor=WORKERS * 2))
    yield lambda: loader


@contextmanager
def tf_data(images: Path, *, like_torchvision: bool = False) -> Iterator[Read]:
    """NHWC, which is TensorFlow's. Its boxes are smaller than torchvision's, and its resizing has no antialiasing."""
    import tensorflow as tf

    files = files_of(images)
    dataset = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files))
    dataset = dataset.map(tf_crop(tf, like_torchvision=like_torchvision), num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(BATCH).prefetch(tf.data.AUTOTUNE)
    yield dataset.as_numpy_iterator


def tf_crop(tf: Any, *, like_torchvision: bool = False) -> Callable[[Any], Any]:
    """Decodes, crops and resizes a file."""

    def crop(path: Any) -> Any:
        data = tf.io.read_file(path)
        shape = tf.io.extract_jpeg_shape(data)
        box = torchvision_box(tf, shape) if like_torchvision else tensorflow_box(tf, shape)
        part = tf.image.decode_and_crop_jpeg(data, box, channels=3)
        return tf.cast(tf.image.resize(part, [SIZE, SIZE], antialias=like_torchvision), tf.uint8)

    return crop


def tensorflow_box(tf: Any, shape: Any) -> Any:
    begin, extent, _ = tf.image.sample_distorted_bounding_box(
        shape,
        tf.zeros([1, 0, 4]),
        min_object_covered=0.0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.stack([begin[0], begin[1], extent[0], extent[1]])


def torchvision_box(tf: Any, shape: Any, tries: int = 10) -> Any:
    """Distributed as those of torchvision's RandomResizedCrop; the whole image where no try fits."""
    size = tf.cast(shape[:2], tf.float32)
    area = tf.reduce_prod(size) * tf.random.uniform([tries], 0.08, 1.0)
    ratio = tf.exp(tf.random.uniform([tries], math.log(3 / 4), math.log(4 / 3)))
    boxes = tf.round(tf.stack([tf.sqrt(area / ratio), tf.sqrt(area * ratio)], axis=1))
    fits = tf.reduce_all(boxes <= size, axis=1)
    extent = tf.where(tf.reduce_any(fits), boxes[tf.argmax(fits)], size)
    begin = tf.floor(tf.random.uniform([2]) * (size - extent + 1.0))
    return tf.cast(tf.concat([begin, extent], axis=0), tf.int32)


@contextmanager
def tf_data_like_torchvision(images: Path) -> Iterator[Read]:
    with tf_data(images, like_torchvision=True) as read:
        yield read


def spdl_decoder() -> tuple[Callable[[str], Any], Callable[[list[Any]], Any]]:
    """SPDL's own by FFmpeg, where its libraries are installed, else Pillow in threads; and what makes a batch."""
    import spdl.io

    from torch_dpflow.vision import random_resized_crop_params

    def decode(path: str) -> Any:
        packets: Any = spdl.io.demux_image(path)
        top, left, height, width = random_resized_crop_params(packets.height, packets.width)
        scaled = f"scale={SIZE}:{SIZE}:flags=bilinear,format=pix_fmts=rgb24"
        steps = f"crop={width}:{height}:{left}:{top}:exact=1,{scaled}"
        return spdl.io.decode_packets(packets, filter_desc=steps)

    try:
        spdl.io.demux_config()
    except RuntimeError:
        return PillowCrop(), torch.stack
    return decode, lambda frames: spdl.io.to_torch(spdl.io.convert_frames(frames))


@contextmanager
def spdl(images: Path) -> Iterator[Read]:
    import random

    from spdl.pipeline import PipelineBuilder

    files = files_of(images)
    decode, collate = spdl_decoder()

    def read() -> Iterator[Any]:
        random.shuffle(files)
        builder: Any = PipelineBuilder().add_source(files).pipe(decode, concurrency=WORKERS)
        pipeline = builder.aggregate(BATCH).pipe(collate).add_sink(3).build(num_threads=WORKERS)
        with pipeline.auto_stop():
            yield from pipeline

    yield read


@contextmanager
def grain(images: Path) -> Iterator[Read]:
    """One iterator over repeated data: its processes take seconds to start, and a new one starts new ones."""
    import grain

    crop, files = PillowCrop(), files_of(images)
    dataset: Any = grain.MapDataset.source(files).shuffle(seed=0).repeat().map(lambda path: crop(path).numpy())
    batches = dataset.to_iter_dataset().batch(BATCH)
    iterator = iter(batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=WORKERS)))
    yield lambda: islice(iterator, len(files) // BATCH)


@contextmanager
def ray_data(images: Path) -> Iterator[Read]:
    import ray
    from PIL import Image
    from torchvision import transforms

    ray.init(num_cpus=WORKERS, include_dashboard=False, logging_level="error", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    crop = transforms.Compose([transforms.RandomResizedCrop(SIZE), transforms.PILToTensor()])

    def transform(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": crop(Image.fromarray(row["image"])).numpy()}

    def read() -> Iterator[Any]:
        dataset = ray.data.read_images(files_of(images), mode="RGB", shuffle="files").map(transform)
        return (batch["image"] for batch in dataset.iter_torch_batches(batch_size=BATCH))

    try:
        yield read
    finally:
        ray.shutdown()


@contextmanager
def hf_datasets(images: Path) -> Iterator[Read]:
    import datasets
    from torchvision import transforms

    crop = transforms.Compose([transforms.RandomResizedCrop(SIZE), transforms.PILToTensor()])

    def transform(rows: dict[str, list[Any]]) -> dict[str, list[torch.Tensor]]:
        return {"image": [crop(image.convert("RGB")) for image in rows["image"]]}

    dataset: Any = datasets.Dataset.from_dict({"image": files_of(images)})
    dataset = dataset.cast_column("image", datasets.Image()).with_transform(transform)
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    yield lambda: (batch["image"] for batch in loader)


@contextmanager
def webdataset(images: Path) -> Iterator[Read]:
    """Reads tar files, which are written first; the order is that of the shards, mixed in a buffer."""
    import webdataset as wds

    shards = images.with_name(f"{images.name}_tar")
    if not shards.exists():
        shards.mkdir()
        with wds.ShardWriter(str(shards / "%04d.tar"), maxcount=64, verbose=0) as writer:
            for number, path in enumerate(files_of(images)):
                writer.write({"__key__": f"{number:06d}", "jpg": Path(path).read_bytes()})
    urls = sorted(map(str, shards.glob("*.tar")))
    dataset = wds.WebDataset(urls, shardshuffle=len(urls)).shuffle(500).to_tuple("jpg").map_tuple(PillowCrop())
    loader = wds.WebLoader(dataset.batched(BATCH), batch_size=None, num_workers=WORKERS, persistent_workers=True)
    yield lambda: (batch[0] for batch in loader)


@contextmanager
def litdata(images: Path) -> Iterator[Read]:
    """Reads chunks, which are written first."""
    import litdata
    from litdata.streaming.writer import BinaryWriter

    chunks = images.with_name(f"{images.name}_chunks")
    if not chunks.exists():
        chunks.mkdir()
        writer = BinaryWriter(str(chunks), chunk_bytes="16MB")
        for number, path in enumerate(files_of(images)):
            writer.add_item(number, Path(path).read_bytes())
        writer.done()
        writer.merge(1)
    dataset = litdata.StreamingDataset(str(chunks), shuffle=True, transform=PillowCrop())
    loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)
    yield lambda: loader


#: Side -> what opens it, the package that it needs, and how to install that.
SIDES: Mapping[str, tuple[Open, str]] = {
    "torch + Pillow": (torch_loader, "torch"),
    "dpflow + Pillow": (dpflow, "torch"),
    "torch + vision": (torch_loader_with_vision, "simplejpeg"),
    "dpflow + vision": (dpflow_with_vision, "simplejpeg"),
    "torchdata.nodes": (torchdata_nodes, "torchdata"),
    "tf.data": (tf_data, "tensorflow"),
    "tf.data like torchvision": (tf_data_like_torchvision, "tensorflow"),
    "SPDL": (spdl, "spdl"),
    "Grain": (grain, "grain"),
    "Ray Data": (ray_data, "ray"),
    "HuggingFace datasets": (hf_datasets, "datasets"),
    "webdataset": (webdataset, "webdataset"),
    "litdata": (litdata, "litdata"),
}
#: Packages that are installed by another name.
INSTALLED_AS = {"tensorflow": "tensorflow-cpu", "ray": "'ray[data]'"}
