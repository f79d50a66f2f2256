"""Where a reader asks what a pool holds of a set: the server that it was given, or another that it has heard of."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torch_dpflow.errors import DPFlowError, MessageError, OptionError, PeerLostError, UsageError
from torch_dpflow.log import DATASETS
from torch_dpflow.pool.messages import AnySource, CachedDataset, CountReads, PreloadDataset, StartReading
from torch_dpflow.pool.server_messages import GetStripeTable, ServerInfo, StripeTablePart
from torch_dpflow.pool.transport.address import PoolAddress, check_private
from torch_dpflow.pool.transport.control_connection import PoolConnection

#: Settings that this process, or the one that it was forked from, has warned of.
_WARNED: set[str] = set()


def check_directory(address: PoolAddress) -> None:
    """Warn if the directory of a server's socket is there and cannot be used. Raises nothing."""
    if address.directory is None:
        return
    with suppress(OSError):  # no server has run here yet
        try:
            check_private(address.directory)
        except OptionError as error:
            log_fallback("the pool is not used, and samples are read from storage", error)


def log_fallback(what: str, error: DPFlowError) -> None:
    """Log that storage is read in place of a server: as a warning, once, where a setting has to be changed for it.

    A server that is not there, or does not answer, may come back, and is no reason to warn.
    """
    if isinstance(error, OptionError) and str(error) not in _WARNED:
        _WARNED.add(str(error))
        DATASETS.warning("%s: %s", what, error)
    else:
        DATASETS.info("%s: %s", what, error)


#: How often a server is told how many samples were read, seconds.
_COUNTS_INTERVAL_S = 1.0


class StripeOwners(NamedTuple):
    """Who holds each stripe of a set: places in `servers`, or -1."""

    per_stripe: int
    servers: list[ServerInfo]
    owners: list[int]
    #: Whether all of them have made room for it.
    is_placed: bool
    #: The name of the server that was asked.
    answered_by: str
    #: Whether some samples have no place in memory.
    is_part: bool


class PoolLookup:
    """Asks a pool for one set, for one process. One thread at a time.

    Args:
        address: of a server of the pool.
        silence_s: how long an answer may take, seconds.
    """

    def __init__(self, address: PoolAddress, source: AnySource, identity: bytes, silence_s: float) -> None:
        self._address, self._source, self._identity = address, source, identity
        #: Where the server is that was asked last.
        self.contacted = address
        self._silence_s = silence_s
        #: To the server that is asked; None: there is none for now.
        self.connection: PoolConnection | None = None
        #: Whether the latest that was asked has not answered in time.
        self.is_silent = False
        #: Other servers of this host.
        self._others: list[PoolAddress] = []
        #: How many samples were read from memory and from storage, as servers were told, and when.
        self._reported, self._reported_at = (0, 0), 0.0

    def table(self) -> StripeOwners | None:
        """Who holds the set, which the pool begins to hold if it does not; None: that is not known yet.

        Raises PeerLostError: no server answers; and what keeps the set from being held.
        """
        for address in [self._address, *self._others]:
            if self.connection is None:
                self.contacted = address
            try:
                connection = self.connection = self.connection or PoolConnection(
                    address, silence_s=self._silence_s
                )
                table = self._table(connection)
                self.is_silent = False
                return table
            except PeerLostError as error:
                self.close()
                self.is_silent = isinstance(error.__context__, TimeoutError)
                lost = error
        raise lost

    def address_of(self, server: ServerInfo) -> PoolAddress | None:
        """How this process reaches a server; None: it cannot."""
        if server.is_near:
            return PoolAddress(directory=Path(server.directory))
        has_keys = self._address.connection is not None
        return self._address.at(server.listen) if server.listen and has_keys else None

    def is_unloaded(self) -> bool:
        """Whether the pool does not hold the set. Raises PeerLostError: the server that was given does not answer."""
        if self.connection is None:
            self.connection = PoolConnection(self._address, silence_s=self._silence_s)
        return all(one.identity != self._identity for one in self.connection.contents().sets)

    def send_nowait(self, hits: int, misses: int, pause_s: float = _COUNTS_INTERVAL_S) -> None:
        """Tell a server how many samples were read in all, for people, if the last time is so long ago."""
        now = time.monotonic()
        if self.connection is None or now < self._reported_at + pause_s:
            return
        before = self._reported
        if self.connection.send_nowait(CountReads(self._identity, hits - before[0], misses - before[1])):
            self._reported, self._reported_at = (hits, misses), now

    def close(self) -> None:
        """End the connection; the pool then knows that this reader has ended."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _table(self, connection: PoolConnection) -> StripeOwners | None:
        request = PreloadDataset(source=self._source, identity=self._identity, is_explicit=False, whole=False)
        info = connection.get(request, CachedDataset)
        if not info.records:
            return None
        connection.request(StartReading(self._identity))
        try:
            parts = [connection.get(GetStripeTable(self._identity), StripeTablePart)]
            while (known := sum(len(one.owners) // 2 for one in parts)) < parts[0].stripes:
                parts.append(connection.get(GetStripeTable(self._identity, known), StripeTablePart))
                if parts[-1].generation != parts[0].generation or not parts[-1].owners:
                    return None
        except UsageError:  # it has been given up since
            return None
        table = parts[0]
        self._come_near(table)
        self._others = [one for one in map(self.address_of, table.servers) if one is not None]
        owners = np.frombuffer(b"".join(one.owners for one in parts), dtype="<i2").tolist()
        if table.per_stripe < 1 or not all(-1 <= one < len(table.servers) for one in owners):
            raise MessageError("the pool's table of a set cannot be read")
        return StripeOwners(
            table.per_stripe, table.servers, owners, info.is_placed, table.answered_by, table.is_part
        )

    def _come_near(self, table: StripeTablePart) -> None:
        """Ask the server over its socket, by which memory comes, where this process may map it."""
        contacted = next((one for one in table.servers if one.name == table.answered_by), None)
        if (
            self.connection is None
            or self.connection.passes_memory
            or contacted is None
            or not contacted.is_near
        ):
            return
        try:
            near = PoolConnection(PoolAddress(directory=Path(contacted.directory)), silence_s=self._silence_s)
            near.request(StartReading(self._identity))
        except DPFlowError:  # it answers over the network
            return
        self.connection.close()
        self.connection = near
