"""Reading of one server's records: cached records from its mapped segments, and records that it has read ahead.

Records read ahead come from mapped memory, or over a data connection from another host.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.errors import DPFlowError, MessageError, PoolFullError, UsageError
from torch_dpflow.log import DATASETS
from torch_dpflow.pool.messages import (
    ELSEWHERE,
    HERE,
    MAX_ANNOUNCED,
    MAX_RECORDS,
    ON_ITS_WAY,
    PENDING,
    AheadPlaces,
    AnnounceAccessPlan,
    DatasetOpened,
    GetAheadPlaces,
    GetRecordStates,
    OpenDataset,
    PoolAnswer,
    RecordStates,
)
from torch_dpflow.pool.reader.lookup import log_fallback
from torch_dpflow.pool.transport.control_connection import PoolConnection
from torch_dpflow.pool.transport.data_connection import WantedRecord
from torch_dpflow.pool.transport.data_frames import memory_name
from torch_dpflow.pool.transport.data_reader import DataReader
from torch_dpflow.pool.transport.segments import PoolSegment, map_sealed, map_segment

#: How long an answer may wait for records on their way, seconds; at most half of `silence_s`.
_ANSWER_S = 1.0


def pauses() -> Backoff:
    """Return the pauses between attempts to connect to a server: 0.5 to 30 seconds, not random."""
    return Backoff(0.5, 30.0, draw=lambda: 1.0)


class LocalServer:
    """Reader of one dataset's records from a server on this host. One thread at a time.

    Mapped segments stay readable after the server has ended.

    Args:
        connect: returns a connection to the server whose socket is in the given directory; a `PoolLookup` may share it.
        silence_s: timeout of these connections, seconds. The server is requested to answer within half of it.
        ready: segment of each completely loaded stripe, also of other servers. This object adds its server's stripes.
    """

    def __init__(
        self,
        directory: Path,
        connect: Callable[[Path], PoolConnection],
        identity: bytes,
        per_stripe: int,
        silence_s: float,
        ready: dict[int, PoolSegment],
    ) -> None:
        self._directory, self._connect_to, self._identity = directory, connect, identity
        self._per_stripe, self._silence_s = per_stripe, silence_s
        self._connection: PoolConnection | None = None
        self._retry_at, self._backoff = 0.0, pauses()
        #: Number of the held dataset that `_mapped`, `_segments` and `_states` belong to; see `RecordStates`.
        self._held = 0
        #: Segments in the server's order, and by stripe.
        self._mapped: list[PoolSegment] = []
        self._segments: dict[int, PoolSegment] = {}
        self._ready = ready
        #: Mapped segments that are still in use.
        self._known: set[PoolSegment] = set()
        #: Final states of records in other stripes, as the server reported them.
        self._states: dict[int, int] = {}

    @property
    def retired(self) -> set[int]:
        """Reasons (`UNLOADED`, `IDLE`) for which the server has dropped mapped segments; empty if it dropped none."""
        return {why for segment in self._known if (why := segment.retired) is not None}

    @property
    def is_there(self) -> bool:
        """Whether the server is connected, or a new attempt to connect is due."""
        return self._connection is not None or time.monotonic() >= self._retry_at

    def read(self, record: int, *, copy: bool) -> bytes | memoryview | None:
        """Return a record as a copy or a view; None if it is not known to be in memory."""
        stripe, number = divmod(record, self._per_stripe)
        segment = self._ready.get(stripe)
        if segment is None and self._states.get(record) == HERE:
            segment = self._segments[stripe]
        return None if segment is None else segment.read(stripe, number, copy=copy)

    def offsets(self, stripe: int, records: npt.NDArray[np.int64]) -> tuple[PoolSegment, npt.NDArray[np.int64]] | None:
        """Return a stripe's segment and the offsets of records in it; None if the segment is not mapped.

        A record that is not known to be in memory has the offset -1.
        """
        segment = self._ready.get(stripe)
        here: npt.NDArray[np.bool_] | bool = True
        if segment is None and stripe in self._segments:
            segment = self._segments[stripe]
            here = np.array([self._states.get(one) == HERE for one in records.tolist()])
        if segment is None:
            return None
        return segment, np.where(here, segment.offsets(stripe, records % self._per_stripe), -1)

    def pending(self, records: Iterable[int]) -> list[int]:
        """Return up to `MAX_RECORDS` records whose state must be requested from the server."""
        return [
            one
            for one in records
            if one // self._per_stripe not in self._ready and self._states.get(one, PENDING) == PENDING
        ][:MAX_RECORDS]

    def lacks(self, record: int) -> bool:
        """Return whether to look for a record elsewhere: this server reported `ELSEWHERE`, or cannot be reached now."""
        if record // self._per_stripe in self._ready:
            return False
        state = self._states.get(record, PENDING)
        return state == ELSEWHERE or (state == PENDING and not self.is_there)

    def refresh(self) -> None:
        """Map further segments, and forget reports that records are `ELSEWHERE`, so that they are requested again."""
        self._states = {one: state for one, state in self._states.items() if state != ELSEWHERE}
        if self._connection is not None and self._connection.is_open:
            self._try(self._map_more)

    def send(self, records: Sequence[int]) -> bool:
        """Request the states of records, at most `MAX_RECORDS`; return whether `receive` must follow."""
        if not self.is_there:
            return False

        def request() -> None:
            if self._connection is None or not self._connection.is_open:
                self._connect()
            assert self._connection is not None
            wait_s = min(_ANSWER_S, self._silence_s / 2)
            self._connection.send(GetRecordStates(self._identity, [*records], wait_s))

        return self._try(request)

    def receive(self, records: Sequence[int]) -> bool:
        """Receive the answer to `send` for the same records; return whether it has a state other than `PENDING`."""
        came = dict[int, int]()

        def take() -> None:
            assert self._connection is not None
            answer, _ = self._connection.receive()
            assert isinstance(answer, RecordStates)
            states = {one: state for one, state in zip(records, answer.states) if state != PENDING}
            here = {one // self._per_stripe for one, state in states.items() if state == HERE}
            if self._is_of_another(answer) or not self._segments.keys() >= here:
                self._map_more()
            if self._is_of_another(answer):
                return  # dropped and cached again meanwhile, in other segments
            came.update(states)
            self._states |= {
                one: state for one, state in came.items() if state != HERE or one // self._per_stripe in self._segments
            }
            self._ready |= {one: self._segments[one] for one in answer.stripes if one in self._segments}

        return self._try(take) and bool(came)

    def disconnect(self) -> None:
        """Close the connection; mapped segments stay."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self) -> None:
        self._connection = self._connect_to(self._directory)
        self._replace_segments(0)
        self._map_more()
        self._backoff.reset()

    def _replace_segments(self, held: int) -> None:
        """Begin with a new set of segments: forget states of records in earlier segments, and keep whole stripes."""
        self._held, self._states, self._mapped, self._segments = held, {}, [], {}
        self._known &= {*self._ready.values()}

    def _is_of_another(self, answer: RecordStates | DatasetOpened) -> bool:
        """Return whether an answer belongs to segments other than the mapped ones."""
        return answer.held not in (0, self._held)

    def _map_more(self) -> None:
        assert self._connection is not None
        while True:
            opened, fds = self._connection.request(OpenDataset(self._identity, len(self._mapped)))
            assert isinstance(opened, DatasetOpened)
            try:
                segments = [map_segment(fd, [self._identity, *opened.shares]) for fd in fds]
            finally:
                for fd in fds:
                    os.close(fd)  # a mapping has its own descriptor
            if self._is_of_another(opened):
                are_first = not self._mapped
                self._replace_segments(opened.held)
                if not are_first:
                    continue
            for segment in segments:
                self._mapped.append(segment)
                self._known.add(segment)
                shared = opened.shares.get(segment.identity, math.inf)
                self._segments |= {stripe: segment for stripe in segment.stripes if stripe < shared}
            if not fds or len(self._mapped) >= opened.total:
                return

    def _try(self, act: Callable[[], None]) -> bool:
        try:
            act()
            return True
        except DPFlowError as error:
            self.disconnect()
            self._retry_at = time.monotonic() + self._backoff.pause_s()
            log_fallback(f"the pool server at {self._directory} is not used for now", error)
            return False
        except BaseException:  # after Control-C the answer would be taken for that of the next request
            self.disconnect()
            raise


