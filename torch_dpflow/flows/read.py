"""Built flows (thesis, section 3.3.2): the reader in this process, its map-style dataset, and random splits."""

from __future__ import annotations

import copy
import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from torch_dpflow._core.checks import MAX_INT64, MIN_INT64, check_int, check_type
from torch_dpflow._core.processes import PerProcess
from torch_dpflow.caches import ALSDCache
from torch_dpflow.caches.policy import parse_capacity
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.sample_reader import check_how_to_read
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.datasets.store import DatasetStore
from torch_dpflow.errors import OptionError, OptionTypeError, StageError, UsageError
from torch_dpflow.flows.flow import DataLoadFlow, FlowSource
from torch_dpflow.flows.stage import Failed, SampleTransform, Stage, StagedDataset
from torch_dpflow.log import FLOWS
from torch_dpflow.lookahead import Order
from torch_dpflow.pool.dataset import PooledDataset
from torch_dpflow.pool.transport.address import AddressLike, find_address
from torch_dpflow.samplers.indices import whole_numbers

if TYPE_CHECKING:
    from torch_dpflow.loader.loader import DPFlowDataLoader

#: Workers with separate counts; further ones share them, and may lose an increment.
_SLOTS = 257
_READ = "read"


class Skips:
    """Counters of skipped samples, by the stage that failed, shared by a process and its workers.

    Stages with the same name are counted together. If the dataset is read through another flow, a failure in a stage of
    that flow counts under the stage's name if this flow has a stage of this name, else as "read".
    """

    def __init__(self, stages: Sequence[str]) -> None:
        self._columns = {name: column for column, name in enumerate(dict.fromkeys((_READ, *stages)))}
        counts: Any = torch.zeros(_SLOTS, len(self._columns), dtype=torch.int64)
        self._counts = counts.share_memory_()
        self._lock = PerProcess(threading.Lock)

    def add(self, error: Exception) -> None:
        """Count a sample that is skipped because of this error."""
        name = error.stage if isinstance(error, StageError) else _READ
        info = get_worker_info()
        slot = 0 if info is None else 1 + info.id % (_SLOTS - 1)
        with self._lock.get():
            self._counts[slot, self._columns.get(name, self._columns[_READ])] += 1

    def counts(self) -> dict[str, int]:
        """Return the counts above zero, by the stage's name."""
        totals = self._counts.sum(0).tolist()
        return {name: totals[column] for name, column in self._columns.items() if totals[column]}

    def __getstate__(self) -> dict[str, Any]:
        return {"columns": self._columns, "counts": self._counts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._columns = state["columns"]
        self._counts = state["counts"]
        self._lock = PerProcess(threading.Lock)


def without_failed(samples: Sequence[Any], name_of: Callable[[int], str], skips: Skips | None, flow: str) -> list[Any]:
    """Return the samples without the `Failed` placeholders. If there are only placeholders, raise the last error.

    name_of: returns the name of a sample for the log, given its index in `samples`.
    skips: counts the failed samples, which are also logged; None: they are neither counted nor logged.
    flow: the name of the flow, for the log.
    """
    found = [sample for sample in samples if not isinstance(sample, Failed)]
    for place, sample in enumerate(samples):
        if skips is not None and isinstance(sample, Failed):
            skips.add(sample.error)
            # As text: a handler that keeps records would keep the frames of the error alive.
            what = f"{type(sample.error).__name__}: {sample.error}"
            FLOWS.warning("%s, %s is left out: %s", flow, name_of(place), what)
    if samples and not found:
        raise samples[-1].error
    return found


class MappedDataset(Dataset[Any]):
    """Map-style dataset of a built flow's samples. Made by `DataLoadFlowRead.to_mapped()`.

    If the flow skips samples that cannot be loaded, batches may have fewer samples; the errors are logged
    (`torch_dpflow.flows`) and counted. A batch in which all samples failed raises the last error. A failed sample that
    is indexed alone raises its error, which is neither logged nor counted.
    """

    def __init__(
        self,
        samples: StagedDataset,
        *,
        indices: np.ndarray[Any, np.dtype[np.int64]] | None,
        local: Sequence[Stage],
        flow: str,
        skips: Skips | None,
    ) -> None:
        self._samples = StagedDataset(samples, local, flow) if local else samples
        self._epochs = samples.epochs
        #: The flow's sample number for each index of this dataset; None: all samples of the flow.
        self.indices = indices
        self._flow = flow
        self._skips = skips

    def __len__(self) -> int:
        return len(self._samples) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self._samples[self._place(index)]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        places = [self._place(index) for index in indices]
        if self._skips is not None:
            loaded = self._samples.load_each(places)
            return without_failed(loaded, lambda at: f"sample {places[at]}", self._skips, self._flow)
        return list(self._samples.__getitems__(places))

    def announce_order(self, order: Order, spread: int, extends: bool = False) -> None:
        """Announce the order of an epoch to the flow's dataset; see `lookahead.announce_order`."""
        indices = self.indices
        places = order if indices is None else lambda: indices[order()]
        self._samples.announce_order(places, spread, extends)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch by which random stages are seeded, if the reader has a seed.

        A DPFlowDataLoader passes its epochs to the stages, also after a resume, so this call is not needed. Under
        another loader the epoch is the number of passes over the samples, from 0. Call this method there if a pass
        leaves samples out, as with several ranks, or if another process resumes. Call it before the epoch's first
        batch; it takes effect in persistent workers too.

        Raises OptionTypeError or OptionError unless `epoch` is a whole number of 64 bits.
        """
        epoch = check_int("epoch", epoch, minimum=MIN_INT64, maximum=MAX_INT64)
        if self._epochs is not None:
            self._epochs.set(epoch)

    def _place(self, index: int) -> int:
        place = operator.index(index)
        size = len(self)
        if not -size <= place < size:
            raise IndexError(f"sample {place} is out of range; {self._flow} has {size} samples here, from 0")
        place %= size
        return place if self.indices is None else int(self.indices[place])


class DataLoadFlowRead:
    """Built flow that torch's loaders can read, as a whole or a subset.

    Readers create it. `local_map` and `subset` return a new object, which shares the samples and the cache.

    Args:
        flow: the flow that was built.
        samples: the output of the flow's stages.
    """

    def __init__(self, flow: DataLoadFlow, samples: StagedDataset) -> None:
        self.flow = flow
        self._samples = samples
        self._indices: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self._local: tuple[Stage, ...] = ()
        self._skips = self._new_skips()

    def __len__(self) -> int:
        return len(self._samples) if self._indices is None else len(self._indices)

    def to_mapped(self) -> MappedDataset:
        """Return a map-style dataset, for any DataLoader or for direct indexing."""
        return MappedDataset(
            self._samples,
            indices=self._indices,
            local=self._local,
            flow=f"{self.flow.name}:{self.flow.version}",
            skips=self._skips,
        )

    def to_shuffled(
        self,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch: int | None = None,
        **options: Any,
    ) -> DPFlowDataLoader[Any]:
        """Return a DPFlowDataLoader that reads the samples in a new random order in each epoch, by default.

        Args:
            batch_size: number of samples in a batch.
            collate_fn: makes a batch from a list of samples; None: torch's default.
            prefetch: number of batches that each worker loads ahead; None: torch's default.
            options: further arguments of the loader, such as `num_workers`, `generator` or `sampler`.
        """
        from torch_dpflow.loader.loader import DPFlowDataLoader  # here, because it imports torch's DataLoader

        if options.get("sampler") is None and options.get("batch_sampler") is None:
            options.setdefault("shuffle", True)
        return DPFlowDataLoader(
            self.to_mapped(), batch_size, collate_fn=collate_fn, prefetch_factor=prefetch, **options
        )

    def local_map(self, function: Callable[[Any], Any], name: str = "local_map") -> DataLoadFlowRead:
        """Return a copy that applies `function` last, in the process that reads the samples. Its output is not cached.

        name: name of the function in logs, errors and `skipped()`.
        """
        read = copy.copy(self)
        read._local = (*self._local, Stage(name, function, SampleTransform(), "never"))
        read._skips = read._new_skips()
        return read

    def subset(self, indices: Iterable[int]) -> DataLoadFlowRead:
        """Return a copy with only these samples, in this order. Indices may repeat; negative ones count from the end.

        Raises:
            OptionError: an index is out of range. OptionTypeError: an index is not a whole number.
        """
        chosen = whole_numbers(indices)
        size = len(self)
        outside = chosen[(chosen < -size) | (chosen >= size)]
        if len(outside):
            raise OptionError(
                f"indices: {outside[0]} is out of range; {self.flow.name} has {size} samples here, from 0"
            )
        # Converted only after the check of the bounds.
        chosen = chosen.astype(np.int64) % max(size, 1)
        read = copy.copy(self)
        read._indices = chosen if self._indices is None else self._indices[chosen]
        read._skips = read._new_skips()
        return read

    def indices(self) -> Sequence[int]:
        """Return the flow's sample numbers that this object reads, in order."""
        return range(len(self)) if self._indices is None else self._indices.tolist()

    def skipped(self) -> dict[str, int]:
        """Return how many samples were skipped because of errors, by the stage that failed; "read" is the dataset.

        Counts all datasets and loaders that this object made, in this process and in workers. Stages and local
        functions with the same name are counted together.
        """
        return {} if self._skips is None else self._skips.counts()

    def _new_skips(self) -> Skips | None:
        if self.flow.on_error == "raise":
            return None
        return Skips([stage.name for stage in (*self.flow.stages, *self._local)])

    def __str__(self) -> str:
        return " -> ".join([str(self.flow), *(f"LocalMap({stage.name})" for stage in self._local)])

    def __repr__(self) -> str:
        return f"DataLoadFlowRead({self}, {len(self)} samples)"


def random_split(
    flows: DataLoadFlowRead | Sequence[DataLoadFlowRead],
    lengths: Sequence[int] | Sequence[float],
    *,
    seed: int = 0,
) -> list[DataLoadFlowRead]:
    """Split the samples into disjoint random parts. The i-th part is read through the i-th flow.

    Flows may differ in their stages, such as one with augmentation for training and one without for validation; they
    must read the same samples of the same dataset. The parts equal those of torch's `random_split` with this seed.

    Args:
        flows: one built flow for each part, or a single one for all parts.
        lengths: the number of samples of each part, adding up to all samples; or shares, adding up to 1. Shares are
            rounded down, and the first parts get one more sample each until all samples are assigned.
        seed: seed of the random parts, a whole number.

    Raises:
        OptionError: a number is out of range, the lengths do not add up, the numbers of flows and lengths differ, or
            the flows read different samples.
        OptionTypeError: a length is not a number, a flow has not been built by a reader, or the seed is not a whole
            number.
    """
    shares = _checked_lengths(lengths)
    seed = check_int("seed", seed, minimum=-(2**63), maximum=2**64 - 1)
    reads = _checked_reads(flows, len(shares))
    if len(reads) != len(shares) or not reads:
        raise OptionError(
            f"{len(reads)} flows and {len(shares)} lengths; give one flow for each length, or one for all"
        )
    _check_same_samples(reads)
    counts = _counts(shares, len(reads[0]))
    order = torch.randperm(len(reads[0]), generator=torch.Generator().manual_seed(seed)).tolist()
    ends = [sum(counts[: part + 1]) for part in range(len(counts))]
    return [read.subset(order[end - count : end]) for read, count, end in zip(reads, counts, ends)]


def _checked_reads(flows: Any, parts: int) -> list[DataLoadFlowRead]:
    reads = list(flows) if isinstance(flows, Iterable) else [flows] * parts
    for read in reads:
        check_type("flows", read, DataLoadFlowRead, "what flow.prepare_read(reader) returns")
    return reads


def _check_same_samples(reads: list[DataLoadFlowRead]) -> None:
    first = reads[0]
    for other in reads[1:]:
        if not other.flow.source.is_same(first.flow.source) or list(other.indices()) != list(first.indices()):
            raise OptionError(
                f"{other.flow.source} with {len(other)} samples and {first.flow.source} with {len(first)} "
                "are not the same samples in the same order, so their parts would overlap; split flows of "
                "one dataset"
            )


def _checked_lengths(lengths: Any) -> list[int | float]:
    if isinstance(lengths, str | bytes) or not isinstance(lengths, Iterable):
        raise OptionTypeError(
            f"lengths={lengths!r:.80} is of type {type(lengths).__name__}; give counts or shares, one for each part"
        )
    checked: list[int | float] = []
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, Real):
            raise OptionTypeError(f"lengths: {length!r} is no number; give counts or shares")
        number = int(length) if isinstance(length, Integral) else float(length)
        if not (math.isfinite(number) and number >= 0):
            raise OptionError(f"lengths: {length!r} is out of range; give counts or shares of at least 0")
        checked.append(number)
    return checked


