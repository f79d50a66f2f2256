"""The sides of `benchmarks.storage`: how each of them reads the same JPEGs, as bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks.storage_corpus import (
    BUCKET_FOLDER,
    DATASET,
    LITDATA,
    SAMPLES,
    TAR_SHARDS,
    object_name,
    tar_name,
)
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.datasets import DatasetStore
from torch_dpflow.datasets.reader import DatasetReader

WORKERS = 2
BATCH = 32
BUCKET = "data"
KEY_ID, SECRET = "test-key-id", "test-secret"

#: Batches of encoded JPEGs; a batch is a list.
Batches = Iterable[list[bytes]]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the bucket is: on "disk", or served as "oss" or "s3"."""

    kind: str
    #: URL of the server; empty for the disk
    endpoint: str = ""
    #: how many samples an epoch has
    samples: int = SAMPLES
    #: epochs, one after the other, with the same workers: one alone is over too soon where nothing is waited for
    epochs: int = 1

    @property
    def bucket_url(self) -> str:
        return f"file://{BUCKET_FOLDER.resolve()}" if self.kind == "disk" else f"{self.kind}://{BUCKET}"

    def storage_options(self) -> dict[str, Any]:
        if self.kind == "disk":
            return {}
        name = {"oss": "endpoint", "s3": "endpoint_url"}[self.kind]
        return {name: self.endpoint, "key": KEY_ID, "secret": SECRET}


class PlainReads(Dataset[bytes]):
    """One call of the vendor's client, or one file, for each sample: what users write by themselves.

    The client is made in the worker, on first use, as vendors ask for.
    """

    def __init__(self, connect: Callable[[], Callable[[str], bytes]]) -> None:
        self._connect = connect
        self._read: Callable[[str], bytes] | None = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> bytes:
        if self._read is None:
            self._read = self._connect()
        return self._read(object_name(index))


class WithoutAnnotations(Dataset[bytes]):
    """The bytes of a reader's samples: what the other sides give."""

    def __init__(self, reader: DatasetReader) -> None:
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> bytes:
        return self._reader[index][0]

    def __getitems__(self, indices: list[int]) -> list[bytes]:
        return [data for data, _ in self._reader.__getitems__(indices)]


def open_files() -> Callable[[str], bytes]:
    return lambda name: (BUCKET_FOLDER / name).read_bytes()


def open_oss2(place: Place) -> Callable[[str], bytes]:
    import oss2

    bucket = oss2.Bucket(oss2.Auth(KEY_ID, SECRET), place.endpoint, BUCKET)
    return lambda name: bucket.get_object(name).read()  # type: ignore[no-any-return]


def open_boto3(place: Place) -> Callable[[str], bytes]:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=place.endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET,
    )
    return lambda name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read()  # type: ignore[no-any-return]


#: The client that reads one object, by kind of storage.
CLIENTS: Mapping[str, Callable[[Place], Callable[[str], bytes]]] = {
    "disk": lambda place: open_files(),
    "oss": open_oss2,
    "s3": open_boto3,
}


def read_plainly(place: Place) -> Batches:
    """torch's loader, the vendor's client."""
    return _loader(DataLoader, PlainReads(partial(CLIENTS[place.kind], place)), place)


def read_with_udr(loader: type[DataLoader[bytes]], place: Place) -> Batches:
    """UDR under torch's loader or ours."""
    store = DatasetStore(f"{place.bucket_url}/datasets", **place.storage_options())
    return _loader(loader, WithoutAnnotations(DatasetReader(store.open(DATASET))), place)


def read_webdataset(place: Place) -> Batches:
    """Tar files, read from front to back; over HTTP, as nobody checks signatures there."""
    import webdataset

    root = str(BUCKET_FOLDER) if place.kind == "disk" else f"{place.endpoint}/{BUCKET}"
    urls = [f"{root}/{tar_name(shard)}" for shard in range(TAR_SHARDS)]
    dataset = webdataset.WebDataset(urls, shardshuffle=False).to_tuple("jpg").map(lambda sample: sample[0])
    return DataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=WORKERS,
        collate_fn=list,
        persistent_workers=place.epochs > 1,
    )


def read_litdata(place: Place) -> Batches:
    """Chunks of 16 MB, which litdata brings into a folder of its own first where they are on a server."""
    import litdata

    if place.kind == "disk":
        dataset = litdata.StreamingDataset(str(BUCKET_FOLDER / LITDATA))
    else:
        # It has no switch of its own for a server without TLS.
        litdata.streaming.downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"
        dataset = litdata.StreamingDataset(
            f"{place.bucket_url}/{LITDATA}",
            cache_dir=tempfile.mkdtemp(),
            storage_options={
                "endpoint_url": place.endpoint,
                "aws_access_key_id": KEY_ID,
                "aws_secret_access_key": SECRET,
                "region_name": "us-east-1",
            },
        )
    return litdata.StreamingDataLoader(  # type: ignore[no-any-return]
        dataset,
        batch_size=BATCH,
        num_workers=WORKERS,
        collate_fn=_as_bytes,
        persistent_workers=place.epochs > 1,
    )


def _as_bytes(samples: list[Any]) -> list[bytes]:
    """litdata gives views of its chunks, which no worker can send."""
    return [bytes(sample) for sample in samples]


def _loader(kind: type[DataLoader[bytes]], dataset: Dataset[bytes], place: Place) -> Batches:
    return kind(
        Subset(dataset, range(place.samples)),
        batch_size=BATCH,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
        num_workers=WORKERS,
        collate_fn=list,
        persistent_workers=place.epochs > 1,
    )


_UDR = {
    "torch + UDR": partial(read_with_udr, DataLoader),
    "dpflow + UDR": partial(read_with_udr, DPFlowDataLoader),
}

#: Every way to read an epoch, by kind of storage; the first is the baseline.
SIDES: Mapping[str, Mapping[str, Callable[[Place], Batches]]] = {
    "disk": {"torch + open()": read_plainly, **_UDR, "webdataset": read_webdataset, "litdata": read_litdata},
    "oss": {"torch + oss2": read_plainly, **_UDR},
    "s3": {"torch + boto3": read_plainly, **_UDR, "webdataset": read_webdataset, "litdata": read_litdata},
}
