"""Reading ahead in a server: reads records that are not cached, in the order that readers announce.

A record that was read for one reader is served to all readers that need it soon; then its place is freed. Readers map
the memory and copy from it, and the server writes to freed places again. So a place is kept while a reader may copy
from it. The reader reports each copy (`confirm`), and may use it only if the server answers that the place was still
reserved. If the connection ends before this answer, the reader discards its copy.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.cluster.cache.objects import Arrival, Cancel, Load, Serve
from torch_dpflow.errors import DPFlowError, PoolFullError, UsageError
from torch_dpflow.log import SERVICE
from torch_dpflow.pool.messages import (
    IN_STORAGE,
    IN_STORAGE_ONLY,
    MAX_PLAN_RECORDS,
    ON_ITS_WAY,
    AheadPlaces,
    AnnounceAccessPlan,
)
from torch_dpflow.pool.planning.free_space import FreeSpace
from torch_dpflow.pool.planning.read_ahead import KnownOrder, ReadAhead, ReadAheadInstruction, StorageRequest
from torch_dpflow.pool.server import start_thread
from torch_dpflow.pool.sources import RecordReader
from torch_dpflow.pool.transport.segments import sealed_memory

Keys = npt.NDArray[np.int32]


class AheadPlace:
    """Offset and length of a sample in read-ahead memory, bytes. Freed with the last reference to this object."""

    __slots__ = ("_free", "length", "offset")

    def __init__(self, offset: int, length: int, free: Callable[[], None]) -> None:
        self.offset, self.length = offset, length
        self._free = free

    def __del__(self) -> None:
        self._free()


@dataclass(eq=False, slots=True)
class AccessPlan:
    """Order in which one reader will read records that are not cached, and the records already read ahead for it."""

    name: str
    #: Name of the connection that announced the plan.
    owner: str
    #: As in `AnnounceAccessPlan`.
    spread: int
    order: KnownOrder
    #: Whether further parts of the plan may follow.
    grows: bool
    #: Records read ahead whose copies are not confirmed yet, by position: the place, or the error of reading.
    served: dict[int, AheadPlace | DPFlowError] = field(default_factory=dict)
    #: Positions whose records find no memory until readers confirm copies of other records.
    refused: set[int] = field(default_factory=set)


#: Maximum unread records of a plan that is extended. If there are more, the first of them are skipped.
MAX_UPCOMING = 1 << 16
#: Maximum access plans of a dataset; they share its memory.
MAX_PLANS = 4096
#: Maximum samples per storage request, and number of threads that make requests.
REQUEST_SAMPLES, FETCHERS = 16, 4
#: Share of the memory to plan with, as gaps between samples may be too small for others.
_PLANNED = 0.85
#: Minimum number of requests that fit, so that several are under way.
_MIN_REQUESTS = 16
#: How long an answer waits for other readers to free memory, and for a part of a plan on its way, seconds.
_REFUSED_S, _ON_ITS_WAY_S = 0.05, 0.05


class AheadReading:
    """Memory and threads that read ahead records of one dataset, in the order of readers' access plans. Thread-safe.

    Args:
        may_read: for each record of the dataset, whether it may be read ahead, because it is not cached.
        lengths: bytes of each record.
        reader: reads the dataset's samples; its owner closes it.
        memory_bytes: size of the memory that samples are read into.
        number: number of this memory, unique in this server.

    Raises PoolFullError if the memory is not available.
    """

    def __init__(
        self,
        may_read: npt.NDArray[np.bool_],
        lengths: npt.NDArray[np.integer[Any]],
        reader: RecordReader,
        memory_bytes: int,
        number: int,
    ) -> None:
        self._may_read, self._lengths, self._reader = may_read, lengths, reader
        self.fd, self._memory = sealed_memory(memory_bytes, "reading ahead")
        self.memory_bytes, self.number = memory_bytes, number
        mean = max(1, int(lengths[may_read].mean())) if may_read.any() else 1
        planned = max(1, int(_PLANNED * memory_bytes))
        k = min(REQUEST_SAMPLES, max(1, planned // mean // _MIN_REQUESTS))
        self._machine = ReadAhead(capacity_bytes=planned, k=k, sample_bytes=mean)
        self._space = FreeSpace(memory_bytes)
        #: Length of the sample at each offset.
        self._stored_at: dict[int, int] = {}
        # Reentrant: dropping the last reference to a place frees it, on any thread.
        self._changed = threading.Condition(threading.RLock())
        self._plans: dict[str, AccessPlan] = {}
        #: Parts of incomplete plans, by connection and name.
        self._parts: dict[tuple[str, str], list[Keys]] = {}
        #: Places that each connection may copy from: plan, position and place of each record.
        self._lent: dict[str, dict[int, tuple[AccessPlan, int, AheadPlace]]] = {}
        self._requests: deque[list[Load]] = deque()
        self._cancelled: set[int] = set()
        self._threads = 0
        self._is_closed = False

    def announce(self, connection: str, part: AnnounceAccessPlan) -> None:
        """Accept part of a plan; reading begins after the last part. Raises UsageError if invalid or above a limit."""
        keys = np.frombuffer(part.records, dtype="<i4").astype(np.int32)
        if len(keys) and not 0 <= keys.min() <= keys.max() < len(self._may_read):
            raise UsageError(f"an access plan with records that the dataset of {len(self._may_read)} does not have")
        with self._changed:
            whole = self._joined(connection, part, keys)
            if whole is not None:
                keys, spread = whole[self._may_read[whole]], max(1, part.spread)
                plan = self._plans.get(part.plan)
                if part.extends and plan is not None and plan.owner == connection:
                    self._extend(plan, keys, spread)
                else:
                    grows = part.extends or not part.total
                    self._begin(AccessPlan(part.plan, connection, spread, KnownOrder(keys), grows))

    def want(self, connection: str, name: str, records: Sequence[int], wait_s: float) -> AheadPlaces:
        """Return the places in memory of records of the access plan `name`, so that the reader can copy the records.

        Waits until all are read, at most `wait_s` seconds. Returns earlier if some find no memory until the reader
        confirms copies. In place of a record's length there is `ON_ITS_WAY` if the record is not read yet, or
        `IN_STORAGE_ONLY` if it is not (or no longer) in the plan, or cannot be read.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            plan = self._known(name, records)
            if plan is None:
                return AheadPlaces(self.number, [0] * len(records), [IN_STORAGE_ONLY] * len(records))
            positions = self._open(plan, records)
            for position in positions.values():
                if position not in plan.served:
                    self._apply(self._machine.read(name, position), is_urgent=True)
            awaited = positions.values() - plan.served.keys()
            while awaited and not self._is_closed:
                # Refused records fit once others are confirmed: answer at once if this reader has some, else wait.
                refused = bool(awaited & plan.refused)
                left = min(deadline - time.monotonic(), _REFUSED_S if refused else wait_s)
                if (refused and awaited < set(positions.values())) or not self._changed.wait(left):
                    break
                awaited -= plan.served.keys()
            plan.refused -= awaited
            return self._places(connection, plan, [(one, positions.get(one, -1)) for one in records], awaited)

    def _places(
        self, connection: str, plan: AccessPlan, requested: list[tuple[int, int]], awaited: set[int]
    ) -> AheadPlaces:
        """Return the places that the connection may copy from now; consume requested records that cannot be read."""
        lent = self._lent.setdefault(connection, {})
        places: list[tuple[int, int]] = []
        for record, position in requested:
            place = plan.served.get(position)
            if isinstance(place, AheadPlace):
                lent[record] = plan, position, place
                places.append((place.offset, place.length))
            else:
                places.append((0, ON_ITS_WAY if position in awaited and not self._is_closed else IN_STORAGE_ONLY))
        failed = [position for _, position in requested if isinstance(plan.served.get(position), DPFlowError)]
        self._consume(plan, failed)
        return AheadPlaces(self.number, [one for one, _ in places], [one for _, one in places])

    def look(self, offset: int, watch: object) -> memoryview | int:
        """Return a view of the sample at `offset` for a data connection, or `IN_STORAGE` if no sample begins there."""
        with self._changed:
            length = self._stored_at.get(offset)
            if length is None or self._is_closed:
                return IN_STORAGE
            return memoryview(self._memory)[offset : offset + length]

    def confirm(self, connection: str, records: Sequence[int]) -> None:
        """Accept a connection's copies of records as valid. Raises UsageError if `want` did not return their places."""
        with self._changed:
            lent = self._lent.get(connection, {})
            if missing := [one for one in records if one not in lent]:
                raise UsageError(f"record {missing[0]} was not read ahead for this connection")
            for plan in list(self._plans.values()):
                self._consume(plan, [lent[one][1] for one in records if lent[one][0] is plan])
            for record in records:
                lent.pop(record, None)

    def descriptors(self, mapped: int) -> list[int]:
        """Return a list with a descriptor of the memory, which the caller closes; empty if the reader needs none.

        mapped: number of the memory that the reader has mapped already, 0 for none.
        """
        with self._changed:
            return [] if mapped == self.number or self._is_closed else [os.dup(self.fd)]

    def leave(self, connection: str) -> None:
        """Drop the plans of a connection that has ended; its copies cannot be confirmed any more."""
        with self._changed:
            self._lent.pop(connection, None)
            self._parts = {own: parts for own, parts in self._parts.items() if own[0] != connection}
            for name in [name for name, plan in self._plans.items() if plan.owner == connection]:
                self._end(name)

    @property
    def is_idle(self) -> bool:
        """Whether no reader has an access plan."""
        return not self._plans and not self._parts

    def close(self) -> None:
        """Drop all plans and the memory; readers that have mapped the memory discard copies not yet confirmed."""
        with self._changed:
            self._is_closed = True
            for name in list(self._plans):
                self._end(name)
            self._lent = {}
            self._changed.notify_all()
            os.close(self.fd)
            with suppress(BufferError):  # a data connection still sends from it, and frees it then
                self._memory.close()

    def _joined(self, connection: str, part: AnnounceAccessPlan, keys: Keys) -> Keys | None:
        """Return the whole plan if this is its last part. Raises UsageError for an invalid part, or too many plans."""
        own = connection, part.plan
        parts = self._parts.get(own, []) if part.first else []
        come = sum(map(len, parts))
        if part.first != come or not come + len(keys) <= part.total <= MAX_PLAN_RECORDS:
            raise UsageError(f"part {part.first} of an access plan of {part.total} records, of which {come} arrived")
        others = [plan.order.kept for name, plan in self._plans.items() if name != part.plan]
        others += [sum(map(len, waiting)) for name, waiting in self._parts.items() if name != own]
        if len(others) >= MAX_PLANS or sum(others) + come + len(keys) > MAX_PLAN_RECORDS:
            raise UsageError(
                f"{len(others)} access plans of {sum(others)} records are announced for this dataset; at most "
                f"{MAX_PLANS} of {MAX_PLAN_RECORDS} are allowed"
            )
        self._parts[own] = parts
        parts.append(keys)
        return np.concatenate(self._parts.pop(own)) if come + len(keys) == part.total else None

    def _begin(self, plan: AccessPlan) -> None:
        if plan.name in self._plans:
            self._end(plan.name)
        self._apply(self._machine.announce(plan.name, plan.order))
        self._plans[plan.name] = plan
        for _ in range(FETCHERS - self._threads):
            try:
                start_thread(self._fetch, "dpflow-ahead")
            except PoolFullError as error:  # the existing threads do it, or readers themselves
                SERVICE.warning("reading ahead has %d threads: %s", self._threads, error)
                break
            self._threads += 1

    def _extend(self, plan: AccessPlan, keys: Keys, spread: int) -> None:
        self._pass_over(plan, len(plan.order) + len(keys) - MAX_UPCOMING)
        plan.spread, plan.grows = spread, True
        self._apply(self._machine.extend(plan.name, keys))
        self._changed.notify_all()

    def _pass_over(self, plan: AccessPlan, before: int) -> None:
        self._apply(self._machine.pass_over(plan.name, before))
        for position in [one for one in plan.served if one < plan.order.passed]:
            del plan.served[position]

    def _end(self, name: str) -> None:
        self._plans.pop(name).served.clear()
        self._apply(self._machine.leave(name))

    def _known(self, name: str, records: Sequence[int]) -> AccessPlan | None:
        """Return a plan once it has these records, or after a short wait."""
        deadline = time.monotonic() + _ON_ITS_WAY_S
        while (plan := self._plans.get(name)) is not None and plan.grows:
            left = deadline - time.monotonic()
            if all(map(plan.order.positions, records)) or not self._changed.wait(left):
                break
        return plan

    def _open(self, plan: AccessPlan, records: Sequence[int]) -> dict[int, int]:
        """Return the plan's position of each record that it has not consumed, by record.

        Positions that are more than the plan's spread behind the last one of these are skipped for good, and not
        returned.
        """
        found: dict[int, int] = {}
        for record in records:
            where = (one for one in plan.order.positions(record) if self._machine.is_open(plan.name, one))
            if (position := next(where, None)) is not None:
                found[record] = position
        self._pass_over(plan, max(found.values(), default=0) + 1 - plan.spread)
        return {record: position for record, position in found.items() if position >= plan.order.passed}

    def _consume(self, plan: AccessPlan, positions: list[int]) -> None:
        for position in positions:
            plan.served.pop(position, None)
        self._apply(self._machine.consumed(plan.name, positions))

    def _apply(self, instructions: Iterable[ReadAheadInstruction], *, is_urgent: bool = False) -> None:
        for one in instructions:
            match one:
                case StorageRequest(loads):
                    (self._requests.appendleft if is_urgent else self._requests.append)(loads)
                    self._changed.notify_all()
                case Serve(request, samples):
                    name, position = self._machine.requester(request)
                    plan = self._plans.get(name)
                    if plan is not None and samples:
                        plan.served[position] = samples[0][1]
                    elif plan is not None:
                        plan.refused.add(position)
                    self._changed.notify_all()
                case Cancel(loads):
                    self._cancelled.update(loads)

    def _fetch(self) -> None:
        while (loads := self._next()) is not None:
            try:
                samples = self._reader.read_each([one.key for one in loads])
            except Exception as error:  # any error: its readers must continue
                samples = [DPFlowError(f"{type(error).__name__}: {error}")] * len(loads)
            self._arrive(loads, [one if isinstance(one, DPFlowError) else one[0] for one in samples])

    def _next(self) -> list[Load] | None:
        """Return the next loads; None once this is closed."""
        with self._changed:
            while not self._requests and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            loads = self._requests.popleft()
            live = [one for one in loads if one.load not in self._cancelled]
            self._cancelled.difference_update(one.load for one in loads)
            return live

    def _arrive(self, loads: Sequence[Load], contents: Sequence[bytes | DPFlowError]) -> None:
        with self._changed:
            if self._is_closed:
                return
            arrivals = [
                Arrival(load.load, value, getattr(value, "length", 0), keep=False)
                for load, value in zip(loads, map(self._stored, contents))
            ]
            self._cancelled.difference_update(one.load for one in loads)
            self._apply(self._machine.arrived(arrivals))

    def _stored(self, content: bytes | DPFlowError) -> AheadPlace | DPFlowError:
        if isinstance(content, DPFlowError):
            return content
        offset, length = self._space.take(len(content)), len(content)
        if offset is None:
            return PoolFullError("the memory for reading ahead is in use")
        if length:
            self._memory[offset : offset + length] = content
            self._stored_at[offset] = length
        return AheadPlace(offset, length, partial(self._free, offset, length))

    def _free(self, offset: int, length: int) -> None:
        with self._changed:
            if length:
                del self._stored_at[offset]
            self._space.free(offset, length)