def _counts(lengths: list[int | float], total: int) -> list[int]:
    if all(isinstance(length, int) for length in lengths) and sum(lengths) == total:
        return [int(length) for length in lengths]
    if not math.isclose(sum(lengths), 1.0):
        raise OptionError(f"lengths={list(lengths)} add up to {sum(lengths)}; give counts of {total} or shares of 1")
    counts = [math.floor(length * total) for length in lengths]
    for part in range(total - sum(counts)):
        counts[part % len(counts)] += 1
    return counts


class LocalDataLoadFlowReader:
    """Reader that builds flows in this process and in the workers of its loaders.

    Args:
        store: where stored datasets are: a DatasetStore, or its path or URL. None: flows must have `samples`.
        cache: the capacity of an `ALSDCache` ("4GiB", or a number of samples) for the output of the stages before the
            first with `cache="never"`; None: no cache.
        seed: seeds random stages by (seed, epoch, sample), the same in any process; for the epochs see
            `MappedDataset.set_epoch`. None: stages draw from the process's generators, which a loader seeds.
        storage_options: fsspec's options for the data; None: the store's options.
        read_options: timeouts, retries and concurrency of reads.
        check: True: compare all samples with their checksums, if the dataset has them. None: compare only samples from
            storage, because a pool has compared its samples already. False: compare nothing.
        pool: the pool to read from, as for `PooledDataset`: "auto" or an address. None: read from storage, and use
            "auto" for datasets named pool://...

    Raises:
        OptionError, OptionTypeError: an argument is not allowed.
        DatasetError, StorageError: there is no store at the path or URL, or it cannot be read.
    """

    def __init__(
        self,
        store: DatasetStore | str | os.PathLike[str] | None = None,
        *,
        cache: int | str | None = None,
        seed: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        read_options: ReadOptions | None = None,
        check: bool | None = None,
        pool: AddressLike | None = None,
    ) -> None:
        if cache is not None:
            parse_capacity(cache, "cache")
        check_how_to_read(storage_options, read_options, check)
        if store is not None:
            check_type("store", store, (DatasetStore, str, os.PathLike), "a DatasetStore, its path or URL, or None")
        self._pool = None if pool is None else find_address(pool)
        self._cache = cache
        self._seed = None if seed is None else check_int("seed", seed, minimum=MIN_INT64, maximum=MAX_INT64)
        self._store = DatasetStore(os.fspath(store)) if isinstance(store, str | os.PathLike) else store
        self._reading: dict[str, Any] = {
            "storage_options": storage_options,
            "read_options": read_options,
            "check": check,
        }

    def read(self, flow: DataLoadFlow) -> DataLoadFlowRead:
        """Build `flow` in this process, and return the built flow.

        Raises:
            UsageError: the flow has no dataset, or names a stored dataset although no store was given.
            DatasetError, StorageError: the store has no such dataset, or it is damaged or cannot be read.
        """
        flow = flow.clone()
        name = f"{flow.name}:{flow.version}"
        samples = self.open(flow.source)
        stages = flow.stages
        if self._cache is not None and flow.cacheable:
            kept, stages = stages[: flow.cacheable], stages[flow.cacheable :]
            samples = ALSDCache(StagedDataset(samples, kept, name), self._cache)
        return DataLoadFlowRead(flow, StagedDataset(samples, stages, name, seed=self._seed))

    def open(self, source: FlowSource) -> Any:
        """Open a flow's source and return its samples. Raises the errors of `read`."""
        if source.samples is not None:
            return source.samples
        if self._store is None:
            raise UsageError(f"{source} is in a store, and this reader has none; give it one, as store=…")
        stored = self._store.open(source.ref)
        if source.in_pool or self._pool is not None:
            return PooledDataset(stored, "auto" if self._pool is None else self._pool, **self._reading)
        return DatasetReader(stored, **self._reading)
