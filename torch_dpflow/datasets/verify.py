"""Checking a stored dataset: its metadata, and the data that this describes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_dpflow._core.checks import check_type
from torch_dpflow.datasets.describing import by_groups, span_of
from torch_dpflow.datasets.spec import SampleMeta
from torch_dpflow.datasets.storage import ByteRange, ObjectReader
from torch_dpflow.datasets.storage.base import matches
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.errors import DatasetError, DPFlowError, OptionTypeError

#: A sample's number, the URL of its object, and its metadata.
_Numbered = tuple[int, str, SampleMeta]


@dataclass
class Compared:
    """How many samples `verify(data=True)` compared, by the way in which it compared them."""

    #: by checksum
    checksums: int = 0
    #: without a checksum, by the size of the object
    sizes: int = 0
    #: without either: the object exists
    presence: int = 0


class Problem(NamedTuple):
    """A difference between the dataset's description and its files."""

    #: The number of the first sample that cannot be read because of it.
    sample: int
    #: How many samples cannot be read because of it.
    samples: int
    what: str


def checksums_in(stored: StoredDataset) -> Counter[str]:
    """Count the samples with each algorithm of checksums ("" for none) in two shards of each version.

    These are the first and the last shard that the version has written. One import takes checksums of all samples or of
    none, unless its source has some. Raises DamagedStoreError if a shard cannot be read.
    """
    shards: dict[str, list[int]] = {}
    for number, entry in enumerate(stored.variant.shards):
        shards.setdefault(entry.version, []).append(number)
    read = sorted({number for numbers in shards.values() for number in (numbers[0], numbers[-1])})
    samples = (sample for number in read for sample in stored.shard(number).samples)
    return Counter((sample.checksum or "").partition(":")[0] for sample in samples)


def verify(
    stored: StoredDataset,
    *,
    data: bool = False,
    own: bool = False,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda samples: None,
    compared: Compared | None = None,
) -> Iterator[Problem]:
    """Yield the problems of a dataset as they are found. Keeps one shard in memory.

    Args:
        stored: the dataset to check; opening it has checked its version's own file.
        data: check every sample's object too: its presence, its size and, if there is a checksum, its bytes, which
            are read.
        own: check only objects in the dataset's directory, none that URLs name.
        options: fsspec's options for the data; None: the store's options.
        progress: called with the number of checked samples, after every shard.
        compared: counts the samples without problems.

    Raises OptionTypeError for an argument of the wrong type.
    """
    if not isinstance(stored, StoredDataset):
        raise OptionTypeError(f"stored={stored!r:.80}: give what DatasetStore.open('namespace/name') returns")
    for name, switch in (("data", data), ("own", own)):
        check_type(name, switch, bool, "True or False")
    given = stored.options if options is None else options
    return _problems(stored, data, own, ObjectReader(given), progress, compared or Compared())


def _problems(
    stored: StoredDataset,
    data: bool,
    own: bool,
    objects: ObjectReader,
    progress: Callable[[int], None],
    compared: Compared,
) -> Iterator[Problem]:
    first = 0
    with objects:
        for number in range(len(stored.variant.shards)):
            count = stored.variant.shard_samples(number)
            try:
                samples = stored.shard(number).samples
            except (DatasetError, OSError) as error:
                yield Problem(first, count, _text_of(error))
            else:
                yield from _check(stored, objects if data else None, samples, first, own, compared)
            first += count
            progress(first)


def _check(
    stored: StoredDataset,
    objects: ObjectReader | None,
    samples: Sequence[SampleMeta],
    first: int,
    own: bool,
    compared: Compared,
) -> Iterator[Problem]:
    """Yield the problems of the samples of a shard, whose first sample has number `first`."""
    numbered: list[_Numbered] = []
    for number, sample in enumerate(samples, first):
        try:
            sample.fields()
            if not own or stored.own_path(sample) is not None:
                numbered.append((number, stored.data_url(sample), sample))
        except DatasetError as error:
            yield Problem(number, 1, _text_of(error))
    if objects is not None:
        yield from _check_bytes(objects, [place for place in numbered if place[2].checksum is not None], compared)
        yield from _check_sizes(objects, [place for place in numbered if place[2].checksum is None], compared)


def _check_bytes(objects: ObjectReader, numbered: Sequence[_Numbered], compared: Compared) -> Iterator[Problem]:
    contents = by_groups(objects.read_each, [span_of(url, sample) for _, url, sample in numbered])
    for (number, url, sample), content in zip(numbered, contents):
        assert sample.checksum is not None
        if isinstance(content, DPFlowError):
            yield Problem(number, 1, _text_of(content))
        elif sample.length is not None and len(content) != sample.length:
            yield Problem(number, 1, f"{url} has {len(content)} bytes instead of {sample.length}")
        elif not matches(content, sample.checksum):
            yield Problem(number, 1, f"{url} does not match {sample.checksum}")
        else:
            compared.checksums += 1


def _check_sizes(objects: ObjectReader, numbered: Sequence[_Numbered], compared: Compared) -> Iterator[Problem]:
    spans = [ByteRange(url, state=sample.revision) for _, url, sample in numbered]
    looks = by_groups(objects.look_each, spans)
    for (number, url, sample), look in zip(numbered, looks, strict=True):
        if isinstance(look, DPFlowError):
            yield Problem(number, 1, _text_of(look))
            continue
        size = look.size
        if size is None or sample.length is None:
            compared.presence += 1
        elif sample.offset is None and size != sample.length:
            yield Problem(number, 1, f"{url} has {size} bytes instead of {sample.length}")
        elif sample.offset is not None and size < sample.offset + sample.length:
            end = sample.offset + sample.length
            yield Problem(number, 1, f"{url} has {size} bytes, but the sample ends at {end}")
        else:
            compared.sizes += 1


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, DPFlowError) else f"{type(error).__name__}: {error}"
