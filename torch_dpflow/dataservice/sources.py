"""A stored dataset as a set of the pool: its name, what a server needs to read it, and where its records lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from torch_dpflow.dataservice.protocol import SetSource
from torch_dpflow.dataservice.sets import FileSet, identity
from torch_dpflow.datasets.spec import SampleMeta
from torch_dpflow.datasets.store import DatasetStore, StoredDataset
from torch_dpflow.errors import DamagedStoreError, OptionTypeError

#: Metadata shards that are read at the same time.
_READ_THREADS = 16


def identity_of(stored: StoredDataset) -> bytes:
    """The name of a variant's set: a published version never changes."""
    return identity(
        "files", {"url": stored.url, "digest": stored.dataset.digest, "variant": stored.variant_name}
    )


def source_of(stored: StoredDataset, data_options: Mapping[str, Any] | None) -> SetSource:
    """What a server needs to read it. Raises OptionTypeError: an option is not text, a number or a list of such."""
    source = SetSource(
        store=stored.url.removesuffix(f"/{stored.dataset.id}"),
        options=stored.options,
        ref=str(stored.ref),
        data_options=None if data_options is None else dict(data_options),
    )
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(source), type=SetSource)
    except (TypeError, msgspec.MsgspecError) as error:
        raise OptionTypeError(
            f"options of a storage that a server of the pool reads have to be text, numbers or lists of such: {error}"
        ) from None


def open_source(source: SetSource, wanted: bytes) -> StoredDataset:
    """Open what is to be read. Raises DatasetError or StorageError."""
    stored = DatasetStore(source.store, **source.options).open(source.ref)
    if identity_of(stored) != wanted:
        raise DamagedStoreError(
            f"{source.ref} in {source.store} is another version than the one that was asked for; open the dataset again"
        )
    return stored


def all_samples(stored: StoredDataset) -> Iterator[SampleMeta]:
    """As `StoredDataset.samples`, with metadata shards that are read at the same time."""
    with ThreadPoolExecutor(_READ_THREADS, "dpflow-read") as threads:
        for shard in threads.map(stored.shard, range(len(stored.variant.shards))):
            yield from shard.samples


def record_set(stored: StoredDataset) -> tuple[FileSet, npt.NDArray[np.bool_]]:
    """Where each sample lies, and whether its length is known: reads all metadata. Raises as `StoredDataset.shard`."""
    lengths = [-1 if one.length is None else one.length for one in all_samples(stored)]
    known = np.array(lengths, dtype=np.int64)
    return FileSet(identity_of(stored), np.maximum(known, 0), stored.variant.shard_size), known >= 0
