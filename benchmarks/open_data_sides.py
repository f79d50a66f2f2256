"""Sides of `benchmarks.open_data`: the same samples in five formats, read by each format's library and by ours."""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH = 64
SHARDS = 8
#: Rows of a row group of Parquet.
ROWS = 100
KEYS = {"key": "test-key-id", "secret": "test-secret"}
BUCKET = "data"

Batches = Iterator[list[Any]]


@dataclass(frozen=True)
class Data:
    """One format's files: in `folder`, or served from it at `endpoint`."""

    kind: str
    folder: Path
    #: "" for the disk
    endpoint: str = ""

    @property
    def names(self) -> str:
        """What is below the folder of all formats."""
        return f"tar/train-{{000..{SHARDS - 1:03d}}}.tar" if self.kind == "tar" else self.kind

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.names}" if self.endpoint else f"{self.folder}/{self.names}"

    @property
    def options(self) -> dict[str, Any]:
        """fsspec's options."""
        return {**KEYS, "endpoint_url": self.endpoint} if self.endpoint else {}


@dataclass(frozen=True)
class Opened:
    """A dataset as one side reads it."""

    #: yields the batches of an epoch, by its number
    epoch: Callable[[int], Batches]
    #: reads one sample; None: the library reads from front to back only
    read: Callable[[int], Any] | None


