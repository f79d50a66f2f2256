"""Copying a version of a dataset to another store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch_dpflow._core.checks import check_type
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.import_progress import DraftRecord, ImportProgress
from torch_dpflow.datasets.spec import Dataset, encode_file
from torch_dpflow.datasets.store import DatasetStore, StoredDataset
from torch_dpflow.datasets.verify import Compared, verify
from torch_dpflow.errors import DamagedStoreError, OptionError, PublishedError

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
    """Copy a version (None: the last one) under its own name, with the data in the dataset's directory.

    Data that is named by URLs is not copied; the copy has the same URLs. Before it is published, the copy is verified:
    all metadata, and the copied data by checksums, or by sizes if it has none. Call it again to continue a copy that
    was killed.

    Args:
        progress: see `CopyProgress`.
        compared: counts the comparisons.

    Raises:
        DatasetNotFoundError: no such version is published.
        PublishedError: the target has another version of this name.
        OptionError: the target is the store itself, or has an unfinished import of the version or other files there.
        OptionTypeError: `store` or `target` is no DatasetStore.
        DamagedStoreError: the version, or the copy, is damaged; it is not published.
    """
    for name, given in (("store", store), ("target", target)):
        check_type(name, given, DatasetStore, "a DatasetStore, such as DatasetStore.create(url)")
    dataset = store.load(dataset_id, version)
    source, files = store.files.at(dataset.id), target.files.at(dataset.id)
    name, manifest = f"{dataset.id}:{dataset.version}", f"versions/{dataset.version}.json"
    if source.url == files.url:
        raise OptionError(f"{store.url} is the store that {name} lies in; give another one")
    if files.exists(manifest):
        return _existing(target, dataset)
    try:
        for variant in dataset.variants:
            _begin(files, dataset, variant)
            _copy_variant(StoredDataset(source, dataset, variant), files, progress)
    except FileExistsError as error:
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
