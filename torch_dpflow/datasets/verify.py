"""Checks that a stored dataset is whole: its metadata, and the data that this describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from torch_dpflow.datasets.checksums import matches
from torch_dpflow.datasets.objects import Objects
from torch_dpflow.datasets.spec import SampleMeta
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.errors import DatasetError

#: Objects that are looked at at the same time.
_THREADS = 16


class Problem(NamedTuple):
    """Something that is not as the dataset says."""

    #: The number of the sample that cannot be read, or of the first of them.
    sample: int
    #: Samples that cannot be read because of it.
    samples: int
    what: str


def verify(
    stored: StoredDataset,
    *,
    data: bool = False,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda samples: None,
) -> Iterator[Problem]:
    """What is wrong with a dataset, as it is found; nothing where all is well. Keeps one shard in memory.

    Args:
        stored: what to check. That it could be opened means that its version's own file is whole.
        data: look at every sample's object too: that it is there, has its size, and, where a checksum is
            known, has the right bytes, which reads it.
        options: what fsspec needs to open the data; None: the same as for the store.
        progress: called with the number of samples that are checked, after every shard.
    """
    objects = Objects(stored.options if options is None else options)
    first = 0
    with ThreadPoolExecutor(_THREADS, "dpflow-verify") as threads:
        for number in range(len(stored.variant.shards)):
            count = stored.variant.shard_samples(number)
            try:
                samples = stored.shard(number).samples
            except (DatasetError, OSError) as error:
                samples = []
                yield Problem(first, count, _told(error))
            looked_at = threads.map(lambda sample: _look(stored, objects, sample, data), samples)
            for position, what in enumerate(looked_at, first):
                if what is not None:
                    yield Problem(position, 1, what)
            first += count
            progress(first)


def _look(stored: StoredDataset, objects: Objects, sample: SampleMeta, data: bool) -> str | None:
    """What is wrong with a sample."""
    try:
        sample.fields()
        url = stored.data_url(sample)
        return _look_at_data(objects, sample, url) if data else None
    except (DatasetError, OSError) as error:
        return _told(error)


def _look_at_data(objects: Objects, sample: SampleMeta, url: str) -> str | None:
    if sample.checksum is not None:
        content = objects.read(url, sample.offset, sample.length)
        if sample.length is not None and len(content) != sample.length:
            return f"{url} gave {len(content)} bytes instead of {sample.length}"
        return None if matches(content, sample.checksum) else f"{url} does not match {sample.checksum}"
    size = objects.size(url)
    if size is None or sample.length is None:
        return None
    if sample.offset is None and size != sample.length:
        return f"{url} has {size} bytes instead of {sample.length}"
    if sample.offset is not None and size < sample.offset + sample.length:
        return f"{url} has {size} bytes, the sample ends at {sample.offset + sample.length}"
    return None


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, DatasetError) else f"{type(error).__name__}: {error}"
