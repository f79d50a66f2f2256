"""Reading of one cached dataset's samples, from mapped memory and from servers of other hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.errors import DPFlowError
from torch_dpflow.lookahead import Order
from torch_dpflow.pool.messages import AnySource, ServerInfo, StripeTable
from torch_dpflow.pool.reader.lookup import PoolLookup, log_fallback
from torch_dpflow.pool.reader.server_memory import AheadReader, LocalServer, pauses, receive_ahead
from torch_dpflow.pool.transport.address import PoolAddress
from torch_dpflow.pool.transport.control_connection import PoolConnection
from torch_dpflow.pool.transport.data_connection import WantedRecord
from torch_dpflow.pool.transport.data_reader import Content, DataReader
from torch_dpflow.pool.transport.segments import UNLOADED, PoolSegment

#: How long to wait for a dataset's placement before storage is read, seconds.
_PLANNING_S = 0.2
#: Interval of lookups of records that no known server has, seconds.
_TABLE_S = 1.0
#: How long the beginning of an epoch may wait to announce its order, seconds.
_ANNOUNCING_S = 2.0


class PoolReader:
    """Reader of one dataset's samples from the pool's memory, for one process. Thread-safe.

    Mapped segments stay readable when their server dies, so their samples still come from memory.

    silence_s: seconds without an answer or an expected sample, after which reading continues without the server.
    """

    def __init__(self, address: PoolAddress, source: AnySource, identity: bytes, silence_s: float) -> None:
        self._silence_s = silence_s
        self._ref, self._identity = source.ref, identity
        #: Reads from servers of other hosts, if there are keys.
        self._data_reader = None if address.connection is None else DataReader(address, silence_s)
        self._lookup = PoolLookup(address, source, identity, silence_s)
        self._ahead = AheadReader(identity, silence_s)
        self._lock = threading.Lock()
        self._is_closed = False
        self._table: StripeTable | None = None
        #: Segments of completely loaded stripes.
        self._ready: dict[int, PoolSegment] = {}
        #: Servers by name, also lost ones whose memory is mapped.
        self._servers: dict[str, LocalServer] = {}
        #: Owner of each stripe: a local server, or the address for data connections.
        self._owners: list[LocalServer | str | None] = []
        #: Whether another host did not send a record that it should have.
        self._is_stale = False
        #: Whether it was unloaded by a command: this process does not load it, but reads what others load.
        self._is_unloaded = False
        #: Error because of which the pool could not be used; None once a lookup has found a server again.
        self.failure: DPFlowError | None = None
        #: When the pool may be looked up again.
        self._ask_at, self._backoff = 0.0, pauses()
        #: Numbers of samples that were in the pool's memory, and of all other requested samples.
        self.hits = self.misses = 0

    def announce(self, plan: str, keys: Order, spread: int, extends: bool) -> None:
        """Announce the order of reads to the server that reads ahead for this process, if there is one.

        keys: function that returns the record numbers in reading order; called at most once.
        spread, extends: as in `lookahead.announce_order`.
        """
        with self._lock, self._from_storage():
            deadline = 0.0 if extends and self._lookup.is_silent else time.monotonic() + _ANNOUNCING_S
            wait_s = 0.0 if extends else _PLANNING_S  # further parts follow
            while self._is_unanswered() and self._ask_at - wait_s < (now := time.monotonic()) <= deadline:
                time.sleep(max(0.0, self._ask_at - now))
                self._ask_pool()
            if (connection := self._ahead_from()) is not None:
                self._ahead.announce(connection, plan, keys(), spread, extends)

    def read(
        self,
        records: Sequence[int],
        lengths: Sequence[int | None] | None = None,
        plan: str | None = None,
        copy: bool = True,
    ) -> list[Any]:
        """Return a copy of each record that is in memory or was read ahead; None for records to read from storage.

        copy: if False, records can be read-only memoryviews, of mapped memory, or of receive buffers that are reused
            once no view is left.
        lengths: bytes of each record; None if unknown. A record that another host sends must have this length.
        plan: name of the access plan that this process or its parent announced; None if none.
        """
        with self._lock:
            self._check_retired()
            found = self._mapped(records, copy=copy)
            left = [place for place, content in enumerate(found) if content is None]
            if left and not self._is_closed:
                self._look([records[place] for place in left])
            for place in left:
                found[place] = self._read(records[place], copy=copy)
            if self._data_reader is not None and left:
                wanted = [*map(WantedRecord, records, lengths or repeat(None))]
                self._read_remote(self._data_reader, wanted, found, copy=copy)
            if plan is not None and None in found:
                found = self._read_ahead(plan, records, found)
            self.misses += found.count(None)
            self.hits += len(found) - found.count(None)
            self._lookup.report_reads(self.hits, self.misses)
        return found

    def places(self, records: npt.NDArray[np.int64]) -> dict[PoolSegment, npt.NDArray[np.int64]]:
        """Return the mapped segments for the stripes of these records, each with an offset for every record.

        The offset is in bytes, or -1 if the record is not in this segment or not loaded.
        """
        found: dict[PoolSegment, npt.NDArray[np.int64]] = {}
        with self._lock:
            if not self._is_closed:
                self._look(records.tolist())
            if self._table is None:
                return found
            stripes = records // self._table.per_stripe
            for stripe in np.unique(stripes).tolist():
                own, server = stripes == stripe, self._server_of(stripe * self._table.per_stripe)
                place = server.offsets(stripe, records[own]) if isinstance(server, LocalServer) else None
                if place is not None:
                    found.setdefault(place[0], np.full(len(records), -1, np.int64))[own] = place[1]
        return found

    def fetch(self, wanted: Sequence[WantedRecord]) -> list[bool]:
        """Receive records from other hosts into their buffers; return whether each arrived. First call `places`."""
        found: list[Content | None] = [None] * len(wanted)
        with self._lock:
            if self._data_reader is not None and self._table is not None:
                self._read_remote(self._data_reader, wanted, found, copy=False)
        return [content is not None for content in found]

    def count(self, hits: int, misses: int) -> None:
        """Add to the counts of samples that were read from memory (`hits`), and of all others (`misses`)."""
        with self._lock:
            self.hits += hits
            self.misses += misses
            self._lookup.report_reads(self.hits, self.misses)

    def close(self) -> None:
        """Close all connections, and release the mapped memory. `read` then returns None for all records."""
        with self._lock:
            self._is_closed = True
            self._lookup.report_reads(self.hits, self.misses, 0.0)
            self._forget()

    def _is_unanswered(self) -> bool:
        """Return whether it is still unknown if a server reads ahead for this process."""
        return self._table is None or (self._table.is_part and self._lookup.connection is None)

    def _ahead_from(self) -> PoolConnection | None:
        """Return the connection to the server that reads ahead for this process; None if no server does."""
        return self._lookup.connection if self._table is not None and self._table.is_part else None

    def _read_ahead(self, plan: str, records: Sequence[int], found: Sequence[Any]) -> list[Any]:
        if (connection := self._ahead_from()) is not None:
            missing = [record for record, content in zip(records, found) if content is None]
            with self._from_storage():
                far = None
                if not connection.passes_memory and self._data_reader is not None:
                    far = partial(receive_ahead, self._data_reader, str(self._lookup.contacted))
                ahead = self._ahead.read(connection, plan, missing, far)
                return [ahead.get(one) if content is None else content for one, content in zip(records, found)]
        return [*found]

    def _mapped(self, records: Sequence[int], *, copy: bool) -> list[Any]:
        """Return each record of completely loaded, mapped stripes; None for all other records."""
        if self._table is None:
            return [None] * len(records)
        ready, size, found = self._ready, self._table.per_stripe, []
        for record in records:
            stripe = record // size
            segment = ready.get(stripe)
            found.append(None if segment is None else segment.read(stripe, record - stripe * size, copy=copy))
        return found

    def _read(self, record: int, *, copy: bool) -> Any:
        server = self._server_of(record)
        return server.read(record, copy=copy) if isinstance(server, LocalServer) else None

    def _server_of(self, record: int) -> LocalServer | str | None:
        """Return a server with the record's stripe completely mapped, or else the stripe's owner."""
        if self._table is None:
            return None
        stripe = record // self._table.per_stripe
        owner = self._owners[stripe]
        if stripe in self._ready and not isinstance(owner, LocalServer):
            return next(iter(self._servers.values()))
        return owner

    def _read_remote(
        self, connections: DataReader, wanted: Sequence[WantedRecord], found: list[Any], *, copy: bool
    ) -> None:
        """Fill in records that servers of other hosts hold."""
        owners = (self._server_of(one.record) for one in wanted)
        remote = {place: owner for place, owner in enumerate(owners) if isinstance(owner, str)}
        contents = connections.read(self._identity, [*remote.values()], [wanted[place] for place in remote], copy=copy)
        for place, content in zip(remote, contents):
            found[place] = content
        self._is_stale |= None in contents
        if self._identity in connections.gone:
            connections.gone.clear()
            self._check_unloaded()

    def _check_unloaded(self) -> None:
        """Handle a remote server that does not hold the dataset: it is not placed yet, or was unloaded."""
        try:
            if self._lookup.is_unloaded():  # by a command, as this reader kept it from being idle
                self._forget()
                self._is_unloaded, self._ask_at = True, 0.0
        except DPFlowError:
            self._forget()

    def _look(self, records: Sequence[int]) -> None:
        """Look up records, and wait for records that a server is reading into memory."""
        self._check_retired()
        if self._table is None:
            self._ask_pool()
        self._ask_servers(records)
        if time.monotonic() >= self._ask_at and (self._is_stale or any(self._is_unplaced(one) for one in records)):
            self._is_stale = False
            self._ask_pool()
            self._ask_servers(records)

    def _check_retired(self) -> None:
        """Forget the table and segments of a dataset that a server has dropped."""
        for server in self._servers.values():
            if why := server.retired:
                self._forget()
                self._is_unloaded, self._ask_at = UNLOADED in why, 0.0
                return

    def _is_unplaced(self, record: int) -> bool:
        """Return whether the last report lists a record as only in storage; another server may hold it by now."""
        server = self._server_of(record)
        return server is None or (isinstance(server, LocalServer) and server.lacks(record))

    def _ask_pool(self) -> None:
        if time.monotonic() < self._ask_at:
            return
        with self._from_storage():
            if self._is_unloaded and self._lookup.is_unloaded():
                self._ask_at = time.monotonic() + _TABLE_S
                return
            self._is_unloaded = False
            table = self._lookup.table()
            self.failure = None
            self._backoff.reset()
            is_settled = table is not None and self._lookup.is_placed
            self._ask_at = time.monotonic() + (_TABLE_S if is_settled else _PLANNING_S)
            if table is not None:
                self._take(table)

    @contextmanager
    def _from_storage(self) -> Iterator[None]:
        """Continue without the contacted server if it is missing or does not answer."""
        try:
            yield
        except DPFlowError as error:
            self.failure = error.with_traceback(None)  # which refers to frames with records
            self._lookup.close()
            self._ask_at = time.monotonic() + self._backoff.pause_s()
            log_fallback(f"{self._ref} is read from storage for now", error)

    def _take(self, table: StripeTable) -> None:
        owners = [self._servers.get(one.name) or self._open(one, table) for one in table.servers]
        # In one statement, as Control-C may come between any two.
        self._owners, self._table = [owners[one] if one >= 0 else None for one in self._lookup.owners], table
        for server in owners:
            if isinstance(server, LocalServer):
                server.refresh()

    def _open(self, info: ServerInfo, table: StripeTable) -> LocalServer | str | None:
        """Return a reader of a server's records; None if the server cannot be reached."""
        address = self._lookup.address_of(info, table.answered_by)
        if address is None or address.directory is None:
            return None if address is None else str(address)
        server = LocalServer(
            address.directory, self._lookup.connect, self._identity, table.per_stripe, self._silence_s, self._ready
        )
        self._servers[info.name] = server
        return server

    def _ask_servers(self, records: Sequence[int]) -> None:
        deadline = time.monotonic() + self._silence_s
        while asked := self._send(records):
            if sum(server.receive(own) for server, own in asked):
                deadline = time.monotonic() + self._silence_s
            elif time.monotonic() > deadline:
                return  # the servers' storage does not answer; this reader's may

    def _send(self, records: Sequence[int]) -> list[tuple[LocalServer, Sequence[int]]]:
        """Request the states of the records that are not known here from their servers on this host.

        Returns the servers to which a request was sent, each with the records that were requested.
        """
        by_server = dict[LocalServer, list[int]]()
        for record in records:
            server = self._server_of(record)
            if isinstance(server, LocalServer):
                by_server.setdefault(server, []).append(record)
        wanted = [(server, server.pending(own)) for server, own in by_server.items()]
        return [(server, own) for server, own in wanted if own and server.send(own)]

    def _forget(self) -> None:
        self._lookup.close()
        if self._data_reader is not None:
            self._data_reader.close()
        for server in self._servers.values():
            server.disconnect()
        self._table, self._servers, self._owners, self._ready = None, {}, [], {}
