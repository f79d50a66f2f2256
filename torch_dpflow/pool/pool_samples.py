"""The samples of a stored dataset that are in the pool: what a reader of the dataset may read through."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch_dpflow.announcing import Order
from torch_dpflow.datasets.storage.per_process import PerProcess
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.pool.lanes.pool_address import PoolAddress
from torch_dpflow.pool.reader.reading import SetReading
from torch_dpflow.pool.sources.set_names import identity_of, source_of


class PoolSamples:
    """For `DatasetReader(stored, through=...)`. Thread-safe; each process has connections of its own.

    copy: see `PooledDataset`.

    Raises OptionTypeError: an option of the storage is not text, a number or a list of such.
    """

    def __init__(
        self,
        stored: StoredDataset,
        address: PoolAddress,
        silence_s: float,
        storage_options: Mapping[str, Any] | None,
        *,
        copy: bool = True,
    ) -> None:
        self._copy = copy
        source, self._identity = source_of(stored, storage_options), identity_of(stored)
        self._reading = PerProcess(partial(SetReading, address, source, self._identity, silence_s))
        #: The name of the order that was announced, and the process that has announced it.
        self._order: str | None = None
        self._announcer = 0

    def is_of(self, stored: StoredDataset) -> bool:
        """Whether they are samples of this dataset."""
        return identity_of(stored) == self._identity

    @property
    def hits(self) -> int:
        """Samples that this process has got from memory."""
        return self._reading.get().hits

    @property
    def misses(self) -> int:
        """Samples that were not there for this process."""
        return self._reading.get().misses

    def read(self, numbers: Sequence[int], lengths: Sequence[int | None]) -> list[Any]:
        """Each sample that is in memory, or read ahead, a copy unless that was not wanted; None for the others."""
        return self._reading.get().read(numbers, lengths, self._order, copy=self._copy)

    def announce_order(self, order: Order, spread: int, extends: bool = False) -> None:
        """Have the server read ahead what it has no room for."""
        if self._announcer != os.getpid():
            # Ranks that are forked from one process read each in an order of its own.
            self._announcer, self._order = os.getpid(), secrets.token_hex(8)
        assert self._order is not None
        self._reading.get().announce(self._order, order, spread, extends)

    def close(self) -> None:
        """End this process's connections. It may be used again."""
        reading = self._reading.drop()
        if reading is not None:
            reading.close()
