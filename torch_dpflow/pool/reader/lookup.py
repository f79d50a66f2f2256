"""Lookup of the servers that hold a dataset, by requests to the configured server, or to others of its pool."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from torch_dpflow.errors import DPFlowError, MessageError, OptionError, PeerLostError, UsageError
from torch_dpflow.log import DATASETS
from torch_dpflow.pool.messages import (
    AnySource,
    CachedDataset,
    CountReads,
    GetStripeTable,
    PreloadDataset,
    ServerInfo,
    StartReading,
    StripeTable,
)
from torch_dpflow.pool.transport.address import PoolAddress, check_private
from torch_dpflow.pool.transport.control_connection import PoolConnection

#: Warnings that this process, or its parent before a fork, has logged.
_WARNED: set[str] = set()


def check_directory(address: PoolAddress) -> None:
    """Log a warning if the directory of a server's socket exists and cannot be used. Raises nothing."""
    if address.directory is None:
        return
    with suppress(OSError):  # no server has run here yet
        try:
            check_private(address.directory)
        except OptionError as error:
            log_fallback("the pool is not used, and samples are read from storage", error)


def log_fallback(what: str, error: DPFlowError) -> None:
    """Log the text `what`, which says that storage is read instead of a server, and the error.

    An error that only the user can correct (a wrong setting, or a server of a different release) is logged as a warning
    the first time. Any other error is logged as info, because the server may return.
    """
    must_change = isinstance(error, UsageError) or isinstance(error.__cause__, MessageError)
    if must_change and str(error) not in _WARNED:
        _WARNED.add(str(error))
        DATASETS.warning("%s: %s", what, error)
    else:
        DATASETS.info("%s: %s", what, error)


#: How often counts of read samples are reported, seconds.
_COUNTS_INTERVAL_S = 1.0


class PoolLookup:
    """Lookup of which servers of a pool hold one dataset, for one process. One thread at a time.

    Args:
        address: the configured server; others are used if it does not answer.
        silence_s: how long an answer may take, seconds.
    """

    def __init__(self, address: PoolAddress, source: AnySource, identity: bytes, silence_s: float) -> None:
        self._address, self._source, self._identity = address, source, identity
        #: Address of the server that was contacted last.
        self.contacted = address
        self._silence_s = silence_s
        self._connection: PoolConnection | None = None
        #: Whether the last server that was contacted timed out.
        self.is_silent = False
        #: Whether all servers have reserved memory for the dataset.
        self.is_placed = False
        #: Owner of each stripe in the last table: an index in its servers, or -1.
        self.owners: list[int] = []
        #: Other servers that this process can reach.
        self._others: list[PoolAddress] = []
        #: Last reported numbers of samples read from memory and storage, and when.
        self._reported, self._reported_at = (0, 0), 0.0

    @property
    def connection(self) -> PoolConnection | None:
        """Control connection; None while no server is connected."""
        return self._connection if self._connection is not None and self._connection.is_open else None

    def table(self) -> StripeTable | None:
        """Request that the pool caches the dataset; return the owners of its stripes, None if not known yet.

        Raises PeerLostError if no server answers, MessageError for an invalid table, and the error of a refusal.
        """
        for address in [self._address, *self._others]:
            if self.connection is None:
                self.contacted = address
            try:
                connection = self._connection = self.connection or PoolConnection(address, silence_s=self._silence_s)
                table = self._table(connection)
                self.is_silent = False
                return table
            except PeerLostError as error:
                self.close()
                self.is_silent = isinstance(error.__context__, TimeoutError)
                lost = error
        raise lost

    def address_of(self, server: ServerInfo, answered_by: str) -> PoolAddress | None:
        """Return the address at which this process reaches a server; None if it cannot reach the server.

        answered_by: name of the server that was contacted last.
        """
        if server.is_near:
            return PoolAddress(directory=Path(server.directory))
        if server.name == answered_by and self.contacted.directory is None:
            return self.contacted  # as the user gave it
        has_keys = self._address.connection is not None
        return self._address.at(server.listen) if server.listen and has_keys else None

    def connect(self, directory: Path) -> PoolConnection:
        """Return a connection to a server on this host, if possible the open one. Raises errors of `PoolConnection`."""
        if (connection := self.connection) is not None and self.contacted.directory == directory:
            return connection
        return PoolConnection(directory, silence_s=self._silence_s)

    def is_unloaded(self) -> bool:
        """Return whether the pool does not hold the dataset. Raises PeerLostError if the server does not answer."""
        if (connection := self.connection) is None:
            connection = self._connection = PoolConnection(self._address, silence_s=self._silence_s)
            self.contacted = self._address
        return all(one.identity != self._identity for one in connection.contents().datasets)

    def report_reads(self, hits: int, misses: int, pause_s: float = _COUNTS_INTERVAL_S) -> None:
        """Report to the server, for display, the total numbers of samples that were in memory, and that were not.

        pause_s: minimum seconds between two reports; calls before then do nothing.
        """
        now = time.monotonic()
        if now < self._reported_at + pause_s or (connection := self.connection) is None:
            return
        before = self._reported
        if connection.send_nowait(CountReads(self._identity, hits - before[0], misses - before[1])):
            self._reported, self._reported_at = (hits, misses), now

    def close(self) -> None:
        """Close the connection. The server then no longer counts this process as a reader."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _table(self, connection: PoolConnection) -> StripeTable | None:
        request = PreloadDataset(source=self._source, identity=self._identity, is_explicit=False, whole=False)
        info = connection.get(request, CachedDataset)
        if not info.records:
            return None
        connection.request(StartReading(self._identity))
        try:
            table = connection.get(GetStripeTable(self._identity), StripeTable)
        except UsageError:  # dropped since
            return None
        self._switch_to_socket(table)
        others = (self.address_of(one, table.answered_by) for one in table.servers)
        self._others = [one for one in others if one is not None and one != self._address]
        try:
            owners = np.frombuffer(table.owners, "<i2").tolist()
        except ValueError:  # half a number
            owners = [len(table.servers)]
        if table.per_stripe < 1 or not all(-1 <= one < len(table.servers) for one in owners):
            raise MessageError("the pool's stripe table is invalid")
        self.is_placed, self.owners = info.is_placed, owners
        return table

    def _switch_to_socket(self, table: StripeTable) -> None:
        """Switch to the server's Unix socket, which passes memory, if this process may map the server's memory."""
        contacted = next((one for one in table.servers if one.name == table.answered_by), None)
        if self.connection is None or self.connection.passes_memory or contacted is None or not contacted.is_near:
            return
        address = PoolAddress(directory=Path(contacted.directory))
        try:
            near = PoolConnection(address, silence_s=self._silence_s)
            near.request(StartReading(self._identity))
        except DPFlowError:  # it does answer over the network
            return
        self.connection.close()
        self._connection, self.contacted = near, address
