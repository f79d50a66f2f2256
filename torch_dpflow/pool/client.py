"""DataClient: loads datasets and arrays into the pool, and reads them."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import check_seconds
from torch_dpflow.datasets.index import Index
from torch_dpflow.datasets.sample_reader import Sample, SampleReader, SampleTable
from torch_dpflow.datasets.storage.base import check_storage_options
from torch_dpflow.errors import OptionError, StorageError, UsageError
from torch_dpflow.pool.array import PooledArray, Rows
from torch_dpflow.pool.array_files import array_layout
from torch_dpflow.pool.dataset import PooledDataset, PoolSamples
from torch_dpflow.pool.messages import ArraySource, CachedDataset
from torch_dpflow.pool.pushing import (
    Transform,
    appended_source,
    check_part,
    plain_array,
    push,
    push_decoded,
    pushed_source,
)
from torch_dpflow.pool.sources import RecordPaths, identity_of, source_of
from torch_dpflow.pool.transport.address import AddressLike, find_address
from torch_dpflow.pool.transport.authentication import check_keys
from torch_dpflow.pool.transport.control_connection import PoolConnection


class DataClient:
    """Client of a pool: loads datasets and arrays into the memory of its servers, and reads them.

    Args:
        address, connection, trust_network, silence_s: see `PooledDataset`.
        storage_options: fsspec's options for reading samples; None: the options of the dataset's store.

    Raises OptionError or OptionTypeError if an argument is not allowed.
    """

    def __init__(
        self,
        address: AddressLike = "auto",
        *,
        connection: str | os.PathLike[str] | None = None,
        trust_network: bool = False,
        silence_s: float = 5.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._address = find_address(address, connection, trust_network=trust_network)
        check_keys(self._address)
        self._silence_s = check_seconds("silence_s", silence_s)
        check_storage_options(storage_options)
        self._storage_options = storage_options
        self._datasets: dict[bytes, PooledDataset | PooledArray] = {}
        self._paths: dict[bytes, RecordPaths] = {}

    def preload(
        self,
        stored: SampleTable | ArraySource,
        *,
        fit: Literal["all", "part"] = "all",
        on_error: Literal["raise", "skip"] = "raise",
        progress: Callable[[CachedDataset], None] = lambda info: None,
        transform: Transform | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> CachedDataset:
        """Cache a dataset, or an array from `open_array`, until it is unloaded; return its state once it is loaded.

        Args:
            stored: the dataset or array to load.
            fit: what to do if not everything fits: "all" raises PoolFullError, "part" caches as much as fits.
            on_error: "raise" raises StorageError at the end if samples could not be read; "skip" only counts these in
                the result's `failed`. Both cache all other samples.
            progress: called with the present state, about ten times a second; with a transform, after each stripe.
            transform: only for a dataset: function that decodes a sample's bytes to an array, in this process. All
                arrays must have the same shape and dtype. The pool caches them instead of the samples, as the rows of
                one array for each transform: give the result's `pushed` to `read`. Like an array of `push`, it is lost
                with its server. If the transform raises an error, rows that were pushed before stay.
            rank, world: only with a transform: this process decodes every `world`-th stripe (64 MiB of arrays),
                beginning with stripe `rank`.

        Raises:
            PoolFullError: the dataset does not fit.
            OptionError: a value is not allowed, such as `fit` with a transform; or the decoded arrays differ in shape.
            StorageError, DatasetError: a sample could not be read, or the dataset could not be opened.
            PeerLostError: there is no server, or it has died.
        """
        if fit not in ("all", "part") or on_error not in ("raise", "skip"):
            raise OptionError(f'fit={fit!r}, on_error={on_error!r}: give "all" or "part", and "raise" or "skip"')
        check_part(rank, world)
        if transform is not None:
            if isinstance(stored, ArraySource) or (fit, on_error) != ("all", "raise"):
                raise OptionError(
                    "transform= is for datasets of a store, cached as a whole, without fit= and on_error="
                )
            reader = SampleReader(stored, storage_options=self._storage_options)
            return push_decoded(self._address, stored, transform, reader, rank=rank, world=world, progress=progress)
        if world != 1:
            raise OptionError(
                f"rank={rank}, world={world} without transform=: servers read a dataset as it is from storage among "
                "themselves; leave them out, or give transform="
            )
        source, identity = source_of(stored, self._storage_options), identity_of(stored)
        with PoolConnection(self._address) as connection:
            info = connection.preload(source, identity, whole=fit == "all", progress=progress)
        if info.failed and on_error == "raise":
            raise StorageError(
                f"{info.failed} of {info.records} samples of {info.ref} are not in the pool: "
                f"{info.error or 'their lengths are not known'}"
            )
        return info

    def push(
        self,
        name: str,
        array: npt.ArrayLike,
        *,
        progress: Callable[[CachedDataset], None] = lambda info: None,
    ) -> ArraySource:
        """Cache an array from memory until it is unloaded; return its description, by which `read` finds it.

        The first dimension counts the rows. Other processes get the description by name (`array`). The array is in no
        storage: once its server is lost, reading can raise PeerLostError until the array is pushed again. Pushing the
        same array again under this name changes nothing, or completes an interrupted push.

        name: a name of the caller's choice, NAMESPACE/NAME:VERSION. progress: called with the state after each stripe.

        Raises:
            OptionError, OptionTypeError: the array cannot be cached, or the name is invalid.
            UsageError: another array has this name, or the pool's leader is not on this host.
            PoolFullError, PeerLostError: see `preload`.
        """
        rows = plain_array(array)
        source = pushed_source(name, rows)
        push(self._address, source, lambda first, stop: rows[first:stop], progress=progress)
        return source

    def append(
        self,
        name: str,
        array: npt.ArrayLike,
        *,
        version: str | None = None,
        progress: Callable[[CachedDataset], None] = lambda info: None,
    ) -> ArraySource:
        """Push a new version of a pushed array: the rows of the old version, followed by the rows of `array`.

        Returns the new version's description. The new version shares the full stripes (64 MiB) of the old one, and the
        old one stays unchanged.

        Args:
            name: the old version, as `NAMESPACE/NAME:VERSION`.
            array: the rows to add.
            version: VERSION of the new name; None: the next number.
            progress: see `push`.

        Raises:
            OptionError: `array` has no rows, or the new version's name is invalid or equal to the old one.
            PoolFullError, PeerLostError: see `push`.
            OptionTypeError: the rows differ from the old version's rows in shape or dtype.
            UsageError: no array of this name is completely in memory; or as in `push`, for the new name.
        """
        old, rows = self.array(name), plain_array(array)
        if any(one.pushed == old and one.loaded < one.records for one in self.cached_datasets()):
            raise UsageError(f"{name} is not completely in memory; complete its push first")
        source = appended_source(old, rows, version)
        first, count = source.shared * array_layout(old).per_stripe, old.shape[0]
        tail = np.asarray(self.read_batch(old, range(first, count)))

        def rows_of(start: int, stop: int) -> npt.NDArray[Any]:
            both = tail[start - first : stop - first], rows[max(0, start - count) : max(0, stop - count)]
            return np.concatenate(both).astype(old.dtype, copy=False)  # numpy has made the byte order native

        push(self._address, source, rows_of, progress=progress)
        return source

    def array(self, name: str) -> ArraySource:
        """Return the description of the array that was pushed under this name.

        Raises UsageError if there is no such array, PeerLostError if there is no server.
        """
        found = [one.pushed for one in self.cached_datasets() if one.pushed is not None and one.ref == name]
        if not found:
            raise UsageError(f"no array {name!r} was pushed to this pool, or its server was lost; push it")
        return found[0]

    def cached_datasets(self) -> list[CachedDataset]:
        """Return the state of each dataset and array in the pool. Raises PeerLostError if there is no server."""
        with PoolConnection(self._address) as connection:
            return connection.contents().datasets

    def unload(self, stored: SampleTable | ArraySource) -> None:
        """Unload a dataset or array. Readers continue from storage; readers of a pushed array get PeerLostError.

        Raises UsageError if it is not cached, PeerLostError if there is no server.
        """
        with PoolConnection(self._address) as connection:
            connection.unload(identity_of(stored))

    @overload
    def dataset(self, stored: SampleTable) -> PooledDataset: ...
    @overload
    def dataset(self, stored: ArraySource) -> PooledArray: ...

    def dataset(self, stored: SampleTable | ArraySource) -> PooledDataset | PooledArray:
        """Return a map-style dataset of the samples, or of an array's rows; the same object until `close`."""
        identity = identity_of(stored)
        if identity not in self._datasets:
            self._datasets[identity] = (
                PooledArray(stored, self._address, silence_s=self._silence_s)
                if isinstance(stored, ArraySource)
                else PooledDataset(
                    stored, self._address, silence_s=self._silence_s, storage_options=self._storage_options
                )
            )
        return self._datasets[identity]

    def samples(self, stored: SampleTable) -> PoolSamples:
        """Return the argument `through` with which `DatasetReader(stored, through=...)` reads samples from the pool.

        Raises OptionTypeError if a storage option cannot be sent to a server, such as an object.
        """
        return PoolSamples(stored, self._address, self._silence_s, self._storage_options)

    @overload
    def read(self, stored: SampleTable, index: int | str) -> Sample: ...
    @overload
    def read(self, stored: ArraySource, index: int) -> Rows: ...

    def read(self, stored: SampleTable | ArraySource, index: int | str) -> Sample | Rows:
        """Return one sample (bytes and annotations), or a row of an array, from memory or from storage.

        index: number of the sample or row; for a dataset from a store also the sample's path in the metadata.

        Raises ObjectMissingError if no sample has the path, OptionError if several have it or `stored` is an `Index`,
        which has no paths, and the errors of `PooledDataset.read` or `PooledArray.read_batch`, among others.
        """
        if isinstance(stored, ArraySource):
            return self.dataset(stored)[operator.index(index)]  # type: ignore[arg-type]
        return self.dataset(stored).read(self._number(stored, index))

    @overload
    def read_batch(self, stored: SampleTable, indices: Sequence[int | str]) -> list[Sample]: ...
    @overload
    def read_batch(self, stored: ArraySource, indices: Sequence[int]) -> Rows: ...

    def read_batch(
        self, stored: SampleTable | ArraySource, indices: Sequence[int] | Sequence[int | str]
    ) -> list[Sample] | Rows:
        """Return samples as a list, or rows as one tensor, in the order of `indices`. Raises the errors of `read`."""
        if isinstance(stored, ArraySource):
            return self.dataset(stored).read_batch(indices)  # type: ignore[arg-type]
        return self.dataset(stored).__getitems__([self._number(stored, index) for index in indices])

    def close(self) -> None:
        """Close the opened datasets. The client can be used again."""
        for dataset in self._datasets.values():
            dataset.close()
        self._datasets = {}

    def _number(self, stored: SampleTable, index: int | str) -> int:
        if not isinstance(index, str):
            return index
        if isinstance(stored, Index):
            raise OptionError(f"{stored.ref} is an index, whose samples are read by number; {index!r} is a path")
        identity = identity_of(stored)
        if identity not in self._paths:
            self._paths[identity] = RecordPaths(stored)
        return self._paths[identity].number(index)
