"""Follower: a server that has joined a pool. It applies the leader's instructions and forwards clients' requests."""

from __future__ import annotations

import threading
import time

import msgspec
import numpy as np

from torch_dpflow.errors import DPFlowError, PeerLostError, UsageError
from torch_dpflow.log import SERVICE
from torch_dpflow.pool.messages import (
    CachedDataset,
    CountReads,
    DatasetState,
    FollowerHeartbeat,
    GetStripeTable,
    Instructions,
    JoinPool,
    ListDatasets,
    ListServers,
    PoolAnswer,
    PoolRequest,
    PreloadDataset,
    ServerInfo,
    StripeTable,
    UnloadDataset,
)
from torch_dpflow.pool.server.holdings import MAX_DATASETS, Holdings
from torch_dpflow.pool.server.leader_state import KnownDataset
from torch_dpflow.pool.transport.address import PoolAddress
from torch_dpflow.pool.transport.control_connection import AnswerT, PoolConnection

#: Timeouts of the leader's answers to forwarded requests, below those of readers and commands for this server (5 s and
#: 60 s), and to a heartbeat: seconds.
_READING_S, _COMMAND_S, _SILENCE_S = 1.5, 30.0, 5.0
#: How long a heartbeat waits for instructions: while datasets are loaded, to report progress, and else. Seconds.
_BUSY_S, _CALM_S = 0.1, 1.0
#: Pause between attempts to reach the leader, seconds.
_RETRY_S = 0.5
#: Maximum states in one heartbeat.
_MAX_STATES = 200


