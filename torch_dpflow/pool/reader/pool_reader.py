"""What a process sees of one set in the pool: which server has each sample, and the memory of those on this host."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.announcing import Order
from torch_dpflow.errors import DPFlowError
from torch_dpflow.pool.messages import AnySource
from torch_dpflow.pool.reader.ahead_reader import AheadReader, RemoteMemory
from torch_dpflow.pool.reader.local_server import FIRST_PAUSE_S, MAX_PAUSE_S, LocalServer
from torch_dpflow.pool.reader.lookup import PoolLookup, StripeOwners, log_fallback
from torch_dpflow.pool.server_messages import ServerInfo
from torch_dpflow.pool.transport.address import PoolAddress
from torch_dpflow.pool.transport.control_connection import PoolConnection
from torch_dpflow.pool.transport.data_connection import WantedRecord
from torch_dpflow.pool.transport.data_reader import Content, DataReader
from torch_dpflow.pool.transport.segments import UNLOADED, Segment

#: How long a set's places are waited for before samples are read from storage again, seconds.
_PLANNING_S = 0.2
#: How often the pool is asked who has what is in nobody's memory, seconds.
_TABLE_S = 1.0
#: How long an epoch begins later for that, seconds: its order can be announced at its beginning only.
_ANNOUNCING_S = 2.0


class PoolReader:
    """Reads samples of one set from memory, for one process. Thread-safe; never waits for a server that is gone.

    What has been mapped stays readable when its server dies, so its samples still come from memory.

    silence_s: after how long without an answer, or a sample that it waits for, it goes on without a server, seconds.
    """

    def __init__(self, address: PoolAddress, source: AnySource, identity: bytes, silence_s: float) -> None:
        self._silence_s = silence_s
        self._ref, self._identity = source.ref, identity
        #: How servers on other hosts are read from, where there are keys for it.
        self._data_reader = None if address.connection is None else DataReader(address, silence_s)
        self._entry = PoolLookup(address, source, identity, silence_s)
        self._ahead = AheadReader(identity, silence_s)
        self._lock = threading.Lock()
        self._is_closed = False
        self._table: StripeOwners | None = None
        #: Stripes that are mapped as a whole, and where.
        self._ready: dict[int, Segment] = {}
        #: Servers by name, those that are lost and whose memory is mapped too.
        self._servers: dict[str, LocalServer] = {}
        #: The owner of each stripe, where it is near; or where its lanes are.
        self._owners: list[LocalServer | str | None] = []
        #: The lanes of the server that was asked for that.
        self._asked: str | None = None
        #: Whether another host has not given what it should have.
        self._is_stale = False
        #: Whether somebody has unloaded it, so that this process loads it no more, and reads what others have loaded.
        self._is_unloaded = False
        #: When the pool may be asked again.
        self._ask_at, self._pause_s = 0.0, FIRST_PAUSE_S
        #: Samples that came from memory, and that did not.
        self.hits = self.misses = 0

    def announce(self, plan: str, keys: Order, spread: int, extends: bool) -> None:
        """Tell the server in which order, of this name, records are read from now on, if that is of use.

        keys: called at most once.
        spread, extends: as of `announcing.announce_order`.
        """
        with self._lock, self._from_storage():
            deadline = 0.0 if extends and self._entry.is_silent else time.monotonic() + _ANNOUNCING_S
            wait_s = 0.0 if extends else _PLANNING_S  # there is more to come, once it knows
            while self._is_unheard() and self._ask_at - wait_s < (now := time.monotonic()) <= deadline:
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
        """A copy of each record that is in memory; None for those that have to be read from storage.

        copy: False gives memoryviews that nobody can write to: mapped memory, and where large records of other hosts
            were received, which is used again when nobody has a view of it.
        lengths: of each; None: unknown. What has another one is not taken from another host.
        order: the name of what was announced, in this process or its parent.
        """
        with self._lock:
            self._see_what_is_given_up()
            found = self._mapped(records, copy=copy)
            left = [place for place, content in enumerate(found) if content is None]
            if left and not self._is_closed:
                self._look([records[place] for place in left])
            for place in left:
                found[place] = self._read(records[place], copy=copy)
            if self._data_reader is not None and left:
                wanted = [*map(WantedRecord, records, lengths or repeat(None))]
                self._read_afar(self._data_reader, wanted, found, copy=copy)
            if plan is not None and None in found:
                found = self._read_ahead(plan, records, found)
            self.misses += found.count(None)
            self.hits += len(found) - found.count(None)
            self._entry.send_nowait(self.hits, self.misses)
        return found

    def places(self, records: npt.NDArray[np.int64]) -> list[tuple[Segment, npt.NDArray[np.int64]]]:
        """Regions in which some of these records are mapped, and where each begins there; -1: not in this one."""
        found: list[tuple[Segment, npt.NDArray[np.int64]]] = []
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
                    begins = np.full(len(records), -1, np.int64)
                    begins[own] = place[1]
                    found.append((place[0], begins))
        return found

    def fetch(self, wanted: Sequence[WantedRecord]) -> list[bool]:
        """Receive what servers of other hosts hold, and has been looked up by `places`; whether each has come."""
        found: list[Content | None] = [None] * len(wanted)
        with self._lock:
            if self._data_reader is not None and self._table is not None:
                self._read_afar(self._data_reader, wanted, found, copy=False)
        return [content is not None for content in found]

    def count(self, hits: int, misses: int) -> None:
        """So many more samples were found in memory by `places`, and were not."""
        with self._lock:
            self.hits += hits
            self.misses += misses
            self._entry.send_nowait(self.hits, self.misses)

    def close(self) -> None:
        """End reading; memory is freed, and everything is in storage from now on."""
        with self._lock:
            self._is_closed = True
            self._entry.send_nowait(self.hits, self.misses, 0.0)
            self._forget()

    # -- inside ----------------------------------------------------------------------------------------------

    def _is_unheard(self) -> bool:
        """Whether no server has said that it reads ahead for this process, or need not."""
        return self._table is None or (self._table.is_part and self._entry.connection is None)

    def _ahead_from(self) -> PoolConnection | None:
        """Who reads ahead for this process; None: nobody, or all has a place in memory."""
        return self._entry.connection if self._table is not None and self._table.is_part else None

    def _far_memory(self, connection: PoolConnection) -> RemoteMemory | None:
        """What that server reads ahead into, where it is on another host."""
        if connection.passes_memory or self._data_reader is None or self._asked is None:
            return None
        return RemoteMemory(self._data_reader, self._asked)

    def _read_ahead(self, plan: str, records: Sequence[int], found: Sequence[Any]) -> list[Any]:
        """What was found, and what the server reads ahead of the rest."""
        if (connection := self._ahead_from()) is not None:
            missing = [record for record, content in zip(records, found) if content is None]
            with self._from_storage():
                ahead = self._ahead.read(connection, plan, missing, self._far_memory(connection))
                return [
                    ahead.get(one) if content is None else content for one, content in zip(records, found)
                ]
        return [*found]

    def _mapped(self, records: Sequence[int], *, copy: bool) -> list[Any]:
        """Each record of a stripe that is mapped as a whole; None for the others."""
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
        """Who has a record's stripe mapped as a whole, or else its owner."""
        if self._table is None:
            return None
        stripe = record // self._table.per_stripe
        owner = self._owners[stripe]
        if stripe in self._ready and not isinstance(owner, LocalServer):
            return next(iter(self._servers.values()))
        return owner

    def _read_afar(
        self,
        connections: DataReader,
        wanted: Sequence[WantedRecord],
        found: list[Any],
        *,
        copy: bool,
    ) -> None:
        """Put what servers of other hosts hold into `found`."""
        owners = (self._server_of(one.record) for one in wanted)
        afar = {place: owner for place, owner in enumerate(owners) if isinstance(owner, str)}
        contents = connections.read(
            self._identity, [*afar.values()], [wanted[place] for place in afar], copy=copy
        )
        for place, content in zip(afar, contents):
            found[place] = content
        self._is_stale |= None in contents
        if self._identity in connections.gone:
            connections.gone.clear()
            self._see_what_is_gone()

    def _see_what_is_gone(self) -> None:
        """A server of another host does not hold the set: it is not there yet, is new, or somebody has unloaded it."""
        try:
            if self._entry.is_unloaded():  # by somebody: this reader has kept it from being idle
                self._forget()
                self._is_unloaded, self._ask_at = True, 0.0
        except DPFlowError:
            self._forget()

    def _look(self, records: Sequence[int]) -> None:
        """Learn where these are, and wait for those that are on their way to memory."""
        self._see_what_is_given_up()
        if self._table is None:
            self._ask_pool()
        self._ask_servers(records)
        if time.monotonic() >= self._ask_at and (
            self._is_stale or any(self._is_unplaced(one) for one in records)
        ):
            self._is_stale = False
            self._ask_pool()
            self._ask_servers(records)

    def _see_what_is_given_up(self) -> None:
        for server in self._servers.values():
            if why := server.retired:
                self._forget()
                self._is_unloaded, self._ask_at = UNLOADED in why, 0.0
                return

    def _is_unplaced(self, record: int) -> bool:
        """Whether a record is in storage as far as is known, though another server may have it by now."""
        server = self._server_of(record)
        return server is None or (isinstance(server, LocalServer) and server.lacks(record))

    def _ask_pool(self) -> None:
        if time.monotonic() < self._ask_at:
            return
        with self._from_storage():
            if self._is_unloaded and self._entry.is_unloaded():
                self._ask_at = time.monotonic() + _TABLE_S
                return
            self._is_unloaded = False
            table = self._entry.table()
            self._pause_s = FIRST_PAUSE_S
            is_settled = table is not None and table.is_placed
            self._ask_at = time.monotonic() + (_TABLE_S if is_settled else _PLANNING_S)
            if table is not None:
                self._take(table)

    @contextmanager
    def _from_storage(self) -> Iterator[None]:
        """Go on without the server that was asked where it is not there, or does not answer."""
        try:
            yield
        except DPFlowError as error:
            self._entry.close()
            self._ask_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            log_fallback(f"{self._ref} is read from storage for now", error)

    def _take(self, table: StripeOwners) -> None:
        owners = [self._servers.get(one.name) or self._open(one, table) for one in table.servers]
        asked = (self._lane_address(info, table) for info in table.servers if info.name == table.answered_by)
        self._asked = next(asked, None)
        # Together, as Control-C may come between any two calls.
        self._owners, self._table = [owners[one] if one >= 0 else None for one in table.owners], table
        for server in owners:
            if isinstance(server, LocalServer):
                server.refresh()

    def _open(self, info: ServerInfo, table: StripeOwners) -> LocalServer | str | None:
        """How to read from a server; None: it cannot be reached."""
        address = self._entry.address_of(info)
        if address is not None and address.directory is not None:
            server = LocalServer(
                address.directory, self._identity, table.per_stripe, self._silence_s, self._ready
            )
            self._servers[info.name] = server
            return server
        return self._lane_address(info, table)

    def _lane_address(self, info: ServerInfo, table: StripeOwners) -> str | None:
        """Where a server's lanes are; None: this process has no keys for them, or there are none."""
        asked = self._entry.contacted
        if info.name == table.answered_by and asked.directory is None:
            return str(asked)  # as it was given
        return info.listen if self._data_reader is not None else None

    def _ask_servers(self, records: Sequence[int]) -> None:
        deadline = time.monotonic() + self._silence_s
        while asked := self._send(records):
            if sum(server.receive(own) for server, own in asked):
                deadline = time.monotonic() + self._silence_s
            elif time.monotonic() > deadline:
                return  # their storage does not answer; ours may, and says so if it does not

    def _send(self, records: Sequence[int]) -> list[tuple[LocalServer, Sequence[int]]]:
        """Ask each server for what only it can tell of."""
        by_server = dict[LocalServer, list[int]]()
        for record in records:
            server = self._server_of(record)
            if isinstance(server, LocalServer):
                by_server.setdefault(server, []).append(record)
        wanted = [(server, server.pending(own)) for server, own in by_server.items()]
        return [(server, own) for server, own in wanted if own and server.send(own)]

    def _forget(self) -> None:
        self._entry.close()
        if self._data_reader is not None:
            self._data_reader.close()
        for server in self._servers.values():
            server.disconnect()
        self._table, self._servers, self._owners, self._ready = None, {}, [], {}
