"""Reads batches over stream lanes, one to each server.

The request is the grant: a server sends what it was asked for at once, so no more is asked for than can be taken.
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
from torch_dpflow.pool.planning.request_window import (
    BatchWindow,
    ConnectionQueues,
    FixedWindow,
    MeasuredWindow,
)
from torch_dpflow.pool.transport.address import PoolAddress
from torch_dpflow.pool.transport.authentication import StreamAuthenticator, authenticator_for
from torch_dpflow.pool.transport.data_connection import (
    DataConnection,
    ReceiveMemory,
    RequestedRecord,
    WantedRecord,
)
from torch_dpflow.pool.transport.data_frames import GONE, LATER

#: What a record comes as.
Content: TypeAlias = bytes | memoryview
#: Records that the window is asked about at a time.
_LOOKAHEAD_RECORDS = 64
#: What one server of this host is asked for before the next, bytes: what it sends in two turns.
_RUN_ON_HOST_BYTES = 2 << 20
#: What may be under way where all servers are of this host, bytes: enough that few answers carry much.
_ON_HOST_BYTES = 8 << 20
#: What a record is taken for whose length only the server knows, bytes.
_ASSUMED_RECORD_BYTES = 64 << 10
#: Between attempts to reach a server, seconds.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0


class DataReader:
    """Reads records from servers of one pool, for one thread at a time. A server that fails costs speed alone.

    Args:
        pool: one of its servers; the others have the same keys.
        silence_s: after how long without a byte that is due a server is left, seconds.
        window: how much may be asked for that has not come; None: what this reader measures, or 8 MiB where all servers
            are of this host.

    Raises OptionError: there are no keys.
    """

    def __init__(self, pool: PoolAddress, silence_s: float, window: BatchWindow | None = None) -> None:
        self._pool, self._silence_s = pool, silence_s
        self._authenticator: StreamAuthenticator = authenticator_for(pool, serves=False)
        self._windows = (
            (MeasuredWindow(), FixedWindow(_ON_HOST_BYTES)) if window is None else (window, window)
        )
        self._window: BatchWindow = self._windows[0]
        self._data: dict[str, DataConnection] = {}
        self._memory = ReceiveMemory()
        #: Servers that have failed: until when they are left alone, and what says for how long the next time.
        self._left: dict[str, tuple[float, Backoff]] = {}
        self._poll = select.poll()
        #: Sets that a server has given up.
        self.gone: set[bytes] = set()

    def read(
        self,
        identity: bytes,
        owners: Sequence[str],
        wanted: Sequence[WantedRecord],
        *,
        copy: bool = True,
    ) -> list[Content | None]:
        """Records of one set, or parts of such; None for those that have to be read from storage.

        owners: the server of each, tcp://HOST:PORT.
        copy: False gives large ones as memoryviews that nobody can write to; their memory is used again when they are
            gone. What has a room is a view of that; where it is None, some of the room may have been written to.
        """
        connections = [self._lane(owner) for owner in {*owners}]
        is_on_host = all(connection is not None and connection.is_on_host for connection in connections)
        self._window = self._windows[is_on_host]
        together = _RUN_ON_HOST_BYTES if is_on_host else 0
        batch = _Batch(identity, owners, wanted, together, copy=copy)
        try:
            while True:
                self._ask(batch)
                busy = [one for one in self._data.items() if one[1].is_busy]
                if not busy:
                    return batch.contents
                self._take(busy, batch)
        except BaseException:
            self.close()  # what comes late must not be taken for what is asked for next
            raise

    def close(self) -> None:
        """Close all lanes; they are opened again where they are needed."""
        for owner in [*self._data]:
            self._close(owner)

    # -- inside ----------------------------------------------------------------------------------------------

    def _ask(self, batch: _Batch) -> None:
        """Ask for as much as the window has room for."""
        while True:
            for owner in batch.queues.connections:
                if self._lane(owner) is None:
                    batch.queues.drop(owner)
            now, sizes, connections = (
                time.monotonic(),
                batch.queues.sizes(_LOOKAHEAD_RECORDS),
                len(batch.queues.connections),
            )
            granted = self._window.grant(sizes, now, connections)
            if not granted:
                return
            asked: dict[str, list[RequestedRecord]] = {}
            for place in batch.queues.take(sum(sizes[:granted])):
                token = self._window.asked(batch.sizes[place], now)
                one = RequestedRecord(batch.wanted[place], place, token)
                asked.setdefault(batch.owners[place], []).append(one)
            for owner, ones in asked.items():
                connection = self._data[owner]
                is_first = not connection.asked
                try:
                    connection.request(batch.identity, ones)
                    if is_first:
                        connection.received_at = time.monotonic()
                except OSError as error:
                    self._lose(batch, owner, error)

    def _take(self, busy: Sequence[tuple[str, DataConnection]], batch: _Batch) -> None:
        """Take an answer of each lane that has one; leave those that have been silent for too long."""
        for owner, connection in self._having(busy, batch):
            try:
                taken = connection.take(copy=batch.copy)
                connection.received_at = time.monotonic()  # some may have come long after the first
                for one, content in taken:
                    self._settle(batch, connection, one, content)
            except (OSError, DPFlowError) as error:
                self._lose(batch, owner, error)

    def _settle(
        self, batch: _Batch, connection: DataConnection, one: RequestedRecord, content: Content | int
    ) -> None:
        if content == 0:  # it was LATER, and is there
            batch.queues.again(one.place)
            return
        if one.token is not None:
            batch.queues.came(one.place)
        if not isinstance(content, int):
            self._window.arrived(one.token, time.monotonic())
        elif one.token is not None:
            self._window.given_up(one.token)
        if content == LATER:
            connection.later.setdefault(one.wanted.record, []).append(one._replace(token=None))
        elif not isinstance(content, int):
            batch.contents[one.place] = content
        elif content == GONE:
            self.gone.add(batch.identity)

    def _having(
        self, busy: Sequence[tuple[str, DataConnection]], batch: _Batch
    ) -> Sequence[tuple[str, DataConnection]]:
        """Those of these lanes from which something has come."""
        if len(busy) == 1 and busy[0][1].asked:
            return busy  # which waits for it
        if found := [one for one in busy if one[1].has_bytes]:
            return found
        since = time.monotonic()
        due = (
            min((connection.received_at for _, connection in busy if connection.asked), default=since)
            + self._silence_s
        )
        ready = {fd for fd, _ in self._poll.poll(max(0.0, due - since) * 1000)}
        # Of those that were not ready no byte had come by then, however long this thread has been suspended since.
        seen = since if ready else max(since, due)
        for owner, connection in busy:
            if connection.fileno() in ready:
                connection.received_at = time.monotonic()
            elif connection.asked and seen >= connection.received_at + self._silence_s:
                self._lose(batch, owner, TimeoutError())
            elif (
                not connection.asked and not ready
            ):  # its storage does not answer; ours may, and says so if it does not
                connection.later.clear()
        return [one for one in busy if one[1].fileno() in ready]

    def _lane(self, owner: str) -> DataConnection | None:
        """The lane to a server; None: it has failed, and it is too early to try again."""
        if (connection := self._data.get(owner)) is not None:
            return connection
        until, backoff = self._left.get(owner) or (-math.inf, Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S))
        if time.monotonic() < until:
            return None
        try:
            connection = DataConnection(
                self._pool.at(owner), self._authenticator, self._silence_s, self._memory
            )
        except DPFlowError as error:
            self._leave(owner, error, backoff)
            return None
        self._left.pop(owner, None)
        self._data[owner] = connection
        self._poll.register(connection, select.POLLIN)
        return connection

    def _lose(self, batch: _Batch, owner: str, error: Exception) -> None:
        """A server has failed: what it was asked for is read from storage."""
        is_silent = isinstance(error, BlockingIOError | TimeoutError)
        text = f"it has sent nothing for {self._silence_s:g} s" if is_silent else str(error)
        self._leave(owner, text, Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S))
        self._close(owner)
        batch.queues.drop(owner)

    def _leave(self, owner: str, why: object, backoff: Backoff) -> None:
        self._left[owner] = time.monotonic() + backoff.pause_s(), backoff
        DATASETS.info("samples of %s are read from storage for now: %s", owner, why)

    def _close(self, owner: str) -> None:
        connection = self._data.pop(owner)
        for _, one in connection.asked:
            self._window.given_up(one.token)
        self._poll.unregister(connection)
        connection.close()


class _Batch:
    """What one call reads."""

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
        #: Places of those that are to be asked for.
        self.queues = ConnectionQueues(owners, self.sizes, together)