#: Number of a record, and its offset and length in a server's read-ahead memory, bytes.
AheadRecord: TypeAlias = tuple[int, int, int]


#: Function of (number of another host's read-ahead memory, records in it); returns the records that arrived.
Receive: TypeAlias = Callable[[int, Sequence[AheadRecord]], dict[int, bytes]]


def receive_ahead(data_reader: DataReader, server: str, number: int, there: Sequence[AheadRecord]) -> dict[int, bytes]:
    """Receive records that a server of another host has read ahead; return the bytes of those that arrived, by number.

    server: its address, tcp://HOST:PORT. number: the number of its read-ahead memory.
    there: the records to receive, each with its offset and length in that memory.
    """
    filled = [one for one in there if one[2]]
    name, servers = memory_name(number), [server] * len(filled)
    contents = data_reader.read(name, servers, [WantedRecord(one[1], one[2]) for one in filled])
    data_reader.gone.discard(name)
    empty = {record: b"" for record, _, length in there if not length}
    return empty | {one[0]: content for one, content in zip(filled, contents) if isinstance(content, bytes)}


class AheadReader:
    """Reader of records that a server reads ahead, in the order that the reader announces. One call at a time.

    silence_s: seconds without a sample, after which the other samples are read from storage.
    """

    def __init__(self, identity: bytes, silence_s: float) -> None:
        self._identity, self._silence_s = identity, silence_s
        #: Mapped memory, and its number.
        self._memory: mmap.mmap | None = None
        self._number = 0

    def announce(
        self,
        connection: PoolConnection,
        plan: str,
        keys: npt.NDArray[np.integer[Any]],
        spread: int,
        extends: bool,
    ) -> None:
        """Announce the order in which records are read. Logs a refusal; raises PeerLostError if the server is lost.

        extends: whether to append to the existing plan named `plan`, without waiting for the server.
        """
        numbers = keys.astype("<i4")
        for first in range(0, max(len(numbers), not extends), MAX_ANNOUNCED):
            part = AnnounceAccessPlan(
                identity=self._identity,
                plan=plan,
                first=first,
                total=len(numbers),
                spread=spread,
                extends=extends,
                records=numbers[first : first + MAX_ANNOUNCED].tobytes(),
            )
            try:
                if extends:
                    connection.send_nowait(part)
                else:
                    connection.request(part)
            except (UsageError, PoolFullError) as error:  # the server has no memory for it
                DATASETS.info("the pool does not read ahead: %s", error)
                return

    def read(
        self, connection: PoolConnection, plan: str, records: Sequence[int], far: Receive | None
    ) -> dict[int, bytes]:
        """Return, by number, the content of the requested records that the server has read ahead or reads now.

        far: receives records from the server's memory; None if the server is on this host.

        Raises PeerLostError or MessageError, among others. A refused request ends the reading without an error.
        """
        found: dict[int, bytes] = {}
        copied: dict[int, bytes] = {}
        left = list(dict.fromkeys(records))
        deadline = time.monotonic() + self._silence_s
        try:
            while copied or (left and time.monotonic() < deadline):
                asked, rest = left[:MAX_RECORDS], left[MAX_RECORDS:]
                request = GetAheadPlaces(self._identity, plan, asked, [*copied], self._number)
                places, fds = connection.request(request)
                self._map(fds, places)
                assert isinstance(places, AheadPlaces)
                if copied:
                    found |= copied
                    deadline = time.monotonic() + self._silence_s
                there = [one for one in zip(asked, places.offsets, places.lengths) if one[2] >= 0]
                copied = self._copies(places.memory, there) if far is None else far(places.memory, there)
                left = [one for one, length in zip(asked, places.lengths) if length == ON_ITS_WAY] + rest
        except (UsageError, PoolFullError):  # the plan of this process or its parent has ended
            pass
        return found

    def _copies(self, number: int, there: Sequence[AheadRecord]) -> dict[int, bytes]:
        if not there:
            return {}
        if self._memory is None or number != self._number:
            raise UsageError(f"memory {number} of the pool is gone")
        memory = self._memory
        if any(not 0 <= offset <= offset + length <= len(memory) for _, offset, length in there):
            raise MessageError("the pool reported a place outside of its memory")
        return {record: memory[offset : offset + length] for record, offset, length in there}

    def _map(self, fds: list[int], places: PoolAnswer) -> None:
        """Map the memory that came with an answer."""
        try:
            if fds and isinstance(places, AheadPlaces):
                self._memory, self._number = map_sealed(fds[0]), places.memory
        except (OSError, ValueError) as error:
            raise MessageError(f"memory of the pool cannot be mapped: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)
