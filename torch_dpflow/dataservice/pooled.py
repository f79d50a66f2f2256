"""PooledDataset: a stored dataset whose bytes come from the pool of this host where they are there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from torch_dpflow.announcing import Order
from torch_dpflow.checks import check_seconds
from torch_dpflow.dataservice.guards import check_keys
from torch_dpflow.dataservice.pool_address import AddressLike, find_address
from torch_dpflow.dataservice.reading import SetReading
from torch_dpflow.dataservice.sources import identity_of, source_of
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.sample_reader import OnError
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.per_process import PerProcess
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.errors import DPFlowError


class PooledDataset(DatasetReader):
    """As `DatasetReader`, with the same samples, which a server of this host reads from storage once for everybody.

    The server begins to hold the dataset when it is first read, and gives it up some time after the last process that
    reads it has ended, unless `dpflow pool preload` or `DataClient.preload` has loaded it. Where there is no server,
    where it has no room, and where it dies, samples are read from storage as by a DatasetReader.

    Args:
        stored: a variant from `DatasetStore.open`.
        address: the directory of the pool's socket, or tcp://HOST:PORT of a server on another host; "auto" for what
            `DPFLOW_POOL` names, or else this user's on this host.
        connection: the file with the keys of another host's server; None: what `DPFLOW_POOL_CONNECTION` names.
        trust_network: samples come from another host as they are, without TLS, as its server has been told too.
        silence_s: after how long without an answer of the server, or a sample that it is to read, samples are read
            from storage, seconds.
        storage_options, read_options, metadata_cache, check, on_error: as for `DatasetReader`.

    Raises:
        OptionError, OptionTypeError: an option is not allowed.
    """

    def __init__(
        self,
        stored: StoredDataset,
        address: AddressLike = "auto",
        *,
        connection: str | os.PathLike[str] | None = None,
        trust_network: bool = False,
        silence_s: float = 5.0,
        storage_options: Mapping[str, Any] | None = None,
        read_options: ReadOptions | None = None,
        metadata_cache: int = 64 << 20,
        check: bool | None = None,
        on_error: OnError = "raise",
    ) -> None:
        self._address = find_address(address, connection, trust_network=trust_network)
        check_keys(self._address)
        self._silence_s = check_seconds("silence_s", silence_s)
        #: The name of the order that was announced, and the process that has announced it.
        self._order: str | None = None
        self._announcer = 0
        super().__init__(
            stored,
            storage_options=storage_options,
            read_options=read_options,
            metadata_cache=metadata_cache,
            check=check,
            on_error=on_error,
        )

    @property
    def hits(self) -> int:
        """Samples that this process has got from memory."""
        return self._reading.get().hits

    @property
    def misses(self) -> int:
        """Samples that this process has read from storage."""
        return self._reading.get().misses

    def announce_order(self, order: Order, spread: int) -> None:
        """Have the server read ahead what it has no room for; see `announcing`. Loaders call it as an epoch begins."""
        if (
            self._announcer != os.getpid()
        ):  # ranks that are forked from one process read each in an order of its own
            self._announcer, self._order = os.getpid(), secrets.token_hex(8)
        assert self._order is not None
        self._reading.get().announce(self._order, order, spread)

    def close(self) -> None:
        reading = self._reading.drop()
        if reading is not None:
            reading.close()
        super().close()

    def _contents(
        self, data: ObjectReader, wanted: Sequence[tuple[int, ByteRange]]
    ) -> Sequence[bytes | DPFlowError]:
        found = self._reading.get().read(
            [number for number, _ in wanted], [span.length for _, span in wanted], self._order
        )
        missing = [span for content, (_, span) in zip(found, wanted) if content is None]
        rest = iter(data.read_each(missing) if missing else ())
        return [next(rest) if content is None else content for content in found]

    def _prepare(self) -> None:
        super()._prepare()
        source, identity = source_of(self.stored, self._storage_options), identity_of(self.stored)
        self._reading = PerProcess(lambda: SetReading(self._address, source, identity, self._silence_s))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_reading"]
        return state
