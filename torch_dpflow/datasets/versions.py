"""Checking stored datasets, copying versions to other stores, and removing versions, datasets and unused files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_dpflow._core.checks import check_type
from torch_dpflow.datasets.describing import by_groups, is_pack, packs_of, span_of
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.spec import Dataset, DatasetRef, SampleMeta, encode_file
from torch_dpflow.datasets.storage import ByteRange, ObjectReader
from torch_dpflow.datasets.storage.base import matches
from torch_dpflow.datasets.storage.urls import split_chain
from torch_dpflow.datasets.store import DatasetStore, StoredDataset
from torch_dpflow.datasets.writer import RECORD, DraftRecord, ImportProgress
from torch_dpflow.errors import (
    DamagedStoreError,
    DatasetError,
    DPFlowError,
    OptionError,
    OptionTypeError,
    PublishedError,
    StorageError,
)

#: A sample's number, the URL of its object, and its metadata.
_Numbered = tuple[int, str, SampleMeta]


@dataclass
class Compared:
    """Numbers of samples in which `verify(data=True)` found no problem, by the strength of the check."""

    #: the checksum matches
    checksums: int = 0
    #: there is no checksum; the size of the object fits
    sizes: int = 0
    #: there is no checksum, and a size is unknown; the object exists
    presence: int = 0


class Problem(NamedTuple):
    """A reason why samples of a dataset cannot be read, or not as the dataset describes them."""

    #: The number of the first sample that it concerns.
    sample: int
    #: The number of consecutive samples that it concerns.
    samples: int
    what: str


def checksums_in(stored: StoredDataset) -> Counter[str]:
    """Count samples by the algorithm of their checksum ("" for none), in some of the shards.

    These are the first and the last shard that each version wrote. Raises the errors of `StoredDataset.shard`.
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
    """Yield the problems of a dataset as they are found. One metadata shard is in memory at a time.

    Args:
        stored: the dataset to check. Its version's file was already checked when it was opened.
        data: whether to check every sample's object too: its presence, its size and, if there is a checksum, its bytes,
            which are read.
        own: whether to check only objects in the dataset's directory, and no objects that are named by a URL.
        options: fsspec's options for the data; None: the store's options.
        progress: called with the number of checked samples, after every shard.
        compared: receives the counts of samples that were compared without a problem.

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
                yield from _check_shard(stored, objects if data else None, samples, first, own, compared)
            first += count
            progress(first)


def _check_shard(
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


#: Objects that are in memory at a time, each whole.
_COPY_THREADS = 8

#: Called with a variant's name and how many of its samples are copied, after every metadata shard.
CopyProgress = Callable[[str, int], None]


def copy(
    store: DatasetStore,
    dataset_id: str,
    version: str | None,
    target: DatasetStore,
    *,
    progress: CopyProgress = lambda variant, samples: None,
    compared: Compared | None = None,
) -> Dataset:
    """Copy a version (None: the last one) to `target` under the same name, with the data in the dataset's directory.

    Returns the version's description, also if the target has this version already. Data that is named by URLs is not
    copied; the copy has the same URLs. Before it is published, the copy is verified: all metadata, and the copied data
    by checksums, or by sizes if it has none. Call `copy` again to continue a copy that was killed.

    Args:
        progress: see `CopyProgress`.
        compared: receives the counts of samples of the copy whose data was compared.

    Raises:
        DatasetNotFoundError: no such version is published.
        PublishedError: the target already has this version of the dataset, with a different description.
        OptionError: the target is the store itself, or has another unfinished import of the version, or other files in
            its place; or the copy was discarded meanwhile.
        OptionTypeError: `store` or `target` is not a DatasetStore.
        DamagedStoreError: the version or the copy is damaged; the copy is not published.
        StorageError: a file cannot be read or written.
    """
    for name, given in (("store", store), ("target", target)):
        check_type(name, given, DatasetStore, "a DatasetStore, such as DatasetStore.create(url)")
    dataset = store.load(dataset_id, version)
    source, files = store.files.at(dataset.id), target.files.at(dataset.id)
    name, manifest = f"{dataset.id}:{dataset.version}", f"versions/{dataset.version}.json"
    if source.url == files.url:
        raise OptionError(f"{store.url} is the store that contains {name}; give another store")
    if files.exists(manifest):
        return _existing(target, dataset)
    is_new = not files.children(f"drafts/{dataset.version}")
    try:
        for variant in dataset.variants:
            _begin(files, dataset, variant)
            _copy_variant(StoredDataset(source, dataset, variant), files, progress)
    except Exception as error:
        first = next(iter(dataset.variants))
        with suppress(OSError, StorageError):  # the copy's own error counts
            if is_new and not files.exists(dataset.shard_path(first, 0)):
                forget(target, dataset.id, dataset.version, first)
        if not isinstance(error, FileExistsError):
            raise
        raise OptionError(
            f"{name} cannot be copied: {error}, and has other bytes; `dpflow dataset prune` or `discard` removes what "
            f"is left of imports and copies"
        ) from error
    for variant in dataset.variants:
        _check(StoredDataset(files, dataset, variant), compared or Compared())
    try:
        files.create(manifest, encode_file(dataset))
    except FileExistsError:
        return _existing(target, dataset)
    files.remove(f"drafts/{dataset.version}")
    return dataset


def _existing(target: DatasetStore, dataset: Dataset) -> Dataset:
    if target.load(dataset.id, dataset.version) != dataset:
        raise PublishedError(
            f"{target.url} has another {dataset.id}:{dataset.version}, and a published version never changes"
        )
    return dataset


def _begin(files: Files, dataset: Dataset, name: str) -> None:
    """Record the copy as an import, so that it is listed, discarded and pruned like one."""
    variant = dataset.variants[name]
    record = DraftRecord(
        format=1,
        data=variant.data,
        shard_size=variant.shard_size,
        source={"copy of": dataset.digest},
        parent=dataset.parent,
    )
    ImportProgress(files, dataset.version, name).begin(record)


def _copy_variant(stored: StoredDataset, files: Files, progress: CopyProgress) -> None:
    before: set[str] = set()
    copied = 0
    with ThreadPoolExecutor(_COPY_THREADS, "dpflow-copy") as threads:
        for number in range(len(stored.variant.shards)):
            shard = stored.shard(number)
            paths = {path for sample in shard.samples if (path := stored.own_path(sample)) is not None}
            copies = [
                threads.submit(lambda path: files.ensure(path, stored.files.read(path)), path)
                for path in sorted(paths - before)
            ]
            for one in copies:
                one.result()
            files.ensure(stored.dataset.shard_path(stored.variant_name, number), encode_file(shard))
            before = paths  # samples of an object are mostly neighbours; other copies of it are only compared
            copied += len(shard.samples)
            progress(stored.variant_name, copied)


def _check(copied: StoredDataset, compared: Compared) -> None:
    """Verify the copy, and that it was not discarded meanwhile."""
    problem = next(verify(copied, data=True, own=True, compared=compared), None)
    if problem is not None:
        raise DamagedStoreError(
            f"the copy of {copied.ref} is not published, as sample {problem.sample} cannot be read correctly: "
            f"{problem.what}; verify the source of the copy, and discard the copy"
        )
    if ImportProgress(copied.files, copied.dataset.version, copied.variant_name).record() is None:
        raise OptionError(f"the copy of {copied.ref} was discarded meanwhile")


#: Files that are removed at a time, as each may be a round trip away.
_REMOVE_THREADS = 16
_SHARD = re.compile(r"ms-\d+\.json")


def delete(store: DatasetStore, dataset_id: str, version: str | None = None) -> list[str]:
    """Remove a published version, or all versions and unfinished imports of a dataset. Returns the removed versions.

    Metadata and packs of the versions are removed too, except files that other published versions refer to. Data that
    no import has written stays. Readers that have a removed version open fail when they need a removed file. If a
    delete was killed, `prune` removes the files that it left.

    Raises:
        DatasetNotFoundError: no such version is published, or there is no such dataset.
        OptionError: an unfinished import appends to the version.
        OptionTypeError: `store` is not a DatasetStore.
        DamagedStoreError: another version cannot be read. The version is deleted, but its metadata and packs stay.
    """
    check_type("store", store, DatasetStore, "a DatasetStore")
    ref = DatasetRef(dataset_id, version)
    files = store.files.at(ref.id)
    versions, drafts = store.versions(ref.id), store.drafts(ref.id)
    if version is not None:
        _check_children(files, ref, drafts)
        versions, drafts = [name for name in versions if name == version], []
    if not versions and not drafts:
        raise store.not_found(ref)
    for name in versions:
        files.remove(f"drafts/{name}")  # a file that publishing left there would count as an import
        files.remove(f"versions/{name}.json")
    _clean(store, ref.id, drafts)
    return versions


def prune(store: DatasetStore, dataset_id: str) -> int:
    """Remove unfinished imports of a dataset, and files of imports that no published version refers to.

    Returns the number of removed files, without the records of imports. An import that is running at the call cannot be
    published. Raises DamagedStoreError if a published version cannot be read; then only the records are removed.
    """
    check_type("store", store, DatasetStore, "a DatasetStore")
    ref = DatasetRef(dataset_id)
    return _clean(store, ref.id, [child.name for child in store.files.at(ref.id).children("drafts")])


def _check_children(files: Files, ref: DatasetRef, drafts: Collection[str]) -> None:
    for draft in drafts:
        for variant in files.children(f"drafts/{draft}"):
            record = ImportProgress(files, draft, variant.name).record()
            if record is not None and record.parent == ref.version:
                raise OptionError(
                    f"the unfinished import {ref.id}:{draft} continues {ref}; let it end, or discard it, first"
                )


def _clean(store: DatasetStore, dataset_id: str, discarded: Collection[str]) -> int:
    """Remove these drafts, and files of imports that no version refers to. Returns the number of these files."""
    files = store.files.at(dataset_id)
    # The order matters: a concurrent import writes its record before anything else, and a concurrent publication is
    # complete before its record is removed.
    folders = list(_folders(files))
    written = [(version, path) for version, variant in folders for path in _written(files, version, variant)]
    for draft in discarded:
        files.remove(f"drafts/{draft}")
    drafts = {child.name for child in files.children("drafts")}
    named = _named(store, dataset_id, with_packs=any(is_pack(path) for _, path in written))
    unnamed = [path for version, path in written if version not in drafts and path not in named]
    with ThreadPoolExecutor(_REMOVE_THREADS, "dpflow-remove") as threads:
        list(threads.map(files.remove, unnamed))
    for version, variant in folders:
        if version not in drafts:
            tidy_up(files, version, variant)
    remove_empty(store, dataset_id)
    return len(unnamed)


def tidy_up(files: Files, version: str, variant: str) -> None:
    """Remove the unfinished files of a variant that killed writers have left, and its directories if they are empty."""
    for folder in (f"{kind}/{version}" for kind in ("data", "meta")):
        files.sweep(f"{folder}/{variant}")
        files.remove_empty(f"{folder}/{variant}")
        files.remove_empty(folder)


def forget(store: DatasetStore, dataset_id: str, version: str, variant: str) -> None:
    """Remove the record of an unfinished import or copy, if no file is beside the record and the variant has no packs.

    A copy records no shards: the caller must check before that it has written none.
    """
    files, folder = store.files.at(dataset_id), f"drafts/{version}"
    # Packs may be those of another import, which has published this version meanwhile.
    is_alone = [child.name for child in files.children(f"{folder}/{variant}")] == [RECORD]
    if is_alone and not packs_of(files, f"data/{version}/{variant}"):
        files.remove(f"{folder}/{variant}")
        files.remove_empty(folder)
        remove_empty(store, dataset_id)


def remove_empty(store: DatasetStore, dataset_id: str) -> None:
    for folder in ("data", "meta", "drafts", "versions", ""):
        store.files.remove_empty(f"{dataset_id}/{folder}".rstrip("/"))
    store.files.remove_empty(dataset_id.partition("/")[0])


def _folders(files: Files) -> Iterator[tuple[str, str]]:
    """Yield the versions and variants that have files."""
    for version in sorted({child.name for kind in ("meta", "drafts") for child in files.children(kind)}):
        for variant in sorted(
            {child.name for kind in ("meta", "drafts") for child in files.children(f"{kind}/{version}")}
        ):
            yield version, variant


def _written(files: Files, version: str, variant: str) -> list[str]:
    """Return the files of a variant that imports have written; packs first, as metadata is needed to find packs."""
    folder = f"meta/{version}/{variant}"
    shards = [f"{folder}/{child.name}" for child in files.children(folder) if _SHARD.fullmatch(child.name)]
    return packs_of(files, f"data/{version}/{variant}") + shards


def _named(store: DatasetStore, dataset_id: str, *, with_packs: bool) -> set[str]:
    """Return the metadata shards that published versions refer to; with `with_packs` also the packs that these name."""
    shards: set[str] = set()
    packs: set[str] = set()
    for version in store.versions(dataset_id):
        dataset = store.load(dataset_id, version)
        for name, variant in dataset.variants.items():
            stored = StoredDataset(files=store.files.at(dataset_id), dataset=dataset, variant_name=name)
            for number in range(len(variant.shards)):
                path = dataset.shard_path(name, number)
                if with_packs and path not in shards:
                    # The path in the dataset's directory, which may have several URLs.
                    urls = (stored.data_url(sample) for sample in stored.shard(number).samples)
                    ends = ("/".join(split_chain(url).inner.split("/")[-4:]) for url in urls)
                    packs |= {end for end in ends if is_pack(end)}
                shards.add(path)
    return shards | packs