class _LeaderConnection:
    """Connection to the leader, opened when needed. Thread-safe: one request at a time.

    silence_s: how long an answer may take, seconds.
    """

    def __init__(self, leader: PoolAddress, silence_s: float) -> None:
        self._leader, self._silence_s = leader, silence_s
        self._lock = threading.Lock()
        self._connection: PoolConnection | None = None
        self._retry_at = 0.0

    def get(self, request: PoolRequest, kind: type[AnswerT]) -> AnswerT:
        """Return the leader's answer of this type. Raises the errors of `request`."""
        answer = self.request(request)
        assert isinstance(answer, kind)
        return answer

    def request(self, request: PoolRequest) -> PoolAnswer:
        """Return the leader's answer.

        Raises PeerLostError if the leader does not answer, or recently did not; and the error of a refusal.
        """
        with self._lock:
            if time.monotonic() < self._retry_at:
                raise PeerLostError(f"the leader of the pool at {self._leader} does not answer; start it again")
            try:
                if self._connection is None:
                    self._connection = PoolConnection(self._leader, silence_s=self._silence_s)
                return self._connection.request(request)[0]
            except PeerLostError:
                self.close()
                self._retry_at = time.monotonic() + _RETRY_S
                raise

    def send_nowait(self, reads: CountReads) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.send_nowait(reads)

    def close(self) -> None:
        """Close the connection, even while an answer is outstanding."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class PoolFollower:
    """Role of a server that is not the leader: answers clients, and keeps the server in the pool. Thread-safe.

    Args:
        server: description of this server.
        leader: address of the leader.
        holdings: the datasets that this server holds.
    """

    def __init__(self, server: ServerInfo, leader: PoolAddress, holdings: Holdings) -> None:
        self._server = server
        self.leader = leader
        self._holdings = holdings
        self._stop = threading.Event()
        #: Separate connections for readers and for commands, which may wait longer.
        self._reading = _LeaderConnection(leader, _READING_S)
        self._commands = _LeaderConnection(leader, _COMMAND_S)
        #: The leader's last tables, for readers that start while there is no leader.
        self._tables: dict[bytes, StripeTable] = {}

    # -- for clients -----------------------------------------------------------------------------------------

    def preload(self, request: PreloadDataset) -> CachedDataset:
        """Forward a request to cache a dataset to the leader; return the dataset's state.

        If the leader does not answer, an implicit request (`is_explicit` is False) returns the state of this server's
        part.

        Raises PeerLostError if the leader does not answer and no state is returned; and the error of a refusal.
        """
        try:
            return (self._commands if request.is_explicit else self._reading).get(request, CachedDataset)
        except PeerLostError:
            if request.is_explicit or not (held := self._own(request)):
                raise
            return held

    def table(self, identity: bytes) -> StripeTable:
        """Return the leader's table of a dataset's stripes.

        If the leader does not answer, return its last answer, or else a table of the stripes on this server.

        Raises UsageError if the dataset is not placed.
        """
        try:
            answer = self._reading.get(GetStripeTable(identity), StripeTable)
        except PeerLostError:
            return self._tables.get(identity) or self._own_table(identity)
        except UsageError:
            self._tables.pop(identity, None)
            raise
        answer = msgspec.structs.replace(answer, answered_by=self._server.name)
        if len(self._tables) >= MAX_DATASETS:
            self._tables.clear()
        self._tables[identity] = answer
        return answer

    def command(self, request: UnloadDataset | ListDatasets | ListServers) -> PoolAnswer:
        """Forward a request to the leader. Raises PeerLostError if it does not answer, and the error of a refusal."""
        return self._commands.request(request)

    def count(self, reads: CountReads) -> None:
        """Forward counts of reads to the leader, if it is connected."""
        self._reading.send_nowait(reads)

    def count_readers(self) -> None:
        """Do nothing here: the next heartbeat reports how many processes read each dataset."""

    # -- membership ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Keep this server in the pool until `close`: join, send heartbeats, apply instructions. Blocks its thread."""
        is_lost = False
        while not self._stop.is_set():
            try:
                with PoolConnection(self.leader, silence_s=_SILENCE_S) as connection:
                    self._join(connection)
                    SERVICE.info("joined the pool at %s", self.leader)
                    is_lost = False
                    self._serve(connection)
            except DPFlowError as error:
                if not is_lost:
                    SERVICE.warning("the leader of the pool at %s is lost: %s", self.leader, error)
                is_lost = True
                self._stop.wait(_RETRY_S)

    def close(self) -> None:
        self._stop.set()
        self._reading.close()
        self._commands.close()

    def _join(self, connection: PoolConnection) -> None:
        for report in self._holdings.reports():
            for part in report.split() if report.stripes else ():
                connection.request(part)
        connection.request(JoinPool(self._server))

    def _serve(self, connection: PoolConnection) -> None:
        reported = dict[bytes, DatasetState]()
        while not self._stop.is_set():
            states = self._holdings.states()
            left = reported.keys() - {one.identity for one in states}
            states += [self._holdings.state(identity) for identity in left]
            changed = [one for one in states if reported.get(one.identity) != one][:_MAX_STATES]
            wait_s = _CALM_S if all(one.is_placed for one in states) and not changed else _BUSY_S
            answer = connection.get(FollowerHeartbeat(states=changed, wait_s=wait_s), Instructions)
            reported |= {one.identity: one for one in changed}
            reported = {identity: one for identity, one in reported.items() if identity not in left}
            for instruction in answer.instructions:
                self._holdings.apply(instruction)
                reported.pop(instruction.identity, None)

    def _own(self, request: PreloadDataset) -> CachedDataset | None:
        """Return a dataset that is held here, as this server knows it."""
        try:
            held = self._holdings.get(request.identity)
        except UsageError:
            return None
        info = KnownDataset(request, is_explicit=False, whole=False, held=held).info()
        return msgspec.structs.replace(info, records=held.records.records, is_placed=held.is_placed)

    def _own_table(self, identity: bytes) -> StripeTable:
        held = self._holdings.get(identity)
        owners = np.full(held.records.stripes, -1, dtype="<i2")
        owners[held.stripes] = 0
        return StripeTable(
            per_stripe=held.records.per_stripe,
            servers=[self._server],
            answered_by=self._server.name,
            is_part=held.is_part,
            owners=owners.tobytes(),
        )
