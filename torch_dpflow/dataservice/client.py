"""DataClient: what programs do with the pool of this host."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

from torch_dpflow.checks import check_seconds
from torch_dpflow.dataservice.guards import check_keys
from torch_dpflow.dataservice.pool_address import AddressLike, find_address
from torch_dpflow.dataservice.pool_connection import PoolConnection
from torch_dpflow.dataservice.pooled import PooledDataset
from torch_dpflow.dataservice.pooled_array import PooledArray, Rows
from torch_dpflow.dataservice.protocol import ArraySource, SetInfo
from torch_dpflow.dataservice.record_paths import RecordPaths
from torch_dpflow.dataservice.sources import identity_of, source_of
from torch_dpflow.datasets.sample_reader import Sample
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.errors import StorageError


class DataClient:
    """Loads datasets and arrays into the memory of this host's server, and reads them.

    Args:
        address, connection, trust_network, silence_s: as for `PooledDataset`.
        storage_options: fsspec's options for the data of datasets; None: those of their stores.

    Raises OptionError, OptionTypeError.
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
        self._storage_options = storage_options
        self._datasets: dict[bytes, PooledDataset | PooledArray] = {}
        self._paths: dict[bytes, RecordPaths] = {}

    def preload(
        self,
        stored: StoredDataset | ArraySource,
        *,
        fit: Literal["all", "part"] = "all",
        on_error: Literal["raise", "skip"] = "raise",
        progress: Callable[[SetInfo], None] = lambda info: None,
    ) -> SetInfo:
        """Load a dataset, or an array from `open_array`, which stays until it is unloaded; returns once it is there.

        fit: "part" holds as much as there is room for, where "all" refuses.
        on_error: "skip" leaves samples that cannot be read to those who read them; the result counts them.
        progress: called about ten times a second.

        Raises:
            PoolFullError: there is no room for all of it.
            StorageError: a sample could not be read.
            PeerLostError: there is no server, or it has died.
        """
        source, identity = source_of(stored, self._storage_options), identity_of(stored)
        with PoolConnection(self._address) as connection:
            info = connection.preload(source, identity, whole=fit == "all", progress=progress)
        if info.failed and on_error == "raise":
            raise StorageError(
                f"{info.failed} of {info.records} samples of {info.ref} are not in the pool: {info.error or 'their '}"
                f"{'' if info.error else 'lengths are not known'}"
            )
        return info

    def sets(self) -> list[SetInfo]:
        """What the server holds. Raises PeerLostError."""
        with PoolConnection(self._address) as connection:
            return connection.contents().sets

    def unload(self, stored: StoredDataset | ArraySource) -> None:
        """Give a dataset up; who reads it goes on from storage. Raises UsageError: it is not there; PeerLostError."""
        with PoolConnection(self._address) as connection:
            connection.unload(identity_of(stored))

    @overload
    def dataset(self, stored: StoredDataset) -> PooledDataset: ...
    @overload
    def dataset(self, stored: ArraySource) -> PooledArray: ...

    def dataset(self, stored: StoredDataset | ArraySource) -> PooledDataset | PooledArray:
        """A dataset to read, for loaders too; the same one at each call."""
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

    @overload
    def read(self, stored: StoredDataset, index: int | str) -> Sample: ...
    @overload
    def read(self, stored: ArraySource, index: int) -> Rows: ...

    def read(self, stored: StoredDataset | ArraySource, index: int | str) -> Sample | Rows:
        """One sample, or the row of an array, from memory or from storage.

        index: its number, or the path in the metadata of a stored dataset.

        Raises ObjectMissingError: none lies at this path; OptionError: several do; and what the dataset's reading does.
        """
        if isinstance(stored, ArraySource):
            return self.dataset(stored)[operator.index(index)]  # type: ignore[arg-type]
        return self.dataset(stored).read(self._number(stored, index))

    @overload
    def read_batch(self, stored: StoredDataset, indices: Sequence[int | str]) -> list[Sample]: ...
    @overload
    def read_batch(self, stored: ArraySource, indices: Sequence[int]) -> Rows: ...

    def read_batch(
        self, stored: StoredDataset | ArraySource, indices: Sequence[int] | Sequence[int | str]
    ) -> list[Sample] | Rows:
        """These samples in order; of an array one tensor. Raises as `read`."""
        if isinstance(stored, ArraySource):
            return self.dataset(stored).read_batch(indices)  # type: ignore[arg-type]
        return self.dataset(stored).__getitems__([self._number(stored, index) for index in indices])

    def close(self) -> None:
        """Close what was read; the client may be used again."""
        for dataset in self._datasets.values():
            dataset.close()
        self._datasets = {}

    def _number(self, stored: StoredDataset, index: int | str) -> int:
        if not isinstance(index, str):
            return index
        identity = identity_of(stored)
        if identity not in self._paths:
            self._paths[identity] = RecordPaths(stored)
        return self._paths[identity].number(index)
