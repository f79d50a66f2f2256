"""Reading ahead in a server: what a set has no place for is read in the orders that its readers announce.

What is read for one of them is there for all who want it soon, and its place is free when nobody does. Its bytes lie
in memory that readers map and copy from, and that is written to again. So a place is kept while a reader may copy from
it, and what a reader copied counts once the server has told it that the place was its until then (`took`): a reader
whose connection ends meanwhile drops its copy.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.cluster.cache.objects import Arrival, Cancel, Load, Serve
from torch_dpflow.errors import DPFlowError, PoolFullError, UsageError
from torch_dpflow.log import SERVICE
from torch_dpflow.pool.messages import (
    COMES,
    IN_STORAGE,
    LEFT,
    MAX_PLAN_RECORDS,
    MAX_PLANS,
    MAX_UPCOMING,
    AheadPlaces,
    AnnounceAccessPlan,
)
from torch_dpflow.pool.planning.block_allocator import BlockAllocator
from torch_dpflow.pool.planning.read_ahead import ReadAhead, ReadAheadInstruction, StorageRequest
from torch_dpflow.pool.server import start_thread
from torch_dpflow.pool.sources import RecordReader
from torch_dpflow.pool.transport.segments import sealed_memory

Keys = npt.NDArray[np.int32]
_SIDES: tuple[Any, Any] = ("left", "right")


class AheadPlace:
    """A sample in memory, whose bytes stay as long as somebody refers to this."""

    __slots__ = ("_free", "length", "offset")

    def __init__(self, offset: int, length: int, free: Callable[[], None]) -> None:
        self.offset, self.length = offset, length
        self._free = free

    def __del__(self) -> None:
        self._free()


class AccessPlan:
    """One reader's order, of those records that have no place in memory.

    owner: the connection that has announced it.
    grows: whether more of it may be on its way.
    """

    def __init__(self, owner: str, spread: int, keys: Keys, *, grows: bool = False) -> None:
        self.owner, self.spread, self.keys, self.grows = owner, spread, keys, grows
        self._by_key = np.argsort(keys, kind="stable").astype(np.int32)
        #: The position of the first of `keys`, and of the first one that may be read.
        self._first = self.passed = 0
        #: What was served and not taken, by position: its place, or why there is none.
        self.served: dict[int, AheadPlace | DPFlowError] = {}
        #: Positions whose answer was that there is no room until others are taken.
        self.refused: set[int] = set()

    def positions(self, key: int) -> list[int]:
        """Where this record is read."""
        first, end = (int(np.searchsorted(self.keys, key, side, sorter=self._by_key)) for side in _SIDES)
        return [self._first + one for one in self._by_key[first:end].tolist()]

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self._first + len(self.keys)

    def extend(self, keys: Keys, spread: int) -> None:
        """These are read then; what was passed over is forgotten."""
        self.keys = np.concatenate([self.keys[self.passed - self._first :], keys])
        self._first, self.spread, self.grows = self.passed, spread, True
        self._by_key = np.argsort(self.keys, kind="stable").astype(np.int32)


#: Samples of one request to the storage, and the threads that make them.
REQUEST_SAMPLES, FETCHERS = 16, 4
#: The part of the memory that is planned with: blocks of several samples are free once all of them were read.
_PLANNED = 0.85
#: Requests for which there is room at least.
_MIN_BLOCKS = 16
#: How long an answer waits for room that others have to free, and for a piece of an order that is on its way, seconds.
_REFUSED_S, _ON_ITS_WAY_S = 0.05, 0.05


class AheadReading:
    """The records of one set that have no place in memory. Thread-safe.

    Args:
        may_read: whether each record is read ahead.
        lengths: of each of those, bytes.
        reader: of the set's samples; not closed.
        memory_bytes: that samples are read into.
        number: of this memory, among all that this server has had.

    Raises:
        PoolFullError: there is not so much memory.
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
        # A block is in use until the last of its samples was read, so many small ones waste less.
        k = min(REQUEST_SAMPLES, max(1, planned // mean // _MIN_BLOCKS))
        self._machine = ReadAhead(capacity_bytes=planned, k=k, lead=1, sample_bytes=mean)
        self._space = BlockAllocator(memory_bytes)
        #: The length of what lies at each offset.
        self._stored_at: dict[int, int] = {}
        # Reentrant: a place is freed by whoever drops the last reference to it.
        self._changed = threading.Condition(threading.RLock())
        self._plans: dict[str, AccessPlan] = {}
        #: Of orders that are not whole, by connection and name.
        self._parts: dict[str, dict[str, list[Keys]]] = {}
        #: What each connection may copy: order and position of each record, and its place.
        self._lent: dict[str, dict[int, tuple[AccessPlan, int, AheadPlace]]] = {}
        self._requests: deque[list[Load]] = deque()
        self._cancelled: set[int] = set()
        self._threads = 0
        self._is_closed = False

    def announce(self, connection: str, part: AnnounceAccessPlan) -> None:
        """Take a part of an order; with the last one reading begins. Raises UsageError: it is no such part."""
        keys = np.frombuffer(part.records, dtype="<i4").astype(np.int32)
        if len(keys) and not 0 <= keys.min() <= keys.max() < len(self._may_read):
            raise UsageError(f"an order with records that the set of {len(self._may_read)} does not have")
        with self._changed:
            whole = self._joined(self._parts.setdefault(connection, {}), part, keys)
            if whole is not None:
                keys, spread = whole[self._may_read[whole]], max(1, part.spread)
                plan = self._plans.get(part.plan)
                if part.extends and plan is not None and plan.owner == connection:
                    self._extend(part.plan, plan, keys, spread)
                else:
                    grows = part.extends or not part.total
                    self._begin(part.plan, AccessPlan(connection, spread, keys, grows=grows))

    def want(self, connection: str, name: str, records: Sequence[int], wait_s: float) -> AheadPlaces:
        """Where these are, once none is on its way, or after so many seconds, or when there is no room for all."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            plan = self._known(name, records)
            positions = {} if plan is None else self._open(name, plan, records)
            if plan is None:
                return AheadPlaces(self.number, [0] * len(records), [LEFT] * len(records))
            for position in positions.values():
                if position not in plan.served:
                    self._apply(self._machine.read(name, position), is_urgent=True)
            due = positions.values() - plan.served.keys()
            while due and not self._is_closed:
                # What is refused has room once others are taken: at once if the asker has some, and else soon.
                refused = bool(due & plan.refused)
                left = min(deadline - time.monotonic(), _REFUSED_S if refused else wait_s)
                if (refused and due < set(positions.values())) or not self._changed.wait(left):
                    break
                due -= plan.served.keys()
            plan.refused -= due
            return self._places(
                connection, name, plan, [(one, positions.get(one, -1)) for one in records], due
            )

    def _places(
        self, connection: str, name: str, plan: AccessPlan, asked: list[tuple[int, int]], due: set[int]
    ) -> AheadPlaces:
        """The answer, by which the connection may copy what is there; what cannot be read is consumed."""
        lent = self._lent.setdefault(connection, {})
        places: list[tuple[int, int]] = []
        for record, position in asked:
            place = plan.served.get(position)
            if isinstance(place, AheadPlace):
                lent[record] = plan, position, place
                places.append((place.offset, place.length))
            else:
                places.append((0, COMES if position in due and not self._is_closed else LEFT))
        failed = [position for _, position in asked if isinstance(plan.served.get(position), DPFlowError)]
        self._consume(name, plan, failed)
        return AheadPlaces(self.number, [one for one, _ in places], [one for _, one in places])

    def look(self, offset: int, watch: object) -> memoryview | int:
        """For lanes, as of `HeldDataset`: what lies there, or `IN_STORAGE`. Whether that was right `took` says."""
        with self._changed:
            length = self._stored_at.get(offset)
            if length is None or self._is_closed:
                return IN_STORAGE
            return memoryview(self._memory)[offset : offset + length]

    def took(self, connection: str, records: Sequence[int]) -> None:
        """A connection has copied these. Raises UsageError: it was not told where one of them is."""
        with self._changed:
            lent = self._lent.get(connection, {})
            if missing := [one for one in records if one not in lent]:
                raise UsageError(f"record {missing[0]} was not read ahead for this connection")
            for name, plan in list(self._plans.items()):
                own = [one for one in records if lent[one][0] is plan]
                self._consume(name, plan, [lent[one][1] for one in own])
            for record in records:
                lent.pop(record, None)

    def leave(self, connection: str) -> None:
        """A connection has ended: with it its orders, and what it may copy."""
        with self._changed:
            self._lent.pop(connection, None)
            self._parts.pop(connection, None)
            for name in [name for name, plan in self._plans.items() if plan.owner == connection]:
                self._end(name)

    @property
    def is_idle(self) -> bool:
        """Whether nobody has announced an order."""
        return not self._plans and not any(self._parts.values())

    def close(self) -> None:
        """Give everything up; readers that map the memory drop what they copy."""
        with self._changed:
            self._is_closed = True
            for name in list(self._plans):
                self._end(name)
            self._lent = {}
            self._changed.notify_all()
            os.close(self.fd)
            with suppress(BufferError):  # a lane still sends from it; it goes with that
                self._memory.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _joined(self, own: dict[str, list[Keys]], part: AnnounceAccessPlan, keys: Keys) -> Keys | None:
        """The whole order, if this is its last part. Raises UsageError: it is no such part, or there are too many."""
        parts = own.get(part.plan, []) if part.first else []
        come = sum(map(len, parts))
        if part.first != come or not come + len(keys) <= part.total <= MAX_PLAN_RECORDS:
            raise UsageError(f"records {part.first} of an order of {part.total}, of which {come} have come")
        others = [len(plan.keys) for name, plan in self._plans.items() if name != part.plan]
        others += [
            sum(map(len, of))
            for waiting in self._parts.values()
            for name, of in waiting.items()
            if waiting is not own or name != part.plan
        ]
        if len(others) >= MAX_PLANS or sum(others) + come + len(keys) > MAX_PLAN_RECORDS:
            raise UsageError(
                f"{len(others)} orders of {sum(others)} records in all are announced of this set; at most "
                f"{MAX_PLANS} of {MAX_PLAN_RECORDS} are allowed"
            )
        own[part.plan] = parts
        parts.append(keys)
        return np.concatenate(own.pop(part.plan)) if come + len(keys) == part.total else None

    def _begin(self, name: str, plan: AccessPlan) -> None:
        if name in self._plans:
            self._end(name)
        self._apply(self._machine.announce(name, plan.keys))
        self._plans[name] = plan
        self._machine.lead = max(1, self._machine.room - 1)
        for _ in range(FETCHERS - self._threads):
            try:
                start_thread(self._fetch, "dpflow-ahead")
            except PoolFullError as error:  # those that there are do it, or readers themselves
                SERVICE.warning("reading ahead has %d threads: %s", self._threads, error)
                break
            self._threads += 1

    def _extend(self, name: str, plan: AccessPlan, keys: Keys, spread: int) -> None:
        self._pass_over(name, plan, plan.end + len(keys) - MAX_UPCOMING)
        plan.extend(keys, spread)
        self._apply(self._machine.extend(name, keys))
        self._changed.notify_all()

    def _pass_over(self, name: str, plan: AccessPlan, before: int) -> None:
        """Positions before this one are not read any more."""
        plan.passed = max(plan.passed, min(before, plan.end))
        self._apply(self._machine.pass_over(name, plan.passed))
        for position in [one for one in plan.served if one < plan.passed]:
            del plan.served[position]

    def _end(self, name: str) -> None:
        self._plans.pop(name).served.clear()
        self._apply(self._machine.leave(name))

    def _known(self, name: str, records: Sequence[int]) -> AccessPlan | None:
        """An order, once it has these records, or after a while: nobody waits until his is announced."""
        deadline = time.monotonic() + _ON_ITS_WAY_S
        while (plan := self._plans.get(name)) is not None and plan.grows:
            left = deadline - time.monotonic()
            if all(map(plan.positions, records)) or not self._changed.wait(left):
                break
        return plan

    def _open(self, name: str, plan: AccessPlan, records: Sequence[int]) -> dict[int, int]:
        """The position of each of these that was not consumed; those that were passed over are now."""
        found: dict[int, int] = {}
        for record in records:
            where = (one for one in plan.positions(record) if self._machine.is_open(name, one))
            if (position := next(where, None)) is not None:
                found[record] = position
        self._pass_over(name, plan, max(found.values(), default=0) + 1 - plan.spread)
        return {record: position for record, position in found.items() if position >= plan.passed}

    def _consume(self, name: str, plan: AccessPlan, positions: list[int]) -> None:
        for position in positions:
            plan.served.pop(position, None)
        self._apply(self._machine.consumed(name, positions))

    def _apply(self, instructions: Iterable[ReadAheadInstruction], *, is_urgent: bool = False) -> None:
        for one in instructions:
            match one:
                case StorageRequest(loads):
                    (self._requests.appendleft if is_urgent else self._requests.append)(loads)
                    self._changed.notify_all()
                case Serve(request, samples):
                    name, position = self._machine.asked_by(request)
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
            except Exception as error:  # whatever it is, its readers have to go on
                samples = [DPFlowError(f"{type(error).__name__}: {error}")] * len(loads)
            self._arrive(loads, [one if isinstance(one, DPFlowError) else one[0] for one in samples])

    def _next(self) -> list[Load] | None:
        """What is to be read next; None once this is closed."""
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
                for load, value in zip(loads, self._stored(contents))
            ]
            self._cancelled.difference_update(one.load for one in loads)
            self._apply(self._machine.arrived(arrivals))

    def _stored(self, contents: Sequence[bytes | DPFlowError]) -> list[AheadPlace | DPFlowError]:
        """Put these into memory together, or where there is no such room, each by itself."""
        keys = [object() for _ in contents]
        sized = [(key, len(one)) for key, one in zip(keys, contents) if isinstance(one, bytes)]
        is_together = self._space.store(sized)
        out: list[AheadPlace | DPFlowError] = []
        for key, one in zip(keys, contents):
            if isinstance(one, DPFlowError):
                out.append(one)
            elif is_together or self._space.store([(key, len(one))]):
                offset, length = self._space.locate(key)
                self._memory[offset : offset + length] = one
                self._stored_at[offset] = length
                out.append(AheadPlace(offset, length, partial(self._free, key, offset)))
            else:
                out.append(PoolFullError("the memory for reading ahead is in use"))
        return out

    def _free(self, key: object, offset: int) -> None:
        with self._changed:
            self._stored_at.pop(offset, None)
            self._space.spend(key)
