"""Reading of batches over data connections, one to each server.

A server sends requested records at once, so a reader limits the bytes that it has requested and not received.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Sequence
from typing import TypeAlias

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.errors import DPFlowError
from torch_dpflow.log import DATASETS
from torch_dpflow.pool.planning.request_window import ConnectionQueues, FixedWindow, MeasuredWindow
from torch_dpflow.pool.transport.address import PoolAddress
from torch_dpflow.pool.transport.authentication import StreamAuthenticator, authenticator_for
from torch_dpflow.pool.transport.data_connection import (
    DataConnection,
    ReceiveMemory,
    RequestedRecord,
    WantedRecord,
)
from torch_dpflow.pool.transport.data_frames import GONE, LATER

Content: TypeAlias = bytes | memoryview
#: Servers and the connections to them.
_Connections: TypeAlias = Sequence[tuple[str, DataConnection]]
#: Number of upcoming records shown to the window.
_LOOKAHEAD_RECORDS = 64
#: Bytes to request from one server of this host before the next: what it sends in two turns.
_RUN_ON_HOST_BYTES = 2 << 20
#: Window if all servers are on this host, bytes: few answers then carry much.
_ON_HOST_BYTES = 8 << 20
#: Assumed size of a record of unknown length, bytes.
_ASSUMED_RECORD_BYTES = 64 << 10
#: Pauses between attempts to connect to a server, seconds.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0


class DataReader:
    """Reader of records from the servers of one pool. One thread at a time.

    A failed server causes no error: None is returned for its records.

    Args:
        pool: address of any server of the pool; all its servers have the same keys.
        silence_s: seconds without an expected byte, after which a server's connection is closed.
        window: limit of outstanding bytes; None for a measured limit, or 8 MiB if all servers are on this host.

    Raises OptionError if there are no keys.
    """

    def __init__(self, pool: PoolAddress, silence_s: float, window: FixedWindow | None = None) -> None:
        self._pool, self._silence_s = pool, silence_s
        self._authenticator: StreamAuthenticator = authenticator_for(pool, serves=False)
        self._windows = (MeasuredWindow(), FixedWindow(_ON_HOST_BYTES)) if window is None else (window, window)
        self._window: FixedWindow = self._windows[0]
        self._connections: dict[str, DataConnection] = {}
        self._memory = ReceiveMemory()
        #: Failed servers: when to retry, and the backoff.
        self._failed: dict[str, tuple[float, Backoff]] = {}
        self._poll = select.poll()
        #: Identities of requested datasets that a server does not hold; callers remove them.
        self.gone: set[bytes] = set()

    def read(
        self, identity: bytes, owners: Sequence[str], wanted: Sequence[WantedRecord], *, copy: bool = True
    ) -> list[Content | None]:
        """Return records of one dataset, or parts of records; None for each record that must be read from storage.

        owners: the server of each record, tcp://HOST:PORT.
        copy: if False, large records are read-only memoryviews, whose memory is reused once no view is left. A record
            with a `buffer` is always a view of the buffer; if None is returned, the buffer may be partly written.
        """
        connections = [self._connection(owner) for owner in {*owners}]
        is_on_host = all(connection is not None and connection.is_on_host for connection in connections)
        self._window = self._windows[is_on_host]
        together = _RUN_ON_HOST_BYTES if is_on_host else 0
        batch = _RecordBatch(identity, owners, wanted, together, copy=copy)
        try:
            while True:
                self._request(batch)
                busy = [one for one in self._connections.items() if one[1].is_busy]
                if not busy:
                    return batch.contents
                self._take(busy, batch)
        except BaseException:
            self.close()  # late answers must not be taken for those to the next requests
            raise

    def close(self) -> None:
        """Close all connections; they are opened again when needed."""
        for owner in [*self._connections]:
            self._close(owner)

    def _request(self, batch: _RecordBatch) -> None:
        """Request as many records as the window allows."""
        while True:
            for owner in batch.queues.connections:
                if self._connection(owner) is None:
                    batch.queues.drop(owner)
            now, sizes = time.monotonic(), batch.queues.sizes(_LOOKAHEAD_RECORDS)
            granted = self._window.grant(sizes, now)
            if not granted:
                return
            requested: dict[str, list[RequestedRecord]] = {}
            for place in batch.queues.take(sum(sizes[:granted])):
                token = self._window.requested(batch.sizes[place], now)
                one = RequestedRecord(batch.wanted[place], place, token)
                requested.setdefault(batch.owners[place], []).append(one)
            for owner, ones in requested.items():
                connection = self._connections[owner]
                is_first = not connection.requested
                try:
                    connection.request(batch.identity, ones)
                    if is_first:
                        connection.received_at = time.monotonic()
                except OSError as error:
                    self._lose(batch, owner, error)

    def _take(self, busy: _Connections, batch: _RecordBatch) -> None:
        """Receive an answer from each connection that has received bytes; close connections silent for too long."""
        for owner, connection in self._having(busy, batch):
            try:
                taken = connection.take(copy=batch.copy)
                connection.received_at = time.monotonic()  # the last bytes may be much later than the first
                for one, content in taken:
                    self._settle(batch, connection, one, content)
            except (OSError, DPFlowError) as error:
                self._lose(batch, owner, error)

    def _settle(
        self, batch: _RecordBatch, connection: DataConnection, one: RequestedRecord, content: Content | int
    ) -> None:
        if content == 0:  # it was answered LATER and is in memory now
            batch.queues.requeue(one.place)
            return
        if one.token is not None:
            batch.queues.received(one.place)
            if isinstance(content, int):
                self._window.cancelled(one.token)
            else:
                self._window.arrived(one.token, time.monotonic())
        if content == LATER:
            connection.later.setdefault(one.wanted.record, []).append(one._replace(token=None))
        elif not isinstance(content, int):
            batch.contents[one.place] = content
        elif content == GONE:
            self.gone.add(batch.identity)

    def _having(self, busy: _Connections, batch: _RecordBatch) -> _Connections:
        """Return the connections that have bytes to receive."""
        if len(busy) == 1 and busy[0][1].requested:
            return busy  # receiving blocks
        if found := [one for one in busy if one[1].has_bytes]:
            return found
        since = time.monotonic()
        deadline = min((one.received_at for _, one in busy if one.requested), default=since) + self._silence_s
        ready = {fd for fd, _ in self._poll.poll(max(0.0, deadline - since) * 1000)}
        # Connections that were not ready had no byte by then, however long this thread was suspended since.
        seen = since if ready else max(since, deadline)
        for owner, connection in busy:
            if connection.fileno() in ready:
                connection.received_at = time.monotonic()
            elif connection.requested and seen >= connection.received_at + self._silence_s:
                self._lose(batch, owner, TimeoutError())
            elif not connection.requested and not ready:
                connection.later.clear()  # the server's storage does not answer; this reader's may
        return [one for one in busy if one[1].fileno() in ready]

    def _connection(self, owner: str) -> DataConnection | None:
        """Return the connection to a server; None if it has failed and it is too early to retry."""
        if (connection := self._connections.get(owner)) is not None:
            return connection
        until, backoff = self._failed.get(owner) or (-math.inf, Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S))
        if time.monotonic() < until:
            return None
        try:
            connection = DataConnection(self._pool.at(owner), self._authenticator, self._silence_s, self._memory)
        except DPFlowError as error:
            self._leave(owner, error, backoff)
            return None
        self._failed.pop(owner, None)
        self._connections[owner] = connection
        self._poll.register(connection, select.POLLIN)
        return connection

    def _lose(self, batch: _RecordBatch, owner: str, error: Exception) -> None:
        """Close a failed server's connection; its records are read from storage."""
        is_silent = isinstance(error, BlockingIOError | TimeoutError)
        text = f"it has sent nothing for {self._silence_s:g} s" if is_silent else str(error)
        self._leave(owner, text, Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S))
        self._close(owner)
        batch.queues.drop(owner)

    def _leave(self, owner: str, why: object, backoff: Backoff) -> None:
        self._failed[owner] = time.monotonic() + backoff.pause_s(), backoff
        DATASETS.info("samples of %s are read from storage for now: %s", owner, why)

    def _close(self, owner: str) -> None:
        connection = self._connections.pop(owner)
        for _, one in connection.requested:
            if one.token is not None:
                self._window.cancelled(one.token)
        self._poll.unregister(connection)
        connection.close()


class _RecordBatch:
    """State of one `read` call."""

    def __init__(
        self,
        identity: bytes,
        owners: Sequence[str],
        wanted: Sequence[WantedRecord],
        together: int,
        *,
        copy: bool,
    ) -> None:
        self.identity, self.owners, self.wanted, self.copy = identity, owners, wanted, copy
        self.contents: list[Content | None] = [None] * len(wanted)
        self.sizes = [_ASSUMED_RECORD_BYTES if one.length is None else one.length for one in wanted]
        #: Indices of records that should be requested.
        self.queues = ConnectionQueues(owners, self.sizes, together)
