"""The reader that builds flows in this process (thesis, section 3.3.2)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch_dpflow._core.checks import MAX_INT64, MIN_INT64, check_int, check_type
from torch_dpflow.caches import ALSDCache
from torch_dpflow.caches.policy import parse_capacity
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.sample_reader import check_how_to_read
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.datasets.store import DatasetStore
from torch_dpflow.errors import UsageError
from torch_dpflow.flows.flow import DataLoadFlow, FlowSource
from torch_dpflow.flows.read import DataLoadFlowRead
from torch_dpflow.flows.staged import StagedDataset
from torch_dpflow.pool.dataset import PooledDataset
from torch_dpflow.pool.transport.address import AddressLike, find_address


class LocalDataLoadFlowReader:
    """Builds flows in this process and the workers of its loaders.

    Args:
        store: the store of stored datasets: a DatasetStore, or its path or URL.
        cache: the capacity of an `ALSDCache` ("4GiB", or a number of samples) for the output of the stages before the
            first with `cache="never"`; None: no cache.
        seed: random stages draw by (seed, epoch, sample) alone, in any process; for the epochs see
            `MappedDataset.set_epoch`. None: they draw from the process's generators, as a loader seeds them.
        storage_options: fsspec's options for the data; None: the store's options.
        read_options: timeouts, retries and concurrency of reads.
        check: compare samples with their checksums, if the dataset has them; None: only samples from storage, as a
            pool has compared its own; False: no samples.
        pool: the pool to read from, as for `PooledDataset`: "auto" or an address. None: storage, and "auto" for
            datasets named pool://...

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
        """Build `flow` here.

        Raises:
            UsageError: it has no dataset, or names a stored one and there is no store.
            DatasetError: the store has no such dataset, or it is damaged.
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
        """Return the samples of a flow's source. Raises as `read`."""
        if source.samples is not None:
            return source.samples
        if self._store is None:
            raise UsageError(f"{source} is in a store, and this reader has none; give it one, as store=…")
        stored = self._store.open(source.ref)
        if source.in_pool or self._pool is not None:
            return PooledDataset(stored, "auto" if self._pool is None else self._pool, **self._reading)
        return DatasetReader(stored, **self._reading)