def contents(samples: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield an image's bytes and a label for each sample."""
    content = random.Random(0).randbytes(size)
    for number in range(samples):
        yield content, number % 1000


def write_tar(folder: Path, samples: int, size: int) -> None:
    folder.mkdir()
    each = -(-samples // SHARDS)
    written = enumerate(contents(samples, size))
    for shard in range(SHARDS):
        with tarfile.open(folder / f"train-{shard:03d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number, (content, label) in [next(written) for _ in range(min(each, samples - shard * each))]:
                for ending, data in (("jpg", content), ("cls", b"%d" % label)):
                    entry = tarfile.TarInfo(f"{number:08d}.{ending}")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))


def write_mds(folder: Path, samples: int, size: int) -> None:
    from streaming import MDSWriter

    limit = samples * (size + 20) // SHARDS
    with MDSWriter(out=str(folder), columns={"jpg": "bytes", "cls": "int"}, size_limit=limit) as writer:
        for content, label in contents(samples, size):
            writer.write({"jpg": content, "cls": label})


def write_litdata(folder: Path, samples: int, size: int) -> None:
    from litdata.streaming.cache import Cache

    folder.mkdir()
    cache = Cache(str(folder), chunk_size=-(-samples // SHARDS))
    for number, (content, label) in enumerate(contents(samples, size)):
        cache[number] = {"jpg": content, "cls": label}
    cache.done()
    cache.merge()


def write_arrow(folder: Path, samples: int, size: int) -> None:
    import datasets

    rows = [{"jpg": content, "cls": label} for content, label in contents(samples, size)]
    datasets.Dataset.from_list(rows).save_to_disk(str(folder), num_shards=SHARDS)


def write_parquet(folder: Path, samples: int, size: int) -> None:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    rows = [{"jpg": content, "cls": label} for content, label in contents(samples, size)]
    each = -(-samples // SHARDS)
    for shard in range(SHARDS):
        table = pyarrow.Table.from_pylist(rows[shard * each : (shard + 1) * each])
        pyarrow.parquet.write_table(
            table, folder / f"train-{shard:03d}.parquet", row_group_size=ROWS, use_dictionary=False
        )


WRITERS = {
    "tar": write_tar,
    "mds": write_mds,
    "litdata": write_litdata,
    "arrow": write_arrow,
    "parquet": write_parquet,
}


def batches(samples: Iterator[Any]) -> Batches:
    batch = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def in_random_order(count: int, read: Callable[[Sequence[int]], list[Any]], epoch: int) -> Batches:
    order = random.Random(epoch).sample(range(count), count)
    for first in range(0, count, BATCH):
        yield read(order[first : first + BATCH])


def open_webdataset(data: Data, cache: str) -> Opened:
    """Shards in random order, samples by a buffer of 1,000. From S3 by curl, as it has no client of its own."""
    import webdataset

    if not data.endpoint:
        dataset = webdataset.WebDataset(data.url, shardshuffle=SHARDS, seed=0).shuffle(1000)
    else:
        url = f"pipe:curl -sf {data.endpoint}/{BUCKET}/{data.names}"
        dataset = webdataset.WebDataset(url, shardshuffle=SHARDS, cache_dir=cache, seed=0).shuffle(1000)
    return Opened(lambda number: batches(iter(dataset)), None)


def open_streaming(data: Data, cache: str) -> Opened:
    from streaming import StreamingDataset

    if data.endpoint:
        os.environ |= {
            "S3_ENDPOINT_URL": data.endpoint,
            "AWS_ACCESS_KEY_ID": KEYS["key"],
            "AWS_SECRET_ACCESS_KEY": KEYS["secret"],
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        dataset = StreamingDataset(remote=data.url, local=cache, shuffle=True, batch_size=BATCH)
    else:
        dataset = StreamingDataset(local=data.url, shuffle=True, batch_size=BATCH)
    return Opened(lambda number: batches(iter(dataset)), dataset.__getitem__)


def open_litdata(data: Data, cache: str) -> Opened:
    import litdata

    if not data.endpoint:
        dataset = litdata.StreamingDataset(data.url, shuffle=True, drop_last=False)
    else:
        # It has no switch of its own for a server without TLS.
        litdata.streaming.downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"
        dataset = litdata.StreamingDataset(
            data.url,
            shuffle=True,
            drop_last=False,
            cache_dir=cache,
            storage_options={
                "endpoint_url": data.endpoint,
                "aws_access_key_id": KEYS["key"],
                "aws_secret_access_key": KEYS["secret"],
                "region_name": "us-east-1",
            },
        )
    # By number it fails on S3 once chunks were read ("unpack_from requires a buffer of at least 8 bytes").
    read = None if data.endpoint else dataset.__getitem__
    # Its samples have views of a mapped chunk, which no longer holds once another one is read.
    return Opened(
        lambda number: batches({**sample, "jpg": bytes(sample["jpg"])} for sample in dataset),
        read,
    )


def open_huggingface(data: Data, cache: str) -> Opened:
    """Arrow files that `save_to_disk` wrote; or Parquet, which is downloaded and written as Arrow files first."""
    import datasets

    opened: list[Any] = []

    def dataset() -> Any:
        if not opened and data.kind == "arrow":
            opened.append(datasets.load_from_disk(data.url))
        elif not opened:  # the download is a part of the first epoch
            files = f"{data.url}/*.parquet"
            opened.append(
                datasets.load_dataset(
                    "parquet", data_files=files, split="train", cache_dir=cache, storage_options=data.options
                )
            )
        return opened[0]

    return Opened(
        lambda number: in_random_order(len(dataset()), dataset().__getitems__, number),
        lambda number: dataset()[number],
    )


def open_ours(data: Data, cache: str) -> Opened:
    from torch_dpflow.datasets import open_dataset
    from torch_dpflow.datasets.storage import ReadOptions

    options: dict[str, Any] = {} if data.kind in ("arrow", "parquet") else {"index_dir": f"{cache}/index"}
    if data.endpoint:
        options["read_options"] = ReadOptions(cache_dir=f"{cache}/samples")
    dataset = open_dataset(data.url, storage_options=data.options, **options)
    return Opened(
        lambda number: in_random_order(len(dataset), dataset.__getitems__, number),
        dataset.__getitem__,
    )


#: By format: the package of its library, and what opens it. Ours reads the same files.
PEERS: dict[str, tuple[str, Callable[[Data, str], Opened]]] = {
    "tar": ("webdataset", open_webdataset),
    "mds": ("streaming", open_streaming),
    "litdata": ("litdata", open_litdata),
    "arrow": ("datasets", open_huggingface),
    "parquet": ("datasets", open_huggingface),
}
#: Where a format is not read: on S3, `save_to_disk` files have no footer; on a disk, Parquet has no random order.
LEFT_OUT = {("arrow", "S3"), ("parquet", "disk")}
