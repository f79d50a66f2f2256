"""PooledDataset: a stored dataset whose samples come from the pool's memory if they are cached there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

from torch_dpflow._core.checks import check_flag, check_seconds, check_type
from torch_dpflow._core.processes import PerProcess
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.sample_reader import OnError, SampleTable, check_how_to_read
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.lookahead import Order
from torch_dpflow.pool.reader.lookup import check_directory
from torch_dpflow.pool.reader.pool_reader import PoolReader
from torch_dpflow.pool.sources import identity_of, source_of
from torch_dpflow.pool.transport.address import AddressLike, PoolAddress, find_address
from torch_dpflow.pool.transport.authentication import check_keys


class PoolSamples:
    """Source of a stored dataset's samples that are in the pool's memory, for `DatasetReader(stored, through=...)`.

    Thread-safe; each process has separate connections. The arguments are explained in `PooledDataset`.

    Raises OptionTypeError if a storage option cannot be sent to a server, such as an object.
    """

    def __init__(
        self,
        stored: SampleTable,
        address: PoolAddress,
        silence_s: float,
        storage_options: Mapping[str, Any] | None,
        *,
        copy: bool = True,
    ) -> None:
        self._copy = copy
        source, self._identity = source_of(stored, storage_options), identity_of(stored)
        self._reading = PerProcess(partial(PoolReader, address, source, self._identity, silence_s))
        #: Name of the announced access plan, and the process that announced it.
        self._plan: str | None = None
        self._announcer = 0

    def is_of(self, stored: SampleTable) -> bool:
        """Return whether this is the source of `stored`'s samples."""
        return identity_of(stored) == self._identity

    @property
    def hits(self) -> int:
        """Number of requested samples that this process got from the pool's memory since its last `close`."""
        return self._reading.get().hits

    @property
    def misses(self) -> int:
        """Number of requested samples that this process did not get from the pool's memory since its last `close`."""
        return self._reading.get().misses

    def read(self, numbers: Sequence[int], lengths: Sequence[int | None]) -> list[Any]:
        """Return the bytes of each sample, or a view (only with `copy=False`); None for samples to read from storage.

        lengths: bytes of each sample; None if unknown. A sample that another host sends must have this length.
        """
        return self._reading.get().read(numbers, lengths, self._plan, copy=self._copy)

    def announce_order(self, order: Order, spread: int, extends: bool = False) -> None:
        """Announce the order of reads, so that the server reads ahead the samples that do not fit in its memory.

        The arguments are those of `lookahead.announce_order`.
        """
        if self._announcer != os.getpid():
            # Ranks forked from one process read in different orders.
            self._announcer, self._plan = os.getpid(), secrets.token_hex(8)
        assert self._plan is not None
        self._reading.get().announce(self._plan, order, spread, extends)

    def close(self) -> None:
        """Close this process's connections, and reset its counts. The next read opens connections again."""
        reading = self._reading.drop()
        if reading is not None:
            reading.close()


class PooledDataset(DatasetReader):
    """`DatasetReader` that gets samples from a pool server, which reads each cached sample from storage only once.

    The server begins to cache the dataset when it is first read. It can drop the dataset once no process reads it any
    more; a dataset that `dpflow pool preload` or `DataClient.preload` has loaded stays. Samples that are not in the
    pool's memory are read from storage, as by a `DatasetReader`, also while there is no server.

    Args:
        stored: a variant from `DatasetStore.open`.
        address: directory of the pool's socket, or tcp://HOST:PORT of a server on another host. "auto": the address in
            `DPFLOW_POOL`, or else this user's default directory on this host.
        connection: file with the keys for a server on another host; None: the file that `DPFLOW_POOL_CONNECTION` names.
        trust_network: connect to another host without TLS. Its server must have been started with this option too.
        silence_s: seconds to wait for an answer or a sample before reading from storage.
        copy: whether each sample is copied to `bytes`. If False, samples in the pool's memory on this host and large
            samples of other hosts are read-only `memoryview` objects, valid while they are referenced. Other samples
            are `bytes`. Decoders must accept both, as `torch_dpflow.vision` does.
        storage_options, read_options, check, on_error: see `DatasetReader`.

    Raises OptionError or OptionTypeError if an argument is not allowed.
    """

    def __init__(
        self,
        stored: SampleTable,
        address: AddressLike = "auto",
        *,
        connection: str | os.PathLike[str] | None = None,
        trust_network: bool = False,
        silence_s: float = 5.0,
        copy: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        read_options: ReadOptions | None = None,
        check: bool | None = None,
        on_error: OnError = "raise",
    ) -> None:
        pool = find_address(address, connection, trust_network=trust_network)
        check_keys(pool)
        check_directory(pool)
        check_type("stored", stored, get_args(SampleTable), "what DatasetStore.open returns")
        check_how_to_read(storage_options, read_options, check)
        self._pool = PoolSamples(
            stored,
            pool,
            check_seconds("silence_s", silence_s),
            storage_options,
            copy=check_flag("copy", copy),
        )
        super().__init__(
            stored,
            storage_options=storage_options,
            read_options=read_options,
            check=check,
            on_error=on_error,
            through=self._pool,
        )

    @property
    def hits(self) -> int:
        """Number of samples that this process got from the pool's memory since its last `close`."""
        return self._pool.hits

    @property
    def misses(self) -> int:
        """Number of requested samples that were not in the pool's memory, in this process since its last `close`."""
        return self._pool.misses
